"""Registration in Megatron: what it replaces, undoes and refuses; settings that are refused; the launcher."""

import argparse
import contextlib
import copy
import dataclasses
import importlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
import torch.distributed as dist
from megatron_layer import (
    CLASSES,
    NO_MEGATRON,
    OURS,
    Layout,
    error_of,
    make_config,
    make_layer,
    megatron_pool,
    plain_latent_projections,
    use_layout,
)

pytest.importorskip("megatron.core", reason=NO_MEGATRON)

MODULE = "ep_dispatcher.integrations.megatron"


def run(test, *args) -> None:
    megatron_pool(2).run(test, *args)


def what_megatron_has() -> dict:
    """All that register() may replace."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    from megatron.core.models.gpt import fine_grained_callables
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe import experts, moe_layer, token_dispatcher
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    owners: list = [FullCudaGraphWrapper, schedules, argparse.ArgumentParser, TransformerLayerSchedulePlan]
    owners += [DistributedDataParallel, experts.TEGroupedMLP, experts.SequentialMLP]
    owners += [fine_grained_callables, experts, moe_layer, moe_layer.MoELayer, token_dispatcher, TransformerConfig]
    owners += [MLATransformerConfig, token_dispatcher.MoETokenDispatcher, token_dispatcher.MoEFlexTokenDispatcher]
    if not hasattr(fine_grained_callables, "should_free_input"):  # 0.19
        from megatron.core.models.common import utils

        owners.append(utils)
    found = {(str(owner), name): value for owner in owners for name, value in vars(owner).items()}
    field = TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"]
    found["field", "type"] = field.type
    return {key: value for key, value in found.items() if key[1] not in ("__new__", "__builtins__")}


def differing(before: dict) -> list[str]:
    now, missing = what_megatron_has(), object()
    keys = sorted(before.keys() | now.keys())
    return [name for owner, name in keys if now.get((owner, name), missing) is not before.get((owner, name), missing)]


# ---- register and unregister ----------------------------------------------------------------------------------------


SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


def register_and_undo(rank: int) -> None:
    use_layout(Layout(ep=2))
    import megatron.core
    from megatron.core.transformer.moe import experts, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from ep_dispatcher.integrations.megatron import register, unregister

    flex = token_dispatcher.MoEFlexTokenDispatcher
    unregister()
    before = what_megatron_has()
    for _ in range(2):
        registration = register()
        assert register() is registration, "a second call changes nothing"
        assert registration.megatron_version == megatron.core.__version__
        replaced = differing(before)
        expected = {"type", "__post_init__", "set_layer_number", "should_free_input", "__call__", *SCHEDULES}
        expected |= {"__init__", "forward", "backward_dw", "run", "parse_known_args"}
        if hasattr(experts, "skip_routed_expert_padding"):
            expected.add("skip_routed_expert_padding")
        assert set(replaced) == expected
        assert len(registration.replaced) == len(replaced) + 1  # the class's __new__
        for name in (*replaced, "moe_flex_dispatcher_backend", "__new__"):
            assert any(name in line for line in registration.replaced), name
        text = str(registration)
        assert text.startswith("ep_dispatcher is a backend of Megatron-core") and megatron.core.__version__ in text
        assert text.count("\n") == len(registration.replaced)
        assert type(make_layer(make_config()).token_dispatcher).__name__ == CLASSES[OURS]
        assert "ep_dispatcher" in get_args(type_of_the_field()) and "deepep" in get_args(type_of_the_field())

        unregister()
        unregister()
        assert not differing(before), "all is as it was"
        assert ("set_layer_number" in vars(MoELayer)) == ("set_layer_number" not in vars(MoELayer.__base__))
        assert "ep_dispatcher" not in get_args(type_of_the_field())
        # The class makes itself again, and Megatron does not know our name.
        assert type(flex.__new__(flex)) is flex
        assert "ep_dispatcher" in error_of(lambda: make_layer(make_config()))
        assert type(make_layer(make_config("alltoall")).token_dispatcher).__name__ == CLASSES["alltoall"]


def type_of_the_field():
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"].type


def test_register_and_undo():
    run(register_and_undo)


def own_backends(rank: int) -> None:
    """Megatron's own backends behave the same before, with and after a registration."""
    use_layout(Layout(ep=2))
    from megatron.core.transformer.moe import token_dispatcher

    from ep_dispatcher.integrations.megatron import register, unregister

    flex = token_dispatcher.MoEFlexTokenDispatcher

    class Subclass(flex):
        def __init__(self, one, two):
            self.both = one, two

    def behaviour() -> list:
        seen = []
        for backend in get_args(type_of_the_field()):
            if backend == OURS:
                continue
            config = make_config("flex", moe_flex_dispatcher_backend=backend)
            try:
                seen.append(type(make_layer(config).token_dispatcher).__name__)
            except Exception as error:  # none of these is installed on a machine without GPUs
                seen.append((type(error).__name__, str(error)))
        config = make_config("flex")
        config.moe_flex_dispatcher_backend = "nonsense"
        seen.append(error_of(lambda: make_layer(config)))
        one = Subclass(1, two=2)
        assert one.both == copy.copy(one).both == (1, 2) and type(copy.deepcopy(one)) is Subclass
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex, "__init__", lambda self, *args, **kwargs: None)
            one = make_layer(make_config("flex")).token_dispatcher
            assert type(one) is flex and type(copy.copy(one)) is flex
        try:  # refused for DeepEP by name
            make_config("flex", moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
            seen.append("accepted")
        except ValueError as error:
            seen.append(str(error))
        return seen

    unregister()
    before = behaviour()
    assert len(before) >= 4 and "accepted" not in before
    for _ in range(2):
        register()
        assert behaviour() == before
        unregister()
        assert behaviour() == before


def test_megatrons_own_backends_are_left_alone():
    run(own_backends)


def unknown_layouts(rank: int) -> None:
    use_layout(Layout(ep=2))
    import megatron.core
    from megatron.core.models.gpt import fine_grained_callables
    from megatron.core.transformer.moe import moe_layer, token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ep_dispatcher.integrations.megatron import plugin, register, registration, unregister

    unregister()
    flex = token_dispatcher.MoEFlexTokenDispatcher
    field = TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"]
    scheduler = fine_grained_callables
    if not hasattr(scheduler, "should_free_input"):
        from megatron.core.models.common import utils as scheduler

    numbered = next(one for one in moe_layer.MoELayer.__mro__ if "set_layer_number" in vars(one))

    def other_init(self, num_local_experts, config, more):
        pass

    def set_attribute(owner, name, value):
        return lambda patch: patch.setattr(owner, name, value)

    def delete(owner, name):
        return lambda patch: patch.delattr(owner, name)

    changes = {
        "should_free_input is missing": delete(scheduler, "should_free_input"),
        r"should_free_input takes \['name'\]": set_attribute(scheduler, "should_free_input", lambda name: True),
        r"MoEFlexTokenDispatcher takes \['self', 'num_local_experts', 'config', 'more'\]": set_attribute(
            flex, "__init__", other_init
        ),
        "no Literal": set_attribute(field, "type", str),
        "no step token_combine": delete(token_dispatcher.MoETokenDispatcher, "token_combine"),
        "moe_layer does not use MoEFlexTokenDispatcher": set_attribute(moe_layer, "MoEFlexTokenDispatcher", object),
        "MoEFlexTokenDispatcher.__new__ is missing": delete(token_dispatcher, "MoEFlexTokenDispatcher"),
        "set_layer_number is missing": delete(numbered, "set_layer_number"),
        "given 0.15.0, allowed: 0.16 or newer": set_attribute(megatron.core, "__version__", "0.15.0"),
        "given unknown, allowed": set_attribute(megatron.core, "__version__", "unknown"),
        # a module that is gone
        "fine_grained_callables": lambda patch: (
            patch.delattr(megatron.core.models.gpt, "fine_grained_callables"),
            patch.setitem(sys.modules, "megatron.core.models.gpt.fine_grained_callables", None),
        ),
    }
    before = what_megatron_has()
    for pattern, change in changes.items():
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            replaced = flex.__dict__.get("__new__")
            message = error_of(register, plugin.UnknownMegatronError)
            assert re.search(pattern, message), f"{pattern}: {message}"
            if "allowed" not in pattern:
                assert "nothing was replaced" in message
            assert flex.__dict__.get("__new__") is replaced and registration.active() is None and not plugin._undo
        assert not differing(before), pattern
    register()  # and in the layout that is known it works


def test_an_unknown_layout_is_refused_and_nothing_replaced():
    run(unknown_layouts)


def other_versions(rank: int) -> None:
    use_layout(Layout(ep=2))
    import megatron.core

    from ep_dispatcher.integrations.megatron import register, unregister

    for version, warns in [("0.99.0", True), ("1.0.0+abc", True), ("0.16.1", False), ("0.20.0+1234567", False)]:
        unregister()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(megatron.core, "__version__", version)
            assert register().megatron_version == version
            texts = [str(one.message) for one in caught if version in str(one.message)]
            assert len(texts) == warns and all("newer than 0.20" in text for text in texts)
            unregister()


def test_a_newer_version_warns():
    run(other_versions)


# ---- Megatron-Bridge ------------------------------------------------------------------------------------------------

BRIDGE = "megatron.bridge.training.flex_dispatcher_backend"


@pytest.fixture
def bridge_folder(tmp_path) -> Path:
    """A folder with the one function of Megatron-Bridge that counts here, and a recipe that imports it by name."""
    folder = tmp_path.joinpath(*BRIDGE.split("."))
    folder.parent.mkdir(parents=True)
    folder.with_suffix(".py").write_text(
        "def apply_flex_dispatcher_backend(model_config, moe_flex_dispatcher_backend=None):\n"
        "    model_config.seen = moe_flex_dispatcher_backend\n"
    )
    (folder.parent / "recipe.py").write_text(f"from {BRIDGE} import apply_flex_dispatcher_backend\n")
    return tmp_path


@contextlib.contextmanager
def bridge_in(folder: Path):
    """Yield what imports the recipe. Afterwards nothing of Megatron-Bridge is left, and ours is registered."""
    from ep_dispatcher.integrations.megatron import register, unregister

    def names() -> list[str]:
        return [name for name in sys.modules if name.startswith("megatron.bridge")]

    unregister()
    finders = list(sys.meta_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            yield lambda: importlib.import_module("megatron.bridge.training.recipe")
        finally:
            unregister()
            for name in names():
                del sys.modules[name]
            sys.modules["megatron"].__dict__.pop("bridge", None)
    assert sys.meta_path == finders
    register()


def bridge_takes_our_name(rank: int, folder: Path) -> None:
    use_layout(Layout(ep=2))
    from ep_dispatcher.integrations.megatron import register, unregister

    def applied(recipe, name: str, num_moe_experts: int | None = 8) -> dict:
        config = types.SimpleNamespace(num_moe_experts=num_moe_experts, moe_shared_expert_overlap=True)
        recipe.apply_flex_dispatcher_backend(config, name)
        return vars(config)

    experts, chosen = dict(num_moe_experts=8, moe_shared_expert_overlap=True), dict(moe_flex_dispatcher_backend=OURS)
    ours = experts | chosen | dict(moe_token_dispatcher_type="flex")
    assert "bridge" not in str(register())
    with bridge_in(folder) as import_recipe:
        assert "apply_flex_dispatcher_backend" in str(register()) and BRIDGE not in sys.modules
        recipe = import_recipe()
        module = sys.modules[BRIDGE]
        for _ in range(2):  # imported after register(), and before it
            assert applied(recipe, OURS) == applied(module, OURS) == ours
            assert applied(recipe, "deepep") == experts | dict(seen="deepep")
            assert applied(recipe, OURS, None)["seen"] == OURS, "a model without experts: as Megatron-Bridge does"
            unregister()
            assert applied(recipe, OURS) == applied(module, OURS) == experts | dict(seen=OURS)
            register()


def test_megatron_bridge_takes_our_name(bridge_folder):
    run(bridge_takes_our_name, bridge_folder)


def another_bridge(rank: int, folder: Path) -> None:
    """One with another function keeps it, and a warning says what to do."""
    use_layout(Layout(ep=2))
    from ep_dispatcher.integrations.megatron import register

    module = folder.joinpath(*BRIDGE.split(".")).with_suffix(".py")
    for text in ("def apply_flex_dispatcher_backend(config): return config", "apply_flex_dispatcher_backend = None"):
        dist.barrier()
        if rank == 0:
            module.write_text(text)
        dist.barrier()
        with bridge_in(folder) as import_recipe:
            importlib.invalidate_caches()
            register()
            with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "dont_write_bytecode", True)
                warnings.simplefilter("always")
                function = import_recipe().apply_flex_dispatcher_backend
            assert function is None or function(1) == 1
            (said,) = [str(one.message) for one in caught if "Megatron-Bridge" in str(one.message)]
            assert f'moe_flex_dispatcher_backend = "{OURS}"' in said, said


def test_another_megatron_bridge_is_left_alone(bridge_folder):
    run(another_bridge, bridge_folder)


# ---- flags ----------------------------------------------------------------------------------------------------------


def flags(rank: int) -> None:
    use_layout(Layout(ep=2))
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    backend = dict(moe_flex_dispatcher_backend=OURS)
    for other in ("alltoall", "allgather"):
        text = error_of(lambda other=other: make_config(other, **backend))
        for words in ("--moe-token-dispatcher-type", other, f"--moe-flex-dispatcher-backend {OURS}", "flex"):
            assert words in text
    text = error_of(lambda: make_config(moe_enable_deepep=True))
    assert "--moe-enable-deepep" in text and OURS in text
    # A model without experts has no dispatcher, and may share its arguments with one that has.
    assert make_config("alltoall", num_moe_experts=None, expert_model_parallel_size=1, **backend) is not None
    # Overlapped shared experts, which Megatron before 0.18 has for alltoall alone.
    for kind in (make_config, lambda **settings: MLATransformerConfig(**vars_of(make_config()) | settings)):
        config = kind(moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True)
        assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", OURS)
        assert config.moe_shared_expert_overlap
    # What else is wrong is still found, by Megatron's own words.
    text = error_of(
        lambda: make_config(
            moe_shared_expert_intermediate_size=32,
            moe_shared_expert_overlap=True,
            moe_pad_expert_input_to_capacity=True,
        )
    )
    assert "moe_expert_capacity_factor" in text
    if hasattr(make_config(), "moe_expert_rank_capacity_factor"):  # 0.18 and newer
        config = make_config(moe_expert_rank_capacity_factor=1.5, use_transformer_engine_op_fuser=True)
        assert config.moe_expert_rank_capacity_factor == 1.5
        assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", OURS)


def vars_of(config) -> dict:
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_moe_experts", "expert_model_parallel_size")
    chosen = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
    return {name: getattr(config, name) for name in (*names, *chosen)}


def test_flags():
    run(flags)


def skipped_padding(rank: int) -> None:
    """Experts leave out their own padding, for ours alone: rows arrive padded."""
    use_layout(Layout(ep=2))
    from megatron.core.transformer.moe import experts, moe_utils

    if hasattr(moe_utils, "skip_routed_expert_padding"):  # 0.18 and newer
        assert experts.skip_routed_expert_padding(make_config())
        assert not experts.skip_routed_expert_padding(make_config("alltoall"))


def test_experts_do_not_pad_again():
    run(skipped_padding)


def refusals(rank: int) -> None:
    use_layout(Layout(ep=2))
    from megatron.core.transformer import enums

    kind = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    name = "cuda_graph_modules" if hasattr(make_config(), "cuda_graph_modules") else "cuda_graph_scope"
    flag = "--" + name.replace("_", "-")

    def built(later=(), **settings) -> None:
        """``later``: what a check of the config itself wants a GPU for."""
        config = make_config(**settings)
        for key, value in dict(later).items():
            assert hasattr(config, key), key
            setattr(config, key, value)
        with plain_latent_projections():
            make_layer(config)

    def graphs(*modules, impl="transformer_engine"):
        return {"cuda_graph_impl": impl, name: [getattr(kind, one) for one in modules]}

    wrong = [
        ((flag, "moe"), dict(later=graphs("moe"))),
        ((flag, "moe"), dict(later=graphs("attn", "moe", impl="local"))),
        ((flag, "whole layer"), dict(later=graphs())),
        ((flag, "whole layer"), dict(later=graphs(impl="local"))),
        (("--moe-router-topk", "given 33", "32"), dict(num_moe_experts=64, moe_router_topk=33)),
        (("--hidden-size", "given 42", "multiple of 4"), dict(hidden_size=42, num_attention_heads=2)),
        (("--hidden-size", "multiple of 8"), dict(hidden_size=36, bf16=True, params_dtype=torch.bfloat16)),
        (("--moe-latent-size", "given 18", "multiple of 4"), dict(moe_latent_size=18)),
        (("--params-dtype", "float64"), dict(params_dtype=torch.float64)),
    ]
    if hasattr(kind, "full_iteration"):
        wrong.append(((flag, "full_iteration"), dict(later=graphs("full_iteration", impl="local"))))
    if "full_iteration" in str(inspect.get_annotations(type(make_config()))["cuda_graph_impl"]):
        wrong.append((("--cuda-graph-impl", "full_iteration"), dict(later=graphs(impl="full_iteration"))))
    assert len(wrong) == 10, "one of the two ways to capture an iteration"
    for words, settings in wrong:
        text = error_of(lambda settings=settings: built(**settings))
        assert all(word in text for word in words), text
    built(later=graphs("attn", "moe_router", "moe_preprocess"))
    built(later=graphs("attn", impl="local"))
    built(num_moe_experts=64, moe_router_topk=32)

    from ep_dispatcher.integrations.megatron import limits

    text = error_of(lambda: limits.check(make_config(), 3, expert_tp=1, num_ranks=2))
    assert "--num-experts: given 8, 3 of them here" in text

    use_layout(Layout(ep=1, etp=2))
    text = error_of(lambda: built(num_moe_experts=32, moe_router_topk=17))
    assert "--moe-router-topk: given 17 x --expert-tensor-parallel-size 2" in text
    built(num_moe_experts=32, moe_router_topk=16)


def test_what_cannot_be_supported_is_refused_by_its_flag_when_the_layer_is_built():
    run(refusals)


def ignored_fields(rank: int) -> None:
    """Fields that this dispatcher would ignore. A Megatron without one of them gets it for this test."""
    use_layout(Layout(ep=2))
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ep_dispatcher.integrations.megatron import limits

    values = {name: 64 if "num" in name else True for name in limits.UNSUPPORTED}
    assert len(values) >= 6
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            if name not in TransformerConfig.__dataclass_fields__:
                default = None if isinstance(value, int) else False
                patch.setitem(TransformerConfig.__dataclass_fields__, name, dataclasses.field(default=default))
                patch.setattr(TransformerConfig, name, default, raising=False)
        for name, value in values.items():
            config = make_config()
            make_layer(config)
            default = getattr(config, name)
            setattr(config, name, value)
            text = error_of(lambda config=config: make_layer(config))
            flag = "--" + name.replace("_", "-")
            assert text.startswith(f"{flag}: given {value}, allowed: {default} with this dispatcher: "), text


def test_fields_that_would_be_ignored_are_refused_by_their_flags():
    run(ignored_fields)


def parsers(rank: int) -> None:
    """The parser that Megatron's training makes of TransformerConfig's fields; 0.16's package has no training."""
    use_layout(Layout(ep=2))
    import typing

    if not hasattr(typing, "override"):  # 0.18's training wants Python 3.12
        typing.override = lambda function: function
    try:
        from megatron.training.argument_utils import ArgumentGroupFactory
    except ImportError:
        assert OURS in get_args(type_of_the_field())
        return
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ep_dispatcher.integrations.megatron import unregister

    def parse():
        parser = argparse.ArgumentParser(exit_on_error=False)
        fields = TransformerConfig.__dataclass_fields__
        exclude = [name for name in fields if name != "moe_flex_dispatcher_backend"]
        ArgumentGroupFactory(TransformerConfig, exclude=exclude).build_group(parser, "transformer")
        return parser.parse_args(["--moe-flex-dispatcher-backend", OURS]).moe_flex_dispatcher_backend

    assert parse() == OURS
    unregister()
    error_of(parse, argparse.ArgumentError)


def test_parsers_allow_the_name():
    run(parsers)


def test_field_type_stays_a_literal():
    """Megatron's configuration tools read it."""
    from ep_dispatcher.integrations.megatron.plugin import _allow_name

    assert _allow_name(Literal["a", "b"]) == Literal["a", "b", "ep_dispatcher"]


# ---- importing and launching ----------------------------------------------------------------------------------------

TESTS = str(Path(__file__).parent)
HELPER = "VALUE = 42\n"
SCRIPT = """
import argparse, json, os, sys
import helper
from ep_dispatcher.integrations.megatron import registration
assert registration.active() is not None, "the launcher has registered it"
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--moe-token-dispatcher-type")
parser.add_argument("--moe-flex-dispatcher-backend", choices=("deepep", "hybridep"))  # as a fork may have written it
parser.add_argument("--moe_flex_dispatcher_backend", choices=("deepep", None), dest="of_bridge")
parser.add_argument("--fruit", choices=("apple",))
chosen = parser.parse_args().moe_flex_dispatcher_backend
report = dict(argv=sys.argv, name=__name__, path=sys.path[0], file=__file__, value=helper.VALUE, chosen=chosen)
if "WORLD_SIZE" in os.environ:
    import torch.distributed as dist
    sys.path.append(os.environ["TESTS"])
    from megatron_layer import Layout, make_config, make_layer, tokens_of, use_layout
    dist.init_process_group("gloo")
    use_layout(Layout(ep=2))
    layer = make_layer(make_config())
    layer(tokens_of(dist.get_rank()))[0].sum().backward()
    report["dispatcher"] = type(layer.token_dispatcher).__name__
    # Nobody destroys the buffers. That happens at exit, whether or not the groups still exist.
    if dist.get_rank() == 0:
        dist.destroy_process_group()
print("REPORT", json.dumps(report), flush=True)
"""
CHOSEN = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend=ep_dispatcher", "--fruit", "apple")
CHOSEN += ("--moe_flex_dispatcher_backend", "ep_dispatcher")


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONWARNINGS": "ignore", "TESTS": TESTS, "GLOO_SOCKET_IFNAME": "lo"} | environment
    command = [sys.executable, "-m", MODULE, *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def report_of(out: str) -> dict:
    return json.loads(out.split("REPORT ")[1].splitlines()[0])


@pytest.fixture
def script(tmp_path) -> Path:
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "helper.py").write_text(HELPER)
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def test_launcher_runs_a_script_of_two_ranks(script, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    processes = [start(tmp_path, "training/train.py", *CHOSEN, RANK=str(rank), **group) for rank in range(2)]
    for rank, (code, out, err) in enumerate(map(finish, processes)):
        assert code == 0, err
        assert report_of(out) == dict(
            argv=["training/train.py", *CHOSEN],
            name="__main__",
            path=str(script.parent),
            file="training/train.py",
            value=42,
            chosen=OURS,
            dispatcher=CLASSES[OURS],
        )
        assert ("Replaced:" in out) == (rank == 0), "one rank says what was replaced"
        assert ("should_free_input" in out) == (rank == 0)
        assert "do not choose it" not in err and "Error" not in err and "Traceback" not in err, err


def test_launcher_runs_a_module(script):
    code, out, err = finish(start(script.parent, "-m", "train", *CHOSEN))
    assert code == 0, err
    report = report_of(out)
    assert report["argv"] == [str(script), *CHOSEN] and report["name"] == "__main__" and report["value"] == 42
    assert report["path"] == str(script.parent) and report["chosen"] == OURS and "Replaced:" in out


@pytest.mark.exhaustive
def test_launcher_says_when_the_arguments_choose_another(script, tmp_path):
    started = [start(tmp_path, str(script), *CHOSEN[:2]), start(tmp_path, str(script), RANK="1")]
    for rank, (code, out, err) in enumerate(map(finish, started)):
        assert code == 0, err
        assert report_of(out)["path"] == str(script.parent)
        said = [line for line in err.splitlines() if "do not choose it" in line]
        assert len(said) == (rank == 0) and ("Replaced" in out) == (rank == 0)
        if rank == 0:
            assert said[0].endswith("missing: --moe-flex-dispatcher-backend ep_dispatcher")


@pytest.mark.exhaustive
def test_launcher_refuses_a_script_that_is_not_there(tmp_path):
    given = (("none.py", "--x"), ("-m", "none.of_it"), (), ("--help",))
    started = [start(tmp_path, *arguments) for arguments in given]
    (code, out, err), (m_code, _, m_err), (no_code, no_out, _), (help_code, help_out, _) = map(finish, started)
    assert code == 1 and not out and "program: given 'none.py', allowed: a Python file that exists" in err
    assert m_code == 1 and "-m: given 'none.of_it', which is no module that Python finds" in m_err
    assert "Traceback" not in err + m_err
    assert no_code == 2 and help_code == 0 and "pretrain_gpt.py" in no_out and no_out == help_out


def test_importing_the_package_imports_nothing_of_megatron():
    """A launcher may still choose which Megatron that is."""
    code = f"""
import sys, {MODULE} as m
assert sorted(m.__all__) == m.__all__ and "register" in m.__all__
try:
    m.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
m.register
m.destroy_buffers()
assert not [name for name in sys.modules if name.split(".")[0] == "megatron"], "megatron was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


OPTIONAL_SCRIPT = """
import importlib, importlib.abc, json, os, pkgutil, sys

class Watch(importlib.abc.MetaPathFinder):
    \"\"\"Neither is installed, and who asks is noted: every time, as a module that is missing is looked for anew.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch", "apex"):
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            asked.append((name, frame.f_globals["__name__"]))
            raise ModuleNotFoundError("No module named " + name, name=name)

asked = []
sys.meta_path.insert(0, Watch())
try:
    import apex.here
except ModuleNotFoundError:
    assert asked == [("apex", "__main__")], asked
import ep_dispatcher
import ep_dispatcher.integrations.megatron as m
assert len(asked) == 1, asked
m.register()
for module in pkgutil.iter_modules(m.__path__):
    if module.name != "__main__":
        importlib.import_module(m.__name__ + "." + module.name)
import torch.distributed as dist
sys.path.insert(0, os.environ["TESTS"])
from megatron_layer import Layout, make_config, make_layer, tokens_of, use_layout
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
use_layout(Layout(ep=1))
layer = make_layer(make_config())
layer(tokens_of(0))[0].sum().backward()
print("REPORT", json.dumps([asked[1:], type(layer.token_dispatcher).__name__]), flush=True)
"""


@pytest.mark.parametrize("switches", ["", "overlap=True, gemm_sm_margin=True"])
def test_transformer_engine_and_apex_are_looked_for_by_megatron_alone(switches):
    """Registration, all modules of the integration, and a pass of a layer with local specs."""
    environment = os.environ | {"TESTS": TESTS, "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", OPTIONAL_SCRIPT.replace("m.register()", f"m.register({switches})")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    asked, dispatcher = report_of(done.stdout)
    assert dispatcher == CLASSES[OURS]
    assert {name for name, _ in asked} >= {"transformer_engine", "apex"}, "Megatron's own attempts are seen"
    assert {who.split(".")[0] for _, who in asked} == {"megatron"}, asked
