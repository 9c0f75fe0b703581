"""The programs that ``python -m`` starts: all are listed, and none prints a warning."""

import importlib.util
import subprocess
import sys

import pytest
from lib.commands import ROOT, environment, run_module

from ep_dispatcher.__main__ import TOOLS


def programs() -> set[str]:
    """Names of the modules that do something when they are run."""
    found = set()
    for path in (ROOT / "ep_dispatcher").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "tools" not in parts and 'if __name__ == "__main__":' in path.read_text():
            found.add(".".join(part for part in parts if part != "__main__"))
    return found


def test_the_list_is_complete():
    assert {name for name, _ in TOOLS} | {"ep_dispatcher"} == programs()


@pytest.mark.exhaustive
def test_none_prints_a_warning():
    """Started side by side, as most of the time goes into importing PyTorch."""
    names = sorted(programs())
    if importlib.util.find_spec("megatron") is None:
        names.remove("ep_dispatcher.integrations.megatron.parity")
    env = environment(CUDA_VISIBLE_DEVICES="")
    started = {}
    for name in names:
        command = [sys.executable, "-W", "error", "-m", name, "--help"]
        started[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    for name, process in started.items():
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, ""), name
        assert output, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("words, code", [([], 0), (["doctor"], 2)])
def test_the_list_of_tools(words, code):
    found, output, _ = run_module("ep_dispatcher", *words)
    assert found == code and all(name in output for name, _ in TOOLS)
    assert "engines cpu" in output.partition("\n")[0]
