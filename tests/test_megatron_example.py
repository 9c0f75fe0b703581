"""``examples/megatron_gpt.py`` as a user runs it, and that its verdict can be the other one."""

import json
import os
import subprocess
import sys

import pytest
from lib.commands import ROOT, torchrun

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

EXAMPLE = ROOT / "examples" / "megatron_gpt.py"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --moe-ffn-hidden-size 32 --num-experts 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 8"
).split()

WRONG_COMBINE = """
import runpy, sys
from ep_dispatcher.integrations.megatron import MoEEPTokenDispatcher
right = MoEEPTokenDispatcher.token_combine
MoEEPTokenDispatcher.token_combine = lambda self, rows: 1.01 * right(self, rows)
sys.path.insert(0, {folder!r})
runpy.run_path({example!r}, run_name="__main__")
"""


@pytest.mark.exhaustive
def test_it_trains_as_megatrons_own_dispatcher_does(tmp_path):
    code, output, errors = torchrun(2, str(EXAMPLE), *TINY, "--out", str(tmp_path), timeout_s=300)
    assert code == 0, output + errors
    assert "MoEEPTokenDispatcher" in output and "\nAGREE" in output
    report = json.loads((tmp_path / "report.json").read_text())
    ours, theirs = report["training_bits_per_byte"].values()
    assert list(report["training_bits_per_byte"])[0] == "ep_dispatcher"
    assert len(ours) == len(theirs) == 8 and ours[-1] < ours[0] - 0.5
    assert report["differences"]["first_steps_relative"] <= 1e-5 and report["agree"]
    assert all(step["milliseconds"] > 0 and step["tokens_per_s"] > 0 for step in report["step"].values())


@pytest.mark.exhaustive
def test_a_wrong_dispatcher_is_found(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_COMBINE.format(folder=str(EXAMPLE.parent), example=str(EXAMPLE)))
    code, output, errors = torchrun(2, str(script), *TINY, "--out", str(tmp_path), timeout_s=300)
    assert code != 0 and "\nDIFFERENT" in output, output + errors


def test_without_torchrun_it_says_how_to_start_it():
    env = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "torchrun --nproc-per-node 4" in done.stderr
