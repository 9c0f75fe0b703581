"""benchmarks/paced_wire.py: points, table and chart from figures that are made up; with a GPU also a run."""

import json
import subprocess
import sys

import pytest
import torch
from commands import ROOT
from conftest import on
from test_nodes import needs_pace

from ep_dispatcher.engines import cuda_problem

SCRIPT = ROOT / "benchmarks" / "paced_wire.py"
MACHINE = {"gpus": ["NVIDIA H200"] * 2, "git_commit": "abc", "date": "2026-11-22T10:00:00+00:00"}
OPERATIONS = ("dispatch", "dispatch FP8", "combine")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import paced_wire

    return paced_wire


def of_rank(us: float, num_bytes: int) -> dict:
    """What a rank measures: three graphs, the second one 10 us slower."""
    times = {"us": [us, us + 10, us], "bytes": num_bytes}
    return {"rail_sms": 1, "operations": dict.fromkeys(OPERATIONS, times)}


def made_up(script, argv: list[str]) -> dict:
    """Every operation sends 50 MB and takes 1.5 times as long as these alone; without a pace 500 us."""
    args = script.parse_args(argv)
    sizes = {name: getattr(args, name) for name in script.SIZES}
    run = {"machine": MACHINE, "wire": args.wire, "nodes": 2, "ranks_per_node": 1, **sizes, "at": args.at, "points": []}
    for point in script.points_of(args):
        us = 1.5 * 50e6 / point.rate / 1e3 if point.rate else 500
        run["points"] += script.merge([of_rank(us, 50_000_000), of_rank(us / 2, 40_000_000)], point)
    return run


def test_each_point_is_measured_once(script):
    """Of the wire's multiprocessors at least one is left for the rest."""
    args = script.parse_args(["--sms", "2,8", "--rates", "25,50", "--sms-at", "8"])
    assert [point[:2] for point in script.points_of(args)] == [(2, 50.0), (8, 50.0), (8, 25.0), (8, None)]
    args = script.parse_args(["--wire", "nvshmem", "--sms", "2,8"])
    assert script.points_of(args) == [(2, None, None, None), (8, None, None, None)]
    args = script.parse_args("--only-at --sms 2,4 --rail-sms 1,3 --chunks 256,128,64 512,512,512".split())
    shares, chunks = [(2, 1), (4, 1), (4, 3)], [(256, 128, 64), (512, 512, 512)]
    assert script.points_of(args) == [(sms, 50.0, rail, each) for sms, rail in shares for each in chunks]


def test_buffers_made_inside_have_the_settings_of_a_point(script, monkeypatch):
    monkeypatch.setenv("EP_DISPATCHER_WIRE", "auto")
    shape, environ = script.memory.Shape(2, 1, 8, 2, 4096, 512, torch.bfloat16), script.os.environ
    seen = lambda: (environ.get("EP_DISPATCHER_WIRE"), environ.get("EP_DISPATCHER_WIRE_GBPS"), shape.token_chunk)  # noqa: E731
    with script.settings("peer", script.Point(8, 50.0, None, (512, 128, 64))):
        assert seen() == ("peer", "50.0", 512) and (shape.sum_chunk, shape.window_chunk) == (128, 64)
    with script.settings("peer", script.Point(8, None)):
        assert seen() == ("peer", None, 256)
    assert seen() == ("auto", None, 256)


def test_a_point_is_of_the_slowest_rank_and_the_most_bytes(script):
    ranks = [of_rank(100, 3_000_000), of_rank(70, 5_000_000)]
    ranks[1]["operations"] = {name: {"us": [70, 95, 130], "bytes": 5_000_000} for name in OPERATIONS}
    points = script.merge(ranks, script.Point(8, 50.0, None, (256, 128, 64)))  # slowest: 100, 110, 130
    assert [p["operation"] for p in points] == list(OPERATIONS)
    expected = dict(us=110, least_us=100, bytes=5_000_000, wire_us=100.0, ratio=1.1, chunks=[256, 128, 64])
    assert expected.items() <= points[0].items()
    assert not {"ratio", "chunks"} & script.merge(ranks, script.Point(8, None))[0].keys()


@pytest.mark.parametrize("argv, axes", [([], 3), (["--wire", "nvshmem", "--sms", "4,8"], 1)])
def test_the_table_and_the_chart(script, tmp_path, capsys, argv, axes):
    """Axes: against multiprocessors; against rates, with 8 and with 24."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "paced.json"
    path.write_text(json.dumps(made_up(script, argv)))
    script.main(["--draw", str(path)])
    said, drawn = capsys.readouterr().out, path.with_suffix(".svg").read_bytes()
    assert drawn.count(b'<g id="axes_') == axes
    if axes == 3:
        assert said.count("| dispatch |") == 16 and "| dispatch | 2 | 1 | 50 | 1500 | 50.0 | 1000 | 1.50 | d" in said


@pytest.mark.parametrize("argument, given", [("--sms", "8,1"), ("--rates", "0"), ("--nodes", "1"), ("--tokens", "x")])
def test_wrong_arguments(script, capsys, argument, given):
    with pytest.raises(SystemExit):
        script.parse_args([argument, given])
    assert f"argument {argument}: given '{given[-1]}', allowed: " in capsys.readouterr().err


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT.with_name(f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(cuda_problem() is None, reason="this process can use a GPU")
@pytest.mark.parametrize("name", ["paced_wire", "time_line"])
def test_without_a_gpu_it_says_why(tmp_path, name):
    found = run_script(name, "--out", tmp_path / "found")
    assert found.returncode == 2 and "allowed: the CUDA engine" in found.stderr


@needs_pace
@pytest.mark.parametrize("engine", [on("cuda")])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_run(tmp_path, layout, engine):
    out = tmp_path / "paced.json"
    sizes = "--tokens 64 --hidden 512 --experts 8 --topk 2 --ranks-per-node 1 --graphs 3".split()
    rates = ["--rates", "0.1", "--at", "0.1", "--sms", "4", "--sms-at", "4"]
    found = run_script("paced_wire", *sizes, *rates, "--layout", layout, "--out", out)
    assert found.returncode == 0, found.stderr
    points = json.loads(out.read_text())["points"]
    expected = [(name, rate) for rate in (0.1, None) for name in OPERATIONS]
    assert [(p["operation"], p["gb_per_s"]) for p in points] == expected
    # 0.1 GB/s: 100 us for each 10 KB. Nothing is faster than the wire alone.
    assert all(p["bytes"] > 10_000 and p["rail_sms"] == 1 for p in points)
    assert all(p["ratio"] > 0.98 for p in points if p["gb_per_s"])
