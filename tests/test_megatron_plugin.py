"""Registration in Megatron: what it replaces, undoes and refuses; settings that are refused; the launcher."""

import argparse
import copy
import dataclasses
import importlib
import importlib.abc
import json
import os
import subprocess
import sys
import types
import warnings
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from lib.megatron_layer import (
    CLASSES,
    OURS,
    Layout,
    error_of,
    make_config,
    make_layer,
    on_ranks,
    plain_latent_projections,
    use_layout,
)

from ep_dispatcher.integrations.megatron import plugin, register, unregister
from ep_dispatcher.integrations.megatron.dispatcher import megatron_config, registration

MODULE = "ep_dispatcher.integrations.megatron"


def functions_of_megatron() -> dict:
    """All that register() may replace: functions and classes of Megatron, those of the parser, the type of a field."""
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.core")]
    classes = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    owners = [*modules, *(one for one in classes if one.__module__.startswith("megatron")), argparse.ArgumentParser]
    found = {(str(owner), name): value for owner in owners for name, value in vars(owner).items()}
    found = {key: one for key, one in found.items() if callable(one) or isinstance(one, staticmethod)}
    return found | {("field", "type"): type_of_the_field()}


def differing(before: dict) -> list[str]:
    """The names of those that are others now, of the modules and classes that were there before."""
    now, owners = functions_of_megatron(), {owner for owner, _ in before}
    return [key[1] for key in sorted(before | now) if key[0] in owners and now.get(key) is not before.get(key)]


# ---- register and unregister ----------------------------------------------------------------------------------------


def type_of_the_field():
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"].type


@on_ranks()
def test_register_and_undo(rank: int, monkeypatch):
    import megatron.core
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    user = types.ModuleType("module_of_a_user")
    user.get_forward_backward_func = schedules.get_forward_backward_func.__wrapped__
    monkeypatch.setitem(sys.modules, user.__name__, user)
    make_layer(make_config())  # imports modules, and lets Python complete classes
    unregister()
    before = functions_of_megatron()
    for _ in range(2):
        registration = register()
        assert register() is registration, "a second call changes nothing"
        replaced = differing(before)
        expected = {"type", "__post_init__", "should_free_input", "__call__", "get_forward_backward_func"}
        expected |= {"__init__", "forward", "backward_dw", "run", "parse_known_args", "create_cudagraphs"}
        assert set(replaced) == expected
        assert len(registration.replaced) == len(replaced) - 1, "one is imported by name elsewhere"
        assert len(registration.replaced) <= 15, "14 functions, and the type of a field"
        for name in (*replaced, "moe_flex_dispatcher_backend"):
            assert any(name in line for line in registration.replaced), name
        assert megatron.core.__version__ in str(registration)
        assert str(registration).count("\n") == len(registration.replaced)
        assert schedules.get_forward_backward_func is pipeline_parallel.get_forward_backward_func
        assert schedules.get_forward_backward_func is user.get_forward_backward_func, "it was imported by name"
        assert type(make_layer(make_config()).token_dispatcher).__name__ == CLASSES[OURS]
        assert "ep_dispatcher" in get_args(type_of_the_field()) and "deepep" in get_args(type_of_the_field())

        unregister()
        unregister()
        assert not differing(before), differing(before)
        assert user.get_forward_backward_func is schedules.get_forward_backward_func
        assert "ep_dispatcher" not in get_args(type_of_the_field())
        # Megatron does not know our name.
        assert "ep_dispatcher" in error_of(lambda: make_layer(make_config()))
        assert type(make_layer(make_config("alltoall")).token_dispatcher).__name__ == CLASSES["alltoall"]


@on_ranks()
def test_megatrons_own_backends_are_left_alone(rank: int):
    """Megatron's own backends behave the same before, with and after a registration."""
    from megatron.core.transformer.moe import token_dispatcher

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
        refused = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)  # for DeepEP by name
        seen.append(error_of(lambda: make_config("flex", **refused)))
        return seen

    unregister()
    before = behaviour()
    assert len(before) >= 4
    for _ in range(2):
        register()
        assert behaviour() == before
        unregister()
        assert behaviour() == before


@on_ranks()
def test_an_unknown_layout_is_refused_and_nothing_replaced(rank: int):
    import megatron.core
    from megatron.core.models.gpt import fine_grained_callables
    from megatron.core.transformer.moe import moe_layer, token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    unregister()
    flex = token_dispatcher.MoEFlexTokenDispatcher
    field = TransformerConfig.__dataclass_fields__["moe_flex_dispatcher_backend"]
    scheduler = fine_grained_callables
    if not hasattr(scheduler, "should_free_input"):
        from megatron.core.models.common import utils as scheduler

    gone = object()
    changes = [
        ("should_free_input", scheduler, "should_free_input", gone),
        ("should_free_input", scheduler, "should_free_input", lambda name: True),
        ("MoEFlexTokenDispatcher takes", flex, "__init__", lambda self, num_local_experts, config, more: None),
        ("no Literal", field, "type", str),
        ("token_combine", token_dispatcher.MoETokenDispatcher, "token_combine", gone),
        ("moe_layer does not use", moe_layer, "MoEFlexTokenDispatcher", object),
        ("MoEFlexTokenDispatcher is missing", token_dispatcher, "MoEFlexTokenDispatcher", gone),
        ("is 0.15.0", megatron.core, "__version__", "0.15.0"),
        ("is unknown", megatron.core, "__version__", "unknown"),
        ("fine_grained_callables", megatron.core.models.gpt, "fine_grained_callables", gone),
    ]
    before = functions_of_megatron()
    for words, owner, name, value in changes:
        with pytest.MonkeyPatch.context() as patch:
            if words == name == "fine_grained_callables":
                patch.setitem(sys.modules, "megatron.core.models.gpt.fine_grained_callables", None)
            patch.delattr(owner, name) if value is gone else patch.setattr(owner, name, value)
            assert words in error_of(register, plugin.UnknownMegatronError), words
            assert registration.active() is None
        assert not differing(before), words
    register()  # and in the layout that is known it works


@on_ranks()
def test_a_newer_version_warns(rank: int):
    import megatron.core

    for version, warns in [("0.99.0", True), ("1.0.0+abc", True), ("0.16.1", False), ("0.20.0+1234567", False)]:
        unregister()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(megatron.core, "__version__", version)
            assert register().megatron_version == version
            texts = [str(one.message) for one in caught if version in str(one.message)]
            assert len(texts) == warns and all("newer than 0.20" in text for text in texts)
            unregister()


class Missing(importlib.abc.MetaPathFinder):
    """Python without a module that one of Megatron's modules imports."""

    def __init__(self, importer: str, name: str):
        self.importer, self.name = importer, name

    def find_spec(self, name, path=None, target=None):
        if name == self.importer:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)


@pytest.mark.parametrize("importer", ["megatron.core.full_cuda_graph", "megatron.core"])
@on_ranks()
def test_missing_modules_are_named_with_their_remedy(rank: int, importer: str):
    """Megatron-core 0.19 imports Triton and does not require it: it was "not laid out" as we need it."""
    package, _, module = importer.rpartition(".")
    for name, remedy in (("triton", "pip install triton"), (importer, r"pip install 'ep_dispatcher\[megatron\]'")):
        if name == "megatron.core.full_cuda_graph":
            continue  # a module of Megatron's own that is missing is another layout
        unregister()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "meta_path", [Missing(importer, name), *sys.meta_path])
            patch.delitem(sys.modules, importer)
            patch.delattr(sys.modules[package], module)
            with pytest.raises(ImportError, match=f"Megatron-core cannot be imported .*{remedy}$"):
                register()
    register()


# ---- flags ----------------------------------------------------------------------------------------------------------


@on_ranks()
def test_flags(rank: int):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    backend = dict(moe_flex_dispatcher_backend=OURS)
    for other in ("alltoall", "allgather"):
        assert "--moe-token-dispatcher-type" in error_of(partial(make_config, other, **backend))
    assert "--moe-enable-deepep" in error_of(lambda: make_config(moe_enable_deepep=True))
    # A model without experts has no dispatcher, and may share its arguments with one that has.
    assert make_config("alltoall", num_moe_experts=None, expert_model_parallel_size=1, **backend) is not None
    # Overlapped shared experts, which Megatron before 0.18 has for alltoall alone.
    overlap = dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True)
    sizes = dict(num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=8, expert_model_parallel_size=2)
    configs = [make_config(**overlap)]
    configs.append(MLATransformerConfig(moe_token_dispatcher_type="flex", **backend, **sizes, **overlap))
    if hasattr(configs[0], "moe_expert_rank_capacity_factor"):  # 0.18 and newer
        configs.append(make_config(moe_expert_rank_capacity_factor=1.5, use_transformer_engine_op_fuser=True))
        assert configs[-1].moe_expert_rank_capacity_factor == 1.5
    for config in configs:
        assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", OURS)
    assert configs[0].moe_shared_expert_overlap and configs[1].moe_shared_expert_overlap
    # What else is wrong is still found, by Megatron's own words.
    wrong = partial(make_config, moe_pad_expert_input_to_capacity=True, **overlap)
    assert "moe_expert_capacity_factor" in error_of(wrong)


@on_ranks()
def test_experts_do_not_pad_again(rank: int):
    """Experts leave out their own padding, for ours alone: rows arrive padded."""
    from megatron.core.transformer.moe import experts, moe_utils

    from ep_dispatcher.integrations.megatron.dispatcher import backend_name

    if hasattr(moe_utils, "skip_routed_expert_padding"):  # 0.18 and newer
        for config, is_ours in ((make_config(), True), (make_config("alltoall"), False)):
            for is_padded in (True, False):
                with backend_name.rows_arrive_padded(config, is_padded):
                    assert experts.skip_routed_expert_padding(config) is (is_ours and is_padded)
        assert make_config().moe_flex_dispatcher_backend == OURS


@on_ranks()
def test_what_cannot_be_supported_is_refused_by_its_flag_when_the_layer_is_built(rank: int):
    """test_megatron_graphs.py has those of CUDA graphs."""

    def refused(given: str, **settings) -> None:
        config = make_config(**settings)
        text = error_of(lambda: make_layer(config))
        assert text.startswith(given), text

    refused("--moe-router-topk is", num_moe_experts=128, moe_router_topk=65)
    refused("--hidden-size is", hidden_size=42, num_attention_heads=2)
    refused("--hidden-size is", hidden_size=36, bf16=True, params_dtype=torch.bfloat16)
    refused("--params-dtype is", params_dtype=torch.float64)
    with plain_latent_projections():
        refused("--moe-latent-size is", moe_latent_size=18)
    make_layer(make_config(num_moe_experts=64, moe_router_topk=64))
    text = error_of(lambda: megatron_config.check(make_config(), 3, expert_tp=1, num_ranks=2))
    assert text.startswith("--num-experts 8 cannot be divided")
    use_layout(Layout(ep=1, etp=2))
    refused("--moe-router-topk is 33 x --expert-tensor-parallel-size 2", num_moe_experts=64, moe_router_topk=33)
    make_layer(make_config(num_moe_experts=64, moe_router_topk=32))


@on_ranks()
def test_fields_that_would_be_ignored_are_refused_by_their_flags(rank: int, monkeypatch):
    """Fields that this dispatcher would ignore. A Megatron without one of them gets it for this test."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {name: 64 if "num" in name else True for name in megatron_config.UNSUPPORTED}
    assert len(values) >= 6
    for name, value in values.items():
        if name not in TransformerConfig.__dataclass_fields__:
            default = None if isinstance(value, int) else False
            monkeypatch.setitem(TransformerConfig.__dataclass_fields__, name, dataclasses.field(default=default))
            monkeypatch.setattr(TransformerConfig, name, default, raising=False)
    for name, value in values.items():
        config = make_config()
        make_layer(config)
        default = getattr(config, name)
        setattr(config, name, value)
        text = error_of(partial(make_layer, config))
        assert text.startswith(f"--{name.replace('_', '-')} is {value}, but has to be {default}"), text


@on_ranks()
def test_parsers_allow_the_name(rank: int):
    """The parser that Megatron's training makes of TransformerConfig's fields; 0.16's package has no training."""
    import typing

    if not hasattr(typing, "override"):  # 0.18's training wants Python 3.12
        typing.override = lambda function: function
    try:
        from megatron.training.argument_utils import ArgumentGroupFactory
    except ImportError:
        assert OURS in get_args(type_of_the_field())
        return
    from megatron.core.transformer.transformer_config import TransformerConfig

    def parse():
        parser = argparse.ArgumentParser(exit_on_error=False)
        fields = TransformerConfig.__dataclass_fields__
        exclude = [name for name in fields if name != "moe_flex_dispatcher_backend"]
        ArgumentGroupFactory(TransformerConfig, exclude=exclude).build_group(parser, "transformer")
        return parser.parse_args(["--moe-flex-dispatcher-backend", OURS]).moe_flex_dispatcher_backend

    assert parse() == OURS
    unregister()
    error_of(parse, argparse.ArgumentError)


# ---- importing and launching ----------------------------------------------------------------------------------------

FOR_RANKS = {"TESTS": str(Path(__file__).parent), "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
SCRIPT = """
import argparse, json, os, sys
import helper
from ep_dispatcher.integrations.megatron.dispatcher import registration
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
    from lib.megatron_layer import Layout, make_config, make_layer, tokens_of, use_layout
    dist.init_process_group("gloo")
    use_layout(Layout(ep=2))
    layers = [make_layer(make_config(os.environ["DISPATCHER"])) for _ in range(2)]
    for layer in layers:
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
    command = [sys.executable, "-m", MODULE, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env | FOR_RANKS | environment, text=True, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """What it prints, and its errors, when it has ended well."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out, err


def report_of(out: str) -> dict:
    return json.loads(out.split("REPORT ")[1].splitlines()[0])


@pytest.fixture
def script(tmp_path) -> Path:
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 42\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def start_ranks(folder: Path, *arguments: str, dispatcher: str = OURS) -> list[subprocess.Popen]:
    """The launcher on two ranks, with a script that chooses this dispatcher."""
    # Here, not on rank 0: until that starts, others may take a port that is free now.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    group |= dict(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    processes = [start(folder, *arguments, RANK=str(rank), DISPATCHER=dispatcher, **group) for rank in range(2)]
    processes[0].store = store  # as long as the ranks live
    return processes


@pytest.mark.exhaustive
def test_launcher_runs_a_script_of_two_ranks(script, tmp_path):
    processes = start_ranks(tmp_path, "training/train.py", *CHOSEN)
    for rank, (out, err) in enumerate(map(finish, processes)):
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
        assert "another token dispatcher" not in out and "Error" not in err and "Traceback" not in err, err


def test_launcher_runs_a_module(script):
    out, _ = finish(start(script.parent, "-m", "train", *CHOSEN))
    report = report_of(out)
    assert report["argv"] == [str(script), *CHOSEN] and report["name"] == "__main__" and report["value"] == 42
    assert report["path"] == str(script.parent) and report["chosen"] == OURS and "Replaced:" in out


@pytest.mark.exhaustive
@pytest.mark.parametrize("chosen, flags", [(OURS, False), ("allgather", False), ("allgather", True)])
def test_launcher_says_when_a_layer_has_another_dispatcher(script, tmp_path, chosen, flags):
    """Whether a script chooses in its code, with or against the flags, only its layers tell."""
    processes = start_ranks(tmp_path, str(script), *(CHOSEN if flags else ()), dispatcher=chosen)
    for rank, (out, _) in enumerate(map(finish, processes)):
        assert report_of(out)["dispatcher"] == CLASSES[chosen]
        said = [line for line in out.splitlines() if "another token dispatcher" in line]
        assert len(said) == (rank == 0 and chosen != OURS), out
        assert all(": allgather. " in line and "--moe-flex-dispatcher-backend ep_dispatcher" in line for line in said)
        assert ("carries the tokens of megatron-core" in out) == (rank == 0 and chosen == OURS)


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
assert sorted(m.__all__) == m.__all__ and "register" in m.__all__ and not hasattr(m, "nonsense")
m.register
m.destroy_buffers()
assert not [name for name in sys.modules if name.split(".")[0] == "megatron"], "the launcher chooses which Megatron"
assert len(asked) == 1, asked
m.register()
for module in pkgutil.walk_packages(m.__path__, m.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import torch.distributed as dist
sys.path.insert(0, os.environ["TESTS"])
from lib.megatron_layer import Layout, make_config, make_layer, tokens_of, use_layout
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
use_layout(Layout(ep=1))
layer = make_layer(make_config())
layer(tokens_of(0))[0].sum().backward()
print("REPORT", json.dumps([asked[1:], type(layer.token_dispatcher).__name__]), flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("switches", ["", "overlap=True, gemm_sm_margin=True"])
def test_transformer_engine_and_apex_are_looked_for_by_megatron_alone(switches):
    """Registration, all modules of the integration, and a pass of a layer. Importing the package asks for nothing."""
    command = [sys.executable, "-c", OPTIONAL_SCRIPT.replace("m.register()", f"m.register({switches})")]
    done = subprocess.run(command, env=os.environ | FOR_RANKS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    asked, dispatcher = report_of(done.stdout)
    assert dispatcher == CLASSES[OURS]
    assert {name for name, _ in asked} >= {"transformer_engine", "apex"}, "Megatron's own attempts are seen"
    assert {who.split(".")[0] for _, who in asked} == {"megatron"}, asked
