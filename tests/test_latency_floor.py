"""benchmarks/latency_floor.py: tables from figures that are made up; with nvcc that its program compiles, with a GPU
also a run."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from commands import ROOT

from ep_dispatcher.engines import cuda_problem

SCRIPT = ROOT / "benchmarks" / "latency_floor.py"
MACHINE = {"git_commit": "abc", "date": "2026-11-22T10:00:00+00:00"}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import latency_floor

    return latency_floor


def made_up(script) -> dict:
    """A launch takes 2 us, 3 with the last block's work, a flag 1; 512 rows take 4 us and the launch."""
    lines = ["GPUs\tname\tNVIDIA H200", "GPUs\tnumber\t2", f"{script.HOP}\tns\t900.0 1000.0 5000.0 "]
    for blocks in script.BLOCKS:
        of_blocks = f"launch, {blocks} blocks of 512 threads, 226 KB"
        lines += [f"{of_blocks}\tns\t2000.0", f"{of_blocks}, last block\tns\t3000.0"]
        for what in ("pull from the peer", "push to the peer", "copy in own memory"):
            lines += [f"{what}: {n} rows of 7 KB, {blocks} blocks\tns\t{2000 + 4000 * n / 512}" for n in (512, 1024)]
    return {"machine": MACHINE, **script.parse("\n".join(lines) + "\n")}


def test_a_part_has_its_median_its_least_and_its_most(script):
    run = made_up(script)
    assert run["parts"][script.HOP] == [1.0, 0.9, 5.0]
    assert (run["gpu_name"], run["gpu_number"]) == ("NVIDIA H200", 2)


def test_a_floor_is_the_sum_of_its_parts(script):
    sums = {name: sum(us for _, us in parts) for name, parts in script.floors(made_up(script), "48").items()}
    assert sums == pytest.approx({"dispatch FP8": 3 + 1 + 4, "dispatch": 3 + 1 + 8, "combine": 3 + 8 + 1 + 8})


def test_the_tables(script, tmp_path, capsys):
    path = tmp_path / "floor.json"
    path.write_text(json.dumps(made_up(script)))
    assert script.main(["--draw", str(path), "--measured", "dispatch FP8=40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "between two NVIDIA H200, build abc, 2026-11-22; microseconds:"
    assert f"| {script.HOP} | 1.00 | 0.90 | 5.00 |" in lines
    rows = [line for line in lines if line.startswith("| dispatch FP8 |")]
    assert len(rows) == 3 and rows[1].startswith("| dispatch FP8 | 48 | 8.0 | 3.00 launch")
    assert rows[1].endswith("| 40 (5.0x, 32.0 above) |")


def test_a_wrong_operation_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.parse_args(["--measured", "gather=3"])
    assert "given 'gather', allowed: dispatch FP8, dispatch, combine" in capsys.readouterr().err


def test_a_program_that_fails_says_why(script, tmp_path, capsys):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho a wait lasted longer >&2\nexit 3\n")
    program.chmod(0o755)
    assert script.main(["--program", str(program), "--out", str(tmp_path / "never.json")]) == 2
    assert capsys.readouterr().out == "latency_floor ended with 3: a wait lasted longer\n"


@needs_nvcc
def test_the_program_has_the_parts_that_the_floors_name(script, tmp_path):
    """Names are built in two languages: compile, and look for the words of each part."""
    script.compile_to(tmp_path / "floor")
    source = script.SOURCE.read_text()
    words = {
        word for parts in script.FLOORS.values() for part in parts for word in re.split(r"[:,] |\{blocks\} ", part)
    }
    words = {re.sub(r"^\d+ ", "", word.removesuffix(script.LESS_LAUNCH)) for word in words}
    assert [word for word in words if word not in source] == []


@needs_nvcc
@pytest.mark.skipif(cuda_problem() is not None, reason="no GPU")
def test_a_run(tmp_path):
    out = tmp_path / "floor.json"
    found = subprocess.run(
        [sys.executable, SCRIPT, "--out", out], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stdout + found.stderr
    run = json.loads(out.read_text())
    assert len(run["parts"]) > 60 and all(0 < least <= median <= most for median, least, most in run["parts"].values())
    assert run["parts"]["flag, one way, to the peer"][0] < 50
