"""benchmarks/deep_ep_speed.py and grouped_gemm.py: all sides do the same work, and figures; with a GPU a run."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT
from deep_ep_case import Case, environment

import ep_dispatcher as ep
from ep_dispatcher.engines import cuda_problem
from ep_dispatcher.tools.testing import device_of

BENCHMARKS = str(ROOT / "benchmarks")
SIZES = dict(tokens=24, few_tokens=8, hidden=512, experts=8, topk=3)
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()] + ["--rounds=2", "--sms=8"]
NAMES = [
    "layout",
    "dispatch, host waits",
    "dispatch, ranks agree",
    "dispatch",
    "dispatch FP8, host waits",
    "dispatch FP8",
    "cached dispatch",
    "combine",
    "combine with weights",
    "low-latency dispatch FP8",
    "low-latency dispatch FP8, hook",
    "low-latency dispatch",
    "low-latency combine",
    "low-latency combine, hook",
]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import deep_ep_speed

    return deep_ep_speed


def used(x: torch.Tensor | tuple, counts: list[int] | None) -> list[torch.Tensor]:
    """Copies of all rows, or of those that experts got."""
    parts = [t.float() for t in (x if isinstance(x, tuple) else (x,))]
    if counts is None:
        return [t.clone() for t in parts]
    return [t[expert, :count].clone() for t in parts for expert, count in enumerate(counts)]


def run_both(rank: int, engine: str) -> list[str]:
    """Compare the results of both sides, where they return any. Return the names of what was compared."""
    sys.path.insert(0, BENCHMARKS)
    import deep_ep_speed
    import torch.distributed as dist

    case = deep_ep_speed.Case(engine=engine, **SIZES, sms=8, rounds=1)
    device, compared = torch.device(device_of(engine, rank)), []
    sizes = dict(hidden=case.hidden, num_experts=case.experts, num_topk=case.topk, num_sms=case.sms, engine=engine)
    with environment(Case(engine), EP_DISPATCHER_MAX_TOKENS_PER_RANK=str(case.tokens)):
        buffer = deep_ep_speed.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
        with (
            ep.Buffer(max_tokens_per_rank=case.tokens, **sizes) as own,
            ep.Buffer(max_tokens_per_rank=case.few_tokens, **sizes) as decode,
        ):
            pairs = deep_ep_speed.rank_layout(buffer, own, case, rank, device)
            pairs |= deep_ep_speed.low_latency(buffer, decode, case, rank, device)
            for name, pair in pairs.items():
                if pair.engine is None or (theirs := pair.deep_ep()) is None:
                    continue
                counts = theirs[1].tolist() if name.startswith("low-latency dispatch") else None
                found, wanted = used(theirs[0], counts), used(pair.engine().x, counts)
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
                compared.append(name)
        buffer.destroy()
    return compared


def test_both_sides_do_the_same(pools, engine):
    without_results = {"layout", "low-latency dispatch FP8, hook", "low-latency combine, hook"}
    for compared in pools(2).run(run_both, engine):
        assert compared == [name for name in NAMES if name not in without_results]


def test_a_run_on_the_cpu(script, tmp_path, capsys):
    script.main(["--engine", "cpu", "--ranks", "2", "--out", str(tmp_path / "times.json"), *OPTIONS])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(NAMES)
    times = json.loads((tmp_path / "times.json").read_text())
    assert times["machine"]["modules"] and times["case"]["tokens"] == 24 and times["graph"] == times["notes"] == []
    assert [name for name, side, _ in times["device"] if side == "deep_ep"] == NAMES
    assert all(us > 0 for _, _, us in times["device"] + times["host"])


def test_lines(script):
    case = script.Case(engine="cuda", **SIZES, sms=8, rounds=1)
    device = {("layout", "deep_ep"): 30.0, ("combine", "deep_ep"): 42.0, ("combine", "engine"): 40.0}
    host = {("layout", "deep_ep"): 50.0, ("combine", "deep_ep"): 22.0, ("combine", "engine"): 20.0}
    graph = {("combine", "deep_ep"): 41.0}
    layout, combine, note = script.lines(case, 2, script.Found(device, host, graph, ["a note"]))[2:]
    assert layout.split() == ["layout", "30.0", "50.0"] and note == "a note"
    assert combine.split() == ["combine", "42.0", "40.0", "1.050", "22.0", "20.0", "1.100", "41.0"]


@pytest.mark.skipif(bool(cuda_problem()), reason=f"needs a usable GPU: {cuda_problem()}")
def test_a_run_on_gpus(tmp_path):
    command = [sys.executable, f"{BENCHMARKS}/deep_ep_speed.py", "--engine", "cuda", "--out", str(tmp_path / "x.json")]
    command += ["--ranks", str(min(2, torch.cuda.device_count())), *OPTIONS]
    subprocess.run(command, check=True, timeout=300)
    times = json.loads((tmp_path / "x.json").read_text())
    assert times["notes"] == [], "a capture has failed"
    assert {(name, side) for name, side, _ in times["graph"]} == {
        (name, side) for name, side, _ in times["device"] if "host waits" not in name and "agree" not in name
    }


# ---- benchmarks/grouped_gemm.py -------------------------------------------------------------------------------------


@pytest.fixture
def gemm(monkeypatch):
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
def test_every_side_of_a_grouped_gemm_runs(gemm, skew):
    """operations() itself compares ours with grouped_mm."""
    case, seen = gemm.Case(4, 64, 32, 48, skew), {}
    for name, sides in gemm.operations(case, []):
        seen[name] = {side: call() for side, call in sides.items()}
    assert set(seen) == {"forward", "grad of rows", "grad of W", "grad of W, +="}
    assert all({"ours", "grouped_mm"} <= set(sides) for sides in seen.values())
    assert all("one expert" in sides for name, sides in seen.items() if name != "grad of W, +=")
    assert seen["forward"]["one expert"].shape == (case.rows // case.experts, case.n)
    assert seen["grad of W, +="]["grouped_mm"].dtype == torch.float32


def test_a_line_of_a_grouped_gemm(gemm):
    case = gemm.Case(4, 4000, 1000, 500)  # 4 GFLOP in all
    line = gemm.line(case, {"ours": 50.0, "grouped_mm": 40.0, "one expert": 10.0})
    assert line == "ours 50 (80)   grouped_mm 40 (100)   one expert 10 (100)   0.80 of grouped_mm"
    assert gemm.line(case, {"ours": 50.0}) == "ours 50 (80)", "grouped_mm could not run"


def test_the_least_is_held_against_the_bar(gemm, monkeypatch, capsys):
    figures = iter([{"ours": 10.0, "grouped_mm": us} for us in (9.0, 8.4, 9.5, 8.6)] + [{"ours": 1.0}] * 2)
    monkeypatch.setattr(gemm, "operations", lambda case, tiles: [("a", {}), ("b", {})])
    monkeypatch.setattr(gemm, "time_sides", lambda sides, rounds: next(figures))
    monkeypatch.setattr(gemm, "host_times", dict)
    monkeypatch.setattr(sys, "argv", ["grouped_gemm.py", "--even", "--cases", "0", "1", "2"])
    gemm.main()
    least = [line for line in capsys.readouterr().out.splitlines() if line.startswith("least of")]
    assert [line.split(", Case")[0] for line in least] == [
        "least of a: 0.90 of grouped_mm's throughput, at least 0.85",
        "least of b: 0.84 of grouped_mm's throughput, BELOW 0.85",
    ]
