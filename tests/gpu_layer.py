"""A layer of experts on GPUs, for tests of its overlap in one part of the tokens and in two.

y, *gradients = run_layer(make_buffer(), layer_inputs(rank, "uniform", 2500, seed=0))     # collective
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.moe.grouped_mlp import Parameters

HIDDEN, INTERMEDIATE, TOPK, EXPERTS_PER_RANK = 256, 192, 4, 6
MAX_TOKENS = 3000  # too many for direct plans
ENOUGH = TOPK * MAX_TOKENS  # rows of a rank, for each rank of the group
LIMIT_S = 8


def make_buffer(**changes: Any) -> ep.Buffer:
    sizes = dict(hidden=HIDDEN, num_experts=EXPERTS_PER_RANK * dist.get_world_size(), num_topk=TOPK)
    return ep.Buffer(engine="cuda", max_tokens_per_rank=MAX_TOKENS, **sizes, **(dict(timeout_s=60) | changes))


def routing(kind: str, num_tokens: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Return the experts of each token.

    "hot": most tokens choose the same; "few": most columns are -1; "one expert": all tokens choose one
    """
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "hot":
        scores[:, num_experts // 2] += 0.9
    idx = scores.topk(TOPK, dim=1).indices
    if kind == "few":
        idx[torch.rand(idx.shape, generator=generator) < 0.8] = -1
    if kind == "one expert":
        idx[:] = -1
        idx[:, 1] = num_experts - 1
    return idx


def layer_inputs(
    rank: int, kind: str, num_tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Return x, topk_idx, topk_weights, w1, w2 of one rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    idx = routing(kind, num_tokens, EXPERTS_PER_RANK * dist.get_world_size(), generator)
    weights = torch.rand(num_tokens, TOPK, generator=generator)
    w1 = torch.randn(EXPERTS_PER_RANK, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS_PER_RANK, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return tuple(t.cuda() for t in (x, idx, weights, w1.to(dtype), w2.to(dtype)))


def raise_out_of_memory(*_, **__):
    raise torch.cuda.OutOfMemoryError("made up")


def go_back(y: Tensor) -> None:
    """Run the backward of y. Its gradient is the same in every run."""
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).to(y.dtype))


def run_layer(buffer: ep.Buffer, given: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """Return y, and the gradients of x, topk_weights, w1 and w2."""
    x, idx, *others = given
    leaves = [t.detach().clone().requires_grad_() for t in (x, *others)]
    y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], **options)
    go_back(y)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def run_with_sums(
    layer: Callable[..., Tensor],
    buffer: ep.Buffer,
    x: Tensor,
    idx: Tensor,
    topk_weights: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    **options: Any,
) -> tuple[list[Tensor], Callable[[], None]]:
    """Run a layer as Megatron does: gradients of w1 and w2 are added to float32 sums, which are 1 before.

    layer: overlap.mlp_in_parts, or what takes the same arguments
    Return y, the gradients of x and topk_weights and all sums; and the function that adds to the sums.
    """
    sums = [[torch.ones_like(w, dtype=torch.float32) for w in of] for of in (w1, w2)]
    take: list = []
    leaves = [x.clone().requires_grad_(), topk_weights.clone().requires_grad_()]
    enough = ENOUGH * dist.get_world_size()
    y = layer(buffer, leaves[0], idx, leaves[1], Parameters(w1, w2), enough, take_grads=take.append, **options)
    go_back(y)
    (write,) = take
    return [y.detach(), *(leaf.grad for leaf in leaves), *sums[0], *sums[1]], partial(write, Parameters(*sums), True)


def assert_graph(
    rank: int, buffer: ep.Buffer, num_tokens: int, runs: Sequence[dict], num_steps: int = 1, **options: Any
) -> None:
    """Replay a CUDA graph of forward and backward with other inputs. Every bit is that of the same step without it.

    runs: options of the steps to compare with
    num_steps: of the graph. The last is compared, and may use memory of those before again
    options: of all steps
    """
    enough = ENOUGH * dist.get_world_size()
    given = layer_inputs(rank, "uniform", num_tokens, seed=0)
    leaves = [t.detach().clone().requires_grad_() for t in (given[0], *given[2:])]
    idx, of_y = given[1].clone(), torch.randn_like(given[0])

    def step(**more: Any) -> list[Tensor]:
        y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], max_recv_rows=enough, **options, **more)
        return [y, *torch.autograd.grad(y, leaves, of_y)]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        for _ in range(num_steps - 1):
            step()
        captured = step()
    for seed in (1, 2, 3):
        again = layer_inputs(rank, "hot" if seed == 2 else "uniform", num_tokens, seed)
        with torch.no_grad():
            for leaf, value in zip(leaves, (again[0], *again[2:])):
                leaf.copy_(value)
            idx.copy_(again[1])
        graph.replay()
        buffer.check()
        replayed = [t.detach().clone() for t in captured]
        for more in runs:
            assert all(torch.equal(a, b) for a, b in zip(replayed, step(**more))), (seed, more)
