"""The routed experts of one MoE layer as Megatron made them: their modules and weights, and what was decided."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Module

from ep_dispatcher.integrations.megatron.dispatcher import registration
from ep_dispatcher.moe.expert_matrices import DescribedMatrices
from ep_dispatcher.moe.grouped_mlp import Parameters


@dataclass
class Forwards:
    """Forwards of experts that take a PendingDispatch or a QuantizedInput in place of counts."""

    ours: weakref.WeakSet[Callable[..., Any]] = field(default_factory=weakref.WeakSet)


def register_forward(forward: Callable[..., Any]) -> None:
    """Remember that this forward of experts accepts what ours accepts."""
    registration.process_wide(Forwards).ours.add(forward)


class MegatronExperts:
    """Modules and weights of the routed experts of one MoE layer, and what was decided about them.

    Megatron's experts module owns this object, which therefore holds neither the module nor the layer.
    """

    def __init__(self, layer: Any):
        self.layer, self._module, self.config = weakref.proxy(layer), weakref.ref(layer.experts), layer.config
        self.ddp: Callable[[], Any] = lambda: None  # Megatron's DistributedDataParallel around them, once it exists
        self.fc1: list[Module] = []  # the linear layers with w1, once it is decided
        self.fc2: list[Module] = []  # those with w2
        self.bypassed: list[Module] = []  # every module that grouped GEMMs do not call
        self.why_not: str | None = None  # why they do not run in grouped GEMMs
        self.is_float8 = False  # whether Megatron runs them in FP8
        self.is_captured = False  # whether CUDA graphs contain these experts

    @property
    def module(self) -> Any:
        return self._module()

    @property
    def name(self) -> str:
        return f"layer {self.layer.layer_number}"

    @property
    def linears(self) -> list[Module]:
        return self.fc1 + self.fc2

    def parameters(self) -> Parameters:
        """Return weights and biases of each expert, as the modules have them now, with Megatron's attributes."""
        names = ("weight", "bias") if self.config.add_bias_linear else ("weight",)
        return Parameters(*(_parameters(linears, name) for name in names for linears in (self.fc1, self.fc2)))

    def has_our_forward(self) -> bool:
        """Return whether the forward of the experts module is ours. Not after unregister(), or if it was replaced."""
        forward = vars(self.module).get("forward", type(self.module).forward)
        return forward in registration.process_wide(Forwards).ours


def stand_in_for_buckets(module: Module, groups: dict[Tensor, Any]) -> Any:
    """Return a stand-in for a module in its hooks. One weight of a bucket group makes them wait for the whole group."""
    weights = {id(groups.get(one)): one for one in module.parameters(recurse=False)}
    return types.SimpleNamespace(parameters=lambda recurse: weights.values())


def _parameters(linears: Sequence[Module], name: str) -> DescribedMatrices:
    """Return weight0, weight1, ... of one grouped layer, or the weights of many layers; likewise with biases."""
    named = (linear._parameters.items() for linear in linears)
    return DescribedMatrices(one for items in named for key, one in items if one is not None and key.startswith(name))
