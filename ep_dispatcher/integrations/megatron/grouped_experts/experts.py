"""Runs Megatron's routed experts in a few grouped GEMMs: --ep-dispatcher-experts.

A layer keeps Megatron's experts module, with its parameters and its checkpoints. Only its forward is replaced, if
possible. The first forward pass decides for which layers. Each later one sees what has changed since then (changes.py):
LoRA on a linear layer, another module, class or forward, a hook, a parameter. Then it decides anew, and prints a line.

With --ep-dispatcher-overlap dispatch and combine of these layers run under the GEMMs, if possible: deferred.py. Layers
that Megatron runs in FP8: float8.py. Gradients of weights: gradients.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleList

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.integrations.agree import all_reduce, say
from ep_dispatcher.integrations.megatron.dispatcher import arguments, graphs, limits, registration
from ep_dispatcher.integrations.megatron.dispatcher.handover import Deferred, Quantized
from ep_dispatcher.integrations.megatron.grouped_experts import deferred, eligibility, float8
from ep_dispatcher.integrations.megatron.grouped_experts.changes import Snapshot
from ep_dispatcher.integrations.megatron.grouped_experts.gradients import Gradients
from ep_dispatcher.integrations.megatron.grouped_experts.layer import LayerExperts, one_of_buckets
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp
from ep_dispatcher.moe.overlap import resolve_num_parts

QUANTISE = "dispatch quantised rows"  # what ranks agree on


@dataclass
class Layers:
    """All layers of this process whose experts may run in grouped GEMMs."""

    # By id, in the order in which they were built.
    all: weakref.WeakValueDictionary[int, Experts] = field(default_factory=weakref.WeakValueDictionary)


class Experts(LayerExperts):
    """How the routed experts of one MoE layer run. It fills the dispatcher's GroupedExperts."""

    def __init__(self, layer: Any):
        super().__init__(layer)
        self.can_overlap = bool(arguments.given(layer.config, "overlap"))
        self.must_be_grouped = arguments.experts(layer.config) == "grouped"
        self.why_no_overlap: str | None = None  # why the steps cannot overlap, whatever the buffer
        self.agreed: dict[str, bool] = {}  # what all ranks of the layer can do, or not all; see agree
        self.was_in_float8 = False  # whether Megatron has run them in FP8, and their number does not say so
        self.can_take_quantised = False
        self.weights = float8.Weights()
        self.gradients = Gradients()
        self.has_run_megatrons_way = False
        self.said: set[str | None] = set()  # what has been printed of this layer as its why_not
        self._decided_from: Snapshot | None = None  # what it was decided from; None: it is not decided
        self._must_look_again = False
        self._parameters: Parameters | None = None  # those that it was decided from, if they run in grouped GEMMs
        self._hooked: list[tuple[Module, Any]] = []  # bypassed modules with hooks, and what takes their places there
        registration.part(Layers).all[id(self)] = self

    @property
    def is_decided(self) -> bool:
        return self._decided_from is not None

    def decide(self) -> None:
        self.fc1, self.fc2, self.bypassed = eligibility.linear_layers(self.module)
        self.is_float8 = self.wants_float8() and float8.are_quantised(self.linears)
        self.weights.forget()
        self.why_not = eligibility.why_not(self)
        if self.why_not is None and self.agreed.get(QUANTISE) and not self.is_float8:
            self.why_not = "it has run in FP8 before"
        self.why_no_overlap = eligibility.why_no_overlap(self)
        self.can_take_quantised = eligibility.can_take_quantised(self)
        if self.why_not is None and self.is_float8:
            for linear in self.linears:  # what Transformer Engine has quantised there grows old
                getattr(linear, "_fp8_workspaces", {}).clear()
        linears = self.linears
        owners = self.bypassed[: -len(linears)] if linears else []
        owners += [one for one in self.module.children() if type(one) is ModuleList]  # SequentialMLP has one
        self._decided_from, self._must_look_again = Snapshot(self.module, owners, linears), False
        self._parameters = self.parameters() if self.why_not is None else None
        groups = getattr(self.ddp(), "param_to_bucket_group", {})
        self._hooked = [(one, one_of_buckets(one, groups)) for one in self.bypassed if one._forward_pre_hooks]

    def look_again(self) -> None:
        """Let the next forward pass decide anew, although nothing may have changed that it sees."""
        self._must_look_again = True

    def wants_float8(self) -> bool:
        """Return whether Megatron runs the layer in FP8, if its linear layers can."""
        return self.was_in_float8 or float8.is_wanted(self.config, self.layer.layer_number)

    def has_changed(self) -> bool:
        """Return whether there is something new since it was decided."""
        if self._decided_from is None:
            return False
        return self._must_look_again or not self._decided_from.is_current()

    def is_grouped(self) -> bool:
        """Return whether they run in grouped GEMMs now. Print what is new. The first call decides for all layers."""
        if self._decided_from is None:
            _decide_all()
        elif self.config.fp8 and not self.wants_float8() and float8.is_entered():
            self.was_in_float8 = self._must_look_again = True
        if self.has_changed():
            _decide_again()
        if self.why_not is not None and self.must_be_grouped and registration.active() is not None:
            flag = arguments.flag("experts")
            checks.refuse(f"{self.name} cannot run in grouped GEMMs ({self.why_not}): give {flag} auto or megatron")
        return self.why_not is None

    def forward(self, rows: Tensor, counts: Tensor | Deferred | Quantized, probs: Tensor) -> tuple[Tensor, None]:
        """Do what TEGroupedMLP.forward does. Counts may be on the host or on the device: the host reads none of them.

        With a Deferred in place of counts, rows and probs are the tokens of this rank, and the result is combined. With
        a Quantized, rows are the anchor of its rows.
        """
        self.is_captured |= graphs.is_capturing() or graphs.stream_is_captured()
        for module, buckets in self._hooked:  # with overlap_param_gather hooks wait for the weights, no more
            for hook in module._forward_pre_hooks.values():
                hook(buckets, (rows, counts))
        if getattr(self.config, "moe_apply_probs_on_input", False):  # top-k is 1, so a token has one
            rows, probs = (rows * probs.view(-1, 1)).to(rows.dtype), torch.ones_like(probs)
        parameters = self._parameters
        assert parameters is not None  # since is_grouped was true
        take_grads, anchor = self.gradients.take(self, parameters, is_deferred=isinstance(counts, Deferred))
        recomputes = self.config.recompute_granularity == "selective" and "moe_act" in self.config.recompute_modules
        options: dict[str, Any] = dict(take_grads=take_grads, anchor=anchor, keep_activated=not recomputes)
        options["activation"] = eligibility.activation_of(self.config)
        is_first = float8.take_first(self.linears)
        if self.is_float8 and (float8.is_on() or float8.is_quantised(parameters.w1[0])):
            options["float8"] = self.weights.get(parameters, self.linears, is_first)
        if isinstance(counts, Deferred):
            return deferred.run(counts, rows, probs, parameters, **options), None
        given: Any
        if isinstance(counts, Quantized):
            given, counts = counts.pair(rows), counts.counts
        else:
            given = rows.contiguous()
        ends = counts.cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        (out,) = grouped_mlp([(given, probs.float(), ends)], parameters, **options)
        return out, None

    def note_megatrons_way(self) -> None:
        """Note that a pass runs Megatron's way, in which no signal tells of new weights."""
        self.has_run_megatrons_way = True
        self.weights.forget()

    def check_rows(self, rows: Tensor, counts: Tensor) -> None:
        """Refuse rows that were dispatched for grouped GEMMs, more than the counts say: Megatron's experts take none.

        They are there if the experts have changed since the dispatch.
        """
        factor = arguments.rank_capacity_factor(self.config)
        if factor is None or getattr(self.config, "moe_expert_rank_capacity_factor", None):
            return
        if rows.shape[0] > int(counts.sum()):
            raise RuntimeError(
                f"{self.name}: its experts have changed between the dispatch and "
                f"their forward ({self.why_not}), and {limits.FACTOR} has given them more rows than Megatron's own "
                "experts take. Change them between two forward passes"
            )

    def can_take_deferred(self, buffer: ep.Buffer) -> bool:
        """Return whether they take a Deferred, and run dispatch and combine themselves: the same on all ranks.

        Ask ``is_grouped`` first: it sees what has changed. The first call is collective. A hook on the experts of one
        rank is enough to forbid it, and a rank without overlap says no. If the linear layers change later, this rank
        still takes part, with Megatron's own experts. Raises RuntimeError if it cannot any more, because the experts'
        own forward was replaced or has hooks: the others would wait for its second part.
        """
        if resolve_num_parts(buffer) == 1:
            return False
        can = self.why_not is None and self.can_overlap and self.why_no_overlap is None
        agreed = self.agree("run their steps in two parts of the tokens", can)
        why_not = eligibility.why_no_deferred(self) if agreed and not can else None
        if why_not is not None:
            raise RuntimeError(
                f"{self.name} has run in two parts of the tokens on all ranks, and cannot any more on this rank: "
                f"{why_not}. Ranks would get out of step. Change the experts before the first pass"
            )
        return agreed

    def agree(self, what: str, here: bool) -> bool:
        """Return whether all ranks of the layer can do this. The first call is collective, and answers later ones.

        It prints a line if only some ranks can. what: the predicate of a sentence about ranks
        """
        if what not in self.agreed:
            group = self.layer.token_dispatcher.tp_ep_group
            cannot = torch.zeros(group.size(), dtype=torch.int32, device="cpu")
            cannot[group.rank()] = not here
            all_reduce(cannot, dist.ReduceOp.MAX, group, about="agree on its experts", note=self.name)
            refusing = [dist.get_global_rank(group, rank) for rank in cannot.nonzero().flatten().tolist()]
            self.agreed[what] = not refusing
            if group.rank() == 0 and 0 < len(refusing) < group.size():
                some = f"{len(refusing)} of {group.size()} ranks cannot, the first is rank {refusing[0]}"
                print(f"ep_dispatcher: the ranks of {self.name} do not {what}: {some}", flush=True)
        return self.agreed[what]

    def quantisation(self) -> QuantizeBlocks | None:
        """Return how the dispatch of this pass quantises. The first call for a layer in FP8 is collective.

        All ranks quantise or none. One whose experts have changed since they agreed gives these dequantised rows.
        """
        agreed = self.wants_float8() and self.agree(QUANTISE, self.can_take_quantised)
        return float8.WIRE if agreed and float8.is_on() else None


def experts_of(module: Module) -> Experts | None:
    """Return what `moe_layer.build` has attached to this experts module."""
    return vars(module).get("ep_dispatcher")


def is_grouped(module: Module) -> bool:
    """Return whether this experts module runs in grouped GEMMs now. Print what is new."""
    one = experts_of(module)
    return one is not None and one.is_grouped()


def is_float8(module: Module) -> bool:
    """Return whether this experts module runs in grouped GEMMs in FP8. Ask ``is_grouped`` first."""
    one = experts_of(module)
    return one is not None and one.why_not is None and one.is_float8


def _decide_all() -> None:
    """Decide for the layers that are new, and print how many run in grouped GEMMs, and why the others do not."""
    new = [one for one in registration.part(Layers).all.values() if not one.is_decided]
    for one in new:
        one.decide()
        one.said = {one.why_not} - {None}
    grouped = [one for one in new if one.why_not is None]
    line = f"ep_dispatcher runs the experts of {len(grouped)} of {len(new)} MoE layers in grouped GEMMs"
    if quantised := sum(one.is_float8 for one in grouped):
        line += f", {quantised} of them in FP8"
    if grouped:
        line += f" (activation in float32, rounded once; {arguments.flag('experts')} megatron switches it off)"
    say(line + _by_reason("Megatron's own way: ", ((one, one.why_not) for one in new)))
    if any(one.can_overlap for one in new):
        _say_overlap(new)


def _say_overlap(layers: Sequence[Experts]) -> None:
    """Print how many layers overlap communication with their experts, and why the others do not."""
    buffers = (getattr(one.layer.token_dispatcher, "buffer", None) for one in layers)  # a model shares one
    buffer = next((one for one in buffers if one is not None), None)
    of_buffer = None if buffer is None else overlap.no_overlap_reason(buffer)
    reasons = [(one, one.why_no_overlap or of_buffer) for one in layers]
    overlapped = sum(reason is None for _, reason in reasons)
    line = (
        f"ep_dispatcher runs dispatch and combine under the experts' GEMMs in {overlapped} of {len(layers)} MoE layers"
    )
    if overlapped:
        line += ", in two parts of the tokens"
        if any(one.can_overlap and arguments.rank_capacity_factor(one.config) is None for one in layers):
            line += f". The host waits for the counts of each dispatch: {limits.FACTOR} is not given"
    say(line + _by_reason("One after the other: ", reasons))


def _decide_again() -> None:
    """Decide anew for the layers that have changed. Print one line for all, on each rank that sees a change."""
    new = []
    for one in [one for one in registration.part(Layers).all.values() if one.has_changed()]:
        before = one.why_not
        one.decide()
        if one.why_not != before and one.why_not not in one.said:
            one.said.add(one.why_not)
            new.append(one)
    if new:
        line = f"ep_dispatcher: experts have changed on rank {dist.get_rank() if dist.is_initialized() else 0}"
        line += _by_reason("Megatron's own way: ", ((one, one.why_not) for one in new))
        again = ((one, "in grouped GEMMs again") for one in new if one.why_not is None)
        print(line + _by_reason("", again), flush=True)


def _by_reason(head: str, layers: Iterable[tuple[Experts, str | None]]) -> str:
    """Return a sentence with the layers that have a reason; nothing if there are none."""
    reasons = dict[str, list[str]]()
    for one, reason in layers:
        if reason is not None:
            reasons.setdefault(reason, []).append(str(one.layer.layer_number))
    text = "; ".join(f"layer {', '.join(numbers)}: {reason}" for reason, numbers in reasons.items())
    return f". {head}{text}" if text else ""


def forget_agreements() -> None:
    """Let ranks agree anew on what each layer can do. register() and unregister() call it, on all ranks."""
    for one in registration.part(Layers).all.values():
        one.agreed.clear()
