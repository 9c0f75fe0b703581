"""Train an MoE model in plain PyTorch: FSDP2, DeviceMesh, mixed precision, torch.compile, selective checkpointing.

    torchrun --nproc-per-node 4 examples/pytorch_moe.py                 # on CPUs, or one rank per GPU
    torchrun --nproc-per-node 4 examples/pytorch_moe.py --precision autocast --no-compile

4 ranks are 2 data-parallel replicas of 2 expert-parallel ranks. FSDP2 shards the dense parameters over all 4 ranks, and
the experts of an expert-parallel rank over its 2 replicas. docs/pytorch.md explains each step.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ep_dispatcher as ep

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, NUM_LAYERS, NUM_TOKENS = 64, 32, 8, 2, 2, 96
MAX_NORM = 0.25  # of the gradients


def keep_communication(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what dispatch and combine return: a recompute then moves nothing. The GEMMs run again."""
    kept = torch.ops.ep_dispatcher.dispatch.default, torch.ops.ep_dispatcher.combine.default
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):  # topk_weights are float32
            topk_weights, topk_idx = self.gate(x.float()).softmax(-1).topk(NUM_TOPK)
            return topk_idx, topk_weights / topk_weights.sum(-1, keepdim=True)


class Experts(nn.Module):
    """The experts of this rank. FSDP2 gathers their parameters for `forward`, so moe_mlp is called there."""

    def __init__(self, buffer: ep.Buffer, first: int, num_local: int, layer: int, checkpoints: bool):
        super().__init__()
        own = [torch.Generator().manual_seed(1000 * (layer + 1) + e) for e in range(first, first + num_local)]
        w1 = [torch.randn(2 * INTERMEDIATE, HIDDEN, generator=seeded) / HIDDEN**0.5 for seeded in own]
        w2 = [torch.randn(HIDDEN, INTERMEDIATE, generator=seeded) / INTERMEDIATE**0.5 for seeded in own]
        self.w1, self.w2 = nn.Parameter(torch.stack(w1)), nn.Parameter(torch.stack(w2))
        self.buffer, self.checkpoints = buffer, checkpoints

    def run(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        return ep.moe_mlp(
            self.buffer,
            x,
            topk_idx,
            topk_weights,
            self.w1,
            self.w2,
            max_recv_rows=self.buffer.max_recv_rows(),  # enough for any routing, so all shapes are static
            average_gradients=True,  # FSDP2 averages over the replicas
        )

    def forward(self, *routed: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.run(*routed)
        context_fn = partial(create_selective_checkpoint_contexts, keep_communication)
        return checkpoint(self.run, *routed, use_reentrant=False, context_fn=context_fn)


class Block(nn.Module):
    def __init__(self, experts: Experts):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router, self.experts = Router(), experts

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.silu(self.dense(x))
        rows = self.norm(x)
        return x + self.experts(rows, *self.router(rows))


def make_model(buffer: ep.Buffer, *, checkpoints: bool) -> nn.Sequential:
    torch.manual_seed(0)  # dense parameters are the same on all ranks
    num_local = buffer.num_local_experts
    first = buffer.rank * num_local
    layers = [Block(Experts(buffer, first, num_local, layer, checkpoints)) for layer in range(NUM_LAYERS)]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, HIDDEN))


def blocks_of(model: nn.Sequential) -> list[Block]:
    return [part for part in model if isinstance(part, Block)]


def shard(model: nn.Sequential, world: DeviceMesh, replicas: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard the dense parameters over all ranks, and this rank's experts over the replicas of them."""
    dense = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # By default FSDP2 casts all floating arguments of a module that it wraps, also topk_weights.
    of_experts = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks_of(model):
        fully_shard(block.experts, mesh=replicas, mp_policy=of_experts)
        fully_shard(block.router, mesh=world)  # float32
        fully_shard(block, mesh=world, mp_policy=dense)
    fully_shard(model, mesh=world, mp_policy=dense)


def clip_gradients(model: nn.Module, expert_parallel: DeviceMesh) -> Tensor:
    """Clip by the norm of all gradients. Those of experts differ between expert-parallel ranks, so they are summed."""
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    squares = []
    for params in (dense, experts):
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2)
    dist.all_reduce(squares[1], group=expert_parallel.get_group())
    total = (squares[0] + squares[1]).sqrt()
    for params in (dense, experts):
        nn.utils.clip_grads_with_norm_(params, MAX_NORM, total)
    return total


def data(rank: int, step: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens of a rank and their targets."""
    generator = torch.Generator().manual_seed(10_000 + 100 * step + rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    return x.to(device), x.roll(1, dims=1).tanh().to(device)


def train(
    num_steps: int,
    device: str,
    *,
    precision: str,
    compiles: bool,
    checkpoints: bool,
    replicas: int | None = None,
    backend: str = "inductor",
) -> list[tuple[float, float]]:
    """Return the loss of this rank and the norm of all gradients, of each step."""
    ranks = dist.get_world_size()
    world = init_device_mesh(device, (ranks,), mesh_dim_names=("world",))
    if replicas is None:
        replicas = 2 if ranks > 2 else 1
    mesh = init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("replicas", "experts"))
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    with ep.Buffer(
        mesh["experts"],
        hidden=HIDDEN,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=NUM_TOKENS,
        dtype=dtype,
        engine="cuda" if device == "cuda" else "cpu",
    ) as buffer:
        model = make_model(buffer, checkpoints=checkpoints).to(device)
        if compiles:
            for block in blocks_of(model):
                experts: Any = block.experts
                experts.forward = torch.compile(experts.forward, backend=backend, fullgraph=True)
        shard(model, world, mesh["replicas"], torch.bfloat16 if precision == "policy" else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for step in range(num_steps):
            x, target = data(dist.get_rank(), step, device)
            with torch.autocast(device, torch.bfloat16, enabled=precision == "autocast"):
                y = model(x)
            loss = F.mse_loss(y.float(), target)
            loss.backward()
            seen.append((loss.item(), clip_gradients(model, mesh["experts"]).item()))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an MoE model in plain PyTorch.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", choices=("policy", "autocast", "float32"), default="policy")
    parser.add_argument("--replicas", type=int, help="of the experts; the default is 2, with 2 ranks 1")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    options = dict(precision=args.precision, compiles=args.compile, checkpoints=args.checkpoint)
    seen = train(args.steps, device, replicas=args.replicas, **options)
    if dist.get_rank() == 0:
        for step, (loss, norm) in enumerate(seen):
            print(f"step {step}: loss {loss:.4f}, norm of the gradients {norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
