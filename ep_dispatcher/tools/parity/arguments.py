"""The command line of the parity tool: those of Megatron's flags that concern an MoE layer, and what will run."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ep_dispatcher.integrations.megatron import arguments as of_dispatcher
from ep_dispatcher.integrations.megatron.arguments import flag_of
from ep_dispatcher.tools.benchmark.harness import number

# Fields of TransformerConfig that have a flag here, by prefix or by name. The flags are made from the fields, as
# Megatron makes them, so that they fit each version of Megatron.
PREFIXES = ("moe_", "expert_", "fp8", "fp4", "recompute_", "activation_func_", "glu_", "cuda_graph_")
FIELDS = {
    "tensor_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "bf16",
    "fp16",
    "hidden_size",
    "ffn_hidden_size",
    "add_bias_linear",
    "transformer_impl",
    "deterministic_mode",
    "disable_bf16_reduced_precision_matmul",
    "batch_invariant_mode",
    "use_te_activation_func",
    "use_fused_weighted_squared_relu",
    "use_transformer_engine_op_fuser",
    "use_grouped_gemm_for_shared_expert",
}
# Flags that look like those of an MoE layer, and change nothing in this one. The first three choose the dispatcher.
WITHOUT_EFFECT = {
    "--moe-token-dispatcher-type",
    "--moe-flex-dispatcher-backend",
    "--moe-enable-deepep",
    "--moe-deepep-num-sms",
    "--moe-hybridep-num-sms",
    "--moe-layer-freq",
    "--moe-per-layer-logging",
    "--moe-use-upcycling",
    "--moe-upcycling-granularity",
}
LOOKS_LIKE_MOE = ("--moe-", "--expert-", "--num-experts")
RECOMPUTE_MODULES = ("moe", "moe_act", "shared_experts")  # those of Megatron's that are inside an MoE layer
TP = "--tensor-model-parallel-size"


class Refused(Exception):
    """A configuration that cannot be run; the text names the flag."""


@dataclass
class Run:
    """One comparison: what was asked for, and the layers that will run."""

    args: argparse.Namespace  # the flags of this tool
    settings: dict[str, Any]  # of TransformerConfig, except for the dispatcher
    ours: dict[str, Any]  # fields of this dispatcher for its layer
    num_ranks: int
    cpu: bool
    transformer_engine: bool
    unused: list[str]  # flags that were given and do not concern an MoE layer, as shown
    reference: str = ""  # Megatron's dispatcher to compare with
    tokens: int = 0  # along the sequence, of one rank
    batch: int = 0
    assumed: dict[str, Any] = field(default_factory=dict)  # flags that were not given
    changes: list[str] = field(default_factory=list)  # differences from the given flags, and why


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
    own = parser.add_argument_group("flags of this tool")
    steps: dict[str, Any] = dict(type=number(int, 0), default=0)
    own.add_argument("--steps", type=number(int, 1), default=2, help="steps that are compared; default 2")
    own.add_argument("--timed-steps", **steps | {"default": 5}, help="further steps that are timed; default 5")
    own.add_argument("--profiled-steps", **steps, help="steps whose time is shown by step of the layer; default 0")
    own.add_argument("--seed", **steps | {"default": 1234}, help="of weights and tokens; default 1234")
    own.add_argument("--uneven-tokens", action="store_true", help="another number of tokens on each rank, each step")
    own.add_argument("--reference", choices=("alltoall", "allgather"), help="what to compare with; default alltoall")
    own.add_argument("--out", type=Path, metavar="FILE", help="write the figures there too, as JSON")
    of_dispatcher.add_to(parser)
    group = parser.add_argument_group("flags of Megatron, with its meanings; all others are accepted, and named")
    flags = _flags_of_megatron()
    for flag, options in flags.items():
        group.add_argument(flag, default=argparse.SUPPRESS, **options)
    args, rest = parser.parse_known_args(argv)
    dests = {options["dest"] for options in flags.values()}
    settings = {name: value for name, value in vars(args).items() if name in dests}
    known = [*flags, *(flag_of(name) for name in vars(args))]
    ours = {n: value for n, value in vars(args).items() if n.startswith(of_dispatcher.PREFIX) and value is not None}
    run = Run(args, settings, ours, num_ranks, cpu, transformer_engine, _unused(rest, known))
    _complete(run)
    return run


def _flags_of_megatron() -> dict[str, dict[str, Any]]:
    """Return flag -> arguments of ``add_argument``. Those with values of ``_complete`` are not made from fields."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {one.name: one for one in dataclasses.fields(TransformerConfig)}
    sizes = ("tensor_model_parallel", "context_parallel", "expert_model_parallel", "expert_tensor_parallel")
    numbers = [*(f"{name}_size" for name in sizes), "hidden_size", "num_experts", "seq_length", "micro_batch_size"]
    found: dict[str, dict[str, Any]] = {flag_of(name): dict(dest=name, type=number(int, 1)) for name in numbers}
    for name in ("swiglu", "squared_relu", "quick_geglu", "no_bias_swiglu_fusion", "no_bias_gelu_fusion"):
        found[flag_of(name)] = dict(dest=name, action="store_true")
    for name in {"cuda_graph_scope", "cuda_graph_modules"} & fields.keys():
        found[flag_of(name)] = dict(dest=name, nargs="*")
    found["--fp8-param-gather"] = dict(dest="fp8_param", action="store_true")
    found["--moe-router-load-balancing-type"] = dict(dest="moe_router_load_balancing_type", nargs="+")
    found["--moe-aux-loss-coeff"] = dict(dest="moe_aux_loss_coeff", nargs="+", type=float)
    for name, one in fields.items():
        if flag_of(name) in found or not concerns_moe(name):
            continue
        options, flags = _options(one.type), [flag_of(name)]
        if options == {"type": bool}:
            options = {"action": "store_false" if one.default is True else "store_true"}
            flags = [f"--no-{flags[0][2:]}", f"--disable-{flags[0][2:]}"] if one.default is True else flags
        flags = one.metadata.get("argparse_meta", {}).get("arg_names", flags)
        if options is not None and not WITHOUT_EFFECT.intersection(flags):
            found |= {flag: {"dest": name, **options} for flag in flags}
    return found


def concerns_moe(name: str) -> bool:
    return name in FIELDS or name.startswith(PREFIXES)


def _options(annotation: Any) -> dict[str, Any] | None:
    """Return the options of a flag for a field of this type; None if the type has no flag."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = tuple(one for one in inner if one is not type(None))
        return _options(inner[0]) if len(inner) == 1 else None
    if origin is list:
        of_one = _options(inner[0])
        return of_one and {**of_one, "nargs": "+"}
    if origin is Literal:
        return {"type": type(inner[0]), "choices": inner}
    return {"type": annotation} if annotation in (bool, int, float, str) else None


def _unused(rest: list[str], known: list[str]) -> list[str]:
    """Return the flags that the parser left over, in order. Raise Refused if one of them is a misspelt MoE flag."""
    # The first word may be the script's name.
    flags = dict.fromkeys(word.partition("=")[0] for i, word in enumerate(rest) if i == 0 or word.startswith("--"))
    shown = []
    for flag in flags:
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.9)
        hint = f" (did you mean {close[0]}?)" if close else ""
        if flag.startswith(LOOKS_LIKE_MOE) and flag not in WITHOUT_EFFECT:
            raise Refused(f"{flag}: this Megatron has no such flag{hint}")
        shown.append(flag + hint)
    return shown


# ---- what will run --------------------------------------------------------------------------------------------------


def _demand(ok: bool, flag: str, given: Any, allowed: str) -> None:
    if not ok:
        raise Refused(f"{flag}: given {given}, allowed: {allowed}")


def _default(run: Run, flag: str, value: Any) -> Any:
    """Return the value of a flag. One that was not given becomes ``value``, and is named."""
    name = flag[2:].replace("-", "_")
    if name not in run.settings:
        run.settings[name] = run.assumed[flag] = value
    return run.settings[name]


def _complete(run: Run) -> None:
    settings = run.settings
    impl = settings.get("transformer_impl")
    _demand(impl != "inference_optimized", "--transformer-impl", impl, "local, transformer_engine: this trains")
    without = "local layers" if run.transformer_engine else "without Transformer Engine"
    run.transformer_engine = run.transformer_engine and impl != "local"
    settings["transformer_impl"] = "transformer_engine" if run.transformer_engine else "local"
    _sizes(run)
    _activation(run)
    if not run.transformer_engine:
        _leave_out_kernels(run, without)
    _recompute(run)
    _reference(run)
    if run.args.uneven_tokens:
        settings["variable_seq_lengths"] = True
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if len(settings.get(name, ())) == 1:
            settings[name] = settings[name][0]
    if settings.get("cuda_graph_impl", "none") == "none":
        for name in ("cuda_graph_scope", "cuda_graph_modules"):
            settings.pop(name, None)
    if "cuda_graph_impl" in settings:
        run.changes.append("--cuda-graph-impl: checked; the layer itself runs without a graph")
    settings |= {"num_layers": 1, "num_attention_heads": settings["tensor_model_parallel_size"]}
    settings |= {"perform_initialization": False, "use_cpu_initialization": run.cpu}


def _sizes(run: Run) -> None:
    settings, ranks = run.settings, run.num_ranks
    tp, cp = (settings.setdefault(f"{name}_parallel_size", 1) for name in ("tensor_model", "context"))
    _demand(ranks % (tp * cp) == 0, f"{TP} x --context-parallel-size", tp * cp, f"a divisor of the {ranks} ranks")
    if tp == 1:
        settings.pop("sequence_parallel", None)  # as Megatron's arguments do
    elif not settings.get("sequence_parallel"):
        raise Refused(f"--sequence-parallel: not given; Megatron trains MoE layers with {TP} {tp} only with it")
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
    length, ways = _default(run, "--seq-length", 32 * tp * cp), tp * cp
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


def _reference(run: Run) -> None:
    uneven_chunks = run.cpu and run.settings["expert_tensor_parallel_size"] > 1
    uneven_chunks = uneven_chunks and not run.settings.get("moe_pad_expert_input_to_capacity")
    run.reference = run.args.reference or ("allgather" if uneven_chunks else "alltoall")
    allowed = "allgather, as gloo gathers no uneven chunks over the expert tensor group"
    _demand(not uneven_chunks or run.reference == "allgather", "--reference", "alltoall", allowed)
    equal = run.args.uneven_tokens and run.reference == "allgather"
    allowed = "alltoall, as allgather needs equal numbers"
    _demand(not equal, "--uneven-tokens", "with allgather as the reference", allowed)
    if uneven_chunks and run.args.reference is None:
        run.changes.append("the reference is allgather: gloo cannot do what alltoall does over expert tensor groups")


def reference_settings(run: Run) -> dict[str, Any]:
    """Return the settings that the reference supports. The others become changes of the run."""
    settings, lacking = dict(run.settings), ["moe_expert_rank_capacity_factor"]
    if run.reference == "allgather":
        lacking.append("moe_shared_expert_overlap")
    for name in lacking:
        if settings.pop(name, None):
            run.changes.append(f"{flag_of(name)}: not in the reference, {run.reference} does not have it")
    return settings
