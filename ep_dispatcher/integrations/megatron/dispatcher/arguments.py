"""The settings of a job. Each is an argument of Megatron's command line and of register(), and a field of a config:

    --ep-dispatcher-experts auto        register(experts="auto")        config.ep_dispatcher_experts = "auto"

A field of a TransformerConfig that is set before its layers are built takes precedence over the command line, and the
command line over register().
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ep_dispatcher import checks, envs
from ep_dispatcher.balance.balancer import MAX_SLOTS
from ep_dispatcher.integrations.megatron.dispatcher import registration

PREFIX = "ep_dispatcher_"
BACKEND = ("--moe-flex-dispatcher-backend", "--moe_flex_dispatcher_backend")  # Megatron-Bridge has underscores


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        checks.fail(name, repr(value), "a number above 0")


@dataclass(frozen=True)
class Argument:
    parse: Callable[[str], Any]  # makes the value from text
    check: Callable[[str, Any], Any]  # raises ValueError for a (name, value) that is not allowed
    meaning: str


ARGUMENTS = {
    "experts": Argument(
        str,
        functools.partial(checks.one_of, allowed=("auto", "grouped", "megatron")),
        "how routed experts run. auto: in a few grouped GEMMs where possible, and a line says why others do not. "
        "grouped: likewise, but a layer that cannot is an error. megatron: as Megatron runs them. Default: auto for "
        "layers with this dispatcher, megatron for others",
    ),
    "rank_capacity_factor": Argument(
        float,
        _positive,
        "with experts in grouped GEMMs: the most rows that a rank can receive in an MoE layer, divided by tokens per "
        "rank x top-k. With it no host waits for row counts. If an iteration has more rows, its optimizer step is "
        "skipped, and the factor grows; the expert parallel size is always enough. Default: no limit, rows are counted",
    ),
    "node_capacity_factor": Argument(
        float,
        _positive,
        "with a rank capacity factor and several nodes: the most tokens of a rank that go to any one other node, "
        "divided by those that go there if routing is even. Messages between nodes have this size. If an iteration has "
        "more, its optimizer step is skipped, and the factor grows. Default: no limit, messages have the size of all "
        "tokens",
    ),
    "overlap": Argument(
        bool,
        checks.boolean,
        "overlap dispatch and combine with the grouped GEMMs where possible; a line says why other layers do not. All "
        "ranks must be given the same",
    ),
    "redundant_experts_per_rank": Argument(
        int,
        functools.partial(checks.integer, lowest=1, highest=MAX_SLOTS),
        "with experts in grouped GEMMs: slots of each rank for redundant copies of hot experts of its node, which are "
        "chosen anew in every microbatch. 1 is nearly as good as more. Default: no copies",
    ),
    "num_sms": Argument(
        int,
        functools.partial(checks.integer, lowest=1),
        "the most multiprocessors that a dispatch or combine uses. Default: Megatron's argument with this meaning, "
        "else 32, or 24 if anything overlaps with them",
    ),
    "max_tokens_per_rank": Argument(
        int,
        functools.partial(checks.integer, lowest=1),
        "the most tokens that a rank brings to an MoE layer in one microbatch, the same on all ranks: sequence length "
        "x micro batch size / context parallel size, and with sequence parallelism / tensor parallel size. Default: "
        "EP_DISPATCHER_MAX_TOKENS_PER_RANK, else Megatron's arguments and the first forward pass",
    ),
    "stats_interval": Argument(
        int,
        functools.partial(checks.integer, lowest=1),
        "every this many steps, log to TensorBoard and W&B how unevenly rows are spread over ranks and experts, and "
        "which rank the others wait for. No host waits for this. Default: never",
    ),
    "gemm_sm_margin": Argument(
        bool,
        checks.boolean,
        "let GEMMs of Transformer Engine leave free the multiprocessors that a dispatch or combine uses, where "
        "Megatron overlaps it with another microbatch or with shared experts",
    ),
}


def setting(config: Any, name: str) -> Any:
    """Return the value of a setting for the layers of this config; None if it was not given."""
    value, active = getattr(config, PREFIX + name, None), registration.active()
    if value is not None or active is None:
        return value
    value = getattr(active.parsed, PREFIX + name, None)
    return active.settings.get(name) if value is None else value


def experts_mode(config: Any) -> str:
    """Return how the routed experts of this config are to run: auto, grouped or megatron."""
    by_default = "auto" if registration.chooses_ep_dispatcher(config) or setting(config, "overlap") else "megatron"
    return setting(config, "experts") or by_default


def rank_capacity_factor(config: Any) -> float | None:
    """Return the factor, if experts of this config may run in grouped GEMMs."""
    return None if experts_mode(config) == "megatron" else setting(config, "rank_capacity_factor")


def node_capacity_factor(config: Any) -> float | None:
    """Return the factor. It matters only where a rank capacity factor limits rows too."""
    return setting(config, "node_capacity_factor")


def redundant_experts_per_rank(config: Any) -> int:
    return setting(config, "redundant_experts_per_rank") or 0


def max_tokens_per_rank(config: Any) -> int | None:
    value = setting(config, "max_tokens_per_rank")
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
                checks.refuse(f"config.{name} is not a setting of ep_dispatcher; its settings are {settings}")
            if value is not None:
                ARGUMENTS[name.removeprefix(PREFIX)].check(f"config.{name}", value)
    if setting(config, "overlap") and experts_mode(config) == "megatron":
        checks.fail(flag("experts"), "megatron", f"auto or grouped with {flag('overlap')}")
    if experts_mode(config) == "megatron":
        _refuse_what_needs_grouped_experts(config)
    if redundant_experts_per_rank(config) and setting(config, "overlap"):
        given = f"{flag('redundant_experts_per_rank')} is {redundant_experts_per_rank(config)}"
        checks.refuse(f"{given}, which does not go with {flag('overlap')}: give one of them")
    _check_node_capacity(config)


def _refuse_what_needs_grouped_experts(config: Any) -> None:
    """Refuse settings that would have no effect, or cannot have theirs, with Megatron's experts."""
    given = {"redundant_experts_per_rank": redundant_experts_per_rank(config) or None}
    if registration.chooses_ep_dispatcher(config):  # a layer with another dispatcher beside ours may ignore it
        given["rank_capacity_factor"] = setting(config, "rank_capacity_factor")
    for name, value in given.items():
        if value is not None:
            checks.refuse(
                f"{flag(name)} is {value:g}, which needs experts in grouped GEMMs, but {flag('experts')} is megatron"
            )


def _check_node_capacity(config: Any) -> None:
    """Refuse a node capacity factor without a rank capacity factor: messages would have their exact size anyway."""
    factor = node_capacity_factor(config)
    of_ranks = setting(config, "rank_capacity_factor"), getattr(config, "moe_expert_rank_capacity_factor", None)
    if factor is not None and all(one is None for one in of_ranks):
        checks.refuse(
            f"{flag('node_capacity_factor')} is {factor:g}, which has no effect where hosts wait for row counts: give "
            f"{flag('rank_capacity_factor')} too, or leave it out"
        )


def wrap_parse_known_args(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ArgumentParser.parse_known_args, so that a parser of Megatron's gets our name and our arguments.

    This works with every version of Megatron, and with parsers that a fork has written by hand.
    """

    def parse_known_args(parser, *args, **kwargs):
        backends = {id(one): one for one in map(parser._option_string_actions.get, BACKEND) if one is not None}
        for action in backends.values():
            if action.choices is not None and registration.NAME not in action.choices:
                action.choices = (*action.choices, registration.NAME)
        if backends and flag("experts") not in parser._option_string_actions:
            add_arguments(parser)
        result = old(parser, *args, **kwargs)
        active = registration.active()
        if backends and active is not None:
            active.parsed = result[0]
        return result

    return parse_known_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ep_dispatcher")
    for name, argument in ARGUMENTS.items():
        if argument.parse is bool:
            group.add_argument(flag(name), action="store_true", default=None, help=argument.meaning)
        else:
            group.add_argument(flag(name), type=functools.partial(_from_text, name), help=argument.meaning)


def _from_text(name: str, text: str) -> Any:
    argument = ARGUMENTS[name]
    try:
        value = argument.parse(text)
    except ValueError:
        value = text  # the check says what is allowed
    try:
        argument.check(flag(name), value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"{flag(name)} ")) from None  # argparse adds the name
    return value
