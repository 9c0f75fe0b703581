"""Runs Megatron's routed experts in a few grouped GEMMs: --ep-dispatcher-experts.

A layer keeps Megatron's experts module, with its parameters and its checkpoints. Only its forward is replaced, if
possible. The first forward pass decides for which layers. Each later one sees what has changed since then: LoRA on a
linear layer, another module, class or forward, a hook, a parameter. Then it decides anew, and prints a line.

With --ep-dispatcher-overlap dispatch and combine of these layers run under the GEMMs, if possible: deferred.py. Layers
that Megatron runs in FP8: float8.py.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleList

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.argument_types import QuantizeBlocks
from ep_dispatcher.integrations.agree import all_reduce, say
from ep_dispatcher.integrations.megatron import arguments, eligibility, float8, graphs, limits, registration
from ep_dispatcher.integrations.megatron.deferred import Deferred
from ep_dispatcher.integrations.megatron.dispatcher import MoEEPTokenDispatcher
from ep_dispatcher.moe import overlap
from ep_dispatcher.moe.grouped_mlp import Parameters, WriteGrads, grouped_mlp
from ep_dispatcher.moe.overlap import num_parts_of

TakeGrads = Callable[[WriteGrads], Tensor | None]  # writes the gradients, and may return that of the anchor
QUANTISE = "dispatch quantised rows"  # what ranks agree on

_all: weakref.WeakValueDictionary[int, Experts] = weakref.WeakValueDictionary()  # by id, in the order of the layers
forwards: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # forwards of experts that take a Deferred
pads_rows = False  # whether Megatron's experts run on rows without the padding that their GEMMs need


class Experts:
    """The routed experts of one MoE layer: how they run, and where the gradients of their weights go.

    Megatron's experts module owns it (``of``), so it holds neither this nor the layer: both end when they are dropped.
    """

    fc1: list[Module]  # the linear layers with w1
    fc2: list[Module]  # those with w2
    bypassed: dict[Module, Any]  # every module that grouped GEMMs leave uncalled, and its _one_of_buckets

    def __init__(self, layer: Any):
        self.layer, self._module, self.config = weakref.proxy(layer), weakref.ref(layer.experts), layer.config
        self.may_overlap = bool(arguments.given(layer.config, "overlap"))
        self.must_be_grouped = arguments.experts(layer.config) == "grouped"
        self.ddp: Callable[[], Any] = lambda: None  # Megatron's DistributedDataParallel around them, once there is one
        self.why_not: str | None = None  # why they run Megatron's way
        self.why_no_overlap: str | None = None  # why the steps cannot overlap, whatever the buffer
        self.agreed: dict[str, bool] = {}  # what all ranks of the layer can do, or not all; see agree
        self.float8 = False  # whether Megatron runs them in FP8
        self.seen_in_float8 = False  # whether it has, and their number does not say so
        self.takes_quantised = False  # whether they take a Quantized
        self.weights = float8.Weights()
        self.state: list[Any] | None = None  # what it was decided from; see eligibility.state
        self.said: set[str | None] = set()  # what has been printed of this layer as its why_not
        self.ran_megatrons_way = False
        self.is_captured = False  # whether CUDA graphs contain these experts
        self.is_delivered = False  # whether a backward has called _deliver_in_graph, and the anchor's hook is next
        self.anchor: Any = None  # the one weight that autograd sees, if CUDA graphs may contain the layer
        self.delayed: deque[Callable[[], None]] = deque()  # gradients of weights that wait for backward_dw
        self.fc1, self.fc2, self.bypassed = [], [], {}  # until it is decided
        _all[id(self)] = self

    @property
    def module(self) -> Any:
        return self._module()

    @property
    def name(self) -> str:
        return f"layer {self.layer.layer_number}"

    def parameters(self) -> Parameters:
        """Return weights and biases of each expert, as the modules have them now, with Megatron's attributes."""
        names = ("weight", "bias") if self.config.add_bias_linear else ("weight",)
        return Parameters(*(_parameters(linears, name) for name in names for linears in (self.fc1, self.fc2)))

    def decide(self) -> None:
        self.fc1, self.fc2, bypassed = eligibility.linear_layers(self.module)
        groups = getattr(self.ddp(), "param_to_bucket_group", {})
        self.bypassed = {module: _one_of_buckets(module, groups) for module in bypassed}
        self.float8 = self.wants_float8() and float8.are_quantised(self.fc1 + self.fc2)
        self.weights.forget()
        self.why_not = eligibility.why_not(self)
        if self.why_not is None and self.agreed.get(QUANTISE) and not self.float8:
            self.why_not = "it has run in FP8 before"
        self.why_no_overlap = eligibility.why_no_overlap(self)
        self.takes_quantised = eligibility.takes_quantised(self)
        if self.why_not is None and self.float8:
            for linear in self.fc1 + self.fc2:  # what Transformer Engine has quantised there grows old
                getattr(linear, "_fp8_workspaces", {}).clear()
        self.state = self._state()

    def wants_float8(self) -> bool:
        """Return whether Megatron runs the layer in FP8, if its linear layers can."""
        return self.seen_in_float8 or float8.is_wanted(self.config, self.layer.layer_number)

    def has_changed(self) -> bool:
        """Return whether there is something new since it was decided."""
        if self.state is None:
            return False
        state = self._state()
        return len(state) != len(self.state) or not all(map(is_, state, self.state))

    def _state(self) -> list[Any]:
        lists = [module for module in self.module.children() if type(module) is ModuleList]  # SequentialMLP has one
        return eligibility.state((self.module, *lists, *self.bypassed))

    def takes_deferred(self) -> bool:
        """Return whether the forward of the experts module is ours: not after unregister(), or if it was replaced."""
        return vars(self.module).get("forward", type(self.module).forward) in forwards

    def is_grouped(self) -> bool:
        """Return whether they run in grouped GEMMs now. Print what is new. The first call decides for all layers."""
        if self.state is None:
            _decide_all()
        elif self.config.fp8 and not self.wants_float8() and float8.is_entered():
            self.seen_in_float8, self.state = True, []  # look at it again
        if self.has_changed():
            _decide_again()
        if self.why_not is not None and self.must_be_grouped and registration.active() is not None:
            checks.fail(arguments.flag("experts"), "grouped", f"auto or megatron with {self.name}: {self.why_not}")
        return self.why_not is None

    def forward(self, rows: Tensor, counts: Tensor | Deferred | float8.Quantized, probs: Tensor) -> tuple[Tensor, None]:
        """Do what TEGroupedMLP.forward does. Counts may be on the host or on the device: the host reads none of them.

        With a Deferred in place of counts, rows and probs are the tokens of this rank, and the result is combined. With
        a Quantized, rows are the anchor of its rows.
        """
        self.is_captured |= graphs.is_capturing() or graphs.stream_is_captured()
        for module, buckets in self.bypassed.items():  # with overlap_param_gather hooks wait for the weights, no more
            for hook in module._forward_pre_hooks.values():
                hook(buckets, (rows, counts))
        if getattr(self.config, "moe_apply_probs_on_input", False):  # top-k is 1, so a token has one
            rows, probs = (rows * probs.view(-1, 1)).to(rows.dtype), torch.ones_like(probs)
        parameters = self.parameters()
        take_grads, anchor = self._take_grads(parameters, communicate=isinstance(counts, Deferred))
        recomputes = self.config.recompute_granularity == "selective" and "moe_act" in self.config.recompute_modules
        options: dict[str, Any] = dict(take_grads=take_grads, anchor=anchor, keep_activated=not recomputes)
        options["activation"] = eligibility.activation_of(self.config)
        is_first = float8.take_first(self.fc1 + self.fc2)
        if self.float8 and (float8.is_on() or float8.is_quantised(parameters.w1[0])):
            options["float8"] = self.weights.get(parameters, self.fc1 + self.fc2, is_first)
        if isinstance(counts, Deferred):
            return counts.run(rows, probs, parameters, **options), None
        given: Any
        if isinstance(counts, float8.Quantized):
            given, counts = counts.pair(rows), counts.counts
        else:
            given = rows.contiguous()
        ends = counts.cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        (out,) = grouped_mlp([(given, probs.float(), ends)], parameters, **options)
        return out, None

    def _take_grads(self, parameters: Parameters, *, communicate: bool) -> tuple[TakeGrads | None, Tensor | None]:
        """Return who writes the gradients of the parameters in the backward, and the tensor that autograd sees instead.

        None: autograd writes them, as for every other tensor. ``communicate``: whether the experts run dispatch and
        combine. Then communication of the backward runs under these gradients anyway, and they need not wait for it.
        """
        tensors = parameters.flat()
        if not all(one.requires_grad for one in tensors):
            return None, None
        fused = self.config.gradient_accumulation_fusion and hasattr(tensors[0], "main_grad")
        overlaps = limits.overlaps_wgrad(self.config) and not communicate
        if overlaps or getattr(self.config, "delay_wgrad_compute", False):
            return lambda write: self.delayed.append(lambda: self._deliver(write, parameters, fused)), None
        if not fused:
            return None, None
        if limits.layers_may_be_captured(self.config):
            anchor: Any = parameters.w2[0]
            if self.anchor is not anchor:
                self.anchor, ours = anchor, weakref.ref(self)  # no collection sees what the hook of a tensor holds

                def after_backward(anchor: Any) -> None:
                    if (one := ours()) is not None:
                        one.after_backward(anchor)

                anchor.register_post_accumulate_grad_hook(after_backward)
            return functools.partial(self._deliver_in_graph, parameters), anchor
        return lambda write: self._deliver(write, parameters, True), None

    def _deliver(self, write: WriteGrads, parameters: Parameters, fused: bool) -> None:
        """Write the gradients where Megatron looks for them, and call its hooks.

        Transformer Engine returns a dummy for each weight, so that autograd accumulates it and calls the hook of
        Megatron's DistributedDataParallel. Experts have many weights, so that takes much host time. Calling the hooks
        from here avoids it.
        """
        tensors: list[Any] = parameters.flat()
        if fused:
            # False since main_grad was filled with zeros: nothing has been added yet.
            accumulate = getattr(tensors[0], "grad_added_to_main_grad", True)
            write(parameters.like([one.main_grad for one in tensors]), accumulate)
            _say_added(tensors)
        else:
            grads = parameters.empty_like()
            write(grads, False)
            for one, grad in zip(tensors, grads.flat()):
                one.grad = grad if one.grad is None else one.grad + grad
        self._run_hooks(tensors, fused)

    def _run_hooks(self, weights: list[Any], fused: bool) -> None:
        """Run the hooks of Megatron's DistributedDataParallel that autograd's accumulation would run."""
        ddp = self.ddp()
        if ddp is None:
            return
        if fused and not any(one.is_last_microbatch for one in ddp.bucket_groups + ddp.expert_parallel_bucket_groups):
            return  # before the last microbatch the hooks would only take away a dummy
        like, dummy = None, None
        for weight in weights:
            if fused:  # the hook wants a gradient to be there, and takes it away again
                if (shape := weight.shape) != like:
                    like, dummy = shape, _dummy(shape, weight.dtype, weight.device)
                weight.grad = dummy
            ddp._make_backward_post_hook(weight)()

    def _deliver_in_graph(self, parameters: Parameters, write: WriteGrads) -> Tensor:
        """Write the gradients to main_grad, in a CUDA graph or not. Return the gradient of the anchor.

        A replay runs kernels only, the same in every microbatch: all add to main_grad, which Megatron fills with zeros
        before a step. Then autograd accumulates the anchor's gradient, and ``after_backward`` does the rest.
        """
        tensors: list[Any] = parameters.flat()
        write(parameters.like([one.main_grad for one in tensors]), True)
        _say_added(tensors)
        self.is_delivered = True
        anchor = parameters.w2[0]
        return _dummy(anchor.shape, anchor.dtype, anchor.device).detach()

    def after_backward(self, anchor: Any) -> None:
        """Run Megatron's hooks for all weights, once autograd has accumulated the gradient of the anchor.

        Do nothing while Megatron captures, as its own hooks do, nor if the forward pass has run Megatron's way.
        """
        is_delivered, self.is_delivered = self.is_delivered, False
        if graphs.is_capturing():
            return
        is_replayed = self.is_captured and self.why_not is None and self.takes_deferred()
        if not is_delivered and not is_replayed:
            return
        tensors = self.parameters().flat()
        _say_added(tensors)
        self._run_hooks([one for one in tensors if one is not anchor], True)
        if self.ddp() is None:
            anchor.grad = None  # a dummy

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

    def communicate(self, buffer: ep.Buffer) -> bool:
        """Return whether they take a Deferred, and run dispatch and combine themselves: the same on all ranks.

        Ask ``is_grouped`` first: it sees what has changed. The first call is collective. A hook on the experts of one
        rank is enough to forbid it, and a rank without overlap says no. If the linear layers change later, this rank
        still takes part, with Megatron's own experts. Raises RuntimeError if it cannot any more, because the experts'
        own forward was replaced or has hooks: the others would wait for its second part.
        """
        if num_parts_of(buffer) == 1:
            return False
        can = self.why_not is None and self.may_overlap and self.why_no_overlap is None
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
        agreed = self.wants_float8() and self.agree(QUANTISE, self.takes_quantised)
        return float8.WIRE if agreed and float8.is_on() else None


def _say_added(weights: list[Any]) -> None:
    """Set the flag of each weight by which Megatron sees that its gradient is in main_grad."""
    if hasattr(weights[0], "grad_added_to_main_grad"):
        for weight in weights:
            weight.grad_added_to_main_grad = True


@functools.cache
def _dummy(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _parameters(linears: Sequence[Module], name: str) -> list[Any]:
    """Return weight0, weight1, ... of one grouped layer, or the weights of many layers; likewise with biases."""
    named = (linear._parameters.items() for linear in linears)
    return [one for items in named for key, one in items if one is not None and key.startswith(name)]


def _one_of_buckets(module: Module, groups: dict[Tensor, Any]) -> Any:
    """Return what takes a module's place before its hooks: they wait for a whole bucket group by any weight of it."""
    weights = {id(groups.get(one)): one for one in module.parameters(recurse=False)}
    return types.SimpleNamespace(parameters=lambda recurse: weights.values())


def of(module: Module) -> Experts | None:
    """Return what ``note_layer`` has attached to this experts module."""
    return vars(module).get("ep_dispatcher")


def is_grouped(module: Module) -> bool:
    """Return whether this experts module runs in grouped GEMMs now. Print what is new."""
    one = of(module)
    return one is not None and one.is_grouped()


def is_float8(module: Module) -> bool:
    """Return whether this experts module runs in grouped GEMMs in FP8. Ask ``is_grouped`` first."""
    one = of(module)
    return one is not None and one.why_not is None and one.float8


def _decide_all() -> None:
    """Decide for the layers that are new, and print how many run in grouped GEMMs, and why the others do not."""
    new = [one for one in _all.values() if one.state is None]
    for one in new:
        one.decide()
        one.said = {one.why_not} - {None}
    grouped = [one for one in new if one.why_not is None]
    line = f"ep_dispatcher runs the experts of {len(grouped)} of {len(new)} MoE layers in grouped GEMMs"
    if quantised := sum(one.float8 for one in grouped):
        line += f", {quantised} of them in FP8"
    if grouped:
        line += f" (activation in float32, rounded once; {arguments.flag('experts')} megatron switches it off)"
    say(line + _by_reason("Megatron's own way: ", ((one, one.why_not) for one in new)))
    if any(one.may_overlap for one in new):
        _say_overlap(new)


def _say_overlap(layers: Sequence[Experts]) -> None:
    """Print how many layers overlap communication with their experts, and why the others do not."""
    buffers = (getattr(one.layer.token_dispatcher, "buffer", None) for one in layers)  # a model shares one
    buffer = next((one for one in buffers if one is not None), None)
    of_buffer = None if buffer is None else overlap.why_not(buffer)
    reasons = [(one, one.why_no_overlap or of_buffer) for one in layers]
    overlapped = sum(reason is None for _, reason in reasons)
    line = (
        f"ep_dispatcher runs dispatch and combine under the experts' GEMMs in {overlapped} of {len(layers)} MoE layers"
    )
    if overlapped:
        line += ", in two parts of the tokens"
        if any(one.may_overlap and arguments.rank_capacity_factor(one.config) is None for one in layers):
            line += f". The host waits for the counts of each dispatch: {limits.FACTOR} is not given"
    say(line + _by_reason("One after the other: ", reasons))


def _decide_again() -> None:
    """Decide anew for the layers that have changed. Print one line for all, on each rank that sees a change."""
    new = []
    for one in [one for one in _all.values() if one.has_changed()]:
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
    for one in _all.values():
        one.agreed.clear()


# ---- what the plugin puts into Megatron -----------------------------------------------------------------------------


def note_layer(old: Callable[..., None]) -> Callable[..., None]:
    """Wrap MoELayer.__init__."""

    def init(layer, config, *args, **kwargs):
        arguments.check(config)
        wanted, active = arguments.experts(config), registration.active()
        if wanted != "megatron" and active is not None and active.why_no_grouped:
            raise registration.UnknownMegatronError(f"{arguments.flag('experts')} {wanted}: {active.why_no_grouped}")
        old(layer, config, *args, **kwargs)
        one = None if wanted == "megatron" else Experts(layer)
        if one is not None:
            layer.experts.ep_dispatcher = one
        if isinstance(layer.token_dispatcher, MoEEPTokenDispatcher):
            layer.token_dispatcher.layer, layer.token_dispatcher.experts = weakref.ref(layer), one
        else:
            registration.note_other_dispatcher(config)

    return init


def forward_grouped(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of TEGroupedMLP and SequentialMLP."""

    def forward(experts, rows, tokens_per_expert, permuted_probs, *rest, **options):
        one = of(experts)
        if one is not None and not rest and not options and one.is_grouped():
            return one.forward(rows, tokens_per_expert, permuted_probs)

        def run(rows, counts, probs):
            if isinstance(counts, float8.Quantized):
                rows, counts = ep.dequantize(counts.pair(rows)), counts.counts
            if one is None:
                return old(experts, rows, counts, probs, *rest, **options)
            one.ran_megatrons_way = True
            one.weights.forget()
            one.check_rows(rows, counts)
            global pads_rows
            before, pads_rows = pads_rows, isinstance(tokens_per_expert, Deferred) or one.agreed.get(QUANTISE, False)
            try:
                return old(experts, rows, counts, probs, *rest, **options)
            finally:
                pads_rows = before

        if isinstance(tokens_per_expert, Deferred):
            return tokens_per_expert.run_megatrons_way(rows, permuted_probs, run), None
        return run(rows, tokens_per_expert, permuted_probs)

    forwards.add(forward)
    return forward


def delayed_grads(old: Callable[..., None]) -> Callable[..., None]:
    """Wrap TEGroupedMLP.backward_dw: write the gradients of the microbatch that has waited longest."""

    def backward_dw(experts):
        one = of(experts)
        if one is None or (one.ran_megatrons_way and not one.delayed):
            old(experts)
        elif one.delayed:
            with torch.no_grad():
                one.delayed.popleft()()

    return backward_dw


def note_ddp(old: Callable[..., None]) -> Callable[..., None]:
    """Wrap DistributedDataParallel.__init__."""

    def init(ddp, *args, **kwargs):
        old(ddp, *args, **kwargs)
        for module in ddp.module.modules():
            if (one := of(module)) is not None:
                one.ddp = weakref.ref(ddp)
                one.state = one.state and []  # look at its weights again

    return init
