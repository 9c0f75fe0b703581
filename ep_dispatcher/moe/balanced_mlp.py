"""The layer of ``ep.moe_mlp`` on a buffer with redundant experts, as one node of autograd.

balance/balancer.py says in which order ranks write and read the slots, and why that is safe. On a GPU weights and
gradients of copies move in a side stream, beside the GEMMs of a rank's own experts:

    main   plan | dispatch | w1 own | w1 copies, activation, w2 | combine
    side          push       barrier ^

    main   dispatch | w2 own        | w2 copies, activation | dw of copies | dw1     | w1       | dw2
    side              push | barrier ^                                       barrier   pull dw1  combine  pull dw2 ^

The push of a new plan is launched by the host inside of the call of the dispatch, where it would only wait for counts.
``^`` is where the main stream waits for the side stream. dw are gradients of weights, and w1 stands for the product
that gives the gradients of rows. A recompute has no plan to make, and pushes where the backward does.

Float8 experts take the same way (slot_contents.py says what a push brings). Each row has the arithmetic of its
expert's home, because that has quantized the weights: float8_gemm takes the place of grouped_gemm, and rows,
activations and gradients are quantized before its products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor
from torch.autograd import Function

from ep_dispatcher import recompute
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.arguments import dispatch_request
from ep_dispatcher.autograd import backward_buffer, check_saved_plan
from ep_dispatcher.balance.balancer import Balancer
from ep_dispatcher.balance.slots import Slots
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.engines.base import Engine
from ep_dispatcher.engines.cuda.streams import SideStream
from ep_dispatcher.float8 import QuantizedRows
from ep_dispatcher.handle import Handle
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.expert_matrices import ExpertMatrices
from ep_dispatcher.moe.gradients import clear_unused_rows
from ep_dispatcher.moe.grouped_mlp import (
    Mlp,
    Parameters,
    SavedForward,
    activation_backward,
    gemm_inputs,
    gemms_of,
    make_mlp,
    write_first_grads,
    write_parameter_grads,
    write_second_grads,
)
from ep_dispatcher.moe.slot_contents import (
    given,
    gradients_in_slots,
    own_weights,
    slot_weights,
    weights_in_slots,
    weights_to_push,
    with_copies,
)
from ep_dispatcher.observers import light_apply, once_differentiable
from ep_dispatcher.outputs import new_handle
from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest

if TYPE_CHECKING:
    from ep_dispatcher.engines.cuda.engine import CudaEngine

T = TypeVar("T")

_FIRST_MLP_INPUT = 7  # of the node: before it come x to slots, then those of Mlp.autograd_inputs


def balanced_mlp(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    parameters: Parameters,
    max_recv_rows: int | None,
    *,
    handles: list[Handle] | None = None,
    quantize: QuantizeBlocks | None = None,
    **options: Any,
) -> Tensor:
    """``ep.moe_mlp`` with redundant experts; parameters and options are those of grouped_mlp. Both were checked.

    quantize: how rows travel if the options have float8, otherwise None
    handles: with the one of an earlier call with this routing; an empty list gets a new one
    """
    if grouped_gemm.has_kernels(x):
        grouped_gemm.kernels()  # an error here comes before anything is sent
    mlp = make_mlp(x.dtype, parameters, **options)
    engine, balancer = buffer.live_engine(), buffer.balancer()
    request = dispatch_request(
        engine,
        x,
        topk_idx,
        topk_weights,
        quantize=quantize,
        max_recv_rows=max_recv_rows,
        label=buffer.label,
        has_gradients=True,
        is_balanced=True,
    )
    engine.check_routing(topk_idx, buffer.num_experts)
    slots = balancer.slots_for(slot_weights(parameters, mlp.float8), given(parameters))
    if handles is None:
        handles = [] if buffer.caller_keeps_plans else recompute.handles_for(engine, request)
    inputs = mlp.autograd_inputs(x, topk_weights)
    return _apply_balanced_mlp(x, topk_weights, buffer, request, handles, mlp, slots, *inputs)


class _BalancedMlp(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        buffer: Buffer,
        request: DispatchRequest,
        handles: list[Handle],
        mlp: Mlp,
        slots: Slots,
        anchor: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        assert request.topk_idx is not None
        engine, balancer, gemms = buffer.live_engine(), buffer.balancer(), gemms_of(mlp)
        own = own_weights(mlp.parameters, mlp.float8)
        in_slots = weights_in_slots(own, slots)
        pushed = weights_to_push(mlp.parameters, mlp.float8, is_backward=False)
        with balancer.using_slots(), _CopyStream(engine, x) as side:
            if handles:
                copies = handles[0].copies
                assert copies is not None  # as the handle is that of a layer with redundant experts
                recompute.use_plan(request, handles[0])
                received = side.collective(engine.dispatch, request)
                side.push(balancer, slots, copies, pushed)
            else:
                balanced = side.collective(balancer.balance, request.topk_idx)
                copies = balanced.plan.copies
                side.follow_main()  # up to the plan, so the push does not wait for the dispatch

                def push() -> None:
                    with side.current():
                        balancer.push(slots, balanced.plan.copies, pushed)
                        balancer.count(balanced.plan)  # behind the push: its small kernels delay nothing there

                request = replace(request, topk_idx=balanced.topk_idx, meanwhile=push)
                received = side.collective(engine.dispatch, request)
                handles.append(new_handle(engine, request, received, copies))
            side.barrier(balancer)
            row_weights, scales = received.topk_weights, received.scales
            assert row_weights is not None  # as topk_weights was given
            rows = received.rows if scales is None else QuantizedRows(received.rows, scales)
            ends = grouped_gemm.ends_of(received.tokens_per_expert, received.rows)
            b1, b2 = with_copies(own.b1, in_slots.b1), with_copies(own.b2, in_slots.b2)
            hidden = gemms.linear(rows, own.w1, ends, own.b1)
            side.main_waits()
            gemms.linear(rows, in_slots.w1, ends, b1, out=hidden, first_expert=engine.config.num_own_experts)
            activated = gemms.activate(hidden, row_weights, ends, mlp.activation)
            results = gemms.linear(activated, with_copies(own.w2, in_slots.w2), ends, b2, row_weights)
            handle = handles[0]
            sums = CombineRequest(
                results,
                handle.plan,
                x.shape[0],
                message_rows=handle.message_rows,
                max_tokens_to_node=handle.max_tokens_to_node,
            )
            y = side.collective(engine.combine, sums).x
        kept = activated if mlp.keep_activated and mlp.float8 is None else None
        saved = SavedForward(received.rows, row_weights, ends, hidden, kept, scales)
        ctx.save_for_backward(handle.plan, handle.message_rows, copies, *saved, *tensors)
        ctx.mlp, ctx.buffer, ctx.slots, ctx.note = mlp, buffer, slots, buffer.backward_note
        ctx.max_tokens_to_node = handle.max_tokens_to_node
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, message_rows, copies, *others = ctx.saved_tensors
        num_saved = len(SavedForward._fields)
        saved, tensors = SavedForward(*others[:num_saved]), others[num_saved:]
        plan, message_rows = check_saved_plan(plan, message_rows)
        mlp: Mlp = ctx.mlp
        slots: Slots = ctx.slots
        parameters, buffer = mlp.saved_parameters(tensors), backward_buffer(ctx)
        own = own_weights(parameters, mlp.float8)
        in_slots = weights_in_slots(own, slots)
        engine, balancer, gemms = buffer.live_engine(), buffer.balancer(), gemms_of(mlp)
        num_own = engine.config.num_own_experts
        ends, num_rows = saved.ends, saved.rows.shape[0]
        needs_parameter_grads = mlp.needs_parameter_grads(ctx.needs_input_grad[_FIRST_MLP_INPUT:])
        with balancer.using_slots(), _CopyStream(engine, grad) as side:
            request = DispatchRequest(
                grad.contiguous(),
                plan=plan,
                message_rows=message_rows,
                max_tokens_to_node=ctx.max_tokens_to_node,
                num_rows=num_rows,
            )
            grad_results = side.collective(engine.dispatch, request).rows
            side.push(balancer, slots, copies, weights_to_push(parameters, mlp.float8, is_backward=True))
            side.barrier(balancer)
            inputs_of_w2 = gemm_inputs(grad_results, ends, mlp)
            grad_activated = gemms.linear_grad_rows(inputs_of_w2, own.w2, ends)
            side.main_waits()
            gemms.linear_grad_rows(inputs_of_w2, in_slots.w2, ends, out=grad_activated, first_expert=num_own)
            b2 = with_copies(own.b2, in_slots.b2)
            needs_grad_rows = any(ctx.needs_input_grad[:2])
            grad_inputs, grad_hidden, grad_row_weights = activation_backward(
                grad_activated, grad_results, saved, mlp, b2, needs_grad_rows, needs_parameter_grads
            )
            inputs_of_w1 = [grad_hidden]  # freed once they are used
            del inputs_of_w2, grad_activated, grad_hidden

            used_beside: list[Tensor] = []  # by the side stream, so they live until the main stream has waited for it

            def to_tokens() -> Combined:
                grad_rows = gemms.linear_grad_rows(inputs_of_w1.pop(), with_copies(own.w1, in_slots.w1), ends)
                clear_unused_rows(ends, grad_rows, grad_row_weights)
                used_beside.append(grad_rows)
                sums = CombineRequest(
                    grad_rows,
                    plan,
                    grad.shape[0],
                    topk_weights=grad_row_weights,
                    message_rows=message_rows,
                    max_tokens_to_node=ctx.max_tokens_to_node,
                    out=grad.new_empty(grad.shape),  # memory of the main stream, which goes on to use it
                )
                side.follow_main()
                with side.current():
                    return side.collective(engine.combine, sums)

            back = _Once(to_tokens if needs_grad_rows else None)

            def write(out: Parameters, accumulate: bool) -> None:
                # They serve the gradients in slots, and then those of own experts.
                inputs = [replace(grad_inputs, rows=grad_inputs.dequantized_rows(), scales=None)]
                slot_grads = gradients_in_slots(parameters, slots)
                held = copies[buffer.rank]
                write_parameter_grads(inputs, slot_grads, False, first_expert=num_own, held=held)
                side.follow_main()
                side.barrier(balancer)  # all ranks have written the gradients in their slots

                def pull(**gradients: ExpertMatrices | None) -> None:
                    side.follow_main()
                    names = [name for name, matrices in parameters._asdict().items() if matrices is not None]
                    with side.current():
                        balancer.pull(slots, copies, [gradients.get(name) for name in names])

                # The pull of w1 runs beside the gradients of rows, and their combine beside those of w2. Only the pull
                # of w2, the smaller one, has nothing beside it.
                write_first_grads(inputs, out, accumulate)
                pull(w1=out.w1, b1=out.b1)
                del inputs  # before gradients of rows need as much memory
                back.run()
                write_second_grads([grad_inputs], out, accumulate)
                pull(w2=out.w2, b2=out.b2)
                side.main_waits()

            parameter_grads = mlp.autograd_gradients(write, tensors, needs_parameter_grads)
            combined = back.run()
            side.main_waits()
            grad_x, grad_topk_weights = (None, None) if combined is None else combined
            if grad_topk_weights is not None:
                grad_topk_weights = grad_topk_weights.clone()  # that memory belongs to the side stream
        return grad_x, grad_topk_weights, None, None, None, None, None, *parameter_grads


_apply_balanced_mlp = light_apply(_BalancedMlp)


class _Once:
    """The combine of a backward: beside gradients of weights where there are any, else at the end."""

    def __init__(self, call: Callable[[], Combined] | None):
        self._call, self._result = call, cast("Combined | None", None)

    def run(self) -> Combined | None:
        """Return the gradients of x and topk_weights, or None if nobody wants one. Only the first call moves them."""
        call, self._call = self._call, None
        if call is not None:
            self._result = call()
        return self._result


class _CopyStream:
    """The stream for weights and gradients of copies, beside the GEMMs. On a CPU each step takes its turn.

    Operations of the buffer in both streams follow each other, as the engine orders them. Inside ``with``, an error
    that other ranks may not have ends a buffer on a GPU, so that they learn of it at once.
    """

    def __init__(self, engine: Engine, t: Tensor):
        self._engine = cast("CudaEngine", engine)
        self._side: SideStream | None = self._engine.side_stream() if t.is_cuda else None
        self._is_in_operation = self._has_followed = False

    def __enter__(self) -> _CopyStream:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_of_all_ranks = self._is_in_operation and isinstance(error, ValueError)
        if error is not None and self._side is not None and not is_of_all_ranks:
            self._engine.give_up("ran the experts of a layer", error)
        if self._has_followed:
            self.main_waits()
        if self._side is not None:
            self._side.order_memory()

    def collective(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Call an operation of the buffer in the current stream: the main one outside of ``with current()``.

        If it raises, the flag stays set. So ``__exit__`` knows that a ValueError is an error of all ranks.
        """
        self._is_in_operation = True
        result = operation(*arguments)
        self._is_in_operation = False
        return result

    def current(self) -> AbstractContextManager[Any]:
        """Make it the current stream."""
        return nullcontext() if self._side is None else self._side.current()

    def barrier(self, balancer: Balancer) -> None:
        """Let what follows in the side stream come after all earlier work of every rank."""
        with self.current():
            self.collective(balancer.barrier)

    def push(self, balancer: Balancer, slots: Slots, copies: Tensor, weights: Sequence[ExpertMatrices | None]) -> None:
        """Push the weights of copies, behind all that the main stream has been given so far."""
        self.follow_main()
        with self.current():
            balancer.push(slots, copies, weights)

    def follow_main(self) -> None:
        """Let the side stream wait for all that the main stream has been given so far."""
        if self._side is not None:
            self._side.follow_main()
            self._has_followed = True

    def main_waits(self) -> None:
        """Let the main stream wait for all that the side stream has been given so far."""
        if self._side is not None:
            self._side.main_follows()
