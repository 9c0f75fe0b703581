"""The flags of the parity tool: its own, those of Megatron that concern an MoE layer, and a sorting of all others."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import re
import types
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from ep_dispatcher.integrations.megatron.dispatcher.arguments import flag_of
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
# Flags that look like those of an MoE layer, and change nothing in a single one.
WITHOUT_EFFECT = {
    "--moe-layer-freq",
    "--moe-per-layer-logging",
    "--moe-use-upcycling",
    "--moe-upcycling-granularity",
}
# Flags that change how an MoE layer runs in a job, but only together with other layers or with an optimizer.
NOT_RUN = {
    "--overlap-moe-expert-parallel-comm",
    "--overlap-dispatch-backward-with-experts-wgrad",
    "--delay-wgrad-compute",
    "--use-megatron-fsdp",
}
LOOKS_LIKE_MOE = ("--moe-", "--expert-", "--num-experts")
SIMILAR = 0.9  # of two flags, as difflib measures it. No flag of Megatron-LM 0.16 to 0.20 is so similar to one of ours


class Refused(Exception):
    """A configuration that cannot be run; the text names the flag."""


class Others(NamedTuple):
    """The flags that were given but are not used to make a layer, in their order."""

    of_job: list[str]  # of Megatron, but not of an MoE layer
    not_run: list[str]  # of NOT_RUN
    unknown: list[str]


def add_own(parser: argparse.ArgumentParser, dispatchers: tuple[str, ...]) -> None:
    """Add the flags of this tool. dispatchers: the names that Megatron has for them."""
    own = parser.add_argument_group("flags of this tool")
    steps: dict[str, Any] = dict(type=number(int, 0), default=0)
    own.add_argument(
        "--against",
        choices=dispatchers,
        help="the dispatcher to compare with. Default: ep_dispatcher, or alltoall if the other flags choose "
        "ep_dispatcher or none",
    )
    own.add_argument("--steps", type=number(int, 1), default=2, help="steps that are compared; default 2")
    own.add_argument("--timed-steps", **steps | {"default": 5}, help="further steps that are timed; default 5")
    own.add_argument("--profiled-steps", **steps, help="further steps that are profiled, part by part; default 0")
    own.add_argument("--seed", **steps | {"default": 1234}, help="seed of weights and tokens; default 1234")
    own.add_argument(
        "--uneven-tokens", action="store_true", help="use different numbers of tokens on ranks and in steps"
    )
    own.add_argument("--out", type=Path, metavar="FILE", help="also write the figures to this file, as JSON")
    own.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw step times and differences as bars (needs Matplotlib)"
    )


def of_megatron() -> dict[str, dict[str, Any]]:
    """Return flag -> arguments of ``add_argument``. Those that arguments.py completes are not made from fields."""
    fields = {one.name: one for one in dataclasses.fields(_config_class())}
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


def _config_class() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig


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


def sort_others(rest: list[str], known: list[str]) -> Others:
    """Sort the words that the parser left over. Raise Refused for a flag that looks like a misspelled ``known`` one."""
    found = Others([], [], [])
    is_script = rest and not rest[0].startswith("--")
    training = _flags_of_training([Path(rest[0])] if is_script else [])
    for flag in dict.fromkeys(word.partition("=")[0] for word in rest if word.startswith("--")):
        if flag in NOT_RUN:
            found.not_run.append(flag)
        elif flag in WITHOUT_EFFECT or flag in training:
            found.of_job.append(flag)
        else:
            close = difflib.get_close_matches(flag, known, n=1, cutoff=SIMILAR)
            if close or flag.startswith(LOOKS_LIKE_MOE):
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise Refused(f"{flag}: neither this tool nor this Megatron has such a flag{hint}")
            found.unknown.append(flag)
    return found


def _flags_of_training(scripts: list[Path]) -> set[str]:
    """Return the other flags of a training job: of Megatron-core's configurations, megatron.training and the scripts.

    megatron.training is read as text where it is found, because its imports take long, and need much.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    configs = (_config_class(), DistributedDataParallelConfig, OptimizerConfig)
    names = {one.name for config in configs for one in dataclasses.fields(config)}
    spec = importlib.util.find_spec("megatron.training")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    files = [*(path for folder in folders for path in Path(folder).rglob("*.py")), *filter(Path.is_file, scripts)]
    found = set[str]()
    for text in (path.read_text(errors="replace") for path in files):
        found.update(re.findall(r"[\"'](--[a-zA-Z][\w-]*)[\"']", text))
        names.update(re.findall(r"^    (\w+): ", text, re.MULTILINE))  # fields of dataclasses, which get flags
    return found | {flag_of(name) for name in names} | {flag_of(f"no_{name}") for name in names}
