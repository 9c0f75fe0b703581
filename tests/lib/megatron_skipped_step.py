"""Jobs whose optimizer steps are skipped because too many rows or tokens arrive, and all that later steps depend on."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from ep_dispatcher.integrations.megatron import skipped_steps
from ep_dispatcher.integrations.megatron.dispatcher import rank_capacity
from lib.megatron_layer import assert_same_bits, on_gpu
from lib.megatron_training import logged_values, training

ON_CPU = pytest.mark.skipif(on_gpu(), reason="Megatron's training loop on GPUs needs more than these ranks have")

FACTOR = "--ep-dispatcher-rank-capacity-factor"
NODE_FACTOR = "--ep-dispatcher-node-capacity-factor"
STEPS = 10
HALF, ALL = 0.6, 1.0  # share of the tokens that go to experts 0 and 1, both of the first rank of a group
SKEWED = {3: HALF, 7: ALL}
ENOUGH = 4.0


@dataclass
class Job:
    """What a job gives. Its tensors: losses, logged values, weights, the optimizer's state, the next random numbers."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    succeeded: list[bool] = field(default_factory=list)
    printed: str = ""
    skipped: int = 0
    factors: list[float] = field(default_factory=list)  # after each step
    node_factors: list[float] = field(default_factory=list)


def state_of(model, optimizer) -> dict[str, torch.Tensor]:
    """Weights, expert bias and counts, main weights, the optimizer's state, the loss scale.

    Without weights that are gathered in the next forward pass.
    """
    found = {}
    if not getattr(model, "remove_forward_pre_hook_handles", None):
        found = {name: one.clone() for name, one in model.state_dict().items() if torch.is_tensor(one)}
    found |= {name: one.clone() for name, one in model.named_buffers()}
    for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        found[f"loss scale {number}"] = part.get_loss_scale().clone()
        if getattr(part, "grad_scaler", None) is not None:
            found[f"hysteresis {number}"] = torch.tensor([part.grad_scaler._hysteresis_tracker])
        for place, (weight, state) in enumerate(part.optimizer.state.items() if part.optimizer is not None else ()):
            found[f"main weight {number} {place}"] = weight.detach().clone()
            found |= {f"state {number} {place} {k}": v.clone() for k, v in state.items() if torch.is_tensor(v)}
    return found


def run_job(
    rank: int,
    factor: float,
    skewed=SKEWED,
    leaves_out: Collection[int] = (),
    ranks: Collection[int] | None = None,
    shares: tuple[float, ...] = (1.0,),
    **settings,
) -> Job:
    """Train, and note all that the next steps depend on.

    leaves_out  steps in which Megatron finds gradients that are not finite, before it changes its loss scale. What they
                have changed before the optimizer is put back here, as nothing of them is to count
    shares      one number for each schedule of a step: how much of the step's skew it has
    """
    from megatron.core.optimizer import ChainedOptimizer

    job = Job()
    with training(factor, ranks is None or rank in ranks, **settings) as of, pytest.MonkeyPatch.context() as patch:
        model, optimizer = of.model, of.optimizer
        random.seed(3 + rank), np.random.seed(4 + rank)
        buffers_of = dict(model.named_buffers())
        for step in range(1, STEPS + 1):
            before = state_of(model, optimizer)
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses = {}
            for number, share in enumerate(shares):
                of.skew.share = share * skewed.get(step, 0.0)
                losses |= losses_of(f"step {step}, schedule {number}", of.schedule())
            if step in leaves_out:
                with patch.context() as finding:
                    finding.setattr(ChainedOptimizer, "prepare_grads", lambda self: True)
                    success, norm, zeros = optimizer.step()
                for name, buffer in buffers_of.items():
                    buffer.copy_(before[name])
                logged_values()
            else:
                success, norm, zeros = optimizer.step()
            job.succeeded.append(success)
            job.factors.append(rank_capacity.state().grown_factor)
            job.node_factors.append(rank_capacity.state().grown_node_factor)
            logged = logged_values()
            if success:
                assert norm > 0 and zeros is not None
                job.tensors |= losses | {f"{name} of step {step}": one for name, one in logged.items()}
            else:
                assert (norm, zeros) == (None, None)
                assert not any(one.any() for one in logged.values()), "logged losses of a skipped step"
                assert_same_bits(state_of(model, optimizer), before)
        if settings.get("overlap_param_gather"):
            model.disable_forward_pre_hook()  # gathers
        job.tensors |= state_of(model, optimizer)
        assert any(name.endswith("router.weight") for name in job.tensors) or settings.get("dense_stages")
        numbers = dict(host=torch.tensor(random.random()), numpy=torch.tensor(np.random.rand()), torch=torch.rand(1))
        job.tensors |= {f"next random number of {name}": one for name, one in numbers.items()}
    job.printed, job.skipped = of.printed.getvalue(), skipped_steps()
    return job


def losses_of(what: str, of_microbatches: list[dict]) -> dict[str, torch.Tensor]:
    return {f"loss of {what}, microbatch {number}": one["lm loss"] for number, one in enumerate(of_microbatches)}


def lines_of(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "the optimizer step of this iteration is skipped" in line]
