"""A layer of experts whose communication runs under its GEMMs, on a GPU.

                   main stream                                 side stream
    forward        plan, stage rows
                   GEMM 1, experts ascending: each tile    ◀── pull rows, those of low experts first
                     waits for its rows
                   activation (after the pull)
                   GEMM 2, experts descending: counts      ──▶ push, towards its end: a token's partial sum leaves
                     the rows that it has written              when the last of its experts here has written its row
                   sums of the partial sums
    backward       stage gradients
                   GEMM: gradient of the activation        ◀── pull gradients, as above
                   gradients of the activation's input,
                     GEMM: gradients of rows
                   GEMMs: gradients of w2 and w1           ──▶ combine: gradients of x and topk_weights

Pull, pushes and combine hold few multiprocessors. The GEMMs' programs take all others, one tile at a time, and all of
them once the communication is over. Before a GEMM that waits, the main stream waits until all blocks of the pull have
begun, so that the GEMM cannot take their multiprocessors.

A token's experts are scattered, so few tokens are complete before GEMM 2 is nearly done. So the pushes begin late, by
push_after, and hold no multiprocessor before. They run in a stream of higher priority: their blocks take the next
multiprocessors that become free. The sums come last, and take all multiprocessors.

With several nodes only the combine of the backward runs beside GEMMs, because rows and sums cross in the order of
tokens, not of experts. There two parts of the tokens overlap (parts.py).

Tiles and sums are the same as without overlap, so every bit is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_dispatcher.autograd import buffer_of, check_saved_plan, dispatch_goes_back
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.engines import Combined, CombineRequest, DispatchRequest, Waves
from ep_dispatcher.moe import grouped_gemm, parts
from ep_dispatcher.moe.grouped_gemm import Matrices
from ep_dispatcher.moe.grouped_mlp import Call, WriteGrads, checked_call

if TYPE_CHECKING:
    from ep_dispatcher.engines.cuda.engine import CudaEngine


# The fewest tokens that overlap: of a buffer's max_tokens_per_rank, and of a call. With 128 and 512 a layer takes 2 to
# 5 % longer with overlap: one H200, hidden 7168, 32 experts, forward 786 -> 807 and 1188 -> 1248 us.
MIN_TOKENS = 2048
# [bytes] Without gradients rows up to this length gain nothing. 2 H200, 4096 tokens, us, without -> with overlap:
# hidden 2048 1048 -> 1045, with gradients 2759 -> 2644; hidden 7168 7780 -> 7424, with gradients 26436 -> 25822.
LONG_ROW = 8192


class Sms(NamedTuple):
    """The most multiprocessors of each launch. A launch beside a GEMM has at most the buffer's num_sms.

    benchmarks/moe_mlp.py compares several in one run.
    """

    pull: int = 24  # forward
    push: int = 24
    sum: int = 1 << 16  # after all GEMMs, so all that the GPU has
    grad_pull: int = 24  # backward
    grad_combine: int = 24  # with several nodes always num_sms: some serve the wire


SMS = Sms()
# [per second] Measured on 2 H200: operations of GEMMs; bytes of rows that pushes load; bytes over NVLink.
GEMM_FLOPS, LOADED_BYTES, NVLINK_BYTES = 500e12, 2.4e12, 350e9
PUSH_AFTER: float | None = None  # instead of push_after(), for comparisons


def can_overlap(
    buffer: Buffer, wants_gradients: bool, num_tokens: int | None = None, num_parts: int | None = None
) -> bool:
    """Return whether a layer with this buffer overlaps: it can, and it pays."""
    return why_not(buffer, wants_gradients, num_tokens, num_parts) is None


def why_not(
    buffer: Buffer, wants_gradients: bool, num_tokens: int | None = None, num_parts: int | None = None
) -> str | None:
    """Say why a layer with this buffer runs its steps one after the other. None: it overlaps them.

    num_tokens: of this rank in the call; None: as many as the buffer holds. Other ranks may decide differently
    num_parts: as in ep.moe_mlp. Two parts overlap with any number of tokens
    """
    reason = parts.why_no_kernels(buffer)
    in_parts = parts.num_parts_of(buffer, num_parts) > 1
    if reason is None and not in_parts:
        reason = _why_no_waves(buffer, wants_gradients, num_tokens)
    if reason is not None:
        return reason
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):  # then nothing runs beside another kernel
        return "CUDA_LAUNCH_BLOCKING is set"
    # A graph orders its branches by itself. With one queue a GEMM may come before the pull that it waits for.
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if not in_parts and connections == "1" and torch.cuda.is_current_stream_capturing():
        return "it is captured in a CUDA graph with CUDA_DEVICE_MAX_CONNECTIONS=1"
    return None


def _why_no_waves(buffer: Buffer, wants_gradients: bool, num_tokens: int | None) -> str | None:
    """Say why one part on a GPU does not overlap, judging by its sizes. None: it does."""
    config, engine = buffer._config, buffer._live_engine()
    has_nodes = config.topology.num_nodes > 1
    reason = parts.why_few_tokens(buffer, MIN_TOKENS)
    if reason is not None:
        return reason
    if has_nodes and not wants_gradients:
        return f"its ranks are {config.topology.num_nodes} nodes, and one part without gradients does not overlap there"
    if num_tokens is not None and num_tokens < MIN_TOKENS:
        return f"this rank has {num_tokens} tokens, less than {MIN_TOKENS}"
    if not engine.has_waves and not has_nodes:
        return "num_sms is more than half of the GPU's multiprocessors, ranks can be masked, or plans are direct"
    if not wants_gradients and config.hidden * config.dtype.itemsize <= LONG_ROW:
        return f"rows of at most {LONG_ROW} bytes without gradients"
    return None


def push_after(num_ranks: int, num_topk: int, intermediate: int, itemsize: int) -> float:
    """Return the share of the last GEMM's rows that are written before pushes begin.

        share = 1 - 2 * seconds of pushes / seconds of the GEMM,  at least 0

    The seconds are those of a row, for each step alone on the GPU, with even routing. Pushes load all rows and send a
    sum for each (token, rank). They get twice their time, because most tokens are complete late. itemsize: bytes of an
    element

    On 2 H200 it gives 0.80 for hidden 7168, intermediate 2048. There 0.75 and 0.85 were equally fast, 0.5 and 0.92 took
    1 % longer (benchmarks/moe_mlp.py, docs/performance.md). With more ranks it has not been measured.
    """
    rows_of_a_sum = num_topk / (num_ranks * (1 - (1 - 1 / num_ranks) ** num_topk))
    away = (num_ranks - 1) / num_ranks  # the part of the sums that leaves the GPU
    pushes = itemsize * max(1 / LOADED_BYTES, away / rows_of_a_sum / NVLINK_BYTES)  # for an element of a row
    gemm = 2 * intermediate / GEMM_FLOPS
    return max(0.0, 1 - 2 * pushes / gemm)


def overlapped_mlp(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Matrices,
    w2: Matrices,
    max_recv_rows: int | None,
    *,
    keep_activated: bool = True,
    take_grads: Callable[[WriteGrads], Tensor | None] | None = None,
    anchor: Tensor | None = None,
) -> Tensor:
    """``ep.moe_mlp`` with overlap; weights and keywords are those of grouped_swiglu_mlp. The rest was checked."""
    grouped_gemm.kernels()  # an error here comes before anything is sent
    call = checked_call(x.dtype, w1, w2, keep_activated, take_grads, anchor)
    return _Mlp.apply(x, topk_weights, buffer, topk_idx, max_recv_rows, call, *call.inputs(x, topk_weights))


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        buffer: Buffer,
        topk_idx: Tensor,
        max_recv_rows: int | None,
        call: Call,
        anchor: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        has_waves = buffer._live_engine().has_waves
        out = buffer._checked_dispatch(
            partial(buffer._launch_dispatch, only_sends=has_waves, by_expert=has_waves),
            x,
            topk_idx,
            topk_weights,
            layout="expert",
            expert_alignment=1,
            quantize=None,
            handle=None,
            max_recv_rows=max_recv_rows,
        )
        rows, row_weights, handle = out.x, out.topk_weights, out.handle
        assert isinstance(rows, Tensor) and row_weights is not None  # as x and topk_weights were given
        with _Layer(buffer, rows) as layer:
            kernels, ends = grouped_gemm.kernels(), out.tokens_per_expert.cumsum(0, dtype=torch.int32)
            hidden_rows = rows.new_empty(rows.shape[0], call.w1[0].shape[0])
            arrived = layer.receive(SMS.pull) if has_waves else None
            kernels.multiply(rows, call.w1, ends, hidden_rows, transposed=True, arrived=arrived)
            layer.join()  # the weights of rows come with the last of them
            activated = kernels.weighted_swiglu(hidden_rows, row_weights, ends)
            y = torch.empty_like(rows)
            request = CombineRequest(y, handle.plan, None, handle.num_tokens, "expert")
            if has_waves:
                pieces = kernels.pieces_of_row(y.shape[0], len(ends), y.shape[1], transposed=True)
                (_, written), ready = layer.counters(), layer.main.record_event()
                kernels.multiply(activated, call.w2, ends, y, transposed=True, written=written)
                combined = layer.push(request, layer.beside(SMS.push, None, written, pieces), ready, ends, activated)
                layer.sum()
            else:
                kernels.multiply(activated, call.w2, ends, y, transposed=True)
                combined = buffer._launch_combine(request)
        kept = activated if call.keep_activated else None
        ctx.save_for_backward(rows, row_weights, hidden_rows, kept, ends, handle.plan, *weights)
        ctx.num_tokens, ctx.call = handle.num_tokens, call
        ctx.buffer_id, ctx.note = buffer.id, buffer._backward_note
        return combined.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_weights, hidden_rows, activated, ends, plan, *weights = ctx.saved_tensors
        call: Call = ctx.call
        (w1, w2), buffer, kernels = call.saved(weights), buffer_of(ctx), grouped_gemm.kernels()
        check_saved_plan(plan)
        has_waves = buffer._live_engine().has_waves
        sent = DispatchRequest(grad, plan=plan, num_rows=rows.shape[0])
        of_activated = rows.new_empty(rows.shape[0], hidden_rows.shape[1] // 2)
        of_rows = torch.empty_like(rows) if dispatch_goes_back(ctx) else None
        combined: Combined | tuple[None, None] = (None, None)
        of_y = buffer._launch_dispatch(sent, only_sends=has_waves).rows
        with _Layer(buffer, of_y) as layer:
            arrived = layer.receive(SMS.grad_pull) if has_waves else None
            kernels.multiply(of_y, w2, ends, of_activated, transposed=False, arrived=arrived)
            of_hidden, of_weights = kernels.weighted_swiglu_grad(of_activated, hidden_rows, row_weights, ends)
            if of_rows is not None:
                kernels.multiply(of_hidden, w1, ends, of_rows, transposed=False)
                request = CombineRequest(of_rows, plan, of_weights, ctx.num_tokens, "expert")
                combined = layer.combine(request, layer.beside(SMS.grad_combine) if has_waves else None)

            def write(of_w1: Matrices, of_w2: Matrices, accumulate: bool) -> None:
                kept = activated if call.keep_activated else kernels.weighted_swiglu(hidden_rows, row_weights, ends)
                kernels.outer_products(of_y, kept, ends, of_w2, accumulate=accumulate)
                kernels.outer_products(of_hidden, rows, ends, of_w1, accumulate=accumulate)

            of_inputs = call.gradients(write, weights, any(ctx.needs_input_grad[7:]))
        return *combined, None, None, None, None, *of_inputs


class _Layer:
    """Operations of a forward or backward in the side stream, and their counters.

    At the end the main stream waits for the side stream, so that memory of both can be reused. An error that leaves an
    operation half done, such as one of memory, ends the buffer: its peers learn of it at once.
    """

    uses_side = False  # whether the side stream has been given anything

    def __init__(self, buffer: Buffer, rows: Tensor):
        self.buffer, self.engine, self.rows = buffer, cast("CudaEngine", buffer._live_engine()), rows
        self.main, self.side = torch.cuda.current_stream(rows.device), self.engine.side_stream()

    def __enter__(self) -> _Layer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.engine.unreceived is not None:
            self.engine.give_up("ran the experts of a layer", error)
        self.join()

    def counters(self) -> tuple[Tensor, Tensor]:
        """Return zeroed counters for an operation that delivers or takes these rows: Waves.begun, Waves.done."""
        groups = -(-self.rows.shape[0] // grouped_gemm.WAVE_ROWS)
        zeros = torch.zeros(1 + groups, dtype=torch.int32, device=self.rows.device)
        return zeros[:1], zeros[1:]

    def beside(
        self, most: int, begun: Tensor | None = None, done: Tensor | None = None, pieces_of_row: int = 1
    ) -> Waves:
        """Describe a launch beside a GEMM, with at most ``most`` blocks. Without counters neither waits."""
        return Waves(min(most, self.engine.num_sms), begun, done, pieces_of_row)

    def receive(self, most: int) -> Tensor:
        """Receive the rows of the dispatch that was sent, beside the next kernels. Return the counters of the rows.

        most: blocks
        """
        begun, arrived = self.counters()
        waves = self.beside(most, begun, arrived)
        self.kept = self.engine.sent  # a copy of x too, if the pull reads one: the main stream may not reuse it
        self.side.wait_stream(self.main)
        self.uses_side = True
        with torch.cuda.stream(self.side):
            self.buffer._explaining(self.engine.receive, waves)
        self._begin_after(waves)
        return arrived

    def combine(self, request: CombineRequest, waves: Waves | None) -> Combined:
        """Run a combine beside the next kernels. Without waves it has num_sms blocks."""
        self.side.wait_stream(self.main)
        self.uses_side = True
        return self._combine(request, waves, only_sends=False)

    def push(
        self, request: CombineRequest, waves: Waves, ready: torch.cuda.Event, ends: Tensor, activated: Tensor
    ) -> Combined:
        """Run the pushes of a combine beside the last GEMM: they take rows of y as the GEMM counts them.

        ready: recorded before that GEMM; ends, activated: its arguments. The outputs are complete after `sum`.
        """
        assert waves.done is not None
        config = self.buffer._config
        share = PUSH_AFTER
        if share is None:
            share = push_after(config.topology.num_ranks, config.num_topk, activated.shape[1], activated.itemsize)
        self.side.wait_event(ready)
        self.uses_side = True
        with torch.cuda.stream(self.side):
            grouped_gemm.kernels().wait_for_share(waves.done, ends, activated.shape[0], share)
        return self._combine(request, waves, only_sends=True)

    def _combine(self, request: CombineRequest, waves: Waves | None, only_sends: bool) -> Combined:
        with torch.cuda.stream(self.side):
            combined = self.buffer._launch_combine(request, only_sends=only_sends, waves=waves)
        for t in combined:
            if t is not None:
                t.record_stream(self.main)
        return combined

    def sum(self) -> None:
        """Run the rest of the combine on all multiprocessors: nothing runs beside it."""
        self.join()
        self.buffer._explaining(self.engine.receive, Waves(min(SMS.sum, self.engine.all_sms)))

    def _begin_after(self, waves: Waves) -> None:
        """Let the main stream go on once the operation of these counters has its multiprocessors."""
        assert waves.begun is not None
        self.engine.wait_until_begun(waves)

    def join(self) -> None:
        """Let the main stream wait for the side stream, if that was used: a capture may not wait for an unused one."""
        if self.uses_side:
            self.main.wait_stream(self.side)
