"""benchmarks/layer_host_time.py: every sample has one owner, and shares add up to the time of a pass."""

import json
import time

import pytest
from lib.commands import ROOT, torchrun

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import host_samples
import layer_host_time

SCRIPT = str(ROOT / "benchmarks" / "layer_host_time.py")


def test_a_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "figures.json"
    options = "--case 128x64x16x32x1 --seq-length 128 --redundant 2 --popularity lognormal:1.0 --passes 20"
    options += " --sides today copies"
    code, output, errors = torchrun(2, SCRIPT, *options.split(), "--json", str(path), timeout_s=200)
    assert code == 0, output + errors
    for name, found in json.loads(path.read_text())["sides"].items():
        assert f"{name}: forward {found['forward']:.0f} us" in output
        total = found["forward"] + found["backward"]
        assert sum(found["owners"].values()) == pytest.approx(total)
        assert {"this dispatcher and its experts", "Megatron"} <= {*found["owners"]}
        assert max(found["functions"].values()) == pytest.approx(total), "all samples are inside of one_pass"


def test_a_sample_has_the_innermost_owner():
    script = ("layer_host_time.py", "one_pass", 1)
    megatron, ours = ("megatron/core/moe.py", "forward", 2), ("ep_dispatcher/autograd.py", "dispatch", 3)
    plugin, torch = ("ep_dispatcher/integrations/megatron/plugin.py", "f", 4), ("torch/_ops.py", "apply", 5)
    stacks = [[torch, ours, megatron, script], [torch, megatron, script], [plugin, script], [torch, script]]
    found = host_samples.shares([(1.0, stack) for stack in stacks], 40.0)
    assert found["owners"] == {"this dispatcher and its experts": 20.0, "Megatron": 10.0, "others": 10.0}
    assert found["lines"] == {"torch/_ops.py:5 apply": 30.0, "ep_dispatcher/integrations/megatron/plugin.py:4 f": 10.0}
    assert found["functions"]["layer_host_time.py one_pass"] == 40.0


def test_a_file_begins_with_its_package():
    """A virtual environment may be in a folder with the name of a package."""
    code = compile("", "/home/megatron/.venv/lib/torch/nn.py", "exec")
    assert host_samples.file_of(code, {"__name__": "torch.nn"}) == "torch/nn.py"


def test_looking_at_a_stack_is_not_in_the_samples():
    """Under a deep stack a look took longer than the time until the next signal, so most samples were of looks."""
    sampler = host_samples.Sampler(sample_us=30)

    def deep(rest: int) -> None:
        if rest:
            return deep(rest - 1)
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            pass

    with sampler:
        deep(100)
    found = host_samples.shares(sampler.samples, 1.0)
    assert len(sampler.samples) > 10 and found["owners"] == {"others": pytest.approx(1.0)}
    assert max(found["functions"].values()) == pytest.approx(1.0, abs=0.05)
    count = len(sampler.samples)
    deep(0)
    assert len(sampler.samples) == count, "a signal came outside of `with`"


def test_float8_needs_experts_that_have_it(capsys):
    with pytest.raises(SystemExit):
        layer_host_time.main(["--float8"])
    assert "--float8 needs --experts transformer_engine" in capsys.readouterr().err
