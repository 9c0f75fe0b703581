"""Benchmarks between two hosts of this machine: both sides at each rate, the chart, and jobs that take steps in turn.

A package of a few lines plays megatron.training.
"""

import json
import subprocess
import sys

import pytest
from lib.commands import ROOT

TRAINING = """
import os, time, torch
import torch.distributed as dist

def train_step(seconds):
    with open(os.environ["EVENTS"], "a") as events:
        events.write(os.environ["NAME"])
    time.sleep(seconds)
    dist.all_reduce(torch.zeros(2_000_000))  # 8 MB

def train(seconds):
    dist.init_process_group("gloo")
    for n in range(1, 1000):
        train_step(seconds)
        if dist.get_rank() == 1:
            print(f"iteration {n}/ 9 | elapsed time per iteration (ms): 1.0 | lm loss: {10 - n}.0 |")
"""
SCRIPT = """
import os, sys, time
from pathlib import Path
from megatron.training import training

while sys.argv[1] == "--some":
    assert os.environ["RANK"] == "0"
    Path(os.environ["EVENTS"]).with_name("alive").touch()
    time.sleep(0.1)
training.train(float(sys.argv[2]))
"""


def run(*command, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.usefixtures("make_hosts")  # skipped where there can be none
def test_an_engine(tmp_path):
    sizes = "--tokens 256 --hidden 1024 --iters 3 --rates none 1gbit".split()
    said = run("benchmarks/two_hosts.py", *sizes, "--out", tmp_path / "times.json")
    assert said.count("the same results") == 4 and (tmp_path / "times.png").exists()
    found = json.loads((tmp_path / "times.json").read_text())["rates"]
    assert list(found) == ["none", "1gbit"]
    times = [of_rate["operations"]["dispatch+combine"]["all_to_all_single"]["median_s"] for of_rate in found.values()]
    assert times[1] > 2 * 2.1e6 / 125e6, "what a rank sends, twice, at that rate"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("make_hosts")
def test_jobs_of_megatron_lm(tmp_path, monkeypatch):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "training.py").write_text(TRAINING)
    (tmp_path / "pretrain.py").write_text(SCRIPT)
    monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
    jobs = [word for name in "ab" for word in ("--job", f"{name}: NAME={name} --all {0.01 if name == 'a' else 0.1}")]
    jobs += ["--job", "fails: NAME=c --some"]
    options = "--rates none 1gbit --steps 3 --warmup 2 --out".split()
    said = run("benchmarks/megatron_two_hosts.py", *jobs, *options, tmp_path / "out", tmp_path / "pretrain.py", code=1)
    assert "AssertionError" in said and "fails: ended in step 1" in said
    ended, last_step = ((tmp_path / name).stat().st_mtime for name in ("alive", "events"))
    assert ended + 1 < last_step, "the rank that had not failed was ended too"
    assert (tmp_path / "events").read_text() == "".join(4 * "a" + 4 * "b" + 2 * (6 * "a" + 6 * "b"))
    found = json.loads((tmp_path / "out/times.json").read_text())
    assert [len(of_job) for of_rate in found["seconds"].values() for of_job in of_rate.values()] == [3] * 4
    assert min(found["seconds"]["1gbit"]["a"]) > 8e6 / 125e6, "a rank sends half of 8 MB twice"
    assert min(found["seconds"]["none"]["b"]) > 0.1
    assert found["losses"]["a"][:7] == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0]
    assert list(found["median_ms"]["a"]) == ["none", "1gbit"] and (tmp_path / "out/times.png").exists()
