"""The settings of a job. Each is an argument of Megatron's command line, of register(), and a field of a config:

    --ep-dispatcher-experts auto        register(experts="auto")        config.ep_dispatcher_experts = "auto"

A field of a TransformerConfig, set before its layers are built, wins over the command line, and that over register().
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ep_dispatcher import checks, envs
from ep_dispatcher.integrations.megatron.dispatcher import registration

PREFIX = "ep_dispatcher_"
BACKEND = ("--moe-flex-dispatcher-backend", "--moe_flex_dispatcher_backend")  # Megatron-Bridge has underscores


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        checks.fail(name, repr(value), "a number above 0")


@dataclass(frozen=True)
class Argument:
    kind: Callable[[str], Any]  # makes the value from text
    check: Callable[[str, Any], Any]  # raises ValueError for a (name, value) that is not allowed
    meaning: str


ARGUMENTS = {
    "experts": Argument(
        str,
        functools.partial(checks.one_of, allowed=("auto", "grouped", "megatron")),
        "how routed experts run. auto: in a few grouped GEMMs where they can, and a line says why the others do not. "
        "grouped: likewise, and a layer that cannot is an error. megatron: Megatron's way. Default: auto for layers "
        "with this dispatcher, megatron for others",
    ),
    "rank_capacity_factor": Argument(
        float,
        _positive,
        "with experts in grouped GEMMs: the most rows of a rank in an MoE layer, divided by tokens per rank x top-k. "
        "Then no host waits for counts. The optimizer step of an iteration with more rows is skipped, and the factor "
        "grows; the expert parallel size is always enough. Default: rows are counted",
    ),
    "overlap": Argument(
        bool,
        checks.boolean,
        "run dispatch and combine under the grouped GEMMs, where they can; a line says why other layers do not. Give "
        "it alike on all ranks",
    ),
    "num_sms": Argument(
        int,
        functools.partial(checks.integer, lowest=1),
        "multiprocessors that dispatch and combine use at a time, at most. Default: Megatron's argument of this "
        "meaning, else 32, or 24 if anything overlaps with them",
    ),
    "max_tokens_per_rank": Argument(
        int,
        functools.partial(checks.integer, lowest=1),
        "the most tokens that a rank brings to an MoE layer in one microbatch, alike on all ranks: sequence length x "
        "micro batch size / (context parallel size, with sequence parallel x tensor parallel size). Default: "
        "EP_DISPATCHER_MAX_TOKENS_PER_RANK, else Megatron's arguments and the first forward pass",
    ),
    "stats_interval": Argument(
        int,
        functools.partial(checks.integer, lowest=1),
        "after every so many steps, log to TensorBoard and W&B how uneven the rows of ranks and experts are, and which "
        "rank the others wait for. No host waits for it. Default: never",
    ),
    "gemm_sm_margin": Argument(
        bool,
        checks.boolean,
        "let GEMMs of Transformer Engine leave a dispatch or combine the multiprocessors it uses, where Megatron "
        "overlaps microbatches or shared experts",
    ),
}


def given(config: Any, name: str) -> Any:
    """Return the value of a setting for the layers of this config; None: none was given."""
    value, active = getattr(config, PREFIX + name, None), registration.active()
    if value is None and active is not None:
        value = getattr(active.parsed, PREFIX + name, None)
        return active.settings.get(name) if value is None else value
    return value


def experts(config: Any) -> str:
    """Return how the routed experts of this config are to run: auto, grouped or megatron."""
    by_default = "auto" if registration.is_ours(config) or given(config, "overlap") else "megatron"
    return given(config, "experts") or by_default


def rank_capacity_factor(config: Any) -> float | None:
    """Return the factor, if experts of this config may run in grouped GEMMs."""
    return None if experts(config) == "megatron" else given(config, "rank_capacity_factor")


def max_tokens_per_rank(config: Any) -> int | None:
    value = given(config, "max_tokens_per_rank")
    return envs.max_tokens_per_rank() if value is None else value


def flag(name: str) -> str:
    return flag_of(PREFIX + name)


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def check(config: Any) -> None:
    """Raise ValueError for a wrong or misspelt field of this config, or for settings that exclude each other."""
    for name, value in vars(config).items():
        if name.startswith(PREFIX):
            if name.removeprefix(PREFIX) not in ARGUMENTS:
                settings = ", ".join(PREFIX + one for one in ARGUMENTS)
                checks.refuse(f"config.{name} is no setting of ep_dispatcher; its settings are {settings}")
            if value is not None:
                ARGUMENTS[name.removeprefix(PREFIX)].check(f"config.{name}", value)
    if given(config, "overlap") and experts(config) == "megatron":
        checks.fail(flag("experts"), "megatron", f"auto or grouped with {flag('overlap')}")


def read_by_parsers(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ArgumentParser.parse_known_args: a parser of Megatron's gets our name and our arguments.

    It works with each version of Megatron, and with parsers that a fork has written by hand.
    """

    def parse_known_args(parser, *args, **kwargs):
        backends = {id(one): one for one in map(parser._option_string_actions.get, BACKEND) if one is not None}
        for action in backends.values():
            if action.choices is not None and registration.NAME not in action.choices:
                action.choices = (*action.choices, registration.NAME)
        if backends and flag("experts") not in parser._option_string_actions:
            add_to(parser)
        result = old(parser, *args, **kwargs)
        active = registration.active()
        if backends and active is not None:
            active.parsed = result[0]
        return result

    return parse_known_args


def add_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ep_dispatcher")
    for name, argument in ARGUMENTS.items():
        if argument.kind is bool:
            group.add_argument(flag(name), action="store_true", default=None, help=argument.meaning)
        else:
            group.add_argument(flag(name), type=functools.partial(_from_text, name), help=argument.meaning)


def _from_text(name: str, text: str) -> Any:
    argument = ARGUMENTS[name]
    try:
        value = argument.kind(text)
    except ValueError:
        value = text  # the check says what is allowed
    try:
        argument.check(flag(name), value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"{flag(name)} ")) from None  # argparse adds the name
    return value
