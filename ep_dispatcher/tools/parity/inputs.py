"""The weights, routing and tokens of the parity tool's layers: the same for all of them, on any number of ranks."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_dispatcher.tools.parity.arguments import Run

# How Megatron's experts number their parameters: of SequentialMLP, and of Transformer Engine's grouped layers.
_EXPERT = re.compile(r"(?<=local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")

PREFERENCE = 1.0  # with normal logits of deviation 1, the first of 2 ranks gets about 1.5 times the mean


def expert_of(layer, name: str) -> int | None:
    """Return the global number of a parameter's expert; the rank's first one if the parameter holds them all."""
    if not name.startswith("experts."):
        return None
    number = _EXPERT.search(name)
    return layer.local_expert_indices[int(number[0]) if number else 0]


def shared_name(name: str) -> str:
    """Return the name of a parameter with * for the number of its expert."""
    return _EXPERT.sub("*", name)


def _generator(*key: Any) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


@torch.no_grad()
def set_weights(layer, seed: int) -> None:
    """Set normal weights, whose deviation keeps the size of a layer's values. They do not depend on the layout.

    Those of an expert depend on its global number; those that a tensor parallel group divides, on the rank in it.
    """
    from megatron.core import parallel_state

    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        expert, part = expert_of(layer, name), 0
        if expert is not None:
            part = parallel_state.get_expert_tensor_parallel_rank()
        elif re.search(r"linear_fc1|linear_fc2\.weight", name):
            part = parallel_state.get_tensor_model_parallel_rank()
        generator = _generator(seed, shared_name(name), expert, part)
        if tensor.dim() > 1:
            deviation = tensor.shape[-1] ** -0.5
        elif isinstance(tensor, torch.nn.Parameter):
            deviation = 0.1
        else:
            deviation = 0.01 if name == "router.expert_bias" else 0
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu") * deviation)


def follow_routing(leader, follower) -> None:
    """Let the follower take the leader's last routing logits: a rounded logit could send a token to other experts."""
    gating, own_gating = leader.gating, follower.gating
    last: list[Tensor] = []

    def lead(hidden_states):
        logits = gating(hidden_states)
        last[:] = [logits.detach()]
        return logits

    def follow(hidden_states):
        logits = own_gating(hidden_states)
        return last[0].to(logits.dtype) + (logits - logits.detach())  # the leader's value, and the own gradient

    leader.gating, follower.gating = lead, follow


def prefer_first_rank(layer) -> None:
    """Let the router add PREFERENCE to the logits of the experts that the first rank of each group owns."""
    gating = layer.router.gating
    num_local = layer.config.num_moe_experts // layer.config.expert_model_parallel_size

    def prefer(hidden_states):
        logits = gating(hidden_states)
        preference = torch.zeros_like(logits)
        preference[..., :num_local] = PREFERENCE
        return logits + preference

    layer.router.gating = prefer


def tokens(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and the gradient of its output, [tokens, batch, hidden] in float32."""
    rank, seed, length = dist.get_rank(), run.args.seed, run.tokens
    if run.args.uneven_tokens:  # a tensor parallel group shares its sequences
        generator = _generator(seed, step, "length", rank // run.settings["tensor_model_parallel_size"])
        length = int(torch.randint(1, length + 1, (), generator=generator, dtype=torch.int64, device="cpu"))
    shape = (length, run.batch, run.settings["hidden_size"])
    generators = (_generator(seed, step, what, rank) for what in ("tokens", "grad"))
    x, grad = (torch.randn(shape, generator=one, dtype=torch.float32, device="cpu") for one in generators)
    return x, grad
