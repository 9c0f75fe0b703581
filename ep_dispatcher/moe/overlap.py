"""A layer of experts in two parts of its tokens: communication of one part runs under the GEMMs of the other.

                   main stream                                 side stream
    forward                                                    dispatch A
                   experts of A                                dispatch B
                   experts of B                                combine A
                                                               combine B
    backward                                                   dispatch the gradients of B
                   gradients of B's rows                       dispatch the gradients of A
                   gradients of A's rows                       combine B: gradients of x and topk_weights
                   gradients of w1 and w2, both parts          combine A

A is the first half of a rank's tokens, B the rest; a single token is in A. Each GEMM waits for a whole operation
before it, by an event. No kernel waits for another one of its GPU, so no multiprocessors are set aside. The side stream
has a higher priority: its blocks get multiprocessors as tiles end.

Two parts pay between nodes, where communication takes long. On one node they do not: every expert then has half as
many rows in a GEMM, and there is little communication to hide (docs/performance.md).

Operations are collective, so all ranks run the same parts, whatever their tokens. A rank without overlap runs the same
operations in the same order, all in its current stream. So does the CPU engine. The backward begins with B, as autograd
does in torch.compile, where each step is a node of its own.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_dispatcher import checks, recompute
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.arguments import dispatch_request
from ep_dispatcher.autograd import backward_buffer, check_saved_plan
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.handle import Handle
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.grouped_mlp import Kept, Mlp, Parameters, checked_mlp, grads_of_rows, run_rows, write_grads
from ep_dispatcher.outputs import new_handle
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received

if TYPE_CHECKING:
    from ep_dispatcher.engines.cuda.engine import CudaEngine

# The smallest max_tokens_per_rank of a buffer for two parts by default. Measured in docs/performance.md.
MIN_TOKENS = 2048
_PER_PART = len(Kept._fields) + 2  # tensors that autograd keeps of a part: these, the plan, and its message rows


def num_parts_of(buffer: Buffer, asked: int | None = None) -> int:
    """Return the number of parts of a layer: the number asked for, else 2 where that pays, the same on all ranks."""
    if asked is None:
        return 1 if _why_one_part(buffer) else 2
    return checks.integer("num_parts", asked, 1, 2)


def why_not(buffer: Buffer, num_parts: int | None = None) -> str | None:
    """Say why a layer with this buffer runs its steps one after the other. None: it overlaps them.

    num_parts: as in ep.moe_mlp
    """
    if num_parts_of(buffer, num_parts) == 1:
        return _why_one_part(buffer) or "num_parts is 1"
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):  # then nothing runs beside another kernel
        return "CUDA_LAUNCH_BLOCKING is set"
    return _why_no_kernels(buffer)


def _why_one_part(buffer: Buffer) -> str | None:
    """Say why one part is the default. Only settings that are the same on all ranks decide."""
    config = buffer.config
    reason = _why_no_kernels(buffer)
    if reason is None and config.topology.num_nodes == 1:
        return "its ranks are one node"
    if reason is None and config.max_tokens_per_rank < MIN_TOKENS:
        return f"max_tokens_per_rank is {config.max_tokens_per_rank}, less than {MIN_TOKENS}"
    return reason


def _why_no_kernels(buffer: Buffer) -> str | None:
    """Say why kernels of grouped GEMMs do not take the rows of this buffer."""
    config, engine = buffer.config, buffer.live_engine()
    if engine.device != "cuda":
        return f"its engine is {engine.device}"
    return None if config.dtype in grouped_gemm.KERNEL_DTYPES else f"its rows are {config.dtype}"


def _will_run(node: torch.autograd.graph.Node) -> bool:
    """Return whether the backward under way runs a node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` ask for some gradients only, and skip nodes that lead to no
    gradient asked for. needs_input_grad does not show that.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad asks for
        return True


def _dispatch_goes_back(ctx: Any) -> bool:
    """Return whether the backward of a layer runs that of its dispatch. x and topk_weights are its first inputs.

    On another rank the steps of the layer may be nodes of their own. There autograd skips the backward of the dispatch
    if neither x nor topk_weights wants a gradient, or none is asked for in this pass. All ranks must do the same.
    """
    inputs = zip(ctx.needs_input_grad[:2], ctx.next_functions)
    return any(wanted and _will_run(node) for wanted, (node, _) in inputs)


def cut(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of A and those of B."""
    of_a = (t.shape[0] + 1) // 2
    return t[:of_a], t[of_a:]


def mlp_in_parts(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    parameters: Parameters,
    max_recv_rows: int | None,
    *,
    overlap: bool,
    handles: list[Handle] | None = None,
    quantize: QuantizeBlocks | None = None,
    **options: Any,
) -> Tensor:
    """``ep.moe_mlp`` in two parts; parameters and options are those of grouped_mlp. The parameters were checked.

    max_recv_rows: of each part
    quantize: as in ep.dispatch, only with float8
    overlap: run its operations in a stream of their own, unless ``why_not`` has a reason
    handles: of the parts, from an earlier call with this routing; an empty list gets new ones
    """
    overlap = overlap and why_not(buffer, num_parts=2) is None
    if grouped_gemm.has_kernels(x):
        grouped_gemm.kernels()  # an error here comes before anything is sent
    mlp = checked_mlp(x.dtype, parameters, **options)
    engine = buffer.live_engine()
    request = dispatch_request(
        engine,
        x,
        topk_idx,
        topk_weights,
        quantize=quantize,
        max_recv_rows=max_recv_rows,
        label=buffer.label,
        has_gradients=True,
    )
    engine.check_routing(topk_idx)  # of B too, before anything of A is sent
    if handles is None:
        handles = [] if buffer.caller_keeps_plans else recompute.handles_of(engine, request, num_parts=2)
    return _MlpInParts.apply(x, topk_weights, buffer, request, handles, mlp, overlap, *mlp.inputs(x, topk_weights))


class _MlpInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        buffer: Buffer,
        request: DispatchRequest,
        handles: list[Handle],
        mlp: Mlp,
        overlap: bool,
        anchor: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        assert request.topk_idx is not None
        requests = [
            replace(request, rows=rows, topk_idx=idx, topk_weights=row_weights)
            for rows, idx, row_weights in zip(cut(x), cut(request.topk_idx), cut(topk_weights))
        ]
        if has_plans := bool(handles):
            for one, handle in zip(requests, handles, strict=True):
                recompute.use_plan(one, handle)
        y = x.new_empty(x.shape)
        saved: list[Tensor | None] = []
        results: list[Tensor] = []  # keeps them alive: combines read them until the end
        with _Operations(buffer, x, overlap, num_operations=4) as operations:
            # With CUDA_DEVICE_MAX_CONNECTIONS=1 kernels start in the order of their launches. So launch the dispatch of
            # B before the experts of A. But if the host waits for the counts of B, launch the experts of A first. In
            # both cases launch combine A before the experts of B.
            waits = requests[0].waits_for_counts
            sent = [operations.dispatch(one) for one in requests[: 1 if waits else 2]]
            for i, out in enumerate(cut(y)):
                received = operations.take(*sent[i])
                assert received.topk_weights is not None  # as these were given
                if not has_plans:
                    handles.append(new_handle(buffer.live_engine(), requests[i], received))
                ends = received.tokens_per_expert.cumsum(0, dtype=torch.int32)
                rows, kept = run_rows(received.rows, received.topk_weights, ends, mlp, received.scales)
                experts_end = operations.record()
                results.append(rows)
                if waits and i == 0:
                    sent.append(operations.dispatch(requests[1]))
                handle = handles[i]
                sums = CombineRequest(rows, handle.plan, len(out), message_rows=handle.message_rows, out=out)
                operations.combine(sums, experts_end)
                saved += [*kept, handle.plan, handle.message_rows]
        ctx.save_for_backward(*saved, *tensors)
        ctx.mlp, ctx.overlap, ctx.buffer, ctx.note = mlp, overlap, buffer, buffer.backward_note
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        of_a, of_b, tensors = saved[:_PER_PART], saved[_PER_PART : 2 * _PER_PART], saved[2 * _PER_PART :]
        kept, plans = [Kept(*of_a[:-2]), Kept(*of_b[:-2])], [of_a[-2:], of_b[-2:]]
        mlp: Mlp = ctx.mlp
        parameters, buffer = mlp.saved(tensors), backward_buffer(ctx)
        plans = [check_saved_plan(*plan) for plan in plans]
        goes_back = _dispatch_goes_back(ctx)
        grad_x = grad.new_empty(grad.shape) if goes_back else None
        grad_topk_weights: list[Any] = [None, None]
        grads: list[Any] = [None, None]
        sent: list[Any] = [None, None]
        with _Operations(buffer, grad, ctx.overlap, num_operations=4 if goes_back else 2) as operations:
            for i in (1, 0):
                plan, message_rows = plans[i]
                num_rows = kept[i].rows.shape[0]
                sent[i] = operations.dispatch(
                    DispatchRequest(cut(grad)[i], plan=plan, message_rows=message_rows, num_rows=num_rows)
                )
            for i in (1, 0):
                grads[i] = grads_of_rows(operations.take(*sent[i]).rows, kept[i], mlp, parameters, goes_back)
                _, grad_rows, grad_row_weights = grads[i]
                if grad_x is not None:
                    out, (plan, message_rows) = cut(grad_x)[i], plans[i]
                    sums = CombineRequest(
                        grad_rows, plan, len(out), topk_weights=grad_row_weights, message_rows=message_rows, out=out
                    )
                    grad_topk_weights[i] = operations.combine(sums, operations.record()).topk_weights
            sets = [(of_part, row_grads) for of_part, (row_grads, *_) in zip(kept, grads)]
            side = operations.side  # `write` keeps this alone, not the operations: it may be called later

            def write(out: Parameters, accumulate: bool) -> None:
                write_grads(sets, mlp.activation, out, accumulate)
                _order_memory(side)

            grad_inputs = mlp.gradients(write, tensors, any(ctx.needs_input_grad[8:]))
            operations.join()
            grad_probs = torch.cat(grad_topk_weights) if goes_back else None  # reads memory of the side stream
        return grad_x, grad_probs, None, None, None, None, None, *grad_inputs


class _Operations:
    """The operations of a layer, beside its GEMMs, or between them in the current stream.

    Arguments and results of an operation have to live until the end of `with`. There each stream waits for the other.
    So memory of both is reused in order, whichever main stream uses the side stream next.

    An error between the first operation and the last ends a buffer on a GPU: its peers learn of it at once. A
    ValueError does not: it is about counts, and all ranks raise it.
    """

    def __init__(self, buffer: Buffer, x: Tensor, overlap: bool, num_operations: int):
        self.buffer, self.num_operations, self.num_launched = buffer, num_operations, 0
        self.engine = cast("CudaEngine", buffer.live_engine()) if x.is_cuda else None
        self.main: torch.cuda.Stream | None = None
        self.side: torch.cuda.Stream | None = None
        if overlap and self.engine is not None:
            self.main, self.side = torch.cuda.current_stream(x.device), self.engine.side_stream()

    def __enter__(self) -> _Operations:
        if self.main is not None and self.side is not None:
            self.side.wait_stream(self.main)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_between = 0 < self.num_launched < self.num_operations
        if error is not None and is_between and self.engine is not None and not isinstance(error, ValueError):
            self.engine.give_up("ran the experts of a layer", error)
        self.join()
        _order_memory(self.side)

    def join(self) -> None:
        """Let the main stream wait for all operations."""
        if self.main is not None and self.side is not None:
            self.main.wait_stream(self.side)

    def dispatch(self, request: DispatchRequest) -> tuple[Received, torch.cuda.Event | None]:
        """Launch a dispatch after the earlier operations. Return its outputs, and the event that `take` waits for."""
        with self._beside():
            received = self.buffer.live_engine().dispatch(request)
        self.num_launched += 1
        return received, None if self.side is None else self.side.record_event()

    def take(self, received: Received, event: torch.cuda.Event | None) -> Received:
        """Let the main stream wait for a dispatch. Return its outputs."""
        if self.main is not None and event is not None:
            self.main.wait_event(event)
        return received

    def record(self) -> torch.cuda.Event | None:
        """Return an event after all that the main stream has been given so far."""
        return None if self.main is None else self.main.record_event()

    def combine(self, request: CombineRequest, after: torch.cuda.Event | None) -> Combined:
        """Launch a combine after the earlier operations and after an event."""
        if self.side is not None and after is not None:
            self.side.wait_event(after)
        with self._beside():
            combined = self.buffer.live_engine().combine(request)
        self.num_launched += 1
        return combined

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)


def _order_memory(side: torch.cuda.Stream | None) -> None:
    """Let a side stream wait for the current one, so that memory freed from here on is reused after its kernels.

    Two main streams may share a side stream (streams.py), and gradients may be written after the layer. While a
    graph is captured the side stream does not wait, because no join would follow. There the next layer of the same main
    stream waits, and nobody else gets that memory: it is the graph's.
    """
    if side is not None and not torch.cuda.is_current_stream_capturing():
        side.wait_stream(torch.cuda.current_stream(side.device))
