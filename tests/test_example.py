"""The example in ``examples/`` as a user runs it: a process of its own, judged by its exit code, output and JSON."""

import fcntl
import importlib
import json
import logging
import math
import os
import statistics
import struct
import subprocess
import sys
import termios
import warnings
from pathlib import Path

import pytest
import torch
from conftest import on

from ep_dispatcher import engines

ROOT = Path(__file__).parents[1]
TINY = "--layers 2 --hidden 32 --heads 2 --intermediate 32 --experts 8 --seq-len 32 --batch 2 --lr 0.01".split()


def run_example(*args: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / "train_moe_lm.py"), *args]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)


@pytest.fixture
def example(monkeypatch):
    """``example(name)``: a module of the example, as the example imports it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


@pytest.fixture
def arguments(example, monkeypatch, tmp_path):
    """``arguments(*given, gpus=0)``: (args, config) of a command line, on a machine with so many GPUs."""

    def parse(*given: str, gpus: int = 0):
        monkeypatch.setenv("EP_DISPATCHER_ENGINE", "auto")
        monkeypatch.setattr(engines, "cuda_problem", lambda: None if gpus else "PyTorch finds no GPU")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(sys, "argv", ["train_moe_lm.py", "--out", str(tmp_path), *given])
        return example("moe_lm.arguments").parse_arguments()

    return parse


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", [on("cpu"), on("cuda")])
def test_check_agrees_with_the_dense_model(device):
    done = run_example("--check", "--steps", "3", "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nAGREE" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "device, dtype",
    [("cpu", "float32"), on("cpu", "bfloat16"), on("cuda", "float32"), on("cuda", "bfloat16")],
)
def test_short_training_writes_figures_and_chart(device, dtype, tmp_path):
    steps, layers, ranks, num_topk = 25, 2, 4, 2
    tokens_per_step = ranks * 2 * 32
    options = f"--device {device} --dtype {dtype} --ranks {ranks} --steps {steps} --sample-bytes 8 --out".split()
    done = run_example(*TINY, *options, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert device == "cuda" or done.stderr == "", "no bar outside of a terminal, and no line of another library"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["config"]["device"] == device and report["config"]["dtype"] == dtype
    assert (report["machine"]["device"] == "CPU") is (device == "cpu")

    final = report["final"]
    assert final["steps"] == len(report["training_bits_per_byte"]) == steps
    assert final["tokens"] == steps * tokens_per_step
    assert final["step_seconds"] == pytest.approx(statistics.median(report["step_seconds"][5:]), abs=1e-5)
    assert final["tokens_per_second"] == pytest.approx(tokens_per_step / final["step_seconds"])
    assert sum(report["step_seconds"]) < final["training_seconds"]
    assert all(map(math.isfinite, report["training_bits_per_byte"] + report["grad_norm"]))
    assert 1 < final["held_out_bits_per_byte"] < report["training_bits_per_byte"][0] - 1
    assert done.stdout.splitlines()[-1].startswith(("LEARNED: ", "NOT ENOUGH: "))
    assert 4 < final["unigram_bits_per_byte"] < 5 and final["bigram_bits_per_byte"] < final["unigram_bits_per_byte"]
    assert [point["step"] for point in report["held_out"]][-1] == steps

    counts = report["tokens_per_expert"]["counts"]  # [stretch][layer][expert]; nothing is dropped
    for layer in range(layers):
        assert sum(sum(stretch[layer]) for stretch in counts) == steps * tokens_per_step * num_topk
    assert len(report["sample"].encode()) >= 8
    assert (tmp_path / "chart.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "args",
    [
        "--steps many",
        "--experts 10",
        "--hidden 100",
        "--hidden 12 --heads 2 --dtype bfloat16",
        "--dtype bfloat16 --check",
        "--device cuda",
    ],
)
def test_wrong_arguments_are_named(args, arguments, capsys):
    name, value, *_ = args.split()
    with pytest.raises(SystemExit) as exit:
        arguments(*args.split())
    said = capsys.readouterr().err
    assert exit.value.code == 2 and name in said and value in said


def test_without_a_gpu_it_takes_the_cpu_and_says_why(arguments, example):
    args, config = arguments()
    assert (args.device, args.why_cpu, args.ranks, args.ranks_per_node) == ("cpu", "PyTorch finds no GPU", 4, 2)
    assert (args.steps, args.batch, args.lr) == (750, 4, 5e-3)
    assert (config.hidden, config.num_experts, config.num_topk, config.dtype) == (128, 16, 2, torch.float32)
    assert example("moe_lm.device").prepare_ranks("cpu", 4) == "gloo"


@pytest.mark.parametrize(
    "gpus, ranks, experts, backend",
    [(1, 2, 64, "gloo"), (2, 2, 64, "cpu:gloo,cuda:nccl"), (6, 6, 60, "cpu:gloo,cuda:nccl"), (8, 8, 64, None)],
)
def test_with_gpus_it_takes_all_of_them_and_a_larger_model(
    arguments, example, monkeypatch, gpus, ranks, experts, backend
):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "")
    args, config = arguments(gpus=gpus)
    assert (args.device, args.why_cpu, args.ranks, args.ranks_per_node) == ("cuda", "", ranks, ranks)
    assert (config.hidden, config.num_experts, config.dtype) == (1024, experts, torch.bfloat16)
    assert args.steps == 1500 * 2048 // (ranks * 8 * 256)
    assert example("moe_lm.device").prepare_ranks("cuda", ranks) == (backend or "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(
    "given, expected",
    [
        (
            "--ranks 4 --ranks-per-node 2 --hidden 64 --heads 2 --experts 8 --dtype float32 --steps 7",
            dict(ranks=4, ranks_per_node=2, hidden=64, num_heads=2, num_experts=8, dtype=torch.float32, steps=7),
        ),
        ("--device cpu", dict(device="cpu", ranks=4, hidden=128)),
        ("--check", dict(device="cuda", ranks=2, steps=10, hidden=128, num_experts=16, dtype=torch.float32)),
    ],
)
def test_given_sizes_win_on_gpus(arguments, given, expected):
    """The check takes the small model in float32."""
    args, config = arguments(*given.split(), gpus=2)
    found = vars(args) | vars(config)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("num_steps", [1, 2, 19, 20, 21, 39, 750, 10_001])
def test_a_run_prints_a_bounded_number_of_lines(example, num_steps):
    is_line_due = example("moe_lm.progress").is_line_due
    lines = [step for step in range(1, num_steps + 1) if is_line_due(step, num_steps)]
    assert lines[0] == 1 and lines[-1] == num_steps and len(lines) <= 22
    assert len(lines) >= min(num_steps, 10)


@pytest.mark.parametrize("columns, terminal", [(100, True), (100, False)])
def test_a_terminal_shows_a_bar_with_steps_loss_speed_and_time(example, monkeypatch, capsys, columns, terminal):
    pytest.importorskip("tqdm", reason="the bar needs tqdm, of the extra examples")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(slave, "w") as screen, open(master, "rb", buffering=0) as seen:
        if terminal:
            monkeypatch.setattr(sys, "stderr", screen)
        with example("moe_lm.progress").Progress(3, 1000, shows=True) as progress:
            for step in range(3):
                progress.step(4.25 - step, seconds=0.5)
                progress.say(f"line {step}")
        screen.write("end")
        screen.flush()
        shown = seen.read(100_000).decode()
    said = capsys.readouterr()
    assert said.out.splitlines() == ["line 0", "line 1", "line 2"] and said.err == ""
    assert ("|" in shown) == terminal
    if terminal:
        assert all(words in shown for words in ("3 of 3 steps", "2.25 bits per byte", "2,000 tokens/s", "left"))


def test_other_ranks_show_nothing(example, capsys):
    with example("moe_lm.progress").Progress(3, 1000, shows=False) as progress:
        progress.step(4.25, seconds=0.5)
        progress.say("a line")
    assert capsys.readouterr() == ("", "")


def short_report(steps: int) -> dict:
    """A report by Recorder.write of so many steps, as far as a chart reads it."""
    loss = [8.0 / step for step in range(1, steps + 1)]
    return {
        "training_bits_per_byte": loss,
        "held_out": [{"step": steps, "bits_per_byte": loss[-1]}],
        "tokens_per_expert": {"counts": [[[1, 2, 3, 4]]] * steps},
        "final": {f"{name}_bits_per_byte": 4.0 for name in ("held_out", "unigram", "bigram")},
        "config": {"ranks": 2},
    }


@pytest.mark.parametrize("steps, width", [(1, 1), (2, 1), (3, 1), (25, 1), (60, 3), (200, 9), (750, 21), (5000, 21)])
def test_the_chart_of_few_steps_shows_each_of_them(example, tmp_path, steps, width):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="a chart needs matplotlib, of the extra examples")
    charts = example("moe_lm.charts")
    assert charts.smoothing_width(steps) == width
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        charts.draw(short_report(steps), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    assert not logging.getLogger("matplotlib.font_manager").isEnabledFor(logging.WARNING)  # that it looks for fonts
    axes = pyplot.figure().subplots()
    charts.draw_losses(axes, short_report(steps))
    training = [line for line in axes.lines if line.get_label().startswith("training")]
    ticks = [tick == int(tick) for tick in axes.get_xticks()]
    pyplot.close("all")
    assert len(training) == 1 and len(training[0].get_xdata()) == steps and all(ticks)
    assert (training[0].get_label() == "training") == (width == 1)
    # One step is a dot, and no line of no length.
    assert training[0].get_marker() == ("." if steps <= charts.FEW_STEPS else "")


def test_the_verdict_names_the_steps(example):
    recorder = example("moe_lm.report").Recorder(False, 1000, 4.7, 3.67)
    for held_out, verdict in ((3.6, "LEARNED: 3.60"), (3.7, "NOT ENOUGH: 3.70 bits per byte after 1,200 steps")):
        recorder.final = dict(held_out_bits_per_byte=held_out, bigram_bits_per_byte=3.67, steps=1200)
        assert recorder.verdict().startswith(verdict)
    assert recorder.verdict().endswith("more --steps")


def test_the_first_steps_do_not_count(example):
    median_step = example("moe_lm.report").median_step
    assert median_step([9.0] * 3 + [1.0, 2.0, 3.0]) == 2.0  # half of them are left out at most
    assert median_step([9.0] * 5 + [1.0, 2.0, 3.0] * 9) == 2.0
    assert median_step([9.0] * 5 + [1.0, 2.0, 3.0] * 9 + [5.0] * 3, since=32) == 5.0
    assert median_step([9.0]) == 9.0
