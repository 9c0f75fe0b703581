"""moe_mlp with overlap on GPUs: the bits of one step after the other, memory of two streams, an end to every wait."""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.experts import NAMES
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher import engines
from ep_dispatcher.moe import float8_gemm
from ep_dispatcher.moe import overlap as overlapping
from ep_dispatcher.moe.grouped_mlp import Parameters
from ep_dispatcher.moe.mlp import run_grouped_nodes
from ep_dispatcher.tools.testing import device_of

pytestmark = pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}")
HIDDEN, INTERMEDIATE, TOPK, EXPERTS_PER_RANK = 256, 192, 4, 6
MAX_TOKENS = 3000  # too many for direct plans
LIMIT_S = 8
KINDS = ("uniform", "few", "hot")
NODES = [(2, 1), (4, 2), (2, 2)]  # ranks, ranks per node


def make_buffer(ranks_per_node: int = 1, **changes: Any) -> ep.Buffer:
    device_of("cuda", dist.get_rank())
    sizes = dict(hidden=HIDDEN, num_experts=EXPERTS_PER_RANK * dist.get_world_size(), num_topk=TOPK)
    options = dict(max_tokens_per_rank=MAX_TOKENS, ranks_per_node=ranks_per_node, timeout_s=60) | changes
    return ep.Buffer(engine="cuda", **sizes, **options)


def rows_of(counted: bool) -> dict[str, int]:
    """Return options of a layer: the host waits for the number of rows, or there are enough."""
    return {} if counted else dict(max_recv_rows=TOPK * MAX_TOKENS * dist.get_world_size())


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


def go_back(y: Tensor) -> None:
    """Run the backward of y. Its gradient is the same in every run."""
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).to(y.dtype))


def run_layer(
    buffer: ep.Buffer, given: tuple[Tensor, ...], *, between: Callable[[], None] = lambda: None, **options: Any
) -> list[Tensor]:
    """Return y, and the gradients of x, topk_weights, w1 and w2."""
    x, idx, *others = given
    leaves = [t.detach().clone().requires_grad_() for t in (x, *others)]
    y = ep.moe_mlp(buffer, leaves[0], idx.clone(), *leaves[1:], **options)
    between()
    go_back(y)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def run_with_sums(
    buffer: ep.Buffer, given: tuple[Tensor, ...], num_parts: int, **options: Any
) -> tuple[list[Tensor], Callable]:
    """Run a layer as Megatron does: gradients of w1 and w2 are added to float32 sums, which are 1 before.

    Return y, the gradients of x and topk_weights and all sums; and the function that adds to the sums.
    """
    x, idx, topk_weights, *stacks = given
    w1, w2 = ([w.clone() for w in stack] for stack in stacks)
    sums = [[torch.ones_like(w, dtype=torch.float32) for w in of] for of in (w1, w2)]
    take: list = []
    leaves = [x.clone().requires_grad_(), topk_weights.clone().requires_grad_()]
    enough = rows_of(counted=False)["max_recv_rows"]
    options |= dict(take_grads=take.append)
    inputs = buffer, leaves[0], idx, leaves[1], Parameters(w1, w2), enough, num_parts
    y = overlapping.mlp_in_parts(*inputs, **options)
    go_back(y)
    (write,) = take
    return [y.detach(), *(leaf.grad for leaf in leaves), *sums[0], *sums[1]], partial(write, Parameters(*sums), True)


def fill_what_is_free() -> None:
    """Write NaN to memory that a layer has freed."""
    for size in (1 << 16, 1 << 20, 1 << 23):
        torch.full((size,), float("nan"), device="cuda")


def assert_same(right: Sequence[Tensor], found: Sequence[Tensor], where: str) -> None:
    for i, (a, b) in enumerate(zip(right, found, strict=True)):
        assert torch.equal(a, b), f"{where}: {NAMES[i] if len(right) == len(NAMES) else i} differs"


# ---- the same bits --------------------------------------------------------------------------------------------------


def both_ways(rank: int, kinds: list[str], ranks_per_node: int, dtype: torch.dtype = torch.bfloat16) -> None:
    with make_buffer(ranks_per_node, dtype=dtype) as buffer:
        for step, kind in enumerate(kinds):
            num_tokens = 0 if (rank + step) % 5 == 4 else 2900 - 577 * rank - 41 * step
            given = layer_inputs(rank, kind, num_tokens, step, dtype)
            assert ep.why_no_overlap(buffer, num_parts=2) is None
            plain = run_layer(buffer, given, overlap=False, num_parts=2)
            for counted in (True, False):
                found = run_layer(buffer, given, num_parts=2, **rows_of(counted))
                assert_same(plain, found, f"step {step}, {kind}, {counted=}")
            one_part = run_layer(buffer, given, overlap=False, num_parts=1)
            for counted in (True, False):
                found = run_layer(buffer, given, num_parts=1, **rows_of(counted))
                assert_same(one_part, found, f"step {step}, {kind}, {counted=}, in one part")
            for name, a, b in zip(NAMES, one_part, plain):
                largest = float(a.abs().max()) if a.numel() else 0.0
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * max(1.0, largest), msg=name)
        buffer.check()


def run_in_one_part(buffer: ep.Buffer, given: tuple[Tensor, ...], *, separate: bool, quantizes: bool) -> list[Tensor]:
    """Return what run_layer does, with a node of autograd for each step or one node for all."""
    x, idx, *others = given
    leaves = [t.clone().requires_grad_() for t in (x, *others)]
    inputs = buffer, leaves[0], idx, leaves[1], Parameters(*leaves[2:]), rows_of(False)["max_recv_rows"], 1
    options: dict[str, Any] = {}
    if quantizes:
        options["quantize"] = "e4m3_1x128_pow2"
        options["float8"] = tuple(float8_gemm.quantize_weights(w) for w in others[1:])
    if separate:
        y = run_grouped_nodes(*inputs, **options)
    else:
        y = overlapping.mlp_in_parts(*inputs, overlap=True, **options)
    go_back(y)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def as_separate_nodes(rank: int, quantizes: bool) -> None:
    """Compare bits, and the memory that both need."""
    with make_buffer(dist.get_world_size()) as buffer:
        for step, kind in enumerate(KINDS):
            given = layer_inputs(rank, kind, 2900 - 577 * rank, step)
            results, peaks = [], []
            for separate in (True, False):
                run_in_one_part(buffer, given, separate=separate, quantizes=quantizes)  # compiles kernels
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                results.append(run_in_one_part(buffer, given, separate=separate, quantizes=quantizes))
                torch.cuda.synchronize()
                peaks.append(torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in results[-1]))
            assert_same(*results, kind)
            # The gradient of x lives longer, and so do small tensors, but no tensor of rows.
            of_rows = rows_of(False)["max_recv_rows"] * HIDDEN * given[0].itemsize
            most = given[0].nbytes + of_rows // 8
            assert peaks[1] - peaks[0] <= most, f"{peaks} bytes, but at most {most} more are expected"
        buffer.check()


@pytest.mark.parametrize("quantizes", [False, True])
def test_one_part_has_the_bits_of_separate_nodes(pools, quantizes):
    pools(2).run(as_separate_nodes, quantizes)


@pytest.mark.parametrize("num_ranks, ranks_per_node", NODES)
def test_the_bits_of_one_part_after_the_other(pools, num_ranks, ranks_per_node):
    """Whatever the routing, and whatever the tokens of the ranks; none among them."""
    pools(num_ranks).run(both_ways, ["uniform", "hot", "few", "one expert", "uniform", "uniform"], ranks_per_node)


def test_float16(pools):
    pools(2).run(partial(both_ways, dtype=torch.float16), ["uniform", "few"], 1)


def many_steps(rank: int, ranks_per_node: int, counted: bool, num_parts: int | None) -> None:
    """Other routings and other memory at each step, and no host waits. New tensors are filled with NaN in between."""
    with make_buffer(ranks_per_node) as buffer:
        given = [layer_inputs(rank, KINDS[n % 3], 2900 - 577 * rank - 300 * (n % 4), n) for n in range(6)]
        plain = [run_layer(buffer, one, overlap=False, num_parts=num_parts or 2) for one in given]
        found, options = [], dict(num_parts=num_parts, **rows_of(counted))
        for step in range(18):
            found.append(run_layer(buffer, given[step % 6], between=fill_what_is_free, **options))
            fill_what_is_free()
        for step, values in enumerate(found):
            assert_same(plain[step % 6], values, f"step {step}")
        buffer.check()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("num_ranks, ranks_per_node, num_parts", [(2, 1, None), (4, 2, None), (2, 2, 1), (4, 2, 1)])
def test_many_steps_in_a_row(pools, num_ranks, ranks_per_node, num_parts, counted):
    """By default layers between nodes run in two parts."""
    pools(num_ranks).run(many_steps, ranks_per_node, counted, num_parts)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("counted", [True, False])
@on_ranks(2)
def test_layers_in_two_streams(rank: int, counted: bool, num_parts: int) -> None:
    """Layers in two streams in turn. Only the buffer orders these: each has memory and a side stream of its own."""
    with make_buffer() as buffer:
        given = [layer_inputs(rank, kind, 2900 - 577 * rank, n) for n, kind in enumerate(KINDS)]
        plain = [run_layer(buffer, one, overlap=False, num_parts=num_parts) for one in given]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(2)], []
        for step in range(12):
            with torch.cuda.stream(streams[step % 2]):
                found.append(run_layer(buffer, given[step % 3], num_parts=num_parts, **rows_of(counted)))
                torch.full((1 << 23,), float("nan"), device="cuda")
        torch.cuda.synchronize()
        for step, values in enumerate(found):
            assert_same(plain[step % 3], values, f"step {step}")
        buffer.check()


def in_a_graph(rank: int, ranks_per_node: int, num_parts: int) -> None:
    """A graph of two steps, forward and backward, with other inputs at each replay. The second is compared."""
    with make_buffer(ranks_per_node) as buffer:
        num_tokens = 2049  # enough to overlap in one part too
        given = layer_inputs(rank, "uniform", num_tokens, seed=0)
        leaves = [t.detach().clone().requires_grad_() for t in (given[0], *given[2:])]
        idx, of_y = given[1].clone(), torch.randn_like(given[0])

        def step(**options: Any) -> list[Tensor]:
            y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], num_parts=num_parts, **rows_of(False), **options)
            return [y, *torch.autograd.grad(y, leaves, of_y)]

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            step()
            captured = step()  # may use memory of the first again
        for seed in (1, 2, 3):
            again = layer_inputs(rank, "hot" if seed == 2 else "uniform", num_tokens, seed)
            with torch.no_grad():
                for leaf, value in zip(leaves, (again[0], *again[2:])):
                    leaf.copy_(value)
                idx.copy_(again[1])
            graph.replay()
            buffer.check()
            replayed = [t.detach().clone() for t in captured]
            for overlap in (False, True):
                assert_same(replayed, step(overlap=overlap), f"{seed=}, {overlap=}")


@pytest.mark.parametrize(
    "num_ranks, ranks_per_node, num_parts", [*((*nodes, 2) for nodes in NODES), (2, 1, 1), (2, 2, 1)]
)
def test_a_graph_of_forward_and_backward(pools, num_ranks, ranks_per_node, num_parts):
    pools(num_ranks).run(in_a_graph, ranks_per_node, num_parts)


def each_its_own_way(rank: int, ranks_per_node: int, num_parts: int) -> None:
    """Ranks with overlap beside ranks without. Not all inputs want gradients."""
    with make_buffer(ranks_per_node) as buffer:
        for step, wanted in enumerate(((0, 1, 2, 3), (2, 3), (0,), ())):
            x, idx, *others = layer_inputs(rank, "uniform", 2500 if (rank + step) % 2 else 3, seed=step)
            results = []
            for overlap in (False, True, (rank + step) % 2 == 0):
                leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, *others))]
                y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:], overlap=overlap, num_parts=num_parts)
                if wanted:
                    go_back(y)
                results.append([y.detach(), *(t.grad for t in leaves if t.grad is not None)])
                assert len(results[-1]) == 1 + len(wanted)
            for other in results[1:]:
                assert_same(results[0], other, f"{wanted=}")
        buffer.check()


@pytest.mark.parametrize("num_ranks, ranks_per_node, num_parts", [(2, 1, 2), (4, 2, 2), (2, 2, 1), (4, 2, 1)])
def test_ranks_that_choose_differently(pools, num_ranks, ranks_per_node, num_parts):
    pools(num_ranks).run(each_its_own_way, ranks_per_node, num_parts)


@on_ranks(2)
def test_a_forward_has_the_bits_of_one_part(rank: int) -> None:
    """A row of the result is the same sum, whatever the tile that it is in."""
    with make_buffer() as buffer, torch.no_grad():
        for kind in KINDS:
            x, idx, *others = layer_inputs(rank, kind, 2900 - 577 * rank, seed=1)
            one, two = (ep.moe_mlp(buffer, x, idx, *others, num_parts=number) for number in (1, 2))
            assert torch.equal(one, two), kind


@pytest.mark.parametrize("num_parts", [1, 2])
@on_ranks(2)
def test_the_host_waits_for_nothing(rank: int, num_parts: int) -> None:
    with make_buffer() as buffer:
        given = layer_inputs(rank, "uniform", 2500, seed=0)
        plain = run_layer(buffer, given, num_parts=num_parts, **rows_of(False))
        torch.cuda.set_sync_debug_mode("error")  # raises where the host waits
        try:
            found = run_layer(buffer, given, num_parts=num_parts, **rows_of(False))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same(plain, found, "again")


@pytest.mark.parametrize("num_parts", [1, 2])
@on_ranks(2)
def test_gradients_are_written_behind_other_layers(rank: int, num_parts: int) -> None:
    """As with delay_wgrad_compute: gradients of weights are written when another layer has run."""
    with make_buffer() as buffer:
        given = [layer_inputs(rank, kind, 2500 - 300 * rank, n) for n, kind in enumerate(KINDS)]
        results = []
        for overlap, most_waiting in ((False, 0), (True, 0), (True, 2)):
            found, waiting = [], []
            for step in range(8):
                options = dict(overlap=overlap, keep_activated=step % 2 == 0)
                values, write = run_with_sums(buffer, given[step % 3], num_parts, **options)
                found.append(values)
                waiting.append(write)
                fill_what_is_free()
                while len(waiting) > (most_waiting if step < 7 else 0):
                    write = waiting.pop(0)
                    write()
                    del write  # with the rows that it has read
                    fill_what_is_free()
            results.append(found)
        buffer.check()
    for result in results[1:]:
        for step, (plain, found) in enumerate(zip(results[0], result, strict=True)):
            assert_same(plain, found, f"step {step}")


@pytest.mark.parametrize("num_parts", [1, 2])
@on_ranks(2)
def test_a_recompute(rank: int, num_parts: int) -> None:
    """Two layers, each in a checkpoint: a forward without gradients, and again in the backward."""
    with make_buffer() as buffer:
        _, idx, *weights = layer_inputs(rank, "hot", 2500 - 300 * rank, seed=1)
        x = layer_inputs(rank, "uniform", 2500 - 300 * rank, seed=2)[0]
        results = []
        for recomputes, counted in ((False, True), (True, True), (True, False)):
            options = dict(overlap=recomputes, num_parts=num_parts, **rows_of(counted))
            for _ in range(2):
                leaves = [t.clone().requires_grad_() for t in (x, *weights)]
                layer = partial(residual_layer, buffer, idx, **options)
                y = leaves[0]
                for _ in range(2):
                    y = checkpoint(layer, y, *leaves[1:], use_reentrant=False) if recomputes else layer(y, *leaves[1:])
                    fill_what_is_free()
                go_back(y)
                fill_what_is_free()
                results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        buffer.check()
    for step, result in enumerate(results):
        assert_same(results[0], result, f"run {step}")


def residual_layer(buffer: ep.Buffer, idx: Tensor, rows: Tensor, *others: Tensor, **options: Any) -> Tensor:
    return rows + ep.moe_mlp(buffer, rows, idx, *others, **options)


# ---- mistakes and late ranks ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_after_a_bad_entry_in_either_part_the_buffer_goes_on(rank: int) -> None:
    with make_buffer() as buffer:
        x, idx, *others = layer_inputs(rank, "uniform", 2100, seed=0)
        for token, of_part in ((17, 17), (1067, 17)):
            wrong = idx.clone()
            wrong[token, 2] = 10_000
            with pytest.raises(ValueError, match=rf"topk_idx\[{of_part}, 2\] is 10000"):
                ep.moe_mlp(buffer, x, wrong, *others)
            plain, found = run_layer(buffer, (x, idx, *others), overlap=False), run_layer(buffer, (x, idx, *others))
            assert_same(plain, found, "afterwards")
    buffer = make_buffer()
    with pytest.raises((ValueError, RuntimeError), match="max_recv_rows|aborted|given up"):  # found by either operation
        ep.moe_mlp(buffer, x, idx, *others, max_recv_rows=10)
        buffer.check()
    torch.cuda.synchronize()
    with contextlib.suppress(ValueError, RuntimeError):
        buffer.destroy()


@on_ranks(2)
def test_an_error_between_the_parts_ends_the_buffer(rank: int) -> None:
    """Rank 0 fails in the experts of B. Rank 1 hears of it before its limit, while rank 0 keeps its buffer."""
    buffer, given = make_buffer(), layer_inputs(rank, "uniform", 2100, seed=0)
    run_layer(buffer, given)
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        forward_rows, calls = overlapping.forward_rows, []

        def fail(*args):
            calls.append(args)
            if len(calls) == 2:
                raise torch.cuda.OutOfMemoryError("made up")
            return forward_rows(*args)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError, match="made up"):
            patch.setattr(overlapping, "forward_rows", fail)
            run_layer(buffer, given)
        with pytest.raises(RuntimeError, match="gave up while it ran the experts of a layer, by OutOfMemoryError"):
            run_layer(buffer, given)
    else:
        with pytest.raises(ep.PeerTimeoutError) as error:
            run_layer(buffer, given)
            buffer.check()
        assert error.value.late_ranks == (0,) and time.monotonic() - begin < 30
    torch.cuda.synchronize()
    dist.barrier()
    buffer.destroy()


@pytest.mark.parametrize("counted", [True, False])
@on_ranks(2)
def test_a_late_rank_is_named(rank: int, counted: bool) -> None:
    buffer = make_buffer(timeout_s=LIMIT_S)
    given = layer_inputs(rank, "uniform", 2100, seed=0)
    run_layer(buffer, given)
    dist.barrier()
    if rank == 1:
        time.sleep(2 * LIMIT_S)
        buffer.destroy()
        return
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as error:
        run_layer(buffer, given, **rows_of(counted))
        buffer.check()
    torch.cuda.synchronize()
    assert error.value.late_ranks == (1,)
    assert LIMIT_S - 1 < time.monotonic() - begin < LIMIT_S + 5
