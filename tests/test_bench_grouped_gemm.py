"""benchmarks/grouped_gemm.py: its cases, its operations on the CPU, and its lines from figures that are made up."""

import sys
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT


@pytest.fixture
def script(monkeypatch):
    """The benchmark on the CPU, without Triton. Its own name is also that of a module of the package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kernels = SimpleNamespace(Tile=lambda *sizes: sizes)
    monkeypatch.setitem(sys.modules, "ep_dispatcher.moe.grouped_gemm_kernels", kernels)
    monkeypatch.setattr("ep_dispatcher.moe.grouped_gemm_kernels", kernels, raising=False)
    monkeypatch.delitem(sys.modules, "grouped_gemm", raising=False)
    import grouped_gemm

    monkeypatch.setattr(grouped_gemm, "DEVICE", "cpu")
    return grouped_gemm


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_every_side_runs(script, skew):
    """operations() itself compares ours with grouped_mm."""
    case, seen = script.Case(4, 64, 32, 48, skew), {}
    for name, sides in script.operations(case, []):
        seen[name] = {side: call() for side, call in sides.items()}
    assert set(seen) == {"forward", "grad of rows", "grad of W", "grad of W, +="}
    assert all({"ours", "grouped_mm"} <= set(sides) for sides in seen.values())
    assert all("one expert" in sides for name, sides in seen.items() if name != "grad of W, +=")
    assert seen["forward"]["one expert"].shape == (case.rows // case.experts, case.n)
    assert seen["grad of W, +="]["grouped_mm"].dtype == torch.float32


def test_a_line(script):
    case = script.Case(4, 4000, 1000, 500)  # 4 GFLOP in all
    line = script.line(case, {"ours": 50.0, "grouped_mm": 40.0, "one expert": 10.0})
    assert line == "ours 50 (80)   grouped_mm 40 (100)   one expert 10 (100)   0.80 of grouped_mm"
    assert script.line(case, {"ours": 50.0}) == "ours 50 (80)", "grouped_mm could not run"


def test_the_least_is_held_against_the_bar(script, monkeypatch, capsys):
    figures = iter([{"ours": 10.0, "grouped_mm": us} for us in (9.0, 8.4, 9.5, 8.6)] + [{"ours": 1.0}] * 2)
    monkeypatch.setattr(script, "operations", lambda case, tiles: [("a", {}), ("b", {})])
    monkeypatch.setattr(script, "time_sides", lambda sides, rounds: next(figures))
    monkeypatch.setattr(script, "host_times", dict)
    monkeypatch.setattr(sys, "argv", ["grouped_gemm.py", "--even", "--cases", "0", "1", "2"])
    script.main()
    least = [line for line in capsys.readouterr().out.splitlines() if line.startswith("least of")]
    assert least[0].startswith(
        "least of a: 0.90 of grouped_mm's throughput, at least 0.85, Case(experts=16, rows=2048,"
    )
    assert least[1].startswith("least of b: 0.84 of grouped_mm's throughput, BELOW 0.85, Case(experts=16, rows=2048,")
    assert len(least) == 2
