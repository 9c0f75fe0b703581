"""benchmarks/time_line.py and the build with stamps: what can be tested without a GPU; with one also a run."""

import importlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import time_line as script
import torch
from lib.commands import ROOT
from lib.cuda_build import needs_module, needs_nvcc

from ep_dispatcher.engines import cuda_problem

SCRIPT = ROOT / "benchmarks" / "time_line.py"
MACHINE = {"gpus": ["NVIDIA H200"], "git_commit": "abc", "date": "2026-11-22T10:00:00+00:00"}
SOURCE = (ROOT / "csrc/cuda/device/stamps.h").read_text()
STEPS = re.findall(r'"([\w ]+)"', SOURCE.partition("kStepNames[] = {")[2].partition("}")[0])
BEGIN = 1_700_000_000_000_000_000  # of a clock in ns


def stamped(by_warp: dict[tuple[int, int], dict[str, float]], blocks: int = 3) -> torch.Tensor:
    """The stamps of one operation in one launch, from microseconds by block and warp."""
    stamps = torch.zeros(2, blocks, 20, len(STEPS), dtype=torch.int64)
    for (block, warp), times in by_warp.items():
        for name, us in times.items():
            stamps[0, block, warp, STEPS.index(name)] = BEGIN + round(us * 1000)
    return stamps


def a_dispatch(later: float = 0) -> torch.Tensor:
    """Two pull warps, a pull warp of block 0, and a stage warp; block 2 is the last one."""
    first = {"dispatch": 0.0 + later, "memory free": 1 + later, "announced": 3 + later, "agreed": 5 + later}
    mover = {"dispatch": 0.5 + later, "agreed": 6 + later, "rows stored": 16 + later}
    slow = {"dispatch": 1.5 + later, "agreed": 7 + later, "rows stored": 21 + later}
    slow |= {"block ended": 22 + later, "last block": 23 + later, "complete": 25 + later}
    helper = {"dispatch": 0.5 + later, "memory free": 1.5 + later, "staged": 4 + later}
    return stamped({(0, 0): first, (1, 0): mover, (2, 1): slow, (1, 8): helper})


def a_combine(later: float = 0) -> torch.Tensor:
    begin = {"combine": 0.0 + later}
    pushes = begin | {"pushes stored": 9 + later, "sums stored": 15 + later}
    reduces = begin | {"sums stored": 13 + later}
    return stamped({(0, 2): begin | {"agreed": 4 + later}, (1, 3): pushes, (1, 4): pushes, (2, 3): reduces})


def steps_by_name(run: dict) -> dict:
    return {(step.lane, step.name): step for step in run["steps"]}


def test_a_step_lasts_from_the_stamp_before_it_to_its_own():
    run = script.run_of(a_dispatch(), STEPS)
    steps = steps_by_name(run)
    assert run["us"] == 25
    assert steps["dispatch: pull warps, block 0", "announced"][2:] == (1, 3, 3, 2)
    assert steps["dispatch: pull warps, other blocks", "agreed"][2:] == (1, 6.5, 7, 5.5)  # medians of two, and the last
    assert steps["dispatch: stage warps, other blocks", "staged"][2:] == (1.5, 4, 4, 2.5)
    assert steps["dispatch: last block", "complete"][2:] == (23, 25, 25, 2)
    steps = steps_by_name(script.run_of(a_combine(), STEPS))
    assert steps["combine: summing warps, pushing blocks", "sums stored"].us == 6
    assert steps["combine: summing warps, reducing blocks", "sums stored"].us == 13
    begin = {"dispatch": 0.0, "calls exchanged": 5}
    relay = begin | {"all chunks relayed": 90, "block ended": 95}
    sender = begin | {"first chunk sent": 20, "items sent": 30, "all chunks sent": 80, "block ended": 95}
    rail = stamped({(0, 0): {"dispatch": 0.0, "agreed": 6}, (1, 0): relay, (1, 1): sender, (1, 2): sender})
    steps = steps_by_name(script.run_of(rail, STEPS))
    assert steps["dispatch: senders", "first chunk sent"][2:] == (5, 20, 20, 15)
    assert steps["dispatch: relays", "all chunks relayed"][2:] == (5, 90, 90, 85)


def test_launches_and_operations_are_ordered_by_time():
    """The ring of operations begins anywhere."""
    helper, mover = {(0, 8): {"dispatch": 0.0, "staged": 4}}, {(0, 0): {"dispatch": 0.0, "planned": 9}}
    in_two_launches = torch.stack([stamped(helper | mover)[0], a_dispatch(20)[0]])
    run = script.run_of(in_two_launches, STEPS)
    lanes = list(dict.fromkeys(step.lane for step in run["steps"]))
    assert ["launch 1" in lane for lane in lanes] == [True] * 2 + [False] * 4
    ring = torch.stack([a_combine(40), torch.zeros_like(a_combine()), a_dispatch()], dim=1)
    runs = [script.run_of(stamps, STEPS) for stamps in script.operations_in(ring)]
    assert [(run["zero_ns"] - BEGIN, run["us"]) for run in runs] == [(0, 25), (40_000, 15)]


def test_the_rank_with_the_longest_median_run_is_shown(tmp_path, capsys):
    sizes = dict(tokens=128, hidden=7168, experts=256, sms=24, layout="decode", ranks_per_node=None)
    found = {"one_us": 30.0, "gap_us": 4.5, "clock_step_ns": 32}
    run = script.run_of(a_dispatch(), STEPS)
    ranks = [found | {"runs": [run | {"us": us} for us in times]} for times in ([30, 31, 90], [33, 40, 38])]
    made_up = {"machine": MACHINE, "operation": "dispatch", "ranks": 2, **sizes, **script.slowest(ranks)}
    assert (made_up["rank"], made_up["us"], made_up["runs"]) == (1, 38, 3)
    pytest.importorskip("matplotlib")
    path = tmp_path / "dispatch.json"
    path.write_text(json.dumps(made_up))
    script.main(["--draw", str(path)])
    assert "| dispatch: pull warps, other blocks | rows stored | 6.5 | 18.5 | 21.0 | 12.0 |" in capsys.readouterr().out
    assert path.with_suffix(".svg").read_bytes().count(b"<g id=") > 20


def test_roles_are_those_of_the_kernels():
    dispatch, pipeline = (
        (ROOT / f"csrc/cuda/{name}.cuh").read_text() for name in ("dispatch/dispatch", "combine/pipeline")
    )
    threads = re.search(r"kPullThreads = (\d+);.*?kStageThreads = [^?]+\? (\d+)", dispatch, re.DOTALL).groups()
    assert [int(number) // 32 for number in threads] == [len(warps) for warps in script.ROLES["dispatch"].values()]
    numbers = [int(re.search(rf"k{name}Warps = (\d+)", pipeline)[1]) for name in ("Issuing", "Summing")]
    roles = script.ROLES["combine"]
    assert numbers == [len(roles["issuing warps"]), len(roles["summing warps"])]
    assert roles["preparing warp"] == range(numbers[0], numbers[0] + 1)


# ---- the build ------------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("define, reads", [([], False), (["-DEP_STAMPS"], True)])
def test_without_stamps_nothing_is_compiled(tmp_path, define, reads):
    """A kernel that does nothing but stamp reads the clock, or is empty."""
    source = tmp_path / "kernel.cu"
    source.write_text("""
#include "cuda/context.h"
using namespace ep::cuda;
struct Op { const Context& context; unsigned long long epoch; };
__global__ void kernel(const __grid_constant__ Context context) { stamp(Op{context, 3}, Step::kComplete); }
""")
    flags = ["-std=c++17", "-gencode=arch=compute_90a,code=compute_90a", "--expt-relaxed-constexpr"]
    flags += [f"-I{ROOT / 'csrc'}"]
    command = ["nvcc", "-O3", *flags, *define, "-ptx", str(source), "-o", str(tmp_path / "kernel.ptx")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    body = (tmp_path / "kernel.ptx").read_text().partition("\n{")[2].partition("}")[0]
    assert ("globaltimer" in body) == reads
    if not reads:
        assert body.split() == ["ret;"]


@needs_module
def test_the_module_names_the_steps():
    from ep_dispatcher import _C_cuda

    assert _C_cuda.steps == STEPS and len(set(STEPS)) == len(STEPS) > 20
    assert (_C_cuda.stamped_launches, _C_cuda.stamped_operations, _C_cuda.stamped_warps) == (2, 8, 20)


@needs_module
def test_stamps_are_read_once(monkeypatch):
    """From memory that the kernels write: cleared after each call, which leaves the next operations alone."""
    from ep_dispatcher.engines.cuda.engine import CudaEngine

    with pytest.raises(RuntimeError, match="EP_DISPATCHER_STAMPS=1"):
        CudaEngine.stamps(SimpleNamespace(_compiled=SimpleNamespace(has_stamps=False)))
    monkeypatch.setattr("ep_dispatcher.engines.cuda.engine.wait_for_device", lambda *_: None)
    sizes = dict(stamped_launches=2, stamped_operations=8, stamped_warps=20)
    compiled = SimpleNamespace(has_stamps=True, steps=STEPS, **sizes)
    given = []
    engine = SimpleNamespace(_compiled=compiled, _stamps=None, all_sms=3, _device="cpu", _start_limit_s=1.0)
    engine._c = SimpleNamespace(stamp_into=lambda *them: given.append(them))
    assert not CudaEngine.stamps(engine).any() and given == [(engine._stamps.data_ptr(), 3)]
    engine._stamps[1, 3, 1, 15, 26] = 7
    found = CudaEngine.stamps(engine)
    assert found.shape == (2, 8, 3, 20, len(STEPS)) and found.nonzero().tolist() == [[1, 3, 1, 15, 26]]
    assert not CudaEngine.stamps(engine).any() and len(given) == 1


HAS_STAMPS = cuda_problem() is None and importlib.import_module("ep_dispatcher._C_cuda").has_stamps


@pytest.mark.skipif(not HAS_STAMPS, reason="no GPU, or built without stamps")
@pytest.mark.parametrize("operation", ["dispatch FP8", "combine"])
@pytest.mark.parametrize("nodes", [[], ["--ranks-per-node", "1", "--layout", "rank"]])
def test_a_run(operation, nodes, tmp_path):
    sizes = "--tokens 16 --hidden 512 --experts 16 --sms 4 --ranks 2 --replays 3".split()
    command = [sys.executable, SCRIPT, operation, *sizes, *nodes, "--out", tmp_path]
    found = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    (path,) = tmp_path.glob("*.json")
    run = json.loads(path.read_text())
    assert run["runs"] == 3 * 6 and 0 < run["us"] < 1e4
    names = {name for _, name, *_ in run["steps"]}
    assert names >= {"memory free", "announced", "agreed", "block ended", "last block", "complete"}
    assert (names >= {"calls exchanged", "all chunks sent", "all chunks relayed"}) == bool(nodes)
    assert all(0 <= begin <= end <= last + 1e-3 for _, _, begin, end, last, _ in run["steps"])
