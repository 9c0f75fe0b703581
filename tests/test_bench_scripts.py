"""The scripts in benchmarks/: all sides do the same work; figures; a run on GPUs."""

import json
import subprocess
import sys
from types import SimpleNamespace

import deep_ep_speed
import float8_experts
import moe_mlp
import neighbours
import pytest
import torch
import torch.distributed as dist
from all_to_all_layer import AllToAllLayer
from lib.commands import ROOT
from lib.deep_ep_case import Case, environment

import ep_dispatcher as ep
from ep_dispatcher.engines import cuda_problem
from ep_dispatcher.tools.testing import device_of, make_routing

BENCHMARKS = str(ROOT / "benchmarks")
SIZES = dict(tokens=24, few_tokens=8, hidden=512, experts=8, topk=3)
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()] + ["--rounds=2", "--sms=8"]
NUM_PAIRS = 14  # of operations in deep_ep_speed
WITHOUT_RESULTS = ["layout", "low-latency dispatch FP8, hook", "low-latency combine, hook"]


def used(x: torch.Tensor | tuple, counts: list[int] | None) -> list[torch.Tensor]:
    """Copies of all rows, or of those that experts got."""
    parts = [t.float() for t in (x if isinstance(x, tuple) else (x,))]
    if counts is None:
        return [t.clone() for t in parts]
    return [t[expert, :count].clone() for t in parts for expert, count in enumerate(counts)]


def run_both(rank: int, engine: str) -> tuple[int, list[str]]:
    """Compare the results of both sides, where they return any. Return the number of pairs, and those without any."""
    case = deep_ep_speed.Case(engine=engine, **SIZES, sms=8, rounds=1)
    device, not_compared = torch.device(device_of(engine, rank)), []
    with (
        environment(Case(engine), EP_DISPATCHER_MAX_TOKENS_PER_RANK=str(case.tokens)),
        deep_ep_speed.pairs_of(case, rank, device) as pairs,
    ):
        for name, pair in pairs.items():
            if pair.engine is None or (theirs := pair.deep_ep()) is None:
                not_compared.append(name)
                continue
            counts = theirs[1].tolist() if name.startswith("low-latency dispatch") else None
            found, wanted = used(theirs[0], counts), used(pair.engine().x, counts)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
    return len(pairs), not_compared


def test_both_sides_do_the_same(pools, engine):
    assert pools(2).run(run_both, engine) == [(NUM_PAIRS, WITHOUT_RESULTS)] * 2


def test_a_run_on_the_cpu(tmp_path, capsys):
    deep_ep_speed.main(["--engine", "cpu", "--ranks", "2", "--out", str(tmp_path / "times.json"), *OPTIONS])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == NUM_PAIRS
    times = json.loads((tmp_path / "times.json").read_text())
    assert times["machine"]["modules"] and times["case"]["tokens"] == 24 and times["graph"] == times["notes"] == []
    sides = [side for _, side, _ in times["device"]]
    assert (sides.count("deep_ep"), sides.count("engine")) == (NUM_PAIRS, NUM_PAIRS - 1), "the layout has no twin"
    assert all(us > 0 for _, _, us in times["device"] + times["host"])


def test_lines():
    case = deep_ep_speed.Case(engine="cuda", **SIZES, sms=8, rounds=1)
    device = {("layout", "deep_ep"): 30.0, ("combine", "deep_ep"): 42.0, ("combine", "engine"): 40.0}
    host = {("layout", "deep_ep"): 50.0, ("combine", "deep_ep"): 22.0, ("combine", "engine"): 20.0}
    graph = {("combine", "deep_ep"): 41.0}
    layout, combine, note = deep_ep_speed.lines(case, 2, deep_ep_speed.Found(device, host, graph, ["a note"]))[2:]
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
    kernels = SimpleNamespace(Tile=lambda *sizes: sizes)
    for name in ("grouped_gemm_kernels", "weight_grad_kernels"):
        monkeypatch.setitem(sys.modules, f"ep_dispatcher.moe.{name}", kernels)
        monkeypatch.setattr(f"ep_dispatcher.moe.{name}", kernels, raising=False)
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


# ---- benchmarks/float8_experts.py ------------------------------------------------------------------------------------


def test_float8_beside_bfloat16(monkeypatch):
    """Decibels of both, and every operation runs."""
    monkeypatch.setattr(float8_experts, "DEVICE", "cpu")
    case = float8_experts.Case(3, 200, 144, 48)
    lost = float8_experts.decibels(case)
    assert all(22 < db < 35 for db in lost["float8"]) and all(db > 45 for db in lost["bfloat16"]), lost
    for amounts, sides in float8_experts.operations(case).values():
        assert amounts.keys() == sides.keys()
        for name, call in sides.items():
            if name not in ("PyTorch", "fast"):  # scaled_grouped_mm is not there for CPUs
                call()


# ---- benchmarks/moe_mlp.py ------------------------------------------------------------------------------------------

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 16, 8, 8, 3, 20


def given_to(rank: int, routing: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """topk_idx; x, topk_weights, w1 and w2, which want gradients."""
    idx, weights = make_routing(routing, TOKENS + rank, EXPERTS, TOPK, seed=rank)
    generator, local = torch.Generator().manual_seed(rank), EXPERTS // dist.get_world_size()
    shapes = (TOKENS + rank, HIDDEN), (local, 2 * INTERMEDIATE, HIDDEN), (local, HIDDEN, INTERMEDIATE)
    x, w1, w2 = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return idx, [t.requires_grad_() for t in (x, weights.to(dtype).float(), w1, w2)]


def make_buffer(dtype: torch.dtype, ranks_per_node: int | None = None) -> ep.Buffer:
    sizes = dict(hidden=HIDDEN, num_experts=EXPERTS, num_topk=TOPK, max_tokens_per_rank=TOKENS + 4)
    return ep.Buffer(engine="cpu", dtype=dtype, ranks_per_node=ranks_per_node, **sizes)


def plain_layer(rank: int, routing: str) -> None:
    idx, leaves = given_to(rank, routing, torch.float32)
    of_y = torch.randn_like(leaves[0])
    layer = AllToAllLayer(idx, EXPERTS, dist.group.WORLD)
    found = layer(*leaves)
    found = [found.detach(), *torch.autograd.grad(found, leaves, of_y)]
    with make_buffer(torch.float32) as buffer:
        y = ep.moe_mlp(buffer, leaves[0], idx, *leaves[1:])
        wanted = [y.detach(), *torch.autograd.grad(y, leaves, of_y)]
    for name, a, b in zip(("y", "x", "topk_weights", "w1", "w2"), found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3, msg=f"{name} differs")


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_plain_layer_computes_the_same(pools, num_ranks, routing):
    pools(num_ranks).run(plain_layer, routing)


def all_sides(rank: int, ranks_per_node: int) -> tuple[list, dict, dict]:
    """Every side, what moe_mlp chose, and the options of each path's call of ep.moe_mlp."""
    idx, leaves = given_to(rank, "uniform", torch.bfloat16)
    run, calls = ep.moe_mlp, {}
    with make_buffer(torch.bfloat16, ranks_per_node) as buffer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_mlp, "nccl_group", lambda: dist.group.WORLD)
        sides, ran = moe_mlp.sides_of(buffer, [*moe_mlp.PATHS], idx, [t.detach() for t in leaves])
        for (_, path), side in sides.items():
            patch.setattr(ep, "moe_mlp", lambda *a, path=path, **given: run(*a, **calls.setdefault(path, given)))
            side()
    return list(sides), ran, calls


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_every_side_runs(pools, ranks_per_node):
    """Each path and each path's GEMMs alone, in all passes, with its parts; the choice is that of moe_mlp."""
    for sides, ran, calls in pools(2).run(all_sides, ranks_per_node):
        assert set(sides) == {
            (name, path) for name in moe_mlp.PASSES for path in {*moe_mlp.PATHS, *moe_mlp.PATHS.values()}
        }
        assert ran == {(name, "parts"): "chose serial, " for name in moe_mlp.PASSES}
        parts = {path: (given["num_parts"], given["overlap"]) for path, given in calls.items()}
        assert parts == {
            "serial": (1, False),
            "whole": (1, True),
            "parts": (2, True),
            "parts-serial": (2, False),
        }
        rows = {path: given["max_recv_rows"] for path, given in calls.items()}
        assert rows["parts"] == rows["parts-serial"] < rows["serial"]


def test_cases_of_layers(capsys):
    few = ["--cases", "128x2048x128x768", "--sms", "16", "24", "--max-tokens", "64"]
    cases = moe_mlp.cases_of(moe_mlp.parse_args([*few, "--ranks", "4", "--ranks-per-node", "2"]))
    assert [(case.routing, case.sms) for case in cases] == [(r, s) for r in ("uniform", "skewed") for s in (16, 24)]
    assert all(case.max_tokens == case.tokens == 128 for case in cases), "never less than the case brings"
    for given, size in ([], 4), (["--ranks-per-node", "2"], 2):
        args = moe_mlp.parse_args(["--ranks", "4", *given])
        assert {case.ranks_per_node for case in moe_mlp.cases_of(args)} == {size}
    for size in ("3", "0", "-1", "8"):
        with pytest.raises(SystemExit):
            moe_mlp.parse_args(["--ranks", "4", "--ranks-per-node", size])
        assert f"--ranks-per-node is {size}, but has to be " in capsys.readouterr().err


def test_time_that_is_exposed():
    """What a path takes beyond its GEMMs: those of its own parts, or of the path that it is compared with."""
    (case, *_) = moe_mlp.cases_of(moe_mlp.parse_args(["--ranks", "2"]))
    us = {"serial": 30.0, "parts": 25.0, "nccl": 50.0, "GEMMs": 20.0, "grouped_mm": 22.0}
    times = {(name, path): value + 100 * i for i, name in enumerate(moe_mlp.PASSES) for path, value in us.items()}
    ran = dict.fromkeys(times, "CUDA graph") | {("forward", "parts"): "chose serial, CUDA graph"}
    _, *rows = moe_mlp.lines(case, moe_mlp.Measured(times, ran))
    assert [row.split()[:3] for row in rows[:3]] == [["forward", p, v] for p, v in zip(us, ("30", "25", "50"))]
    assert rows[1].split("exposed")[1].split(maxsplit=1) == ["5", "chose serial, CUDA graph"]
    assert rows[2].split("grouped_mm alone")[1].split()[:3] == ["22", "exposed", "28"]
    us = {"serial": 30.0, "parts": 21.0, "parts-serial": 40.0, "GEMMs": 20.0}
    in_parts = {(name, path): value for name in moe_mlp.PASSES for path, value in us.items()}
    rows = moe_mlp.lines(case, moe_mlp.Measured(in_parts, dict.fromkeys(in_parts, "CUDA graph")))[1:4]
    assert [row.split("exposed")[1].split()[0] for row in rows] == ["10", "1", "20"]


@pytest.mark.skipif(bool(cuda_problem()), reason=f"needs a usable GPU: {cuda_problem()}")
def test_a_run_of_layers():
    ranks = min(2, torch.cuda.device_count())
    options = ["--ranks", str(ranks), "--cases", "64x256x16x128", "--rounds", "2", "--routings", "skewed"]
    run = subprocess.run(
        [sys.executable, f"{BENCHMARKS}/moe_mlp.py", *options], capture_output=True, text=True, timeout=300, check=True
    )
    assert sum(" exposed" in line for line in run.stdout.splitlines()) == 2 * len(moe_mlp.PASSES), run.stdout


# ---- benchmarks/neighbours.py ---------------------------------------------------------------------------------------


def test_what_runs_beside_has_the_figures_of_the_slowest_rank(capsys):
    ranks = [{"alone": 44.0, "beside": 66.0}, {"alone": 45.5, "beside": 60.0}]
    assert neighbours.report("decode", ranks) == {"alone": 45.5, "beside": 66.0}
    assert neighbours.report("waiting", [{"copy": 1.02}, {}]) == {"copy": 1.02}, "rank 0 alone measures"
    printed = capsys.readouterr().out
    assert "45.5 us" in printed and "1.020" in printed


@pytest.mark.skipif(bool(cuda_problem()), reason=f"needs a usable GPU: {cuda_problem()}")
def test_a_run_of_neighbours(tmp_path):
    options = ["--ranks", "2", "--rounds", "1", "--only", "decode", "--json", str(tmp_path / "found.json")]
    subprocess.run([sys.executable, f"{BENCHMARKS}/neighbours.py", *options], timeout=300, check=True)
    assert len(json.loads((tmp_path / "found.json").read_text())["decode"]) == 4
