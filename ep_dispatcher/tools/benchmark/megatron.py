"""Times Megatron's own dispatchers and ours as Megatron runs them, in addition to the benchmark's operations.

    python -m ep_dispatcher.bench --with ep_dispatcher.tools.benchmark.megatron

The experts return their input, so that the times are those of the six steps alone. If there is no package ``deep_ep``
that has the flex backends, notes say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.integrations.megatron import destroy_buffers, register, unregister
from ep_dispatcher.integrations.megatron.dispatcher import registration
from ep_dispatcher.integrations.megatron.dispatcher.dispatcher import MoEEPTokenDispatcher
from ep_dispatcher.tools.benchmark.measurements import ENGINE, Calls, Measurement
from ep_dispatcher.tools.benchmark.sides import go_back, verdict

SIDE = "Megatron alltoall"
FLEX = {"Megatron flex, DeepEP": "deepep", "Megatron flex, HybridEP": "hybridep"}  # side -> backend
FORWARD_STEPS, ALL_STEPS = "six steps, forward", "six steps, forward+backward"


def measure(measurement: Measurement) -> None:
    """Time all dispatchers in Megatron, and compare their results."""
    case = measurement.case
    settings = dict(hidden=case.hidden, num_experts=case.experts, num_topk=case.topk, num_sms=case.sms)
    with dispatchers(measurement.group, dtype=getattr(torch, case.dtype), **settings) as made:
        measurement.found["megatron"] = made.version
        measurement.found["passes"] |= {FORWARD_STEPS: 2, ALL_STEPS: 4}
        theirs = {SIDE: made.theirs}
        for side, backend in FLEX.items():
            steps = measurement.attempt(f"not measured: {side}", partial(made.flex, backend))
            theirs |= {side: steps} if steps else {}
        sides = {
            name: measurement.attempt(f"{name} in Megatron", partial(steps.operations, *measurement.inputs)) or {}
            for name, steps in {ENGINE: made.ours, **theirs}.items()
        }
        measurement.time(sides)
        for side, steps in theirs.items():
            compared = measurement.attempt(f"comparison, {side}", partial(made.compare, steps, *measurement.inputs))
            measurement.found["compared"] |= {side: compared} if compared else {}


class SixSteps:
    """One dispatcher, from a token to its experts and back."""

    def __init__(self, dispatcher: Any, num_experts: int):
        self.dispatcher, self.num_experts = dispatcher, num_experts

    def forward(self, x: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens that come back, and the probabilities as the experts get them."""
        d = self.dispatcher
        rows, row_probs = d.token_dispatch(*d.dispatch_preprocess(x, routing_map, probs))
        rows, _, row_probs = d.dispatch_postprocess(rows, row_probs)
        return d.combine_postprocess(d.token_combine(d.combine_preprocess(rows))), row_probs

    def forward_backward(self, x: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and the gradients of x and probs, as ``go_back`` defines them."""
        x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
        y, row_probs = self.forward(x, routing_map, probs)
        return go_back(y, row_probs, x, probs)

    def operations(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Calls:
        given = as_routed(x, topk_idx, topk_weights, self.num_experts)
        with_gradients = (given[0].detach().requires_grad_(), given[1], given[2].detach().requires_grad_())
        return {
            FORWARD_STEPS: lambda: self.forward(*with_gradients),
            ALL_STEPS: lambda: self.forward_backward(*given),
        }


@dataclass(frozen=True)
class Dispatchers:
    ours: SixSteps
    theirs: SixSteps
    flex: Callable[[str], SixSteps]  # of another backend of flex
    version: str  # of Megatron

    def compare(self, other: SixSteps, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict:
        """Return whether both give the same results. Megatron rounds after each addition of a token's rows."""
        given = as_routed(x, topk_idx, topk_weights, self.ours.num_experts)
        ours, theirs = (side.forward_backward(*given) for side in (self.ours, other))
        allowed = topk_idx.shape[1] * torch.finfo(x.dtype).eps
        return verdict(torch.equal(ours[2], theirs[2]), list(zip(ours[:2], theirs[:2])), allowed)


def as_routed(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what Megatron's router returns: [tokens, 1, hidden], bool and float32 [tokens, experts]."""
    num_tokens = topk_idx.shape[0]
    if (topk_idx < 0).any():
        raise ValueError("routing has tokens with fewer than top-k experts, which alltoall does not take")
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=x.device)
    probs = torch.zeros(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    return x.unsqueeze(1), routing_map.scatter_(1, topk_idx, True), probs.scatter_(1, topk_idx, topk_weights)


@contextmanager
def dispatchers(
    group: dist.ProcessGroup, *, hidden: int, num_experts: int, num_topk: int, dtype: torch.dtype, num_sms: int
) -> Iterator[Dispatchers]:
    """Yield the dispatchers over the group, without tensor parallelism and Transformer Engine. Collective."""
    if not torch.cuda.is_available():
        from ep_dispatcher.integrations.megatron.dispatcher.cpu import let_megatron_run_on_cpu

        let_megatron_run_on_cpu()
    registered = registration.active() is not None
    register()
    alone, _ = dist.new_subgroups(group_size=1, group=group)
    try:
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ep_dispatcher.integrations.megatron.dispatcher.megatron_config import SMS_FIELDS

        settings = dict(
            num_layers=1,
            hidden_size=hidden,
            num_attention_heads=1,
            num_moe_experts=num_experts,
            moe_router_topk=num_topk,
            add_bias_linear=False,
            expert_model_parallel_size=group.size(),
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
        )
        fields = TransformerConfig.__dataclass_fields__
        sms = {next(f for f in SMS_FIELDS if f in fields and fields[f].default != num_sms): num_sms}
        num_local = num_experts // group.size()
        first = group.rank() * num_local
        groups = SimpleNamespace(ep=group, tp_ep=group, expt_tp=alone)

        def make(kind: type, **chosen: Any) -> SixSteps:
            config = TransformerConfig(**settings, **chosen)
            made = kind(num_local, list(range(first, first + num_local)), config=config, pg_collection=groups)
            return SixSteps(made, num_experts)

        def flex(backend: str) -> SixSteps:
            chosen = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
            ours = backend == registration.NAME
            return make(MoEEPTokenDispatcher if ours else token_dispatcher.MoEFlexTokenDispatcher, **chosen, **sms)

        yield Dispatchers(
            flex(registration.NAME),
            make(token_dispatcher.MoEAlltoAllTokenDispatcher, moe_token_dispatcher_type="alltoall"),
            flex,
            f"megatron-core {megatron.core.__version__}, no Transformer Engine",
        )
    finally:
        destroy_buffers()
        dist.destroy_process_group(alone)
        if not registered:
            unregister()
