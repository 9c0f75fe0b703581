"""The settings of a job: where they can be given, what wins, and what is refused."""

import argparse
import contextlib
import functools
import inspect
import io

import pytest
import torch
from lib.megatron_layer import environment, error_of, make_config, make_layer, on_ranks, tokens_of

from ep_dispatcher.integrations.megatron import register, unregister
from ep_dispatcher.integrations.megatron.dispatcher import arguments

PACKAGE = "ep_dispatcher.integrations.megatron"
GIVEN = ["--ep-dispatcher-experts", "grouped", "--ep-dispatcher-rank-capacity-factor", "1.5", "--ep-dispatcher-overlap"]
GIVEN += [
    "--ep-dispatcher-num-sms",
    "8",
    "--ep-dispatcher-max-tokens-per-rank",
    "64",
    "--ep-dispatcher-stats-interval",
    "9",
    "--ep-dispatcher-node-capacity-factor",
    "1.2",
]
GIVEN += ["--ep-dispatcher-gemm-sm-margin", "--ep-dispatcher-redundant-experts-per-rank", "2"]


def parser_of_megatron() -> argparse.ArgumentParser:
    """With the argument by which a parser of Megatron's is known; its own are in megatron.training."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--moe-flex-dispatcher-backend", choices=("deepep", "hybridep"), default="deepep")
    return parser


def settings_of(config) -> list:
    return [arguments.setting(config, name) for name in arguments.ARGUMENTS]


def test_register_takes_every_setting():
    """It did not take redundant_experts_per_rank."""
    assert list(inspect.signature(register).parameters) == list(arguments.ARGUMENTS)


@on_ranks()
def test_a_config_wins_over_the_command_line_and_that_over_register(rank: int):
    unregister()
    assert not vars(parser_of_megatron().parse_args([])).keys() - {"moe_flex_dispatcher_backend"}
    register(num_sms=4, max_tokens_per_rank=32)
    config = make_config()
    assert settings_of(config) == [None, None, None, None, None, 4, 32, None, None]
    assert arguments.experts_mode(config) == "auto"
    assert arguments.experts_mode(make_config("alltoall")) == "megatron"
    parser = parser_of_megatron()
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert all(flag in printed.getvalue() for flag in GIVEN if flag.startswith("--"))
    args = parser.parse_args([*GIVEN, "--moe-flex-dispatcher-backend", "ep_dispatcher"])
    names = [arguments.PREFIX + name for name in arguments.ARGUMENTS]
    assert (
        settings_of(config) == [getattr(args, name) for name in names] == ["grouped", 1.5, 1.2, True, 2, 8, 64, 9, True]
    )
    args.ep_dispatcher_num_sms = None  # a script may change what it has parsed
    assert arguments.setting(config, "num_sms") == 4
    config.ep_dispatcher_num_sms, config.ep_dispatcher_overlap = 12, False
    assert settings_of(config) == ["grouped", 1.5, 1.2, False, 2, 12, 64, 9, True]
    argparse.ArgumentParser().parse_args([])  # of something else
    assert arguments.setting(make_config(), "experts") == "grouped"
    unregister()
    assert settings_of(make_config()) == [None] * len(arguments.ARGUMENTS)


WRONG = {
    "experts": ("all", True),
    "rank_capacity_factor": (0, -1.0, float("inf"), float("nan"), "much", True),
    "node_capacity_factor": (0, -1.0, float("inf"), float("nan"), "much", True),
    "overlap": ("yes", 1),
    "num_sms": (0, 2.0, "many", True),
    "max_tokens_per_rank": (0, 2.0, "40", True),
    "stats_interval": (0, 1.5, "often", True),
    "gemm_sm_margin": (16, "auto"),
}


@on_ranks()
def test_what_is_wrong_is_refused_before_a_layer_is_built(rank: int):
    for name, values in WRONG.items():
        for value in values:
            assert error_of(lambda n=name, v=value: register(**{n: v})).startswith(
                f"{name} is {value!r}, but has to be "
            )
            config = make_config()
            setattr(config, arguments.PREFIX + name, value)
            text = error_of(functools.partial(make_layer, config))
            assert text.startswith(f"config.ep_dispatcher_{name} is {value!r}, but has to be "), text
            if arguments.ARGUMENTS[name].parse is not bool and not isinstance(value, bool) and value != "40":
                flag = arguments.flag(name)
                parse = functools.partial(parser_of_megatron().parse_args, [flag, str(value)])
                text = error_of(parse, argparse.ArgumentError)
                assert text.startswith(f"argument {flag}: is ") and "but has to be" in text, text
    config = make_config()
    config.ep_dispatcher_expert = "auto"
    assert "ep_dispatcher_experts" in error_of(lambda: make_layer(config))
    with environment(experts="megatron", overlap=True):
        text = error_of(lambda: make_layer(make_config()))
    assert text.startswith("--ep-dispatcher-experts is megatron"), text
    for name, value in dict(rank_capacity_factor=2.0, redundant_experts_per_rank=1).items():
        with environment(experts="megatron", **{name: value}):
            text = error_of(lambda: make_layer(make_config()))
        given = f"{arguments.flag(name)} is {value:g}, which needs experts in grouped GEMMs"
        assert text.startswith(f"{given}, but --ep-dispatcher-experts is megatron"), text
    with environment(node_capacity_factor=1.2):
        text = error_of(lambda: make_layer(make_config()))
        assert text.startswith("--ep-dispatcher-node-capacity-factor is 1.2, which has no effect"), text
        with environment(rank_capacity_factor=2, experts="auto"):
            make_layer(make_config())
        config = make_config()
        config.moe_expert_rank_capacity_factor = 2.0
        make_layer(config)


@on_ranks()
def test_grouped_is_an_error_where_a_layer_cannot(rank: int):
    """Before anything is sent; `auto` says it, and runs Megatron's."""
    for experts in ("grouped", "auto"):
        with environment(experts=experts):
            plain = make_layer(make_config())
            layer = make_layer(make_config(activation_func=torch.tanh), layer_number=7)
            plain(tokens_of(rank))
            if experts == "auto":
                layer(tokens_of(rank))
                continue
            text = error_of(lambda layer=layer: layer(tokens_of(rank)))
            assert "cannot run in grouped GEMMs (" in text and "--ep-dispatcher-experts" in text, text
            assert "layer 7 cannot run in grouped GEMMs (activation_func is tanh)" in text, text
