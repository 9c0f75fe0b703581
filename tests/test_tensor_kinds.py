"""Tensors that are not plain memory: their values arrive, or a ValueError names the argument. Nothing crashes."""

import dataclasses
import itertools
import mmap
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from round_trip import CONFIG, HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, device, make_buffer
from torch.nn import Parameter

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of, make_routing, same_bits

NO_MEMORY = "elements are not in memory"
NOT_ASKED = "to ask for the size of a storage takes the host 1 us, so the CUDA engine does not"


class Marked(torch.Tensor):
    """A subclass with memory of its own."""


def fake(t):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(t)


def functional(t):
    return torch._to_functional_tensor(t)


def pair_of_tensors(t):
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(t, t.clone())


def masked(t):
    from torch.masked import masked_tensor

    return masked_tensor(t, torch.ones_like(t, dtype=torch.bool))


def distributed(t):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(t.device.type, (dist.get_world_size(),))
    return distribute_tensor(t, mesh, [Replicate()], src_data_rank=None)


def awaited(t):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(t.clone())


def resized(num_bytes: int, strided: bool = False):
    def make(t):
        t = (t.t().contiguous().t() if strided else t).clone()
        t.untyped_storage().resize_(num_bytes)
        return t

    return make


# By name: how it is made of a plain tensor, and the error of an operation without gradients. None: the values arrive.
KINDS = {
    "Parameter": (lambda t: Parameter(t, requires_grad=False), None),
    "subclass with memory": (lambda t: t.as_subclass(Marked), None),
    "AsyncCollectiveTensor": (awaited, None),
    "strided": (lambda t: t.t().contiguous().t(), None),
    "slice of a larger one": (lambda t: torch.cat([t, t])[t.shape[0] :], None),
    "FakeTensor": (fake, NO_MEMORY),
    "functional tensor": (functional, NO_MEMORY),
    "TwoTensor": (pair_of_tensors, NO_MEMORY),
    "MaskedTensor": (masked, NO_MEMORY),
    "DTensor": (distributed, "a DTensor, allowed: a tensor of this rank alone"),
    "storage freed": (resized(0), NO_MEMORY),
    "storage too small": (resized(8), NO_MEMORY),
    "strided, storage too small": (resized(8, strided=True), NO_MEMORY),
    "sparse": (lambda t: t.to_sparse(), "torch.sparse_coo"),
    "meta": (lambda t: t.to("meta"), "on meta"),
    "jagged": (lambda t: torch.nested.nested_tensor([*t.split(1)], layout=torch.jagged), "torch.jagged"),
    "nested": (lambda t: torch.nested.nested_tensor([*t.split(1)]), "a nested tensor"),
}
ARGUMENTS = ("x", "topk_idx", "topk_weights", "y", "weights", "out", "dispatch_wait_ns")
PLAIN = {"Parameter", "strided", "slice of a larger one", "functional tensor", "storage freed", "storage too small"}
PLAIN |= {"strided, storage too small"}


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


def kind_of_argument(rank: int, engine: str, name: str, argument: str):
    device_of(engine, rank)
    make, _ = KINDS[name]
    with warnings.catch_warnings(), make_buffer(engine=engine) as buffer:
        warnings.simplefilter("ignore")  # nested tensors and masked ones are beta
        given = [*given_to(rank, buffer)]
        right = operate(buffer, argument, lambda t: t, *given)
        try:
            found = operate(buffer, argument, make, *given)
        except ValueError as error:
            return str(error)
        return same_bits(torch.Tensor(found).detach(), right)


def combinations():
    for name, argument in itertools.product(KINDS, ARGUMENTS):
        error = KINDS[name][1]
        if name == "MaskedTensor" and argument not in ("topk_weights", "weights"):
            continue  # PyTorch makes none of bfloat16 and of int64
        if argument == "dispatch_wait_ns" and "strided" in name:
            continue  # it has one dimension
        is_written = argument in ("out", "dispatch_wait_ns")
        is_subclass = error in (None, NO_MEMORY) or "DTensor" in error
        if is_written and is_subclass and name not in PLAIN:
            error = "a plain tensor"
        yield pytest.param(name, argument, error, id=f"{argument}: {name}")


@pytest.mark.parametrize("name,argument,error", [*combinations()])
def test_of_every_argument(pools, engine, name, argument, error):
    if engine == "cuda" and name == "storage too small" and argument not in ("out", "dispatch_wait_ns"):
        pytest.skip(NOT_ASKED)
    for found in pools(2).run(kind_of_argument, engine, name, argument):
        if error is None:
            assert found is True, found
        else:
            assert isinstance(found, str) and found.startswith(f"{argument}: given ") and error in found, found


def with_gradients(rank: int, engine: str, name: str):
    device_of(engine, rank)
    make, error = KINDS[name]
    with warnings.catch_warnings(), make_buffer(engine=engine) as buffer:
        warnings.simplefilter("ignore")
        x, topk_idx, weights = given_to(rank, buffer)
        leaf = x.clone().requires_grad_()
        out = ep.dispatch(buffer, leaf, topk_idx, weights)
        (right,) = torch.autograd.grad(ep.combine(buffer, out.x, out.handle).float().sum(), leaf)
        try:
            other = make(x).detach().requires_grad_()
            out = ep.dispatch(buffer, other, topk_idx, weights)
            (found,) = torch.autograd.grad(ep.combine(buffer, out.x, out.handle).float().sum(), other)
        except (ValueError, AssertionError) as found:  # PyTorch's own: it mixes no fake tensor with others
            return f"{type(found).__name__}: {found}"
        return same_bits(torch.Tensor(found), right)


@pytest.mark.parametrize(
    "name,error",
    [
        ("Parameter", None),
        ("subclass with memory", None),
        ("AsyncCollectiveTensor", None),
        ("strided", None),
        ("DTensor", "ValueError: x: given a DTensor"),
        ("storage freed", "ValueError: x: given a Tensor"),
        ("functional tensor", "ValueError: x: given a Tensor"),
        ("FakeTensor", "AssertionError: Please convert all Tensors to FakeTensors first"),
    ],
)
def test_with_gradients(pools, engine, name, error):
    for found in pools(2).run(with_gradients, engine, name):
        assert found is True if error is None else str(found).startswith(error), found


def zeros(rank: int, engine: str):
    """PyTorch stands zero gradients, and zero tangents, for tensors without memory (ZeroTensor)."""
    device_of(engine, rank)
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        leaf = x.clone().requires_grad_()
        out = ep.dispatch(buffer, leaf, topk_idx, weights)
        y = ep.combine(buffer, out.x, out.handle)
        zero = torch._efficientzerotensor(y.shape, dtype=y.dtype, device=y.device)
        (grad,) = torch.autograd.grad(y, leaf, zero)
        received = buffer.dispatch(zero, topk_idx, weights).x
        return (
            grad._is_zerotensor(),
            grad.abs().sum().item(),
            received.abs().sum().item(),
            received.shape == out.x.shape,
        )


def test_zero_tensors_are_zeros(pools, engine):
    assert pools(2).run(zeros, engine) == [(False, 0, 0, True)] * 2


def weights_of_experts(rank: int, engine: str):
    device_of(engine, rank)
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        local = buffer.num_local_experts
        w = dict(w1=x.new_zeros(local, 2 * 16, HIDDEN), w2=x.new_zeros(local, HIDDEN, 16))
        texts = {}
        for argument in w:
            try:
                ep.moe_mlp(buffer, x, topk_idx, weights, **(w | {argument: distributed(w[argument])}))
            except ValueError as error:
                texts[argument] = str(error)
        return texts


def test_weights_of_experts_may_be_no_dtensors(pools, engine):
    for texts in pools(2).run(weights_of_experts, engine):
        assert texts.keys() == {"w1", "w2"} and all("a DTensor" in text for text in texts.values())


def read_only(rank: int) -> str:
    with make_buffer() as buffer, tempfile.TemporaryFile() as file:
        x, topk_idx, weights = given_to(rank, buffer)
        file.write(bytes(x.nbytes))
        file.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that the memory may only be read
            memory = mmap.mmap(file.fileno(), x.nbytes, prot=mmap.PROT_READ)
            out = torch.frombuffer(memory, dtype=torch.bfloat16).view(x.shape)
        received = buffer.dispatch(x, topk_idx, layout="decode")
        try:
            buffer.combine(received.x, received.handle, weights=weights, out=out)
        except ValueError as error:
            return str(error)
        return "written"


def test_an_output_that_may_only_be_read(pools):
    text = "out: given a tensor in memory that may only be read, allowed: one in memory that may be written"
    assert pools(2).run(read_only) == [text] * 2


def of_deep_ep(rank: int, engine: str, name: str) -> list[str]:
    from ep_dispatcher.integrations.deep_ep import Buffer

    texts, (make, _) = [], KINDS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISPATCHER_ENGINE", engine)
        device = device_of(engine, rank)
        buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
        x, topk_idx = torch.ones(4, 256, dtype=torch.bfloat16, device=device), torch.arange(4, device=device)[:, None]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)
        counts = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        for run in (
            lambda: buffer.get_dispatch_layout(make(topk_idx), 4),
            lambda: buffer.dispatch(make(x), topk_idx=topk_idx, topk_weights=topk_idx.float(), **counts),
        ):
            try:
                texts.append(f"no error: {run()}")
            except ValueError as error:
                texts.append(str(error))
        buffer.destroy()
    return texts


@pytest.mark.parametrize("name", ["TwoTensor", "DTensor", "storage freed", "storage too small"])
def test_of_deep_ep(pools, engine, name):
    if engine == "cuda" and name == "storage too small":
        pytest.skip(NOT_ASKED)
    for of_layout, of_rows in pools(2).run(of_deep_ep, engine, name):
        assert of_layout.startswith("topk_idx: given ") and of_rows.startswith("x: given "), (of_layout, of_rows)


# ---- handles -------------------------------------------------------------------------------------------------------

CHANGES = {
    "num_rows": lambda handle: dict(num_rows=7),
    "num_tokens": lambda handle: dict(num_tokens=MAX_TOKENS - 1),
    "layout": lambda handle: dict(layout="rank"),
    "expert_alignment": lambda handle: dict(expert_alignment=8),
    "an empty plan": lambda handle: dict(plan=handle.plan[:0]),
    "a plan of floats": lambda handle: dict(plan=handle.plan.float()),
    "a shorter plan": lambda handle: dict(plan=handle.plan[:-1]),
}


def changed(rank: int, engine: str, change: str, in_place: bool) -> list[str]:
    device_of(engine, rank)
    texts = []
    with make_buffer(engine=engine) as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        out = buffer.dispatch(x, topk_idx, weights)
        new = CHANGES[change](out.handle)
        handle = out.handle if in_place else dataclasses.replace(out.handle, **new)
        if in_place:
            for name, value in new.items():
                object.__setattr__(handle, name, value)
        num_tokens, num_rows = handle.num_tokens, handle.num_rows
        y = out.x.new_zeros(num_rows, HIDDEN)
        for run in (
            lambda: buffer.dispatch(x[:num_tokens], topk_weights=weights[:num_tokens], handle=handle),
            lambda: buffer.combine(y, handle),
            lambda: ep.dispatch(buffer, x[:num_tokens], topk_weights=weights[:num_tokens], handle=handle),
            lambda: ep.combine(buffer, y, handle),
        ):
            try:
                texts.append(f"no error: {run()}")
            except ValueError as error:
                texts.append(str(error))
        buffer.dispatch(x, topk_idx, weights)  # nothing was sent: the buffer goes on
    return texts


@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "overwritten"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_handle_is_refused(pools, engine, change, in_place):
    for texts in pools(2).run(changed, engine, change, in_place):
        assert len(texts) == 4 and all(text.startswith("handle: given ") for text in texts), texts


def overwritten(rank: int, value: int) -> str:
    with make_buffer() as buffer:
        x, topk_idx, weights = given_to(rank, buffer)
        out = buffer.dispatch(x, topk_idx, weights)
        out.handle.plan[4:13] = value  # the sizes, after the mark and the buffer
        try:
            buffer.combine(out.x, out.handle)
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("value", [-1, 0, 1 << 30])
def test_a_plan_with_overwritten_sizes_is_refused(pools, value):
    """Of the CPU engine: kernels of the CUDA engine read the plan, and the host does not."""
    for text in pools(2).run(overwritten, value):
        assert text.startswith("handle: given a plan of other sizes")


def many_tokens(rank: int, max_tokens: int) -> str:
    sizes = CONFIG | dict(hidden=8, num_topk=1, max_tokens_per_rank=max_tokens)
    try:
        with ep.Buffer(**sizes, engine="cpu", ranks_per_node=1, timeout_s=30) as buffer:
            topk_idx = torch.full((3, 1), rank, dtype=torch.int64)
            out = buffer.dispatch(torch.ones(3, 8, dtype=torch.bfloat16), topk_idx, max_recv_rows=500)
            return str(buffer.combine(out.x, out.handle).x.sum().item())
    except ValueError as error:
        return str(error)


def test_a_plan_of_more_tokens_than_int32_counts_is_refused(pools):
    """A plan for max_recv_rows has room for all tokens of a rank and its rail peers."""
    assert pools(4).run(many_tokens, (1 << 29) - 1) == ["24.0"] * 4
    for text in pools(4).run(many_tokens, 1 << 29):
        assert text.startswith("max_tokens_per_rank: given 536870912") and "at most 536870911" in text
