"""Times a training step of Megatron-core whose router has a hot rank, with and without redundant experts.

    torchrun --nproc-per-node 2 benchmarks/megatron_balance.py --redundant 8 --json runs/megatron-balance.json
    torchrun --nproc-per-node 2 benchmarks/megatron_balance.py --cases 512x64x16x32x2 --popularity lognormal:1.0

A rank per GPU; without GPUs on the CPU engine, in float32, for trying the script. It needs neither Transformer Engine
nor Megatron's training loop: a GPT of Megatron's local layers, MoE in each, in its DistributedDataParallel with
gradients in float32; bfloat16, top-8. A step is --microbatches forward and backward passes, the reduction of
gradients, and plain SGD. A case is tokens per rank and microbatch x hidden x experts x intermediate x layers.

Megatron's router chooses and weighs the experts. Beforehand a constant is added to the logits of 8 experts of each
token, so that all sides have the same routing in each step: that of --popularity (balance.py). The weights are still
those of the router's own logits, and it is trained. Sides:

    megatron   alltoall, and Megatron's own experts, one after the other (not by default)
    alltoall   alltoall, and our experts in grouped GEMMs, as on the following sides
    today      our dispatcher
    copies     our dispatcher with --redundant experts per rank
    balanced   our dispatcher with a perfectly balanced router

All begin with the same weights and see the same tokens. Sides take turns, each with a new model, there and back again;
times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import balance
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ep_dispatcher.integrations import megatron as ep_megatron
from ep_dispatcher.memory import bytes_of, default_sms
from ep_dispatcher.tools.benchmark.harness import make_parser, number, table
from ep_dispatcher.tools.benchmark.machine import describe_machine, to_json
from ep_dispatcher.tools.benchmark.ranks import TorchrunRanks, largest_over_ranks, mean_over_ranks, sum_over_ranks
from ep_dispatcher.tools.benchmark.suite import BACKENDS
from ep_dispatcher.tools.testing import balance_so_far

CASES = ["8192x2048x128x768x4", "4096x7168x128x2048x2"]
HEAD, VOCABULARY, SEED = 128, 1024, 3
CHOSEN = 100.0  # added to a logit, so that the router chooses its expert
DEVIATION = 0.02  # of weights
LEARNING_RATE = 50.0  # over hidden: a step changes logits by as much in every case
OURS = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ep_dispatcher")
ALLTOALL = dict(moe_token_dispatcher_type="alltoall")


class Side(NamedTuple):
    dispatcher: dict[str, str]  # fields of TransformerConfig
    experts: str = "grouped"  # --ep-dispatcher-experts
    has_copies: bool = False
    is_balanced: bool = False  # the router


SIDES = {
    "megatron": Side(ALLTOALL, experts="megatron"),
    "alltoall": Side(ALLTOALL),
    "today": Side(OURS),
    "copies": Side(OURS, has_copies=True),
    "balanced": Side(OURS, is_balanced=True),
}


@dataclass(frozen=True)
class Case:
    layers: int
    routing: balance.Case  # its sizes and popularity
    seq_length: int
    microbatches: int

    @property
    def tokens(self) -> int:
        return self.routing.tokens

    @property
    def heads(self) -> int:
        return max(1, self.routing.hidden // HEAD)

    @property
    def on_gpu(self) -> bool:
        return self.routing.engine == "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")


@dataclass
class Turn:
    """What one side did in one turn: the slowest or largest rank's figures, the same on every rank."""

    milliseconds: list[float] = field(default_factory=list)  # of each timed step
    losses: list[float] = field(default_factory=list)  # of each step, of all ranks, in nats per token
    gradient_norm: float = 0.0  # of the first step, over the parameters of all ranks
    peak_bytes: int = 0  # of PyTorch's allocator, parameters and gradients included; 0 on CPUs
    buffer_bytes: int = 0  # of the dispatcher
    slot_bytes: int = 0
    imbalance: tuple[float, float] = (1.0, 1.0)  # rows of the fullest rank over the mean, before and after copies
    copies: float = 0.0  # of an MoE layer and microbatch


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")  # missing packages, deprecated calls
    engine = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = TorchrunRanks(torch.get_num_threads(), BACKENDS[engine])
    try:
        cases = [make_case(sizes, args, engine) for sizes in args.cases]
        with megatron_groups(engine):
            found = [measure(case, args) for case in cases]
        if args.json and dist.get_rank() == 0:
            write(args, found)
    finally:
        ranks.close()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    defaults = dict(rounds=2, steps=10, warm_up=3, microbatches=2, seq_length=4096, redundant=1)
    parser = make_parser(__doc__, **defaults)
    add = parser.add_argument
    add("--cases", nargs="+", default=CASES, metavar="TOKENSxHIDDENxEXPERTSxINTERMEDIATExLAYERS", help="sizes")
    add("--popularity", default="trace", help="of experts, as in balance.py")
    add("--fullest", type=number(float, 1), default=1.6, help="rows of the fullest rank over the mean")
    add("--sides", nargs="+", choices=SIDES, default=[name for name in SIDES if name != "megatron"], help="see above")
    add("--json", type=Path, help="write the figures there")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error(f"start it with torchrun --nproc-per-node 2 {sys.argv[0]}")
    return args


def make_case(sizes: str, args: argparse.Namespace, engine: str) -> Case:
    tokens, hidden, experts, intermediate, layers = map(int, sizes.split("x"))
    ranks = dist.get_world_size()
    routing = balance.Case(
        tokens,
        hidden,
        experts,
        intermediate,
        popularity=args.popularity,
        fullest=args.fullest,
        redundant=args.redundant,
        ranks=ranks,
        ranks_per_node=ranks,
        engine=engine,
    )
    length = min(args.seq_length, routing.tokens)
    if routing.tokens % length:
        raise SystemExit(f"--seq-length is {length}, but has to divide the {routing.tokens} tokens of a rank")
    if experts % ranks:
        raise SystemExit(f"--cases has {experts} experts, but has to have a multiple of {ranks} ranks")
    return Case(layers, routing, length, args.microbatches)


def write(args: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    import megatron.core

    about = dict(machine=describe_machine(), megatron_core=megatron.core.__version__)
    about |= dict(rounds=args.rounds, steps=args.steps, warm_up=args.warm_up)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(to_json(about | dict(cases=cases)))


@contextlib.contextmanager
def megatron_groups(engine: str) -> Iterator[None]:
    """Make Megatron's groups, and register our dispatcher."""
    if engine == "cpu":
        from ep_dispatcher.integrations.megatron.dispatcher.cpu import let_megatron_run_on_cpu

        torch.compiler.set_stance("force_eager")  # compiling takes longer than all the rest
        let_megatron_run_on_cpu()
    from megatron.core import parallel_state, tensor_parallel

    ep_megatron.register()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    if engine == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    try:
        yield
    finally:
        ep_megatron.destroy_buffers()
        parallel_state.destroy_model_parallel()
        ep_megatron.unregister()


# ---- the model ------------------------------------------------------------------------------------------------------


class FusedAttention(nn.Module):
    """Causal attention by PyTorch's fused kernel: Megatron's local one writes all scores to memory."""

    def __init__(self, **_: Any):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **_: Any) -> Tensor:
        """Take and return [sequence, batch, heads, HEAD]; the result has heads x HEAD as one dimension."""
        heads_first = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def make_model(case: Case, side: Side, spec: Any = None) -> nn.Module:
    """Return a GPT in Megatron's DistributedDataParallel, with the same weights for all sides.

    spec: of its layers; None: Megatron's local ones
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = make_config(case, side)
    if spec is None:
        spec = get_gpt_layer_local_spec(num_experts=case.routing.experts, moe_grouped_gemm=False)
        spec.submodules.self_attention.submodules.core_attention = FusedAttention
    model = GPTModel(config, spec, VOCABULARY, case.seq_length, position_embedding_type="rope")
    model.to(case.device, config.params_dtype)  # Megatron makes norms in float32
    set_weights(model)
    choose_experts(model, case, side)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    ddp = DistributedDataParallel(config, options, model)
    # Our experts read it in each pass, and add to main_grad. Megatron's linear layers would need apex for it.
    config.gradient_accumulation_fusion = side.experts == "grouped"
    return ddp


def make_config(case: Case, side: Side) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    routing = case.routing
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=routing.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=routing.intermediate,
        moe_ffn_hidden_size=routing.intermediate,
        num_moe_experts=routing.experts,
        moe_router_topk=balance.TOPK,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        expert_model_parallel_size=routing.ranks,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=case.on_gpu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=case.on_gpu,
        params_dtype=torch.bfloat16 if case.on_gpu else torch.float32,
        use_cpu_initialization=not case.on_gpu,
        perform_initialization=False,
        **side.dispatcher,
    )
    config.ep_dispatcher_experts = side.experts
    config.ep_dispatcher_max_tokens_per_rank = routing.tokens
    if side.has_copies:
        config.ep_dispatcher_redundant_experts_per_rank = routing.redundant
    return config


@torch.no_grad()
def set_weights(model: nn.Module) -> None:
    """Set normal weights: dense ones the same on all ranks, experts of each rank its own."""
    for place, parameter in enumerate(model.parameters()):
        seed = SEED + 10_000 * place + (1 + dist.get_rank() if is_expert(parameter) else 0)
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dim() > 1:
            parameter.normal_(0, DEVIATION, generator=generator)


def is_expert(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def choose_experts(model: nn.Module, case: Case, side: Side) -> None:
    """Let the routers choose the experts of the case. Each layer begins with another token."""
    routing = case.routing._replace(popularity="balanced") if side.is_balanced else case.routing
    chosen = balance.choices_of(routing, dist.get_rank()).to(case.device)
    layers = moe_layers(model)
    assert len(layers) == case.layers, "not all layers are MoE layers"
    for place, layer in enumerate(layers):
        layer.router.gating = partial(add_to_chosen, layer.router.gating, chosen.roll(place * 509, 0))


def add_to_chosen(gating: Any, chosen: Tensor, hidden_states: Tensor) -> Tensor:
    """Return the logits [..., experts] of a router with CHOSEN added to those of `chosen` [tokens, TOPK]."""
    logits = gating(hidden_states)
    added = torch.zeros_like(logits).view(-1, logits.shape[-1]).scatter_(1, chosen, CHOSEN)
    return logits + added.view_as(logits)


# ---- a step ---------------------------------------------------------------------------------------------------------


def batch_of(case: Case, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the next ones, int64 [batch, sequence], of this rank: a sequence that can be learnt."""
    generator = torch.Generator().manual_seed(SEED + step * 1009 + microbatch * 101 + dist.get_rank())
    first = torch.randint(VOCABULARY, (case.tokens // case.seq_length, 1), generator=generator)
    places = torch.arange(case.seq_length + 1)
    tokens = ((first + 7 * places) % VOCABULARY).to(case.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_step(model: Any, case: Case, batches: list[tuple[Tensor, Tensor]], norms: list[Tensor] | None) -> Tensor:
    """Run one step. Return the loss of this rank; append the squared norms of its gradients to ``norms``."""
    model.zero_grad_buffer()
    total = torch.zeros((), device=case.device)
    positions = torch.arange(case.seq_length, device=case.device).expand(len(batches[0][0]), -1)
    for microbatch, (tokens, targets) in enumerate(batches):
        is_last = microbatch == len(batches) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(tokens, positions, None, labels=targets).float().mean() / len(batches)
            loss.backward()
        total += loss.detach()
    model.finish_grad_sync()
    if norms is not None:
        norms += squared_norms(model)
    update(model, LEARNING_RATE / case.routing.hidden)
    return total


@torch.no_grad()
def update(model: nn.Module, learning_rate: float) -> None:
    for parameter in model.parameters():
        parameter.add_(parameter.main_grad, alpha=-learning_rate)


def squared_norms(model: nn.Module) -> list[Tensor]:
    """Return the squared norm of the dense gradients, which all ranks share, and that of this rank's experts."""
    squares = [torch.zeros((), device=next(model.parameters()).device) for _ in range(2)]
    for parameter in model.parameters():
        squares[is_expert(parameter)] += parameter.main_grad.square().sum()
    return squares


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one case for the JSON. Rank 0 prints them."""
    turns: dict[str, list[Turn]] = {name: [] for name in args.sides}
    for turn in range(args.rounds):
        for name in args.sides if turn % 2 == 0 else args.sides[::-1]:
            turns[name].append(take_turn(case, SIDES[name], args))
            free_memory(case)  # of its model, which is large
            if dist.get_rank() == 0:
                print(f"{name}, turn {turn + 1}: {median(turns[name][-1:]):.2f} ms", flush=True)
    if dist.get_rank() == 0:
        print(report(case, turns), flush=True)
    figures = {name: [vars(one) for one in of_side] for name, of_side in turns.items()}
    sizes = dict(layers=case.layers, seq_length=case.seq_length, microbatches=case.microbatches)
    medians = {name: median(of_side) for name, of_side in turns.items()}
    about = dict(case=case.routing._asdict() | sizes, milliseconds=medians)
    return about | dict(differences=differences(turns), turns=figures)


def take_turn(case: Case, side: Side, args: argparse.Namespace) -> Turn:
    """Train a new model for some steps."""
    model, turn = make_model(case, side), Turn()
    losses: list[Tensor] = []
    norms: list[Tensor] = []  # of the first step, squared
    seconds: list[float] = []
    for step in range(args.warm_up + args.steps):
        batches = [batch_of(case, step, microbatch) for microbatch in range(case.microbatches)]
        if step == args.warm_up and case.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        synchronize(case)
        dist.barrier()
        begin = time.perf_counter()
        losses.append(train_step(model, case, batches, norms if step == 0 else None))
        synchronize(case)
        seconds.append(time.perf_counter() - begin)
    if case.on_gpu:
        turn.peak_bytes = int(largest_over_ranks([torch.cuda.max_memory_allocated()])[0])
    turn.milliseconds = [1e3 * s for s in largest_over_ranks(seconds[args.warm_up :])]
    turn.losses = mean_over_ranks([float(loss) for loss in losses])
    turn.gradient_norm = (float(norms[0]) + dist.get_world_size() * mean_over_ranks([float(norms[1])])[0]) ** 0.5
    look_at_buffer(model, case, side, batches, turn)
    for layer in moe_layers(model):
        # Megatron's keeps tensors, whose graph keeps the model: the garbage collector does not see this circle.
        layer.token_dispatcher = None
    return turn


def moe_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "token_dispatcher")]


def look_at_buffer(model: nn.Module, case: Case, side: Side, batches: list[tuple[Tensor, Tensor]], turn: Turn) -> None:
    """Fill in what the buffer says of one more step, and how unevenly the routing fills ranks."""
    before = imbalance_of(case, side)
    turn.imbalance = before, before
    if side.dispatcher is not OURS:
        return
    buffer = moe_layers(model)[0].token_dispatcher.buffer
    buffer.stats()
    train_step(model, case, batches, None)
    buffer.check()
    turn.buffer_bytes = bytes_of(buffer.config, buffer.engine, max(default_sms(buffer.config.num_sms).values())).total
    if side.has_copies:
        found = balance_so_far(buffer)
        turn.imbalance = found.imbalance_before, found.imbalance_after
        turn.copies = found.num_copies / found.num_microbatches
        turn.slot_bytes = buffer.balancer().slot_bytes


def imbalance_of(case: Case, side: Side) -> float:
    """Return the rows of the fullest rank over the mean."""
    routing = case.routing._replace(popularity="balanced") if side.is_balanced else case.routing
    mine = balance.choices_of(routing, dist.get_rank())
    of_expert = torch.bincount(mine.flatten(), minlength=routing.experts)
    rows = sum_over_ranks(of_expert.view(routing.ranks, -1).sum(1).tolist())
    return max(rows) * routing.ranks / sum(rows)


def synchronize(case: Case) -> None:
    if case.on_gpu:
        torch.cuda.synchronize()


def free_memory(case: Case) -> None:
    ep_megatron.destroy_buffers()
    gc.collect()
    if case.on_gpu:
        torch.cuda.empty_cache()


# ---- results --------------------------------------------------------------------------------------------------------


def median(turns: list[Turn]) -> float:
    return statistics.median(ms for turn in turns for ms in turn.milliseconds)


def differences(turns: dict[str, list[Turn]]) -> dict[str, dict[str, float]]:
    """Return by how much losses and the first gradient norm of a side differ from the first side's, relatively.

    Sides with another routing are left out.
    """
    base, *_ = (of_side[0] for of_side in turns.values())
    found = {}
    for name, of_side in turns.items():
        if not SIDES[name].is_balanced:
            pairs = [(ours, theirs) for turn in of_side for ours, theirs in zip(turn.losses, base.losses)]
            norm = max(abs(turn.gradient_norm / base.gradient_norm - 1) for turn in of_side)
            found[name] = dict(losses=max(abs(ours / theirs - 1) for ours, theirs in pairs), gradient_norm=norm)
    return found


def report(case: Case, turns: dict[str, list[Turn]]) -> str:
    """Return a table of all sides."""
    titles = ("side", "ms of a step", "ratio", "fullest rank over mean", "copies", "peak GB", "buffer, slots GB")
    titles += ("losses: first, last", "differ by")
    base, apart, rows = median(next(iter(turns.values()))), differences(turns), []
    for name, of_side in turns.items():
        one, ms = of_side[0], median(of_side)
        before, after = one.imbalance
        losses = f"{one.losses[0]:.4f}, {one.losses[-1]:.4f}"
        differ = f"{apart[name]['losses']:.1e}" if name in apart else "another routing"
        memory = f"{one.peak_bytes / 1e9:.1f}", f"{one.buffer_bytes / 1e9:.2f}, {one.slot_bytes / 1e9:.2f}"
        figures = (f"{ms:.2f}", f"{ms / base:.3f}", f"{before:.2f} -> {after:.2f}", f"{one.copies:.1f}")
        rows.append((name, *figures, *memory, losses, differ))
    routing = case.routing
    title = (
        f"\n{routing.tokens} x {routing.hidden} x {routing.intermediate}, top-{balance.TOPK} of {routing.experts}, "
        f"{case.layers} layers, {case.microbatches} microbatches, {routing.popularity}, {routing.ranks} ranks, "
        f"{routing.engine}, {routing.redundant} slot(s)"
    )
    return "\n".join([title, *table(titles, rows)])


if __name__ == "__main__":
    main()
