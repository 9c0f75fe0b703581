"""Writes the gradients of experts' weights to main_grad, past autograd, and calls Megatron's hooks.

Transformer Engine returns a dummy for each weight, so that autograd accumulates it and calls the hook of Megatron's
DistributedDataParallel. For the many weights of experts that takes much host time, which calling the hooks here avoids.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ep_dispatcher.integrations.megatron.dispatcher import graphs, megatron_config, registration
from ep_dispatcher.integrations.megatron.grouped_experts.megatron_experts import MegatronExperts
from ep_dispatcher.moe.grouped_mlp import Parameters, WriteGrads

_requires_grad, _main_grad = attrgetter("requires_grad"), attrgetter("main_grad")
TakeGrads = Callable[[WriteGrads], Tensor | None]  # writes the gradients, and may return that of the anchor


@dataclass
class Dummies:
    """Gradients that nobody reads, one for all weights of the same shape, dtype and device."""

    made: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = field(default_factory=dict)


class Gradients:
    """Writes the gradients of a layer's experts, and runs the hooks that autograd would run.

    The experts own this object, so it does not hold them. A callback that waits for a backward does hold them, because
    the program may drop the layer before.
    """

    def __init__(self) -> None:
        self._is_delivered = False  # whether a backward has called _deliver_in_graph, so that the anchor's hook is next
        self._anchor: Any = None  # the one weight that autograd sees, if CUDA graphs may contain the layer
        self.delayed: deque[Callable[[], None]] = deque()  # gradients of weights that wait for backward_dw

    def take(
        self, experts: MegatronExperts, parameters: Parameters, *, runs_dispatch: bool
    ) -> tuple[TakeGrads | None, Tensor | None]:
        """Return the function that writes the gradients in the backward, and the tensor that autograd sees instead.

        None stands for autograd, which then writes them as for every other tensor. ``runs_dispatch``: whether the
        experts run dispatch and combine. Then communication of the backward overlaps with these gradients anyway.
        """
        tensors: list[Any] = parameters.flat()
        config = experts.config
        if not all(map(_requires_grad, tensors)):
            return None, None
        fused = config.gradient_accumulation_fusion and hasattr(tensors[0], "main_grad")

        def deliver(write: WriteGrads) -> None:
            _deliver(experts, write, parameters, tensors, fused)

        overlaps = megatron_config.has_overlapped_wgrad(config) and not runs_dispatch
        if overlaps or getattr(config, "delay_wgrad_compute", False):
            return lambda write: self.delayed.append(lambda: deliver(write)), None
        if not fused:
            return None, None
        if megatron_config.can_capture_layers(config):
            anchor: Any = parameters.w2[0]
            if self._anchor is not anchor:
                self._anchor = anchor
                # Weak references, because Python's garbage collection does not see what a tensor's hook holds.
                gradients_ref, experts_ref = weakref.ref(self), weakref.ref(experts)

                def after_backward(anchor: Any) -> None:
                    gradients, experts = gradients_ref(), experts_ref()
                    if gradients is not None and experts is not None:
                        gradients.after_backward(experts, anchor)

                anchor.register_post_accumulate_grad_hook(after_backward)
            return functools.partial(self._deliver_in_graph, parameters), anchor
        return deliver, None

    def _deliver_in_graph(self, parameters: Parameters, write: WriteGrads) -> Tensor:
        """Write the gradients to main_grad, in a CUDA graph or not. Return the gradient of the anchor.

        A replay runs the same kernels in every microbatch, so they always add to main_grad, which Megatron fills with
        zeros before a step. Then autograd accumulates the anchor's gradient, and ``after_backward`` does the rest.
        """
        tensors: list[Any] = parameters.flat()
        write(parameters.unflatten(list(map(_main_grad, tensors))), True)
        _mark_added(tensors)
        self._is_delivered = True
        return _dummy(parameters.w2[0]).detach()

    def after_backward(self, experts: MegatronExperts, anchor: Any) -> None:
        """Run Megatron's hooks for all weights, once autograd has accumulated the gradient of the anchor.

        Do nothing while Megatron captures, like its own hooks, nor if the forward pass has run Megatron's experts.
        """
        is_delivered, self._is_delivered = self._is_delivered, False
        if graphs.is_capturing():
            return
        is_replayed = experts.is_captured and experts.why_not is None and experts.has_our_forward()
        if not is_delivered and not is_replayed:
            return
        tensors = experts.parameters().flat()
        _mark_added(tensors)
        _run_hooks(experts, [weight for weight in tensors if weight is not anchor], True)
        if experts.ddp() is None:
            anchor.grad = None  # a dummy


def _deliver(
    experts: MegatronExperts, write: WriteGrads, parameters: Parameters, tensors: list[Any], fused: bool
) -> None:
    """Write the gradients where Megatron looks for them, and call its hooks. tensors: those of the parameters"""
    if fused:
        # The flag is False from when main_grad was filled with zeros until something is added.
        accumulate = getattr(tensors[0], "grad_added_to_main_grad", True)
        write(parameters.unflatten(list(map(_main_grad, tensors))), accumulate)
        _mark_added(tensors)
    else:
        grads = parameters.empty_like()
        write(grads, False)
        for one, grad in zip(tensors, grads.flat()):
            one.grad = grad if one.grad is None else one.grad + grad
    _run_hooks(experts, tensors, fused)


def _run_hooks(experts: MegatronExperts, weights: list[Any], fused: bool) -> None:
    """Run the hooks of Megatron's DistributedDataParallel that autograd's accumulation would run."""
    ddp = experts.ddp()
    if ddp is None:
        return
    if fused and not any(one.is_last_microbatch for one in ddp.bucket_groups + ddp.expert_parallel_bucket_groups):
        return  # before the last microbatch the hooks would only remove a dummy
    shape, dummy = None, None
    for weight in weights:
        if fused:  # the hook expects a gradient, and removes it
            if weight.shape != shape:
                shape, dummy = weight.shape, _dummy(weight)
            weight.grad = dummy
        ddp._make_backward_post_hook(weight)()


def _mark_added(weights: list[Any]) -> None:
    """Set the flag of each weight by which Megatron sees that its gradient is in main_grad.

    Megatron clears it for all weights at once, so all have it if one has.
    """
    if not getattr(weights[0], "grad_added_to_main_grad", True):
        for weight in weights:
            weight.grad_added_to_main_grad = True


def _dummy(weight: Tensor) -> Tensor:
    made, form = registration.process_wide(Dummies).made, (weight.shape, weight.dtype, weight.device)
    found = made.get(form)
    if found is None:
        found = made[form] = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    return found
