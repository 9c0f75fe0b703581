"""benchmarks/moe_mlp.py: the layer that it compares with, its calls on the CPU engine, its lines; with a GPU a run."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from commands import ROOT

import ep_dispatcher as ep
from ep_dispatcher.engines import cuda_problem
from ep_dispatcher.tools.testing import make_routing

BENCHMARKS = str(ROOT / "benchmarks")
HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 16, 8, 8, 3, 20


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import moe_mlp

    return moe_mlp


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
    sys.path.insert(0, BENCHMARKS)
    from all_to_all_layer import AllToAllLayer

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


def all_sides(rank: int, ranks_per_node: int) -> tuple[list, dict]:
    sys.path.insert(0, BENCHMARKS)
    import moe_mlp

    moe_mlp._nccl[:] = [dist.group.WORLD]
    idx, leaves = given_to(rank, "uniform", torch.bfloat16)
    with make_buffer(torch.bfloat16, ranks_per_node) as buffer:
        sides, ran = moe_mlp.sides_of(buffer, [*moe_mlp.PATHS], idx, [t.detach() for t in leaves])
        for side in sides.values():
            side()
    return list(sides), ran


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_every_side_runs(pools, script, ranks_per_node):
    """Each path and each path's GEMMs alone, in both passes; the choice is that of moe_mlp."""
    for sides, ran in pools(2).run(all_sides, ranks_per_node):
        assert set(sides) == {
            (name, path) for name in script.PASSES for path in {*script.PATHS, *script.PATHS.values()}
        }
        assert ran == {(name, "parts"): "chose serial, " for name in script.PASSES}


def test_cases(script, capsys):
    few = ["--cases", "128x2048x128x768", "--sms", "16", "24", "--max-tokens", "64"]
    cases = script.cases_of(script.parse_args([*few, "--ranks", "4", "--ranks-per-node", "2"]))
    assert [(case.routing, case.sms) for case in cases] == [(r, s) for r in ("uniform", "skewed") for s in (16, 24)]
    assert all(case.max_tokens == case.tokens == 128 for case in cases), "never less than the case brings"
    for given, size in ([], 4), (["--ranks-per-node", "2"], 2):
        assert {case.ranks_per_node for case in script.cases_of(script.parse_args(["--ranks", "4", *given]))} == {size}
    for size in ("3", "0", "-1", "8"):
        with pytest.raises(SystemExit):
            script.parse_args(["--ranks", "4", "--ranks-per-node", size])
        assert f"--ranks-per-node: given {size}, allowed: " in capsys.readouterr().err


def test_time_that_is_exposed(script):
    """What a path takes beyond its GEMMs: those of its own parts, or of the path that it is compared with."""
    (case, *_) = script.cases_of(script.parse_args(["--ranks", "2"]))
    us = {"serial": 30.0, "parts": 25.0, "nccl": 50.0, "GEMMs": 20.0, "grouped_mm": 22.0}
    times = {(name, path): value + 100 * i for i, name in enumerate(script.PASSES) for path, value in us.items()}
    ran = dict.fromkeys(times, "CUDA graph") | {("forward", "parts"): "chose serial, CUDA graph"}
    _, *rows = script.lines(case, script.Measured(times, ran))
    assert [row.split()[:3] for row in rows[:3]] == [["forward", p, v] for p, v in zip(us, ("30", "25", "50"))]
    assert rows[1].split("exposed")[1].split(maxsplit=1) == ["5", "chose serial, CUDA graph"]
    assert rows[2].split("grouped_mm alone")[1].split()[:3] == ["22", "exposed", "28"]
    us = {"serial": 30.0, "parts": 21.0, "parts-serial": 40.0, "GEMMs": 20.0}
    in_parts = {(name, path): value for name in script.PASSES for path, value in us.items()}
    rows = script.lines(case, script.Measured(in_parts, dict.fromkeys(in_parts, "CUDA graph")))[1:4]
    assert [row.split("exposed")[1].split()[0] for row in rows] == ["10", "1", "20"]


def test_what_each_path_runs(pools, script):
    """Parts and overlap of every call of ep.moe_mlp."""
    calls = pools(2).run(calls_of_paths)[0]
    assert {path: (found["num_parts"], found["overlap"]) for path, found in calls.items()} == {
        "serial": (1, False),
        "parts": (2, True),
        "parts-serial": (2, False),
    }
    assert calls["parts"]["max_recv_rows"] == calls["parts-serial"]["max_recv_rows"] < calls["serial"]["max_recv_rows"]


def calls_of_paths(rank: int) -> dict:
    sys.path.insert(0, BENCHMARKS)
    import moe_mlp

    idx, leaves = given_to(rank, "uniform", torch.bfloat16)
    found, paths = {}, [path for path in moe_mlp.PATHS if path != "nccl"]
    with make_buffer(torch.bfloat16, 1) as buffer, pytest.MonkeyPatch.context() as patch:
        sides, _ = moe_mlp.sides_of(buffer, paths, idx, [t.detach() for t in leaves])
        for path in paths:
            patch.setattr(ep, "moe_mlp", lambda *given, path=path, **options: found.setdefault(path, options))
            sides["forward", path]()
    return found


@pytest.mark.skipif(bool(cuda_problem()), reason=f"needs a usable GPU: {cuda_problem()}")
def test_a_run(script):
    ranks = min(2, torch.cuda.device_count())
    options = ["--ranks", str(ranks), "--cases", "64x256x16x128", "--rounds", "2", "--routings", "skewed"]
    run = subprocess.run(
        [sys.executable, f"{BENCHMARKS}/moe_mlp.py", *options], capture_output=True, text=True, timeout=300, check=True
    )
    assert sum(" exposed" in line for line in run.stdout.splitlines()) == 4, run.stdout
