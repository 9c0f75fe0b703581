"""The example in ``examples/`` as a user runs it: a process of its own, judged by its exit code, output and JSON."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = "--layers 2 --hidden 32 --heads 2 --intermediate 32 --experts 8 --seq-len 32 --batch 2 --lr 0.01".split()


def run_example(*args: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / "train_moe_lm.py"), *args]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)


def test_check_agrees_with_the_dense_model():
    done = run_example("--check", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nAGREE" in done.stdout


def test_short_training_writes_figures_and_chart(tmp_path):
    steps, layers, tokens_per_step, num_topk = 25, 2, 4 * 2 * 32, 2
    done = run_example(*TINY, "--steps", str(steps), "--sample-bytes", "8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())

    final = report["final"]
    assert final["steps"] == len(report["training_bits_per_byte"]) == steps
    assert final["tokens"] == steps * tokens_per_step
    assert all(map(math.isfinite, report["training_bits_per_byte"] + report["grad_norm"]))
    assert 1 < final["held_out_bits_per_byte"] < report["training_bits_per_byte"][0] - 1
    assert 4 < final["unigram_bits_per_byte"] < 5 and final["bigram_bits_per_byte"] < final["unigram_bits_per_byte"]
    assert [point["step"] for point in report["held_out"]][-1] == steps

    counts = report["tokens_per_expert"]["counts"]  # [stretch][layer][expert]; nothing is dropped
    for layer in range(layers):
        assert sum(sum(stretch[layer]) for stretch in counts) == steps * tokens_per_step * num_topk
    assert len(report["sample"].encode()) >= 8
    assert (tmp_path / "chart.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "args, message",
    [
        (["--steps", "many"], "argument --steps: given 'many', allowed: a whole number from 1"),
        (["--experts", "10"], "argument --experts: given 10, allowed: multiples of 4"),
        (["--hidden", "100"], "argument --hidden: given 100, allowed: multiples of 8"),
    ],
)
def test_wrong_arguments_are_named(args, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["train_moe_lm.py", *args])
    from moe_lm.arguments import parse_arguments

    with pytest.raises(SystemExit) as exit:
        parse_arguments()
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
