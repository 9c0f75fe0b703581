"""What a user reaches for is a public name, and completions show nothing else."""

import importlib
import inspect
import subprocess
import sys

import pytest
from conftest import exhaustive
from lib.commands import environment

import ep_dispatcher as ep
from ep_dispatcher import errors

# Each imports more modules of the package than a user does; none of them may be listed.
LIST_NAMES = """
import importlib
import ep_dispatcher.tools.testing, ep_dispatcher.integrations.collectives
module = importlib.import_module({name!r})
print(*dir(module))
print(*sorted(module.__all__))
"""


def test_the_layer_alone_imports_dtensors():
    """They take half a second and more, which those pay who use the layer."""
    code = """
import sys, torch.distributed, ep_dispatcher as ep
print("torch.distributed.tensor" in sys.modules, "torch._dynamo" in sys.modules)
from ep_dispatcher import MoELayer
print(MoELayer is ep.MoELayer, MoELayer.__module__, hasattr(ep, "MoELayers"))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert result.stdout.splitlines() == ["False False", "True ep_dispatcher.moe.layer False"], result.stderr


def test_every_error_of_a_user_is_a_name_of_the_package():
    classes = [
        value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    public = [one.__name__ for one in classes if not one.__name__.startswith("_")]
    assert {"PeerTimeoutError", "PeerDataError", "TooFewRowsError"} <= {*public} <= {*ep.__all__}
    assert all(getattr(ep, name) is getattr(errors, name) for name in public)


@pytest.mark.parametrize(
    "name, needs",
    [
        ("ep_dispatcher", "torch"),
        exhaustive("ep_dispatcher.integrations.megatron", "torch"),
        exhaustive("ep_dispatcher.integrations.deep_ep", "torch"),
        exhaustive("ep_dispatcher.integrations.transformers", "torch"),
        ("ep_dispatcher.integrations.torchtitan", "torchtitan"),
    ],
)
def test_a_completion_lists_public_names_alone(name: str, needs: str):
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    command = [sys.executable, "-c", LIST_NAMES.format(name=name)]
    said = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True).stdout
    listed, public = (line.split() for line in said.splitlines())
    assert listed == public


def test_every_public_name_of_megatrons_integration_is_there():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    module = importlib.import_module("ep_dispatcher.integrations.megatron")
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
