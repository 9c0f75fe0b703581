"""Runs Megatron's routed experts in a few grouped GEMMs: --ep-dispatcher-experts.

A layer keeps Megatron's experts module, with its parameters and its checkpoints. Only its forward is replaced, and only
if grouped GEMMs can do the same. The first forward pass decides that for all layers. Each later pass finds out what has
changed since then (module_snapshot.py): LoRA on a linear layer, another module, class or forward, a hook, a parameter.
Then it decides again, and prints a line.

overlapped_dispatch.py   --ep-dispatcher-overlap: dispatch and combine of these layers overlap with the GEMMs
float8.py                layers that Megatron runs in FP8
gradients.py             where the gradients of weights go
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
from ep_dispatcher.integrations.collectives import all_reduce
from ep_dispatcher.integrations.megatron.dispatcher import arguments, graphs, rank_capacity, registration
from ep_dispatcher.integrations.megatron.dispatcher.experts_interface import PendingDispatch, QuantizedInput
from ep_dispatcher.integrations.megatron.grouped_experts import eligibility, float8, overlapped_dispatch
from ep_dispatcher.integrations.megatron.grouped_experts.gradients import Gradients
from ep_dispatcher.integrations.megatron.grouped_experts.megatron_experts import MegatronExperts, stand_in_for_buckets
from ep_dispatcher.integrations.megatron.grouped_experts.module_snapshot import ModuleSnapshot
from ep_dispatcher.integrations.messages import print_on_first_rank
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_gemm import ends_of
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp
from ep_dispatcher.moe.overlap import resolve_num_parts

QUANTIZE, HAVE_COPIES = "dispatch quantized rows", "have redundant copies"  # what ranks agree on, in words


@dataclass
class Layers:
    """All layers of this process whose experts may run in grouped GEMMs."""

    # By id, in the order in which they were built.
    all: weakref.WeakValueDictionary[int, Experts] = field(default_factory=weakref.WeakValueDictionary)


class Experts(MegatronExperts):
    """The routed experts of one MoE layer, and how they run. It fills the dispatcher's protocol GroupedExperts."""

    def __init__(self, layer: Any):
        super().__init__(layer)
        self.wants_overlap = bool(arguments.setting(layer.config, "overlap"))
        self.must_be_grouped = arguments.experts_mode(layer.config) == "grouped"
        self.why_no_overlap: str | None = None  # why communication cannot overlap with any buffer
        self.agreed: dict[str, bool] = {}  # what ``agree`` has found: whether all ranks of the layer can do something
        self.was_in_float8 = False  # whether Megatron has run them in FP8 although their layer number does not tell
        self.can_take_quantized = False
        self.weights = float8.Weights(layer.config)
        self.gradients = Gradients()
        self.has_run_megatron_experts = False  # whether a pass has run Megatron's own forward
        self.printed_reasons: set[str | None] = set()  # values of why_not that were printed for this layer
        self._decided_from: ModuleSnapshot | None = None  # the modules when it was decided; None: it is not decided
        self._must_decide_again = False
        self._parameters: Parameters | None = None  # when it was decided, if they run in grouped GEMMs
        self._hooked: list[tuple[Module, Any]] = []  # bypassed modules with hooks, and what to call the hooks with
        registration.process_wide(Layers).all[id(self)] = self

    @property
    def is_decided(self) -> bool:
        return self._decided_from is not None

    def decide(self) -> None:
        """Decide whether the experts run in grouped GEMMs, from their modules as they are now."""
        self.fc1, self.fc2, self.bypassed = eligibility.linear_layers(self.module)
        self.is_float8 = self.wants_float8() and float8.are_quantized(self.linears)
        self.weights.forget()
        self.why_not = eligibility.why_not(self)
        if self.why_not is None and self.agreed.get(QUANTIZE) and not self.is_float8:
            self.why_not = "it has run in FP8 before"
        self.why_no_overlap = eligibility.why_no_overlap(self)
        self.can_take_quantized = eligibility.can_take_quantized(self)
        if self.why_not is None and self.is_float8:
            for linear in self.linears:  # quantized weights of Transformer Engine that would become outdated
                getattr(linear, "_fp8_workspaces", {}).clear()
        linears = self.linears
        owners = self.bypassed[: -len(linears)] if linears else []
        owners += [child for child in self.module.children() if type(child) is ModuleList]  # SequentialMLP has one
        self._decided_from, self._must_decide_again = ModuleSnapshot(self.module, owners, linears), False
        self._parameters = self.parameters() if self.why_not is None else None
        groups = getattr(self.ddp(), "param_to_bucket_group", {})
        self._hooked = [
            (module, stand_in_for_buckets(module, groups)) for module in self.bypassed if module._forward_pre_hooks
        ]

    def decide_again_later(self) -> None:
        """Let the next forward pass decide again, even if it sees no change."""
        self._must_decide_again = True

    def wants_float8(self) -> bool:
        """Return whether Megatron runs the layer in FP8, provided that its linear layers can."""
        return self.was_in_float8 or float8.is_wanted(self.config, self.layer.layer_number)

    def has_changed(self) -> bool:
        """Return whether something has changed since it was decided."""
        if self._decided_from is None:
            return False
        return self._must_decide_again or not self._decided_from.is_current()

    def decide_grouped(self) -> bool:
        """Decide whether they run in grouped GEMMs now, and return it. Print changes.

        The first call decides for all layers.
        """
        if self._decided_from is None:
            _decide_all()
        elif self.config.fp8 and not self.wants_float8() and float8.is_entered():
            self.was_in_float8 = self._must_decide_again = True
        if self.has_changed():
            _decide_again()
        if self.why_not is not None and self.must_be_grouped and registration.active() is not None:
            flag = arguments.flag("experts")
            checks.refuse(f"{self.name} cannot run in grouped GEMMs ({self.why_not}): give {flag} auto or megatron")
        return self.why_not is None

    def forward(
        self, rows: Tensor, counts: Tensor | PendingDispatch | QuantizedInput, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Do what TEGroupedMLP.forward does. Counts may be on the host or on the device: the host does not read them.

        With a PendingDispatch in place of counts, rows and probs are the tokens of this rank, and the result is
        combined. With a QuantizedInput, rows are the anchor of its rows.
        """
        self.is_captured |= graphs.is_capturing() or graphs.stream_is_captured()
        for module, buckets in self._hooked:  # with overlap_param_gather these hooks only wait for the weights
            for hook in module._forward_pre_hooks.values():
                hook(buckets, (rows, counts))
        if getattr(self.config, "moe_apply_probs_on_input", False):  # top-k is 1, so a token has one
            rows, probs = (rows * probs.view(-1, 1)).to(rows.dtype), torch.ones_like(probs)
        parameters = self._parameters
        assert parameters is not None  # since decide_grouped was true
        take_grads, anchor = self.gradients.take(self, parameters, runs_dispatch=isinstance(counts, PendingDispatch))
        recomputes = self.config.recompute_granularity == "selective" and "moe_act" in self.config.recompute_modules
        options: dict[str, Any] = dict(take_grads=take_grads, anchor=anchor, keep_activated=not recomputes)
        options["activation"] = eligibility.activation_of(self.config)
        is_first = float8.take_is_first(self.linears)
        if self.is_float8 and (float8.is_on() or float8.is_quantized(parameters.w1[0])):
            options["float8"] = self.weights.get(parameters, self.linears, is_first)
        if isinstance(counts, PendingDispatch):
            return overlapped_dispatch.run(counts, rows, probs, parameters, **options), None
        inputs: Any
        if isinstance(counts, QuantizedInput):
            inputs, counts = counts.with_anchor(rows), counts.counts
        else:
            inputs = rows.contiguous()
        ends = ends_of(counts, rows)
        (out,) = grouped_mlp([(inputs, probs.float(), ends)], parameters, **options)
        return out, None

    def note_megatron_pass(self) -> None:
        """Note that a pass runs Megatron's own forward, in which this object does not learn of new weights."""
        self.has_run_megatron_experts = True
        self.weights.forget()

    def check_rows(self, rows: Tensor, counts: Tensor) -> None:
        """Refuse surplus rows, which a dispatch with a limit brings for grouped GEMMs: Megatron's experts take none.

        They occur if the experts have changed since the dispatch.
        """
        factor = arguments.rank_capacity_factor(self.config)
        if factor is None or getattr(self.config, "moe_expert_rank_capacity_factor", None):
            return
        if rows.shape[0] > int(counts.sum()):
            raise RuntimeError(
                f"{self.name}: its experts have changed between the dispatch and their forward ({self.why_not}), and "
                f"{rank_capacity.FACTOR_FLAG} has given them more rows than Megatron's own experts take. Change them "
                "between two forward passes"
            )

    def num_parts_of_dispatch(self, buffer: ep.Buffer, alignment: int) -> int:
        """Return the parts of the tokens in which they run dispatch and combine themselves; 0: the dispatcher does.

        Call ``decide_grouped`` first, because it sees changes.

        In one part each rank decides for itself. The operations are the same either way, provided that the dispatcher
        aligns no rows. For two parts the first call is collective. All ranks have to want the overlap, and a hook on
        the experts of one rank is enough to prevent it. If the linear layers of this rank change later, it still takes
        part, with Megatron's own experts. Raises RuntimeError if that has become impossible, because the experts' own
        forward was replaced or has hooks: the others would wait for the second part.
        """
        if buffer.redundant_experts_per_rank:
            self._require_copies()
            return 1
        can = self.why_not is None and self.wants_overlap and self.why_no_overlap is None
        if resolve_num_parts(buffer) == 1:
            return 1 if can and alignment == 1 else 0
        agreed = self.agree("run their steps in two parts of the tokens", can)
        why_not = eligibility.why_dispatch_cannot_be_left_to(self) if agreed and not can else None
        if why_not is not None:
            raise RuntimeError(
                f"{self.name} has run in two parts of the tokens on all ranks, but cannot do so any more on this rank: "
                f"{why_not}. The ranks would get out of step. Change the experts before the first pass"
            )
        return 2 if agreed else 0

    def _require_copies(self) -> None:
        """Refuse experts that cannot have redundant copies. The first call is collective: no rank runs without them.

        Raises ValueError then, and RuntimeError if this rank's experts change so later.
        """
        flag, why_not = arguments.flag("redundant_experts_per_rank"), eligibility.why_no_copies(self)
        could = self.agreed.get(HAVE_COPIES)
        if not self.agree(HAVE_COPIES, why_not is None):
            checks.refuse(
                f"{self.name} cannot have redundant copies of experts ({why_not or 'on another rank'}): "
                f"leave out {flag}"
            )
        if could and why_not is not None:
            raise RuntimeError(
                f"{self.name} has had redundant copies of experts on all ranks, but cannot have them any more on this "
                f"rank: {why_not}. Change the experts before the first pass"
            )

    def agree(self, what: str, is_possible_here: bool) -> bool:
        """Return whether all ranks of the layer can do something. The first call is collective; its answer is kept.

        A line is printed if only some ranks can. what: the predicate of a sentence about ranks
        """
        if what not in self.agreed:
            group = self.layer.token_dispatcher.tp_ep_group
            cannot = torch.zeros(group.size(), dtype=torch.int32, device="cpu")
            cannot[group.rank()] = not is_possible_here
            all_reduce(cannot, dist.ReduceOp.MAX, group, about="agree on its experts", note=self.name)
            refusing = [dist.get_global_rank(group, rank) for rank in cannot.nonzero().flatten().tolist()]
            self.agreed[what] = not refusing
            if group.rank() == 0 and 0 < len(refusing) < group.size():
                reason = f"{len(refusing)} of {group.size()} ranks cannot, the first is rank {refusing[0]}"
                print(f"ep_dispatcher: the ranks of {self.name} do not {what}: {reason}", flush=True)
        return self.agreed[what]

    def quantize_blocks(self) -> QuantizeBlocks | None:
        """Return how the dispatch of this pass quantizes. The first call for a layer in FP8 is collective.

        Either all ranks quantize or none. If the experts of one rank change later, it gives them dequantized rows.
        """
        agreed = self.wants_float8() and self.agree(QUANTIZE, self.can_take_quantized)
        return float8.WIRE if agreed and float8.is_on() else None


def experts_of(module: Module) -> Experts | None:
    """Return the object that ``moe_layer.wrap_init`` has attached to this experts module."""
    return vars(module).get("ep_dispatcher")


def decide_grouped(module: Module) -> bool:
    """Decide whether this experts module runs in grouped GEMMs now, and return it. Print changes."""
    one = experts_of(module)
    return one is not None and one.decide_grouped()


def is_float8(module: Module) -> bool:
    """Return whether this experts module runs in grouped GEMMs in FP8. Call ``decide_grouped`` first."""
    one = experts_of(module)
    return one is not None and one.why_not is None and one.is_float8


def _decide_all() -> None:
    """Decide for all new layers. Print how many run in grouped GEMMs, and why the others do not."""
    new = [one for one in registration.process_wide(Layers).all.values() if not one.is_decided]
    for one in new:
        one.decide()
        one.printed_reasons = {one.why_not} - {None}
    grouped = [one for one in new if one.why_not is None]
    line = f"ep_dispatcher runs the experts of {len(grouped)} of {len(new)} MoE layers in grouped GEMMs"
    if quantized := sum(one.is_float8 for one in grouped):
        line += f", {quantized} of them in FP8"
    if grouped:
        line += f" (activation in float32, rounded once; {arguments.flag('experts')} megatron switches it off)"
    print_on_first_rank(line + _by_reason("Megatron's own way: ", ((one, one.why_not) for one in new)))
    if any(one.wants_overlap for one in new):
        _print_overlap(new)


def _print_overlap(layers: Sequence[Experts]) -> None:
    """Print how many layers overlap communication with their experts, and why the others do not."""
    buffers = (getattr(one.layer.token_dispatcher, "buffer", None) for one in layers)  # a model shares one
    buffer = next((one for one in buffers if one is not None), None)
    why_not_with_buffer = None if buffer is None else overlap.no_side_stream_reason(buffer)
    reasons = [(one, one.why_no_overlap or why_not_with_buffer) for one in layers]
    overlapped = sum(reason is None for _, reason in reasons)
    num_parts = 1 if buffer is None else resolve_num_parts(buffer)
    what = "dispatch and combine" if num_parts == 2 else "the last combine of the backward"
    line = f"ep_dispatcher runs {what} under the experts' GEMMs in {overlapped} of {len(layers)} MoE layers"
    if overlapped and num_parts == 2:
        line += ", in two parts of the tokens"
        if any(one.wants_overlap and arguments.rank_capacity_factor(one.config) is None for one in layers):
            line += f". The host waits for the counts of each dispatch: {rank_capacity.FACTOR_FLAG} is not given"
    print_on_first_rank(line + _by_reason("One after the other: ", reasons))


def _decide_again() -> None:
    """Decide again for all layers that have changed. Print one line, on each rank that sees a change."""
    new = []
    for one in [one for one in registration.process_wide(Layers).all.values() if one.has_changed()]:
        before = one.why_not
        one.decide()
        if one.why_not != before and one.why_not not in one.printed_reasons:
            one.printed_reasons.add(one.why_not)
            new.append(one)
    if new:
        line = f"ep_dispatcher: experts have changed on rank {dist.get_rank() if dist.is_initialized() else 0}"
        line += _by_reason("Megatron's own way: ", ((one, one.why_not) for one in new))
        again = ((one, "in grouped GEMMs again") for one in new if one.why_not is None)
        print(line + _by_reason("", again), flush=True)


def _by_reason(head: str, layers: Iterable[tuple[Experts, str | None]]) -> str:
    """Return a sentence with the layers of each reason, or "" if no layer has one."""
    reasons = dict[str, list[str]]()
    for one, reason in layers:
        if reason is not None:
            reasons.setdefault(reason, []).append(str(one.layer.layer_number))
    text = "; ".join(f"layer {', '.join(numbers)}: {reason}" for reason, numbers in reasons.items())
    return f". {head}{text}" if text else ""


def forget_agreements() -> None:
    """Let ranks agree again on what each layer can do. register() and unregister() call this on all ranks."""
    for one in registration.process_wide(Layers).all.values():
        one.agreed.clear()
