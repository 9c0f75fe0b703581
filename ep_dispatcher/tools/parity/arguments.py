"""The command line of the parity tool: those of Megatron's flags that concern an MoE layer."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ep_dispatcher import checks

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
# Flags that Megatron does not make from fields. `run_of` translates those whose dest is not a field.
BY_HAND: dict[str, dict[str, Any]] = {
    "--num-experts": dict(dest="num_moe_experts", type=int),
    "--swiglu": dict(action="store_true"),
    "--squared-relu": dict(action="store_true"),
    "--quick-geglu": dict(action="store_true"),
    "--no-bias-swiglu-fusion": dict(action="store_true"),
    "--no-bias-gelu-fusion": dict(action="store_true"),
    "--moe-router-load-balancing-type": dict(nargs="+"),
    "--moe-aux-loss-coeff": dict(nargs="+", type=float),
    "--cuda-graph-scope": dict(nargs="*"),
    "--cuda-graph-modules": dict(nargs="*"),
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
REFERENCES = ("alltoall", "allgather")


class Refused(Exception):
    """A configuration that cannot be run; the text names the flag."""


@dataclass(frozen=True)
class Machine:
    num_ranks: int
    cpu: bool
    transformer_engine: bool


@dataclass
class Given:
    """The command line."""

    flags: dict[str, Any]  # Megatron's flags that were given, by field or dest
    unused: list[str]  # flags that were given and do not concern an MoE layer, as shown
    steps: int
    timed_steps: int
    profiled_steps: int
    seed: int
    uneven_tokens: bool
    reference: str | None
    seq_length: int | None
    micro_batch_size: int | None
    out: Path | None


@dataclass
class Run:
    """The layers that will run."""

    settings: dict[str, Any]  # of TransformerConfig, except for the dispatcher
    reference: str
    transformer_engine: bool
    tokens: int  # along the sequence, of one rank
    batch: int
    assumed: dict[str, Any] = dataclasses.field(default_factory=dict)  # flags that were not given
    changes: list[str] = dataclasses.field(default_factory=list)  # differences from the given flags, and why


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


# ---- reading --------------------------------------------------------------------------------------------------------


def parse(argv: list[str], description: str) -> Given:
    """Read the command line. Raises Refused for a wrong value or a misspelt MoE flag; --help prints and exits."""
    parser = _make_parser(description)
    values, rest = parser.parse_known_args(argv)
    flags = vars(values)
    known = {name for action in parser._actions for name in action.option_strings}
    own = {name: flags.pop(name) for name in [field.name for field in dataclasses.fields(Given)] if name in flags}
    given = Given(flags=flags, unused=_unused(rest, known), **own)
    _integer("--steps", given.steps, 1)
    for flag, value in (("--timed-steps", given.timed_steps), ("--profiled-steps", given.profiled_steps)):
        _integer(flag, value, 0)
    _integer("--seed", given.seed, 0)
    for flag, size in (("--seq-length", given.seq_length), ("--micro-batch-size", given.micro_batch_size)):
        if size is not None:
            _integer(flag, size, 1)
    return given


def _make_parser(description: str) -> argparse.ArgumentParser:
    from megatron.core.transformer.transformer_config import TransformerConfig

    parser = _Parser(
        prog="python -m ep_dispatcher.integrations.megatron.parity",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="torchrun --nproc-per-node N -m ep_dispatcher.integrations.megatron.parity [flags]",
    )
    own = parser.add_argument_group("flags of this tool")
    own.add_argument("--steps", type=int, default=2, help="steps that are compared; default 2")
    own.add_argument("--timed-steps", type=int, default=5, help="further steps that are timed; default 5, 0 for none")
    own.add_argument(
        "--profiled-steps",
        type=int,
        default=0,
        help="further steps whose time is shown by step of the layer; default 0",
    )
    own.add_argument("--seed", type=int, default=1234, help="of weights and tokens; default 1234")
    own.add_argument("--uneven-tokens", action="store_true", help="another number of tokens on each rank, each step")
    own.add_argument("--reference", choices=REFERENCES, help="Megatron's dispatcher to compare with; default alltoall")
    own.add_argument("--out", type=Path, metavar="FILE", help="write the figures there too, as JSON")
    own.add_argument("--seq-length", type=int, help="of the whole sequence, before TP and CP divide it")
    own.add_argument("--micro-batch-size", type=int, help="sequences in a step")

    group = parser.add_argument_group("flags of Megatron, with its meanings; all others are accepted, and named")
    by_hand = {options.get("dest", flag[2:].replace("-", "_")) for flag, options in BY_HAND.items()}
    for field in dataclasses.fields(TransformerConfig):
        if field.name not in by_hand and concerns_moe(field.name):
            names, options = _flag_of(field)
            if options is not None and not WITHOUT_EFFECT.intersection(names):
                group.add_argument(*names, dest=field.name, default=argparse.SUPPRESS, **options)
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    for flag, options in BY_HAND.items():
        if not flag.startswith("--cuda-graph") or flag[2:].replace("-", "_") in fields:
            group.add_argument(flag, default=argparse.SUPPRESS, **options)
    return parser


def concerns_moe(name: str) -> bool:
    return name in FIELDS or name.startswith(PREFIXES)


def _flag_of(field: dataclasses.Field) -> tuple[list[str], dict[str, Any] | None]:
    """Return names and options of a field's flag; None for the options if its type has no flag."""
    meta = field.metadata.get("argparse_meta", {})
    options = _options(field.type)
    words = field.name.replace("_", "-")
    names = [f"--{words}"]
    if options == {"type": bool}:
        options = {"action": "store_true"}
        if field.default is True:
            options, names = {"action": "store_false"}, [f"--no-{words}", f"--disable-{words}"]
    return meta.get("arg_names", names), options


def _options(annotation: Any) -> dict[str, Any] | None:
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


def _unused(rest: list[str], known: set[str]) -> list[str]:
    """Return the flags that the parser left over, in order. Raise Refused if one of them is a misspelt MoE flag."""
    flags = dict.fromkeys(word.partition("=")[0] for word in rest if word.startswith("--"))
    if rest and not rest[0].startswith("--"):
        flags = {rest[0]: None, **flags}  # such as the script's name
    shown = []
    for flag in flags:
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.9)
        hint = f"; did you mean {close[0]}?" if close else ""
        if flag.startswith(LOOKS_LIKE_MOE) and flag not in WITHOUT_EFFECT:
            raise Refused(f"{flag}: this Megatron has no such flag{hint}")
        shown.append(f"{flag} ({hint[2:]})" if hint else flag)
    return shown


# ---- what will run --------------------------------------------------------------------------------------------------


def run_of(given: Given, machine: Machine) -> Run:
    """Complete the given configuration, and change what this machine cannot run. Raises Refused."""
    flags = dict(given.flags)
    made = Run({}, "", machine.transformer_engine and flags.get("transformer_impl") != "local", 0, 0)
    if flags.get("transformer_impl") == "inference_optimized":
        _refuse("--transformer-impl", "inference_optimized", "local, transformer_engine: this trains")
    flags["transformer_impl"] = "transformer_engine" if made.transformer_engine else "local"
    tp, cp = flags.get("tensor_model_parallel_size", 1), flags.get("context_parallel_size", 1)
    _parallel_sizes(made, flags, machine, tp, cp)
    _sizes(made, flags)
    _activation(made, flags, machine)
    _kernels(made, flags, machine)
    _recompute(made, flags)
    _tokens(made, given, tp, cp)
    _reference(made, given, flags, machine)
    if given.uneven_tokens:
        flags["variable_seq_lengths"] = True
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if len(flags.get(name, ())) == 1:
            flags[name] = flags[name][0]
    for name in [name for name in ("cuda_graph_scope", "cuda_graph_modules") if name in flags]:
        if flags.get("cuda_graph_impl", "none") == "none":
            del flags[name]
    made.settings = {**flags, "num_layers": 1, "num_attention_heads": tp, "perform_initialization": False}
    made.settings["use_cpu_initialization"] = machine.cpu
    if "cuda_graph_impl" in flags:
        made.changes.append("--cuda-graph-impl: checked; the layer itself runs without a graph")
    return made


def _parallel_sizes(made: Run, flags: dict, machine: Machine, tp: int, cp: int) -> None:
    ranks = machine.num_ranks
    for flag, size in ((TP, tp), ("--context-parallel-size", cp)):
        _integer(flag, size, 1)
    if ranks % (tp * cp):
        _refuse(f"{TP} x --context-parallel-size", tp * cp, f"a divisor of the {ranks} ranks")
    if tp == 1:
        flags.pop("sequence_parallel", None)  # as Megatron's arguments do
    elif not flags.get("sequence_parallel"):
        raise Refused(f"--sequence-parallel: not given; Megatron trains MoE layers with {TP} {tp} only with it")
    etp = flags.get("expert_tensor_parallel_size", tp)
    _integer("--expert-tensor-parallel-size", etp, 1)
    if ranks % etp:
        _refuse("--expert-tensor-parallel-size", etp, f"a divisor of the {ranks} ranks")
    experts = flags.get("num_moe_experts")
    if experts is not None:
        _integer("--num-experts", experts, 1)
    if "expert_model_parallel_size" not in flags:
        ep = math.gcd(ranks // etp, experts or ranks // etp)
        if ep == 1 < ranks // etp:
            _refuse("--num-experts", experts, f"a number that has a divisor in common with the {ranks // etp} ranks")
        _assume(made, flags, "expert_model_parallel_size", ep, "--expert-model-parallel-size")
    ep = flags["expert_model_parallel_size"]
    _integer("--expert-model-parallel-size", ep, 1)
    if ranks % (ep * etp):
        _refuse(
            "--expert-model-parallel-size",
            f"{ep}, times the expert tensor parallel size of {etp}",
            f"a divisor of the {ranks} ranks",
        )
    if ep == etp == 1 and not made.transformer_engine and flags.get("add_bias_linear", True):
        without = "without expert or tensor parallelism Megatron's local experts cannot add a bias"
        _refuse("--expert-model-parallel-size", 1, f"2 and more, or --disable-bias-linear; {without}")
    if experts is not None and experts % ep:
        _refuse("--num-experts", experts, f"a multiple of the expert model parallel size ({ep})")
    if experts is None:
        least = max(8, 2 * flags.get("moe_router_topk", 2))
        _assume(made, flags, "num_moe_experts", -(-least // ep) * ep, "--num-experts")


def _sizes(made: Run, flags: dict) -> None:
    if "hidden_size" not in flags:
        _assume(made, flags, "hidden_size", 64, "--hidden-size")
    hidden = flags["hidden_size"]
    _integer("--hidden-size", hidden, 1)
    if "ffn_hidden_size" not in flags:
        size = max(64, int(4 * hidden * 2 / 3 / 64) * 64) if flags.get("swiglu") else 4 * hidden
        _assume(made, flags, "ffn_hidden_size", flags.get("moe_ffn_hidden_size", size), "--ffn-hidden-size")


def _activation(made: Run, flags: dict, machine: Machine) -> None:
    """Translate the flags as core_transformer_config_from_args() and validate_args() do."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    given = [name for name in ("swiglu", "squared_relu", "quick_geglu") if flags.pop(name, False)]
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        _refuse(first, f"together with {second}", "one activation")
    no_swiglu_fusion, no_gelu_fusion = (
        flags.pop("no_bias_swiglu_fusion", False),
        flags.pop("no_bias_gelu_fusion", False),
    )
    fused = not no_gelu_fusion and flags.get("add_bias_linear", True)
    if given == ["swiglu"]:
        flags |= {"activation_func": F.silu, "gated_linear_unit": True}
        fused = not no_swiglu_fusion
    elif given == ["squared_relu"]:
        flags["activation_func"], fused = squared_relu, False
    elif given == ["quick_geglu"]:
        flags |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    fused = fused and not flags.get("use_te_activation_func")
    if fused and machine.cpu:
        fused = False
        made.changes.append("no fused bias and activation: not on a CPU")
    flags["bias_activation_fusion"] = fused


def _kernels(made: Run, flags: dict, machine: Machine) -> None:
    """Refuse or leave out what only Transformer Engine or a GPU has."""
    if made.transformer_engine:
        return
    why = "local layers" if machine.transformer_engine else "without Transformer Engine"
    for name, flag in (("fp8", "--fp8-format"), ("fp4", "--fp4-format"), ("moe_latent_size", "--moe-latent-size")):
        if flags.get(name) is not None:
            _refuse(flag, flags[name], f"nothing {why}")
    for name in ("moe_permute_fusion", "moe_router_fusion", "moe_use_legacy_grouped_gemm"):
        if flags.pop(name, False):
            made.changes.append(f"--{name.replace('_', '-')} left out: {why}")
    if flags.pop("moe_grouped_gemm", False):
        made.changes.append(f"--moe-grouped-gemm left out: {why} the experts are SequentialMLP")
        modules = flags.get("recompute_modules", ())
        if "moe_act" in modules:
            flags["recompute_modules"] = [name for name in modules if name != "moe_act"]
            made.changes.append("--recompute-modules moe_act left out: it needs --moe-grouped-gemm")


def _recompute(made: Run, flags: dict) -> None:
    granularity = flags.get("recompute_granularity")
    for name in ("recompute_method", "recompute_num_layers"):
        flags.pop(name, None)
    if granularity == "full":
        flags.pop("recompute_modules", None)
        flags |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif granularity == "selective":
        given = flags.pop("recompute_modules", ["core_attn"])
        inside = [name for name in given if name in RECOMPUTE_MODULES]
        outside = [name for name in given if name not in RECOMPUTE_MODULES]
        if outside:
            made.changes.append(f"--recompute-modules {' '.join(outside)} left out: not a part of an MoE layer")
        if inside:
            flags["recompute_modules"] = inside
        else:
            del flags["recompute_granularity"]


def _tokens(made: Run, given: Given, tp: int, cp: int) -> None:
    length, ways = given.seq_length, tp * cp
    if length is None:
        length = made.assumed["--seq-length"] = 32 * ways
    if length % ways:
        _refuse("--seq-length", length, f"a multiple of {ways}, the tensor times the context parallel size")
    if given.micro_batch_size is None:
        made.assumed["--micro-batch-size"] = 2
    made.tokens, made.batch = length // ways, given.micro_batch_size or 2


def _reference(made: Run, given: Given, flags: dict, machine: Machine) -> None:
    etp = flags.get("expert_tensor_parallel_size", flags.get("tensor_model_parallel_size", 1))
    uneven_chunks = machine.cpu and etp > 1 and not flags.get("moe_pad_expert_input_to_capacity")
    made.reference = given.reference or ("allgather" if uneven_chunks else "alltoall")
    if made.reference == "alltoall" and uneven_chunks:
        _refuse("--reference", "alltoall", "allgather, as gloo gathers no uneven chunks over the expert tensor group")
    if made.reference == "allgather" and given.uneven_tokens:
        _refuse("--uneven-tokens", "with allgather as the reference", "alltoall, as allgather needs equal numbers")
    if uneven_chunks and given.reference is None:
        made.changes.append("the reference is allgather: gloo cannot do what alltoall does over expert tensor groups")


def reference_settings(settings: dict[str, Any], reference: str) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that the reference supports, and a line for each that it does not."""
    lacking = ["moe_expert_rank_capacity_factor"]
    if reference == "allgather":
        lacking.append("moe_shared_expert_overlap")
    left_out = [name for name in lacking if settings.get(name)]
    lines = [f"--{name.replace('_', '-')}: not in the reference, {reference} does not have it" for name in left_out]
    return {name: value for name, value in settings.items() if name not in left_out}, lines


def _assume(made: Run, flags: dict, name: str, value: Any, flag: str) -> None:
    flags[name] = made.assumed[flag] = value


def _refuse(flag: str, given: Any, allowed: str) -> None:
    raise Refused(f"{flag}: given {given}, allowed: {allowed}")


def _integer(flag: str, value: int, lowest: int) -> None:
    try:
        checks.integer(flag, value, lowest)
    except ValueError as error:
        raise Refused(str(error)) from None
