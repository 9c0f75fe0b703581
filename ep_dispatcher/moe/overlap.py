"""A layer of experts as one node of autograd, so that communication runs under GEMMs that do not depend on it.

A layer in one part has one such place, in the backward. Gradients of weights do not depend on the combine, nor it on
them:

                   main stream                                 side stream
    forward        dispatch, experts, combine
    backward       dispatch the gradients
                   gradients of rows
                   gradients of w1 and w2                      combine: gradients of x and topk_weights

In two parts of the tokens communication of one part runs under the GEMMs of the other:

                   main stream                                 side stream
    forward                                                    dispatch A
                   experts of A                                dispatch B
                   experts of B                                combine A
                                                               combine B
    backward                                                   dispatch the gradients of B
                   gradients of B's rows                       dispatch the gradients of A
                   gradients of A's rows                       combine B: gradients of x and topk_weights
                   gradients of w1 and w2, both parts          combine A

A is the first half of a rank's tokens, B the rest; a single token is in A. Each GEMM waits, by an event, for the whole
operation before it. No kernel waits for another kernel on the same GPU, so no multiprocessors are set aside. The side
stream has a higher priority: its blocks get multiprocessors as tiles end. What an operation in the side stream
allocates is memory that the main stream cannot use later. In one part that is the gradient of topk_weights alone.

Two parts pay off between nodes, where communication takes long. On one node they do not: every expert then has half as
many rows in a GEMM, and there is little communication to hide (docs/performance.md).

Operations are collective, so all ranks run the same parts, however many tokens they have. A rank without overlap runs
the same operations in the same order, all in its current stream. So does the CPU engine. The backward begins with B, as
autograd does where each step is a node of its own (run_nodes in mlp.py).
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ep_dispatcher import checks, recompute
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.arguments import dispatch_request
from ep_dispatcher.autograd import backward_buffer, check_saved_plan
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.handle import Handle
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.grouped_mlp import (
    Mlp,
    Parameters,
    SavedForward,
    backward_rows,
    forward_rows,
    make_mlp,
    write_parameter_grads,
)
from ep_dispatcher.observers import light_apply, once_differentiable
from ep_dispatcher.outputs import new_handle
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Received

if TYPE_CHECKING:
    from ep_dispatcher.engines.cuda.engine import CudaEngine

# The smallest max_tokens_per_rank of a buffer for two parts by default. Measured in docs/performance.md.
MIN_TOKENS = 2048
# Autograd saves these tensors of each part: the fields of SavedForward, then the plan and its message rows.
_SAVED_PER_PART = len(SavedForward._fields) + 2


def resolve_num_parts(buffer: Buffer, num_parts: int | None = None) -> int:
    """Return num_parts if it is an allowed number. For None return the default, which is the same on all ranks.

    The default is 2 where two parts pay off.
    """
    if num_parts is None:
        return 1 if _one_part_reason(buffer) else 2
    return checks.integer("num_parts", num_parts, 1, 2)


def no_overlap_reason(buffer: Buffer, num_parts: int | None = None) -> str | None:
    """Return why a layer with this buffer runs its steps one after the other. None: it overlaps them.

    num_parts: as in ep.moe_mlp
    """
    if resolve_num_parts(buffer, num_parts) == 1:
        return _one_part_reason(buffer) or "num_parts is 1"
    return no_side_stream_reason(buffer)


def no_side_stream_reason(buffer: Buffer) -> str | None:
    """Return why operations of a layer run in the main stream, whatever the number of parts."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):  # then nothing runs beside another kernel
        return "CUDA_LAUNCH_BLOCKING is set"
    return _no_kernels_reason(buffer)


def _one_part_reason(buffer: Buffer) -> str | None:
    """Return why one part is the default. It depends only on settings that are the same on all ranks."""
    config = buffer.config
    if config.redundant_experts_per_rank:
        return "its experts have redundant copies"
    reason = _no_kernels_reason(buffer)
    if reason is None and config.topology.num_nodes == 1:
        return "its ranks are one node"
    if reason is None and config.max_tokens_per_rank < MIN_TOKENS:
        return f"max_tokens_per_rank is {config.max_tokens_per_rank}, less than {MIN_TOKENS}"
    return reason


def _no_kernels_reason(buffer: Buffer) -> str | None:
    """Return why the kernels of grouped GEMMs do not take the rows of this buffer."""
    config, engine = buffer.config, buffer.live_engine()
    if engine.device != "cuda":
        return f"its engine is {engine.device}"
    return None if config.dtype in grouped_gemm.KERNEL_DTYPES else f"its rows are {config.dtype}"


def _will_backward_run(node: torch.autograd.graph.Node) -> bool:
    """Return whether the backward pass that is running will run a node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` ask for some gradients only, and skip nodes that lead to none
    of these. needs_input_grad does not show that.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad asks for
        return True


def _needs_dispatch_backward(ctx: Any) -> bool:
    """Return whether the backward of a layer runs the backward of its dispatch.

    On another rank the steps of the layer may be nodes of their own. There autograd skips the backward of the dispatch
    if neither x nor topk_weights needs a gradient, or none is asked for in this pass. All ranks must do the same.
    """
    # x and topk_weights are the first inputs.
    inputs = zip(ctx.needs_input_grad[:2], ctx.next_functions)
    return any(needs_grad and _will_backward_run(node) for needs_grad, (node, _) in inputs)


def split_tokens(t: Tensor, num_parts: int) -> tuple[Tensor, ...]:
    """Return the tokens of each part: all of them, or those of A and those of B."""
    if num_parts == 1:
        return (t,)
    num_tokens_a = (t.shape[0] + 1) // 2
    return t[:num_tokens_a], t[num_tokens_a:]


def mlp_in_parts(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    parameters: Parameters,
    max_recv_rows: int | None,
    num_parts: int,
    *,
    overlap: bool,
    handles: list[Handle] | None = None,
    quantize: QuantizeBlocks | None = None,
    **options: Any,
) -> Tensor:
    """Run ``ep.moe_mlp`` in one or two parts, with the options of grouped_mlp. The caller has checked the parameters.

    max_recv_rows: the limit of each part
    quantize: as in ep.dispatch, only with float8
    overlap: run operations beside GEMMs in a stream of their own, where a GPU and its kernels can
    handles: those of the parts, from an earlier call with this routing; an empty list is filled with new ones
    """
    overlap = overlap and no_side_stream_reason(buffer) is None
    if grouped_gemm.has_kernels(x):
        grouped_gemm.kernels()  # an error here comes before anything is sent
    mlp = make_mlp(x.dtype, parameters, **options)
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
        handles = [] if buffer.caller_keeps_plans else recompute.handles_for(engine, request, num_parts)
    inputs = mlp.autograd_inputs(x, topk_weights)
    return _apply_in_parts(x, topk_weights, buffer, request, handles, mlp, num_parts, overlap, *inputs)


_FIRST_MLP_INPUT = 8  # of _MlpInParts, from x on: those of Mlp.autograd_inputs


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
        num_parts: int,
        overlap: bool,
        anchor: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        assert request.topk_idx is not None
        requests = [
            replace(request, rows=rows, topk_idx=idx, topk_weights=row_weights)
            for rows, idx, row_weights in zip(
                *(split_tokens(t, num_parts) for t in (x, request.topk_idx, topk_weights))
            )
        ]
        has_plans = bool(handles)
        if has_plans:
            for part_request, handle in zip(requests, handles, strict=True):
                recompute.use_plan(part_request, handle)
        y = x.new_empty(x.shape)
        saved: list[Tensor | None] = []
        results: list[Tensor] = []  # keeps them alive: combines read them until the end
        # In one part no GEMM could run beside an operation.
        overlaps_here = overlap and num_parts > 1
        with _Operations(buffer, x, num_parts, overlaps_here, num_operations=2 * num_parts) as operations:
            # With CUDA_DEVICE_MAX_CONNECTIONS=1 kernels start in the order of their launches. So launch the dispatch of
            # B before the experts of A. But if the host waits for the counts of B, launch the experts of A first. In
            # both cases launch combine A before the experts of B.
            needs_counts = requests[0].needs_counts
            dispatched = [operations.dispatch(one) for one in (requests[:1] if needs_counts else requests)]
            for i, out in enumerate(split_tokens(y, num_parts)):
                received = operations.wait(*dispatched[i])
                assert received.topk_weights is not None  # because the request has some
                if not has_plans:
                    handles.append(new_handle(buffer.live_engine(), requests[i], received))
                ends = grouped_gemm.ends_of(received.tokens_per_expert, received.rows)
                rows, saved_forward = forward_rows(received.rows, received.topk_weights, ends, mlp, received.scales)
                results.append(rows)
                if len(dispatched) < num_parts:
                    dispatched.append(operations.dispatch(requests[i + 1]))
                handle = handles[i]
                combine_request = CombineRequest(
                    rows,
                    handle.plan,
                    len(out),
                    message_rows=handle.message_rows,
                    max_tokens_to_node=handle.max_tokens_to_node,
                    out=out,
                )
                operations.combine(combine_request)
                saved += [*saved_forward, handle.plan, handle.message_rows]
        ctx.save_for_backward(*saved, *tensors)
        ctx.mlp, ctx.buffer, ctx.note = mlp, buffer, buffer.backward_note
        ctx.num_parts, ctx.overlap = num_parts, overlap
        ctx.max_tokens_to_node = requests[0].max_tokens_to_node  # the same for all parts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        num_parts: int = ctx.num_parts
        parts: list[SavedForward] = []
        plans: list[tuple[Any, Any]] = []
        for i in range(num_parts):
            *saved_forward, plan, message_rows = saved[_SAVED_PER_PART * i : _SAVED_PER_PART * (i + 1)]
            parts.append(SavedForward(*saved_forward))
            plans.append((plan, message_rows))
        parameter_tensors = saved[_SAVED_PER_PART * num_parts :]
        mlp: Mlp = ctx.mlp
        parameters, buffer = mlp.saved_parameters(parameter_tensors), backward_buffer(ctx)
        plans = [check_saved_plan(*plan) for plan in plans]
        needs_dispatch_backward = _needs_dispatch_backward(ctx)
        needs_parameter_grads = mlp.needs_parameter_grads(ctx.needs_input_grad[_FIRST_MLP_INPUT:])
        # The main stream allocates the gradient of x, because it goes on to use it.
        grad_x = grad.new_empty(grad.shape) if needs_dispatch_backward else None
        grad_topk_weights: list[Any] = [None] * num_parts
        grads: list[Any] = [None] * num_parts
        dispatched: list[Any] = [None] * num_parts
        last_to_first = range(num_parts - 1, -1, -1)
        num_operations = 2 * num_parts if needs_dispatch_backward else num_parts
        with _Operations(buffer, grad, num_parts, ctx.overlap, num_operations) as operations:
            for i in last_to_first:
                plan, message_rows = plans[i]
                num_rows, rows = parts[i].rows.shape[0], split_tokens(grad, num_parts)[i]
                dispatched[i] = operations.dispatch(
                    DispatchRequest(
                        rows,
                        plan=plan,
                        message_rows=message_rows,
                        max_tokens_to_node=ctx.max_tokens_to_node,
                        num_rows=num_rows,
                    )
                )
            for i in last_to_first:
                grad_out = operations.wait(*dispatched[i]).rows
                needs = needs_dispatch_backward, needs_parameter_grads
                grads[i] = backward_rows(grad_out, parts[i], mlp, parameters, *needs)
                _, grad_rows, grad_row_weights = grads[i]
                if grad_x is not None:
                    out, (plan, message_rows) = split_tokens(grad_x, num_parts)[i], plans[i]
                    combine_request = CombineRequest(
                        grad_rows,
                        plan,
                        len(out),
                        topk_weights=grad_row_weights,
                        message_rows=message_rows,
                        max_tokens_to_node=ctx.max_tokens_to_node,
                        out=out,
                    )
                    combined = operations.combine(combine_request)
                    grad_topk_weights[i] = combined.topk_weights
            sets = [grad_inputs for grad_inputs, *_ in grads]
            side = operations.side  # `write` may be called later, and must not keep all of `operations` alive

            def write(out: Parameters, accumulate: bool) -> None:
                write_parameter_grads(sets, out, accumulate)
                if side is not None:
                    side.order_memory()

            grad_last_inputs = mlp.autograd_gradients(write, parameter_tensors, needs_parameter_grads)
            operations.join()
            # After the join, because it reads memory of the side stream.
            grad_weights = torch.cat(grad_topk_weights) if needs_dispatch_backward else None
        return grad_x, grad_weights, None, None, None, None, None, None, *grad_last_inputs


_apply_in_parts = light_apply(_MlpInParts)


class _Operations:
    """The operations of a layer: in a side stream beside its GEMMs, or between them in the current stream.

    The dispatch of a layer in one part has no GEMM beside it, so it runs in the current stream anyway. There its rows,
    the largest tensors of the layer, are allocated in the memory of all other tensors.

    Arguments and results of an operation have to live until the end of the `with` block. There each stream waits for
    the other. So the memory of both is reused in order, whichever main stream uses the side stream next.

    On a GPU an error between the first operation and the last one ends the buffer, and its peers learn of that at once.
    A ValueError does not end it, because it is about counts, and all ranks raise it.
    """

    def __init__(self, buffer: Buffer, x: Tensor, num_parts: int, overlap: bool, num_operations: int):
        self.buffer, self.num_parts, self.num_operations, self.num_launched = buffer, num_parts, num_operations, 0
        self.engine = cast("CudaEngine", buffer.live_engine()) if x.is_cuda else None
        self.side = self.engine.side_stream() if overlap and self.engine is not None else None

    def __enter__(self) -> _Operations:
        if self.side is not None:
            self.side.follow_main()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_between = 0 < self.num_launched < self.num_operations
        if error is not None and is_between and self.engine is not None and not isinstance(error, ValueError):
            self.engine.give_up("ran the experts of a layer", error)
        self.join()
        if self.side is not None:
            self.side.order_memory()

    def join(self) -> None:
        """Make the main stream wait for all operations."""
        if self.side is not None:
            self.side.main_follows()

    def dispatch(self, request: DispatchRequest) -> tuple[Received, torch.Event | None]:
        """Launch a dispatch after the earlier operations. Return its outputs, and the event for `wait`.

        The event is needed because the next dispatch may be launched before `wait`.
        """
        side = self.side if self.num_parts > 1 else None
        with nullcontext() if side is None else side.current():
            received = self.buffer.live_engine().dispatch(request)
            self.num_launched += 1
            return received, None if side is None else side.record_event()

    def wait(self, received: Received, event: torch.Event | None) -> Received:
        """Make the main stream wait for a dispatch. Return its outputs."""
        if self.side is not None and event is not None:
            self.side.main_waits(event)
        return received

    def combine(self, request: CombineRequest) -> Combined:
        """Launch a combine after the earlier operations, and after all that the main stream has been given so far."""
        if self.side is not None:
            self.side.follow_main()
        with nullcontext() if self.side is None else self.side.current():
            combined = self.buffer.live_engine().combine(request)
        self.num_launched += 1
        return combined
