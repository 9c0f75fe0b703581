"""How long a buffer lives: as long as a graph of autograd needs it, and no longer; destroy() ends it at once."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.autograd import normal
from lib.faults import mappings
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher.integrations import deep_ep
from ep_dispatcher.tools.testing import device_of, same_bits

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 16, 24, 8, 3, 20
WAYS = ["steps", "rank layout", "observed", "moe_mlp", "two parts"]


def make_buffer(engine: str, **changes) -> ep.Buffer:
    sizes = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens_per_rank=NUM_TOKENS)
    return ep.Buffer(**(sizes | dict(dtype=torch.float32, engine=engine, timeout_s=60) | changes))


class Watching(TorchDispatchMode):
    """Something that looks at operators, so that dispatch and combine run as operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def layer(buffer: ep.Buffer, how: str, x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, idx: Tensor) -> Tensor:
    if how in ("moe_mlp", "two parts"):
        return ep.moe_mlp(buffer, x, idx, weights, w1, w2, num_parts=2 if how == "two parts" else 1)
    if how == "observed":
        with Watching():
            return layer(buffer, "steps", x, weights, w1, w2, idx)
    out = ep.dispatch(buffer, x, idx, weights, layout="rank" if how == "rank layout" else "expert")
    of_rows = out.topk_weights.sum(1) if how == "rank layout" else out.topk_weights
    return ep.combine(buffer, torch.tanh(out.x) * of_rows[:, None], out.handle)


def given(rank: int, engine: str, num_tokens: int = NUM_TOKENS) -> tuple[list[Tensor], Tensor]:
    """x, topk_weights, w1 and w2, which want gradients, and topk_idx."""
    local = NUM_EXPERTS // 2
    shapes = [(num_tokens, HIDDEN), (num_tokens, NUM_TOPK), (local, 2 * INTERMEDIATE, HIDDEN)]
    shapes.append((local, HIDDEN, INTERMEDIATE))
    device = device_of(engine, rank)
    leaves = [normal(shape, 10 * i + rank).to(device).requires_grad_() for i, shape in enumerate(shapes)]
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(rank))
    return leaves, scores.topk(NUM_TOPK).indices.to(device)


def gradients(y: Tensor, leaves: list[Tensor], **options) -> list[Tensor]:
    loss = (y * torch.arange(y.numel(), device=y.device, dtype=y.dtype).view(y.shape)).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found)]


# ---- ways to go back -------------------------------------------------------------------------------------------------


def once(forward, leaves):
    y = forward(*leaves)
    return lambda: gradients(y, leaves)


def with_a_retained_graph(forward, leaves):
    y = forward(*leaves)

    def back() -> list[Tensor]:
        first = gradients(y, leaves, retain_graph=True)
        assert all(map(same_bits, first, gradients(y, leaves, retain_graph=True)))
        return gradients(y, leaves)

    return back


def with_second_derivatives(forward, leaves):
    y = forward(*leaves)

    def back() -> list[Tensor]:
        x, *_ = leaves
        (grad,) = torch.autograd.grad((y**2).sum(), [x], create_graph=True)
        return gradients(grad, leaves)

    return back


def with_saved_tensors_elsewhere(forward, leaves):
    def pack(t: Tensor) -> tuple[torch.device, Tensor]:
        return t.device, t.detach().to("cpu", copy=True)

    with saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0])):
        y = forward(*leaves)
    return lambda: gradients(y, leaves)


def in_a_checkpoint(forward, leaves, **options):
    y = checkpoint(forward, *leaves, **options)

    def back() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        (y * torch.arange(y.numel(), device=y.device, dtype=y.dtype).view(y.shape)).sum().backward()
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    return back


BACKWARDS = {
    "once": once,
    "a retained graph": with_a_retained_graph,
    "second derivatives": with_second_derivatives,
    "saved tensors elsewhere": with_saved_tensors_elsewhere,
    "checkpoint": partial(in_a_checkpoint, use_reentrant=False),
    "reentrant checkpoint": partial(in_a_checkpoint, use_reentrant=True),
    "checkpoint with plans": partial(in_a_checkpoint, use_reentrant=False, context_fn=ep.recompute_contexts),
}
CASES = [("once", how) for how in WAYS] + [(way, "steps") for way in BACKWARDS if way != "once"]


@pytest.mark.parametrize("backward,how", CASES)
@on_ranks(2)
def test_a_graph_keeps_its_buffer(rank, engine, backward, how):
    """A buffer local to a function that returns the result: the backward raised that it was given one that is gone.

    Gradients are those of a buffer that is kept. Without a cycle the memory is free when the graph is.
    """
    leaves, idx = given(rank, engine)
    go = BACKWARDS[backward]

    def begin(buffer: ep.Buffer):
        return go(lambda *leaves: layer(buffer, how, *leaves, idx), leaves)

    def local():
        buffer = make_buffer(engine)
        return begin(buffer), weakref.ref(buffer)

    with make_buffer(engine) as kept:
        right = begin(kept)()
    del kept
    gc.collect()
    gc.disable()
    try:
        back, buffer = local()
        assert buffer() is not None
        found = back()
        assert all(map(same_bits, found, right)) and all(grad.any() for grad in found[:2])
        del back, found
        assert buffer() is None
        assert engine != "cpu" or not mappings()
    finally:
        gc.enable()


class Growing(nn.Module):
    """A module that replaces its buffer by a larger one when more tokens come."""

    def __init__(self, engine: str):
        super().__init__()
        self.engine = engine
        self.held: ep.Buffer | None = None

    def forward(self, how: str, *tensors: Tensor) -> Tensor:
        num_tokens = tensors[0].shape[0]
        if self.held is None or num_tokens > self.held.config.max_tokens_per_rank:
            self.held = make_buffer(self.engine, max_tokens_per_rank=num_tokens)
        return layer(self.held, how, *tensors)


@pytest.mark.parametrize("how", WAYS)
@on_ranks(2)
def test_a_buffer_may_be_replaced_between_two_forwards_and_one_backward(rank, engine, how):
    """The backward of the first forward pass needs the buffer that the second one has replaced."""
    microbatches = [given(rank, engine, num_tokens) for num_tokens in (8, 20)]
    flat = [leaf for leaves, _ in microbatches for leaf in leaves]
    with make_buffer(engine) as buffer:
        right = gradients(torch.cat([layer(buffer, how, *leaves, idx) for leaves, idx in microbatches]), flat)
    module = Growing(engine)
    found = gradients(torch.cat([module(how, *leaves, idx) for leaves, idx in microbatches]), flat)
    assert all(map(same_bits, found, right)) and found[0].any() and found[4].any()
    assert module.held.config.max_tokens_per_rank == 20
    module.held.destroy()


@pytest.mark.parametrize("how", WAYS)
@on_ranks(2)
def test_a_buffer_that_was_destroyed_before_the_backward_is_named(rank, engine, how):
    """As at the end of a ``with`` in a function that returns the result."""
    leaves, idx = given(rank, engine)

    def local() -> Tensor:
        with make_buffer(engine) as buffer:
            return layer(buffer, how, *leaves, idx)

    y = local()
    assert engine != "cpu" or not mappings()
    for _ in range(2):
        with pytest.raises(ValueError, match="^buffer was destroyed before this backward"):
            gradients(y, leaves)


@on_ranks(1, timeout_s=300)
def test_what_is_compiled_names_its_buffer_and_does_not_keep_it(rank):
    """An operator of a compiled graph has the buffer's id. The buffer has to live until the backward, or is named."""
    buffer = make_buffer("cpu", timeout_s=300)
    x = normal((NUM_TOKENS, HIDDEN), 1).requires_grad_()
    idx = torch.arange(NUM_TOKENS * NUM_TOPK, device="cpu").view(NUM_TOKENS, NUM_TOPK) % NUM_EXPERTS

    @partial(torch.compile, backend="aot_eager")
    def run(buffer: ep.Buffer, x: Tensor) -> Tensor:
        out = ep.dispatch(buffer, x, idx, max_recv_rows=NUM_TOKENS * NUM_TOPK)
        return ep.combine(buffer, torch.tanh(out.x), out.handle)

    right = gradients(run(buffer, x), [x])
    first, second = run(buffer, x), run(buffer, x)
    assert all(map(same_bits, gradients(first, [x]), right))
    buffer.destroy()
    with pytest.raises(ValueError, match=r"^buffer \(id \d+\) is gone or was destroyed"):
        gradients(second, [x])
    torch._dynamo.reset()


@pytest.mark.parametrize("is_destroyed", [True, False])
@on_ranks(2)
def test_a_buffer_does_not_hold_its_group(rank, engine, is_destroyed):
    """A group that was held kept its threads after destroy_process_group, and one of them could abort the process."""
    group = dist.new_group()
    reference = weakref.ref(group)
    buffer, deep_ep_buffer = make_buffer(engine, group=group), deep_ep.Buffer(group)
    assert buffer.group is group
    del group, deep_ep_buffer
    if is_destroyed:
        buffer.destroy()
    dist.destroy_process_group(reference())
    gc.collect()
    assert reference() is None
    assert "Buffer(rank" in str(buffer)
    with pytest.raises(ValueError, match="^the process group of this buffer is gone"):
        _ = buffer.group
    buffer.destroy()
