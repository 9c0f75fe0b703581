"""Where the gradients of experts' weights go, past autograd: to main_grad, with Megatron's hooks called from here.

Transformer Engine returns a dummy for each weight, so that autograd accumulates it and calls the hook of Megatron's
DistributedDataParallel. Experts have many weights, so that takes much host time. Calling the hooks from here avoids it.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.integrations.megatron.dispatcher import graphs, limits, registration
from ep_dispatcher.integrations.megatron.grouped_experts.layer import LayerExperts
from ep_dispatcher.moe.grouped_mlp import Parameters, WriteGrads

TakeGrads = Callable[[WriteGrads], Tensor | None]  # writes the gradients, and may return that of the anchor


@dataclass
class Dummies:
    """Gradients that nobody reads, one for all weights of a form."""

    made: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = field(default_factory=dict)


class Gradients:
    """Writes the gradients of a layer's experts, and runs the hooks that autograd would run.

    The experts own it, so it does not hold them. What waits for a backward does: the layer may be dropped meanwhile.
    """

    def __init__(self) -> None:
        self._is_delivered = False  # whether a backward has called _deliver_in_graph, and the anchor's hook is next
        self._anchor: Any = None  # the one weight that autograd sees, if CUDA graphs may contain the layer
        self.delayed: deque[Callable[[], None]] = deque()  # gradients of weights that wait for backward_dw

    def take(
        self, experts: LayerExperts, parameters: Parameters, *, is_deferred: bool
    ) -> tuple[TakeGrads | None, Tensor | None]:
        """Return who writes the gradients of the parameters in the backward, and the tensor that autograd sees instead.

        None: autograd writes them, as for every other tensor. ``is_deferred``: whether the experts run dispatch and
        combine. Then communication of the backward runs under these gradients anyway, and they need not wait for it.
        """
        tensors, config = parameters.flat(), experts.config
        if not all(one.requires_grad for one in tensors):
            return None, None
        fused = config.gradient_accumulation_fusion and hasattr(tensors[0], "main_grad")
        overlaps = limits.has_overlapped_wgrad(config) and not is_deferred
        if overlaps or getattr(config, "delay_wgrad_compute", False):
            return lambda write: self.delayed.append(lambda: _deliver(experts, write, parameters, fused)), None
        if not fused:
            return None, None
        if limits.can_capture_layers(config):
            anchor: Any = parameters.w2[0]
            if self._anchor is not anchor:
                self._anchor = anchor
                mine, noted = weakref.ref(self), weakref.ref(experts)  # no collection sees what a tensor's hook holds

                def after_backward(anchor: Any) -> None:
                    gradients, experts = mine(), noted()
                    if gradients is not None and experts is not None:
                        gradients.after_backward(experts, anchor)

                anchor.register_post_accumulate_grad_hook(after_backward)
            return functools.partial(self._deliver_in_graph, parameters), anchor
        return lambda write: _deliver(experts, write, parameters, True), None

    def _deliver_in_graph(self, parameters: Parameters, write: WriteGrads) -> Tensor:
        """Write the gradients to main_grad, in a CUDA graph or not. Return the gradient of the anchor.

        A replay runs kernels only, the same in every microbatch: all add to main_grad, which Megatron fills with zeros
        before a step. Then autograd accumulates the anchor's gradient, and ``after_backward`` does the rest.
        """
        tensors: list[Any] = parameters.flat()
        write(parameters.unflatten([one.main_grad for one in tensors]), True)
        _say_added(tensors)
        self._is_delivered = True
        return _dummy(parameters.w2[0]).detach()

    def after_backward(self, experts: LayerExperts, anchor: Any) -> None:
        """Run Megatron's hooks for all weights, once autograd has accumulated the gradient of the anchor.

        Do nothing while Megatron captures, as its own hooks do, nor if the forward pass has run Megatron's way.
        """
        is_delivered, self._is_delivered = self._is_delivered, False
        if graphs.is_capturing():
            return
        is_replayed = experts.is_captured and experts.why_not is None and experts.has_our_forward()
        if not is_delivered and not is_replayed:
            return
        tensors = experts.parameters().flat()
        _say_added(tensors)
        _run_hooks(experts, [one for one in tensors if one is not anchor], True)
        if experts.ddp() is None:
            anchor.grad = None  # a dummy


def _deliver(experts: LayerExperts, write: WriteGrads, parameters: Parameters, fused: bool) -> None:
    """Write the gradients where Megatron looks for them, and call its hooks."""
    tensors: list[Any] = parameters.flat()
    if fused:
        # False since main_grad was filled with zeros: nothing has been added yet.
        accumulate = getattr(tensors[0], "grad_added_to_main_grad", True)
        write(parameters.unflatten([one.main_grad for one in tensors]), accumulate)
        _say_added(tensors)
    else:
        grads = parameters.empty_like()
        write(grads, False)
        for one, grad in zip(tensors, grads.flat()):
            one.grad = grad if one.grad is None else one.grad + grad
    _run_hooks(experts, tensors, fused)


def _run_hooks(experts: LayerExperts, weights: list[Any], fused: bool) -> None:
    """Run the hooks of Megatron's DistributedDataParallel that autograd's accumulation would run."""
    ddp = experts.ddp()
    if ddp is None:
        return
    if fused and not any(one.is_last_microbatch for one in ddp.bucket_groups + ddp.expert_parallel_bucket_groups):
        return  # before the last microbatch the hooks would only take away a dummy
    like, dummy = None, None
    for weight in weights:
        if fused:  # the hook wants a gradient to be there, and takes it away again
            if (shape := weight.shape) != like:
                like, dummy = shape, _dummy(weight)
            weight.grad = dummy
        ddp._make_backward_post_hook(weight)()


def _say_added(weights: list[Any]) -> None:
    """Set the flag of each weight by which Megatron sees that its gradient is in main_grad."""
    if hasattr(weights[0], "grad_added_to_main_grad"):
        for weight in weights:
            weight.grad_added_to_main_grad = True


def _dummy(weight: Tensor) -> Tensor:
    made, form = registration.part(Dummies).made, (weight.shape, weight.dtype, weight.device)
    found = made.get(form)
    if found is None:
        found = made[form] = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    return found
