"""The command line of the parity tool. It yields a Run: two dispatchers, and the settings of their layers."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

from ep_dispatcher.integrations.megatron.dispatcher import arguments as of_dispatcher
from ep_dispatcher.integrations.megatron.dispatcher.arguments import flag_of
from ep_dispatcher.tools.parity import dispatchers, flags, plot
from ep_dispatcher.tools.parity.dispatchers import OURS
from ep_dispatcher.tools.parity.flags import Others, Refused

RECOMPUTE_MODULES = ("moe", "moe_act", "shared_experts")  # those of Megatron's that are inside an MoE layer
TP = "--tensor-model-parallel-size"
LENGTH, LENGTH_WITH_COPIES = 32, 1024  # sequences that are chosen here; copies need many rows


@dataclass
class Run:
    """One comparison: what was asked for, and the layers that will run."""

    args: argparse.Namespace  # the flags of this tool
    settings: dict[str, Any]  # of TransformerConfig, except for the dispatcher
    ours: dict[str, Any]  # fields of ep_dispatcher for its layer
    num_ranks: int
    cpu: bool
    transformer_engine: bool
    others: Others  # flags that were given, and that no layer is made from
    tested: str = ""  # the dispatchers, by the names of dispatchers.py
    reference: str = ""
    exact: str = ""  # the one of the layers in float32, below that
    tokens: int = 0  # along the sequence, of one rank
    batch: int = 0
    assumed: dict[str, Any] = field(default_factory=dict)  # flags that were not given
    changes: list[str] = field(default_factory=list)  # differences from the given flags, and why

    @property
    def has_ours(self) -> bool:
        return OURS in (self.tested, self.reference)

    @property
    def has_copies(self) -> bool:
        """Whether the layer of ep_dispatcher may make redundant copies of experts."""
        return bool(self.ours.get(of_dispatcher.PREFIX + "redundant_experts_per_rank"))


def parse(argv: list[str], description: str | None, num_ranks: int, cpu: bool, transformer_engine: bool) -> Run:
    """Read the command line, complete it, and change what this machine cannot run.

    Raises Refused or argparse.ArgumentError. --help prints and exits.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ep_dispatcher.integrations.megatron.parity",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
        usage="torchrun --nproc-per-node N -m ep_dispatcher.integrations.megatron.parity [flags]",
    )
    names = dispatchers.names()
    flags.add_own(parser, names)
    of_dispatcher.add_arguments(parser)
    group = parser.add_argument_group("flags of Megatron, with its meanings; all others are accepted, and named")
    known = flags.of_megatron()
    known[dispatchers.BACKEND]["choices"] = [name for name in names if name not in dispatchers.MEGATRONS]
    for flag, options in known.items():
        group.add_argument(flag, default=argparse.SUPPRESS, **options)
    args, rest = parser.parse_known_args(argv)
    fields = {options["dest"] for options in known.values()}
    settings = {name: value for name, value in vars(args).items() if name in fields}
    given = {n: value for n, value in vars(args).items() if n.startswith(of_dispatcher.PREFIX) and value is not None}
    others = flags.sort_others(rest, [*known, *(flag_of(name) for name in vars(args))])
    check_files(args)
    run = Run(args, settings, given, num_ranks, cpu, transformer_engine, others)
    _complete(run)
    return run


# ---- what will run --------------------------------------------------------------------------------------------------


def _demand(ok: bool, flag: str, given: Any, allowed: str) -> None:
    if not ok:
        raise Refused(f"{flag} is {given}, but has to be {allowed}")


def _default(run: Run, flag: str, value: Any) -> Any:
    """Return the value of a flag. One that was not given becomes ``value``, and is named."""
    name = flag[2:].replace("-", "_")
    if name not in run.settings:
        run.settings[name] = run.assumed[flag] = value
    return run.settings[name]


def _complete(run: Run) -> None:
    settings = run.settings
    impl = settings.get("transformer_impl")
    _demand(
        impl != "inference_optimized",
        "--transformer-impl",
        impl,
        "local or transformer_engine, which can train",
    )
    without = "local layers" if run.transformer_engine else "without Transformer Engine"
    run.transformer_engine = run.transformer_engine and impl != "local"
    settings["transformer_impl"] = "transformer_engine" if run.transformer_engine else "local"
    _sizes(run)
    _activation(run)
    if not run.transformer_engine:
        _leave_out_kernels(run, without)
    _recompute(run)
    _dispatchers(run)
    if run.has_copies:
        flag = of_dispatcher.flag("redundant_experts_per_rank")
        run.changes.append(f"the router prefers the experts of the first rank, so that {flag} has something to copy")
    if run.args.uneven_tokens:
        settings["variable_seq_lengths"] = True
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if len(settings.get(name, ())) == 1:
            settings[name] = settings[name][0]
    if settings.get("cuda_graph_impl", "none") == "none":
        for name in ("cuda_graph_scope", "cuda_graph_modules"):
            settings.pop(name, None)
    if "cuda_graph_impl" in settings:
        run.changes.append("--cuda-graph-impl: only checked, and the layer runs without a graph")
    run.changes += [f"{flag}: the layer runs without it, because it needs a whole model" for flag in run.others.not_run]
    settings |= {"num_layers": 1, "num_attention_heads": settings["tensor_model_parallel_size"]}
    settings |= {"perform_initialization": False, "use_cpu_initialization": run.cpu}


def _sizes(run: Run) -> None:
    settings, ranks = run.settings, run.num_ranks
    tp, cp = (settings.setdefault(f"{name}_parallel_size", 1) for name in ("tensor_model", "context"))
    _demand(ranks % (tp * cp) == 0, f"{TP} x --context-parallel-size", tp * cp, f"a divisor of the {ranks} ranks")
    if tp == 1:
        settings.pop("sequence_parallel", None)  # as Megatron's arguments do
    elif not settings.get("sequence_parallel"):
        raise Refused(f"--sequence-parallel is not given, but Megatron trains MoE layers with {TP} {tp} only with it")
    etp = settings.setdefault("expert_tensor_parallel_size", tp)
    _demand(ranks % etp == 0, "--expert-tensor-parallel-size", etp, f"a divisor of the {ranks} ranks")
    groups, experts, flag = ranks // etp, settings.get("num_experts"), "--expert-model-parallel-size"
    common = math.gcd(groups, experts or groups)
    allowed = f"a number that has a divisor in common with the {groups} ranks"
    _demand("expert_model_parallel_size" in settings or common > 1 or groups == 1, "--num-experts", experts, allowed)
    ep = _default(run, flag, common)
    times = f"{ep}, times the expert tensor parallel size of {etp}"
    _demand(ranks % (ep * etp) == 0, flag, times, f"a divisor of the {ranks} ranks")
    without = "without expert or tensor parallelism Megatron's local experts cannot add a bias"
    bias_fits = ep * etp > 1 or run.transformer_engine or not settings.get("add_bias_linear", True)
    _demand(bias_fits, flag, 1, f"2 and more, or --disable-bias-linear; {without}")
    experts = _default(run, "--num-experts", -(-max(8, 2 * settings.get("moe_router_topk", 2)) // ep) * ep)
    _demand(experts % ep == 0, "--num-experts", experts, f"a multiple of the expert model parallel size ({ep})")
    settings["num_moe_experts"] = settings.pop("num_experts")
    hidden = _default(run, "--hidden-size", 64)
    ffn = max(64, int(4 * hidden * 2 / 3 / 64) * 64) if settings.get("swiglu") else 4 * hidden  # as Megatron's
    _default(run, "--ffn-hidden-size", settings.get("moe_ffn_hidden_size", ffn))
    ways = tp * cp
    length = _default(run, "--seq-length", ways * (LENGTH_WITH_COPIES if run.has_copies else LENGTH))
    allowed = f"a multiple of {ways}, the tensor times the context parallel size"
    _demand(length % ways == 0, "--seq-length", length, allowed)
    _default(run, "--micro-batch-size", 2)
    run.tokens, run.batch = settings.pop("seq_length") // ways, settings.pop("micro_batch_size")


def _activation(run: Run) -> None:
    """Translate the flags as core_transformer_config_from_args() and validate_args() do."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    settings = run.settings
    kinds = {"swiglu": (F.silu, True), "squared_relu": (squared_relu, False), "quick_geglu": (quick_gelu, True)}
    given = [name for name in kinds if settings.pop(name, False)]
    _demand(len(given) < 2, " ".join(map(flag_of, given)), "together", "one activation")
    no_swiglu_fusion, no_fusion = (settings.pop(f"no_bias_{name}_fusion", False) for name in ("swiglu", "gelu"))
    if given:
        settings["activation_func"], settings["gated_linear_unit"] = kinds[given[0]]
    if given == ["swiglu"]:
        fused = not no_swiglu_fusion
    else:
        fused = given != ["squared_relu"] and not no_fusion and settings.get("add_bias_linear", True)
    fused = fused and not settings.get("use_te_activation_func")
    if fused and run.cpu:
        run.changes.append("no fused bias and activation: not on a CPU")
    settings["bias_activation_fusion"] = fused and not run.cpu


def _leave_out_kernels(run: Run, why: str) -> None:
    """Refuse or leave out what only Transformer Engine or a GPU has."""
    from megatron.core.transformer.moe import moe_layer

    settings = run.settings
    for name, flag in (("fp8", "--fp8-format"), ("fp4", "--fp4-format")):
        _demand(settings.get(name) is None, flag, settings.get(name), f"nothing {why}")
    latent, has_te = settings.get("moe_latent_size"), moe_layer.HAVE_TE  # its projections are the engine's always
    _demand(latent is None or has_te, "--moe-latent-size", latent, "nothing without Transformer Engine")
    for name in ("moe_permute_fusion", "moe_router_fusion", "moe_use_legacy_grouped_gemm"):
        if settings.pop(name, False):
            run.changes.append(f"{flag_of(name)} left out: {why}")
    if settings.pop("moe_grouped_gemm", False):
        run.changes.append(f"--moe-grouped-gemm left out: {why} the experts are SequentialMLP")
        modules = settings.get("recompute_modules", [])
        if "moe_act" in modules:
            modules.remove("moe_act")
            run.changes.append("--recompute-modules moe_act left out: it needs --moe-grouped-gemm")


def _recompute(run: Run) -> None:
    settings = run.settings
    granularity, modules = settings.get("recompute_granularity"), settings.get("recompute_modules", ["core_attn"])
    for name in ("recompute_method", "recompute_num_layers"):
        settings.pop(name, None)
    if granularity == "full":
        settings.pop("recompute_modules", None)
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif granularity == "selective":
        settings["recompute_modules"] = [name for name in modules if name in RECOMPUTE_MODULES]
        outside = [name for name in modules if name not in RECOMPUTE_MODULES]
        if outside:
            run.changes.append(f"--recompute-modules {' '.join(outside)} left out: not a part of an MoE layer")
        if not settings["recompute_modules"]:
            del settings["recompute_modules"], settings["recompute_granularity"]


def _dispatchers(run: Run) -> None:
    """Choose the two dispatchers. Raise Refused if one of them cannot run."""
    args, settings = run.args, run.settings
    is_possible: dict[str, str | None] = dict.fromkeys(dispatchers.MEGATRONS)
    if run.cpu and settings["expert_tensor_parallel_size"] > 1 and not settings.get("moe_pad_expert_input_to_capacity"):
        is_possible["alltoall"] = "gloo gathers no uneven chunks over the expert tensor parallel group"
    if args.uneven_tokens:
        is_possible["allgather"] = "it needs the same number of tokens on all ranks, not --uneven-tokens"
    run.tested, run.reference = dispatchers.pair(dispatchers.take_chosen(settings), args.against, is_possible)
    run.exact = next((name for name in dispatchers.MEGATRONS if is_possible[name] is None), run.reference)
    for name in (run.tested, run.reference):
        missing = dispatchers.why_missing(name, run.cpu, bool(settings.get("bf16")))
        if missing is not None:
            raise Refused(f"{name} cannot run here: {missing}")
    if run.ours and not run.has_ours:
        given = ", ".join(map(flag_of, run.ours))
        raise Refused(f"{given} is given to compare {run.tested} with {run.reference}, but works with {OURS} alone")
    if run.reference == "allgather" and args.against is None and is_possible["alltoall"] is not None:
        run.changes.append(f"compared with allgather instead of alltoall: {is_possible['alltoall']}")


def settings_of(run: Run, name: str) -> dict[str, Any]:
    """Return the fields of the configuration of a layer with this dispatcher."""
    kept, changes = dispatchers.without_lacking(name, run.settings)
    run.changes += [text for text in changes if text not in run.changes]
    return kept | dispatchers.settings_of(name)


def check_files(args: argparse.Namespace) -> None:
    """Raise Refused for files that could not be written after the comparison."""
    if args.plot is not None:
        why_not = plot.why_not(args.plot)
        if why_not is not None:
            raise Refused(f"--plot {args.plot}: {why_not}")
