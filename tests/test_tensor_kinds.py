"""Tensors that are not plain memory: their values arrive, or a ValueError names the argument. Nothing crashes."""

import dataclasses
import itertools
import mmap
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.errors import assert_refused
from lib.round_trip import CONFIG, HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, device, make_buffer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.masked import masked_tensor
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor

import ep_dispatcher as ep
from ep_dispatcher.integrations.deep_ep import Buffer as DeepBuffer
from ep_dispatcher.tools.testing import device_of, make_routing, same_bits

NOT_ASKED = "to ask for the size of a storage takes the host 1 us, so the CUDA engine does not"


class Marked(torch.Tensor):
    """A subclass with memory of its own."""


def distributed(t):
    mesh = dist.init_device_mesh(t.device.type, (dist.get_world_size(),))
    return distribute_tensor(t, mesh, [Replicate()], src_data_rank=None)


def resized(num_bytes: int, strided: bool = False):
    def make(t):
        t = (t.t().contiguous().t() if strided else t).clone()
        t.untyped_storage().resize_(num_bytes)
        return t

    return make


KINDS = {  # how it is made of a plain tensor
    "Parameter": lambda t: Parameter(t, requires_grad=False),
    "subclass with memory": lambda t: t.as_subclass(Marked),
    "AsyncCollectiveTensor": lambda t: AsyncCollectiveTensor(t.clone()),
    "strided": lambda t: t.t().contiguous().t(),
    "negated": lambda t: torch._neg_view(-t),  # only a bit says that its values are not those in memory
    "slice of a larger one": lambda t: torch.cat([t, t])[t.shape[0] :],
    "FakeTensor": lambda t: FakeTensorMode().from_tensor(t),
    "functional tensor": torch._to_functional_tensor,
    "TwoTensor": lambda t: TwoTensor(t, t.clone()),
    "MaskedTensor": lambda t: masked_tensor(t, torch.ones_like(t, dtype=torch.bool)),
    "DTensor": distributed,
    "storage freed": resized(0),
    "storage too small": resized(8),
    "strided, storage too small": resized(8, strided=True),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "jagged": lambda t: torch.nested.nested_tensor([*t.split(1)], layout=torch.jagged),
    "nested": lambda t: torch.nested.nested_tensor([*t.split(1)]),
}
WRITABLE = {"Parameter", "strided", "slice of a larger one", "negated"}
ARRIVING = WRITABLE | {"subclass with memory", "AsyncCollectiveTensor"}
ARGUMENTS = ("x", "topk_idx", "topk_weights", "y", "weights", "out", "dispatch_wait_ns")


def given_to(rank: int, buffer: ep.Buffer):
    topk_idx, weights = make_routing("uniform", MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, seed=rank)
    x = torch.randn(MAX_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    return (t.to(device(buffer)) for t in (x, topk_idx, weights))


def operate(buffer: ep.Buffer, argument: str, make, x, topk_idx, weights) -> torch.Tensor:
    """Collective: run the operation that takes the argument, with make() of it. Return what depends on it."""
    if argument in ("x", "topk_idx", "topk_weights"):
        given = dict(x=x, topk_idx=topk_idx, topk_weights=weights)
        out = buffer.dispatch(**(given | {argument: make(given[argument])}))
        return torch.cat([out.x.float().flatten(), out.topk_weights])
    if argument == "y":
        handle = buffer.plan(topk_idx)
        rows = torch.ones(handle.num_rows, HIDDEN, dtype=torch.bfloat16, device=x.device)
        return buffer.combine(make(rows), handle).x
    if argument == "dispatch_wait_ns":
        buffer.dispatch_wait_ns = make(torch.zeros(dist.get_world_size(), dtype=torch.int64, device=x.device))
        return x
    out = buffer.dispatch(x, topk_idx, layout="decode")
    given = dict(weights=weights, out=torch.zeros_like(x))
    return buffer.combine(out.x, out.handle, **(given | {argument: make(given[argument])})).x


def kind_of_argument(rank: int, engine: str, name: str, argument: str) -> None:
    arrives = name in (WRITABLE if argument in ("out", "dispatch_wait_ns") else ARRIVING)
    if (name, argument) == ("negated", "dispatch_wait_ns"):
        arrives = False  # an engine adds to the memory
    with warnings.catch_warnings(), make_buffer(engine=engine) as buffer:
        warnings.simplefilter("ignore")  # nested tensors and masked ones are beta
        given = [*given_to(rank, buffer)]
        right = operate(buffer, argument, lambda t: t, *given)
        if arrives:
            assert same_bits(torch.Tensor(operate(buffer, argument, KINDS[name], *given)).detach().resolve_neg(), right)
        else:
            assert_refused(argument, operate, buffer, argument, KINDS[name], *given)


def combinations():
    for name, argument in itertools.product(KINDS, ARGUMENTS):
        if name == "MaskedTensor" and argument not in ("topk_weights", "weights"):
            continue  # PyTorch makes none of bfloat16 and of int64
        if argument == "dispatch_wait_ns" and "strided" in name:
            continue  # it has one dimension
        yield pytest.param(name, argument, id=f"{argument}: {name}")


@pytest.mark.parametrize("name,argument", [*combinations()])
def test_values_of_every_argument_arrive_or_it_is_refused(pools, engine, name, argument):
    if engine == "cuda" and name == "storage too small" and argument not in ("out", "dispatch_wait_ns"):
        pytest.skip(NOT_ASKED)
    pools(2).run(kind_of_argument, engine, name, argument)


@pytest.mark.parametrize(
    "name",
    [*sorted(ARRIVING), "DTensor", "storage freed", "functional tensor", "FakeTensor"],
)
@on_ranks(2)
def test_values_arrive_with_gradients_or_are_refused(rank, engine, name):
    with warnings.catch_warnings(), make_buffer(engine=engine) as buffer:
        warnings.simplefilter("ignore")
        x, topk_idx, weights = given_to(rank, buffer)

        def gradient(make) -> torch.Tensor:
            leaf = make(x.clone()).detach().requires_grad_()
            out = ep.dispatch(buffer, leaf, topk_idx, weights)
            return torch.autograd.grad(ep.combine(buffer, out.x, out.handle).float().sum(), leaf)[0]

        right = gradient(lambda t: t)
        if name in ARRIVING:
            assert same_bits(torch.Tensor(gradient(KINDS[name])), right)
        elif name == "FakeTensor":  # PyTorch's own error: it mixes no fake tensor with others
            with pytest.raises(AssertionError, match="FakeTensors"):
                gradient(KINDS[name])
        else:
            assert_refused("x", gradient, KINDS[name])


@on_ranks(2)
def test_zero_tensors_are_zeros(rank, engine):
    """PyTorch stands zero gradients, and zero tangents, for tensors without memory (ZeroTensor)."""
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        leaf = x.clone().requires_grad_()
        out = ep.dispatch(buffer, leaf, topk_idx, weights)
        y = ep.combine(buffer, out.x, out.handle)
        zero = torch._efficientzerotensor(y.shape, dtype=y.dtype, device=y.device)
        (grad,) = torch.autograd.grad(y, leaf, zero)
        assert not grad._is_zerotensor() and not grad.any()
        received = buffer.dispatch(zero, topk_idx, weights).x
        assert received.shape == out.x.shape and not received.any()


@on_ranks(2)
def test_weights_of_experts_may_be_no_dtensors(rank, engine):
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        local = buffer.num_local_experts
        w = dict(w1=x.new_zeros(local, 2 * 16, HIDDEN), w2=x.new_zeros(local, HIDDEN, 16))
        for argument in w:
            given = w | {argument: distributed(w[argument])}
            assert_refused(argument, ep.moe_mlp, buffer, x, topk_idx, weights, **given)


@on_ranks(2)
def test_an_output_that_may_only_be_read_is_refused(rank):
    with make_buffer() as buffer, tempfile.TemporaryFile() as file:
        x, topk_idx, weights = given_to(rank, buffer)
        file.write(bytes(x.nbytes))
        file.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that the memory may only be read
            memory = mmap.mmap(file.fileno(), x.nbytes, prot=mmap.PROT_READ)
            out = torch.frombuffer(memory, dtype=torch.bfloat16).view(x.shape)
        received = buffer.dispatch(x, topk_idx, layout="decode")
        assert_refused("out", buffer.combine, received.x, received.handle, weights=weights, out=out)


def of_deep_ep(rank: int, engine: str, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_ENGINE", engine)
        device, make = device_of(engine, rank), KINDS[name]
        buffer = DeepBuffer(dist.group.WORLD, explicitly_destroy=True)
        x, topk_idx = torch.ones(4, 256, dtype=torch.bfloat16, device=device), torch.arange(4, device=device)[:, None]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)
        given = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        given |= dict(topk_idx=topk_idx, topk_weights=topk_idx.float())
        assert_refused("topk_idx", lambda: buffer.get_dispatch_layout(make(topk_idx), 4))
        assert_refused("x", lambda: buffer.dispatch(make(x), **given))
        buffer.destroy()


@pytest.mark.parametrize("name", ["TwoTensor", "DTensor", "storage freed", "storage too small"])
def test_deep_ep_refuses_them_too(pools, engine, name):
    if engine == "cuda" and name == "storage too small":
        pytest.skip(NOT_ASKED)
    pools(2).run(of_deep_ep, engine, name)


PLANS = {"an empty plan": lambda plan: plan[:0], "floats": torch.Tensor.float, "a shorter plan": lambda plan: plan[:-1]}
CHANGES = dict(num_rows=7, num_tokens=MAX_TOKENS - 1, layout="rank", expert_alignment=8)


@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "overwritten"])
@pytest.mark.parametrize("change", [*CHANGES, *PLANS])
@on_ranks(2)
def test_a_changed_handle_is_refused(rank, engine, change, in_place):
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        out = buffer.dispatch(x, topk_idx, weights)
        name = change if change in CHANGES else "plan"
        value = CHANGES[change] if change in CHANGES else PLANS[change](out.handle.plan)
        handle = out.handle if in_place else dataclasses.replace(out.handle, **{name: value})
        object.__setattr__(handle, name, value)
        y = out.x.new_zeros(handle.num_rows, HIDDEN)
        reuse = dict(x=x[: handle.num_tokens], topk_weights=weights[: handle.num_tokens], handle=handle)
        assert_refused("handle", buffer.dispatch, **reuse)
        assert_refused("handle", buffer.combine, y, handle)
        assert_refused("handle", ep.dispatch, buffer, **reuse)
        assert_refused("handle", ep.combine, buffer, y, handle)
        buffer.dispatch(x, topk_idx, weights)  # nothing was sent: the buffer goes on


@pytest.mark.parametrize("value", [-1, 0, 1 << 30])
@on_ranks(2)
def test_a_plan_with_overwritten_sizes_is_refused(rank, value):
    """Of the CPU engine: kernels of the CUDA engine read the plan, and the host does not."""
    with make_buffer() as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        out = buffer.dispatch(x, topk_idx, weights)
        out.handle.plan[4:13] = value  # the sizes, after the mark and the buffer
        assert_refused("handle", buffer.combine, out.x, out.handle)


@on_ranks(4)
def test_a_plan_of_more_tokens_than_int32_counts_is_refused(rank):
    """A plan for max_recv_rows has room for all tokens of a rank and its rail peers."""

    def run(max_tokens: int) -> float:
        sizes = CONFIG | dict(hidden=8, num_topk=1, max_tokens_per_rank=max_tokens)
        with ep.Buffer(**sizes, engine="cpu", ranks_per_node=1, timeout_s=30) as buffer:
            topk_idx = torch.full((3, 1), rank, dtype=torch.int64)
            out = buffer.dispatch(torch.ones(3, 8, dtype=torch.bfloat16), topk_idx, max_recv_rows=500)
            return buffer.combine(out.x, out.handle).x.sum().item()

    assert run((1 << 29) - 1) == 24
    assert_refused("max_tokens_per_rank", run, 1 << 29)
