"""The benchmark: a tiny run with the CPU engine, its JSON, its cases, its errors, and a stand-in for DeepEP."""

import importlib
import importlib.util
import json
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lib.commands import ROOT, torchrun

from ep_dispatcher.integrations import deep_ep as stand_in
from ep_dispatcher.integrations.deep_ep.config import topk_idx_t
from ep_dispatcher.tools import bench
from ep_dispatcher.tools.benchmark import measurements, suite
from ep_dispatcher.tools.benchmark.cases import HOT, OPERATIONS, PASSES, STANDARD, Case, suite_cases
from ep_dispatcher.tools.benchmark.clock import HostClock, Part
from ep_dispatcher.tools.benchmark.measurements import BASELINES, ENGINE, GRAPH
from ep_dispatcher.tools.benchmark.ranks import TorchrunRanks
from ep_dispatcher.tools.benchmark.wires import WIRES
from ep_dispatcher.tools.testing import make_hot_routing, make_routing

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK, ITERS = 4, 48, 64, 8, 3, 3
ALL_TO_ALL = BASELINES["all_to_all"]
MEGATRON, DEEP_EP = "ep_dispatcher.tools.benchmark.megatron", "ep_dispatcher.tools.benchmark.deep_ep"
DECODE = "ep_dispatcher.tools.benchmark.decode"
CASE = Case(2, engine="cpu", tokens=24, hidden=128, experts=16, topk=4, iters=3, warmup=1)
MACHINE = {"gpus": [], "cpu": "a CPU"}
RESULTS = ROOT / "benchmarks" / "results"
TINY = f"--ranks {RANKS} --tokens {TOKENS} --hidden {HIDDEN} --experts {EXPERTS} --topk {TOPK} --warmup 1".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The JSON of one node, and of two."""
    folder = tmp_path_factory.mktemp("bench")
    assert bench.main([*TINY, "--iters", str(ITERS), "--routing", "masked", "--out", str(folder)]) == 0
    name = f"cpu-{RANKS}ranks-{TOKENS}tokens-{HIDDEN}hidden-{EXPERTS}experts-top{TOPK}-bfloat16-masked-expert"
    return [json.loads((folder / f"{name}{nodes}.json").read_text()) for nodes in ("", "-2per_node")]


def rows_of_baseline(ranks_per_node):
    """Rows of all ranks over every wire, token by token."""
    rows = dict.fromkeys(WIRES, 0)
    for src in range(RANKS):
        topk_idx, _ = make_routing("masked", TOKENS, EXPERTS, TOPK, seed=src)
        for expert in topk_idx[topk_idx >= 0].tolist():
            dst = expert // (EXPERTS // RANKS)
            is_near = (src // ranks_per_node == dst // ranks_per_node) + (src == dst)  # in the order of WIRES
            rows[WIRES[is_near]] += 1
    return rows


def least_rows(ranks_per_node):
    """The fewest rows over every wire, token by token: once to each other node, then once to each rank of it."""
    rows = dict.fromkeys(WIRES, 0)
    for src in range(RANKS):
        topk_idx, _ = make_routing("masked", TOKENS, EXPERTS, TOPK, seed=src)
        for token in topk_idx.tolist():
            receivers = {expert // (EXPERTS // RANKS) for expert in token if expert >= 0}
            nodes = {receiver // ranks_per_node for receiver in receivers}
            rows["between nodes"] += len(nodes - {src // ranks_per_node})
            for receiver in receivers:
                is_rail_peer = receiver % ranks_per_node == src % ranks_per_node
                rows["local" if is_rail_peer else "inside nodes"] += 1
    return rows


def test_both_topologies_and_same_results(runs):
    assert [run["case"]["ranks_per_node"] for run in runs] == [None, 2]
    for run in runs:
        assert set(run["compared"]) == set(BASELINES.values()) and run["notes"] == []
        for compared in run["compared"].values():
            assert compared["same"] and compared["largest_relative_error"] <= compared["allowed"]
        assert run["machine"]["git_commit"] and len(run["machine"]["modules"]["_C_cpu"]) == 12, "the build"
        for operation, sides in run["seconds"].items():
            row = {"dispatch FP8": HIDDEN + 4, "dispatch, quantize": HIDDEN + 4}.get(operation, 2 * HIDDEN)
            for side, times in sides.items():
                figures = run["operations"][operation][side]
                assert [figures["min_s"], figures["median_s"], figures["max_s"]] == sorted(times)
                moved = run["received_rows"] * row * PASSES[operation] / RANKS
                assert figures["gb_per_s"] == round(moved / figures["median_s"] / 1e9, 3)


@pytest.mark.parametrize("nodes", [1, 2])
def test_bytes_over_the_wires(runs, nodes):
    """The engine moves the fewest bytes that are possible, and headings between nodes."""
    run = runs[nodes - 1]
    baseline, least = rows_of_baseline(RANKS // nodes), least_rows(RANKS // nodes)
    assert run["received_rows"] == sum(baseline.values())
    for moved in run["wire_bytes"].values():
        headings = 192 * RANKS * (nodes - 1)  # one in front of what goes to a node, in lines of 64 bytes
        expected = moved["least"] | {"between nodes": moved["least"]["between nodes"] + headings}
        assert moved["engine"] == expected
        assert moved["least"] == {wire: rows * HIDDEN * 2 for wire, rows in least.items()}
        assert moved["baseline"] == {wire: rows * HIDDEN * 2 for wire, rows in baseline.items()}


@pytest.mark.exhaustive
def test_ranks_of_torchrun(tmp_path):
    command = ("-m", "ep_dispatcher.bench", "--tokens", "16", "--hidden", "64", "--experts", "8", "--topk", "2")
    code, output, errors = torchrun(2, *command, "--iters", "1", "--warmup", "0", "--out", str(tmp_path))
    assert code == 0, errors
    runs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [run["case"]["ranks_per_node"] for run in runs] == [1, None]
    assert all(compared["same"] for run in runs for compared in run["compared"].values())
    assert output.count("median of 1") == 2, "a table for each case, from one rank"


# ---- cases ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def cases(arguments):
    return bench.parse_args(arguments.split(), None).cases


def test_cases_of_the_cpu():
    standard = STANDARD["cpu"]
    halves = Case(4, "cpu", 1024, 1024, 64, 8, ranks_per_node=2, others=("all_to_all", "fast_sum"))
    assert cases("") == [standard, halves]
    assert [case.tokens for case in cases("--tokens 1,2 --ranks-per-node 4")] == [1, 2]
    alone = Case(3, "cpu", 1024, 1024, 12, 8, threads=2, others=("a.module",))
    assert cases("--ranks 3 --experts 12 --no-baseline --with a.module --threads 2") == [alone]


def test_cases_of_gpus(four_gpus):
    assert cases("--engine cuda") == [Case(4)] and cases("--engine cuda --ranks 2") == [Case(2)]
    expected = [Case(4, tokens=t, sms=s, topk=1, graph=True, others=()) for t in (256, 512) for s in (8, 12)]
    assert cases("--engine cuda --sms 8,12 --tokens 256,512 --graph --no-baseline --topk 1") == expected
    both = cases("--engine cuda --ranks-per-node 4 2")
    assert both == [Case(4), Case(4, ranks_per_node=2)]
    assert [case.name.partition("24sms")[2] for case in both] == ["", "-2per_node"]
    args = bench.parse_args("--engine cuda --ranks 2 --suite somewhere --iters 5 --with a b".split(), None)
    assert args.cases == list(suite_cases(2, ["a", "b"], iters=5)) and args.out.name == "somewhere"


@pytest.mark.parametrize(
    "argument, arguments",
    [
        ("--ranks", "--ranks 0"),
        ("--experts", "--experts 6"),
        ("--topk", "--topk 65"),
        ("--ranks-per-node", "--ranks-per-node 4 3"),
        ("--warmup", "--warmup -1"),
        ("--sms", "--engine cuda --sms 8,0"),
        ("--ranks", "--engine cuda --ranks 8"),
        ("--ranks-per-node", "--engine cuda --ranks 2 --ranks-per-node 3"),
        ("--topk", "--engine cuda --suite x --topk 2"),
        ("--baseline", "--engine cuda --suite x --no-baseline"),
        ("num_topk", "--routing hot_rank --experts 8 --topk 3"),
        ("--sms", "--sms 8"),
        ("--suite", "--suite x"),
        ("--graph", "--graph"),
        ("--tokens", "--tokens a"),
        ("--out", "--out setup.py"),
        ("--compare", "--compare setup.py nowhere"),
        ("--tolerance", "--compare . . --tolerance -1"),
    ],
)
def test_bad_arguments(argument, arguments, four_gpus, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    assert re.search(f"error: (argument )?{argument}.* but has to be ", capsys.readouterr().err)


@pytest.mark.parametrize("gpus, argument", [(0, "--engine is cuda"), (1, "--ranks is 2 on a host")])
def test_cuda_needs_a_gpu_for_each_rank_of_torchrun(monkeypatch, capsys, gpus, argument):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        bench.parse_args(["--engine", "cuda"], 4)
    assert argument in capsys.readouterr().err


def test_gpus_of_torchrun(monkeypatch):
    """Two hosts with two GPUs each. Each rank takes the GPU of its number on its host."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert bench.parse_args(["--engine", "cuda"], 4).cases == [Case(4, ranks_per_node=2)]
    suite_of_hosts = bench.parse_args(["--engine", "cuda", "--suite", "somewhere"], 4).cases
    assert suite_of_hosts == list(suite_cases(4, ranks_per_node=2))
    made = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", made.append)
    TorchrunRanks(torch.get_num_threads(), suite.BACKENDS["cuda"])
    assert made == [1, "cpu:gloo,cuda:nccl"]


# ---- how a case is measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, topk", [(1, 2), (4, 8), (8, 8), (8, 1), (6, 4)])
def test_hot_routing_gives_one_rank_four_times_the_mean(ranks, topk):
    tokens, experts = 240, 16 * ranks
    share = min(1, 4 / ranks)
    rows = torch.zeros(ranks, dtype=torch.int64)
    for seed in range(ranks):
        idx, weights = make_hot_routing(tokens, experts, topk, ranks, seed=seed)
        assert idx.shape == weights.shape == (tokens, topk) and idx.dtype == torch.int64
        assert idx.min() >= 0 and idx.max() < experts and (weights > 0).all()
        assert (idx.sort(1).values.diff() > 0).all(), "an expert twice in a row"
        rows += torch.bincount(idx.flatten() // 16, minlength=ranks)
    assert abs(int(rows[0]) - share * tokens * topk * ranks) <= ranks
    if ranks > 4:
        assert rows[0] / rows.double().mean() == pytest.approx(4, rel=0.01)
        others = rows[1:].double()
        assert (others / others.mean() - 1).abs().max() < 0.3


def test_the_suite_has_every_case():
    cases = list(suite_cases(4))
    assert len({case.name for case in cases}) == len(cases) and cases[0] == Case(4, graph=True)
    measured = {path.stem for path in RESULTS.glob("cuda-*.json")}
    assert {case.name for case in cases} == measured, "the results of docs/performance.md are those of the suite"
    beside = [c for c in suite_cases(4, [MEGATRON, DEEP_EP], iters=5) if MEGATRON in c.others]
    assert [(c.others, c.iters) for c in beside] == [(("all_to_all", MEGATRON, DEEP_EP), 5)] * 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three cases on the CPU engine: in expert layout, with one hot rank, and in rank layout."""
    folder = tmp_path_factory.mktemp("results")
    cases = [CASE, replace(CASE, routing=HOT, graph=True), replace(CASE, layout="rank", dtype="float32")]
    code = suite.run(cases, MACHINE, folder)
    return code, [json.loads((folder / f"{case.name}.json").read_text()) for case in cases]


def test_cases_are_measured(results):
    code, runs = results
    assert code == 0
    for run in runs:
        operations = OPERATIONS if run["case"]["dtype"] == "bfloat16" else [n for n in OPERATIONS if "8" not in n]
        assert set(operations) - {"dispatch, quantize"} == set(run["operations"]) - {"dispatch, quantize"}
        for operation, sides in run["operations"].items():
            assert list(sides) == [ENGINE] if operation in OPERATIONS[1:3] else [ENGINE, ALL_TO_ALL]
            for side, figures in sides.items():
                assert len(run["seconds"][operation][side]) == CASE.iters
                assert 0 < figures["min_s"] <= figures["median_s"] <= figures["max_s"]
        assert run["compared"][ALL_TO_ALL]["same"]
        for moved in run["wire_bytes"].values():
            assert moved["engine"] == moved["least"]
    uniform, hot, by_rank = runs
    assert uniform["received_rows"] == 2 * 24 * 4 > uniform["max_recv_rows"] >= 24 * 4
    assert hot["received_rows"] == hot["max_recv_rows"] == 2 * 24 * 4
    assert by_rank["max_recv_rows"] <= 2 * 24


def test_what_fails_is_a_note(results):
    """There are no CUDA graphs here: everything else of the case is measured all the same."""
    notes = results[1][1]["notes"]
    assert len(notes) == len(OPERATIONS) and notes[0].startswith(f"{GRAPH}, dispatch: NotImplementedError: ")


def test_a_case_that_fails_leaves_the_others(tmp_path, capfd):
    cases = [replace(CASE, experts=15, iters=1, warmup=0), replace(CASE, iters=1, warmup=0, operations=("dispatch",))]
    assert suite.run(cases, MACHINE, tmp_path) == 1
    failed, done = (json.loads((tmp_path / f"{case.name}.json").read_text()) for case in cases)
    assert failed["operations"] == {} and "measure_engine: ValueError: num_experts" in failed["notes"][0]
    assert list(done["operations"]) == ["dispatch"] and done["notes"] == []
    assert "num_experts" in capfd.readouterr().err


def measure(folder, **changes):
    case = replace(CASE, operations=("dispatch",), iters=1, **changes)
    assert suite.run([case], MACHINE, folder) == 0
    return json.loads((folder / f"{case.name}.json").read_text())


def test_beside_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    run = measure(tmp_path, others=(MEGATRON,))
    assert list(run["operations"]["dispatch"]) == [ENGINE]
    assert run["megatron"].startswith("megatron-core ") and run["compared"]["Megatron alltoall"]["same"]
    if not importlib.util.find_spec("deep_ep"):
        assert [note.split(" flex, ")[1][:20] for note in run["notes"]] == [
            "DeepEP: ImportError:",
            "HybridEP: ImportErro",
        ]
    for operation, passes in {"six steps, forward": 2, "six steps, forward+backward": 4}.items():
        figures = run["operations"][operation]
        assert figures["Megatron alltoall"]["speedup"] > 0
        received = passes * run["received_rows"] * 256 / 2
        assert figures[ENGINE]["gb_per_s"] == pytest.approx(received / figures[ENGINE]["median_s"] / 1e9, abs=6e-4)


@pytest.mark.skipif(bool(importlib.util.find_spec("deep_ep")), reason="DeepEP is installed, and needs GPUs")
def test_a_module_that_cannot_be_imported_is_a_note(tmp_path):
    run = measure(tmp_path, others=("all_to_all", DEEP_EP))
    assert len(run["notes"]) == 1 and run["notes"][0].startswith(f"not measured: {DEEP_EP}: ModuleNotFoundError: ")
    assert list(run["operations"]["dispatch"]) == [ENGINE, ALL_TO_ALL]


def test_the_halves_of_hooks_are_timed_apart(tmp_path):
    run = measure(tmp_path, others=(DECODE,))
    halves = [f"decode {name}, {half}" for name in ("dispatch", "combine") for half in ("send", "receive")]
    assert run["notes"] == [] and {"decode dispatch", "decode combine", *halves} < set(run["operations"])
    assert all(run["operations"][name][ENGINE]["median_s"] > 0 for name in halves)


def time_a_part(rank):
    done = []
    work = Part(lambda: done.append("timed"), lambda: done.append(time.sleep(0.2)), lambda: done.append("after"))
    return HostClock().seconds(work, 2, 1), done


def test_a_clock_leaves_out_what_is_around_a_part(pools):
    ((times, done),) = pools(1).run(time_a_part)
    assert len(times) == 2 and max(times) < 0.1 and done == [None, "timed", "after"] * 3


class FakeClock:
    """Takes a second per call of the first side, two of the second; the third fails in its second turn."""

    device = torch.device("cpu")

    def __init__(self, takes_turns):
        self.takes_turns, self.calls = takes_turns, []

    def seconds(self, call, iters, warmup):
        side = call()
        self.calls.append((side, iters, warmup))
        if side == "third" and self.calls.count(("third", 1, 0)):
            raise RuntimeError("disturbed")
        return [{"first": 1.0, "second": 2.0, "third": 3.0}[side]] * iters


def time_three_sides(rank, takes_turns):
    clock = FakeClock(takes_turns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "make_clock", lambda engine: clock)
        measurement = measurements.Measurement(CASE)
    measurement.time({side: {"dispatch": lambda side=side: side} for side in ("first", "second", "third")})
    return clock.calls, measurement.found


def test_sides_take_turns_on_a_host(pools):
    (calls, found), *_ = pools(1).run(time_three_sides, True)
    first, second, third = ("first", "second", "third")
    assert calls[:3] == [(side, 1, CASE.warmup) for side in (first, second, third)]
    assert calls[3:] == [(first, 1, 0), (second, 1, 0), (third, 1, 0), (first, 1, 0), (second, 1, 0)]
    assert found["seconds"] == {"dispatch": {first: [1.0] * 3, second: [2.0] * 3}}
    assert found["notes"] == ["third, dispatch: RuntimeError: disturbed (rank 0)"]
    (calls, found), *_ = pools(1).run(time_three_sides, False)
    assert calls == [(side, CASE.iters, CASE.warmup) for side in (first, second, third)]
    assert found["seconds"]["dispatch"][third] == [3.0] * 3


def beside_deep_ep(rank: int, names: tuple[str, ...]) -> dict:
    """Measure DeepEP with our stand-in for it, which has both versions."""
    module = SimpleNamespace(topk_idx_t=topk_idx_t, **{name: getattr(stand_in, name) for name in names})
    case = replace(CASE, operations=("dispatch", "combine", "cached dispatch", "dispatch+combine", "dispatch FP8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_ep", module)
        patch.setenv("EP_DISPATCHER_ENGINE", "cpu")
        deep_ep = importlib.import_module(DEEP_EP)
        measurement = measurements.Measurement(case)
        deep_ep.measure(measurement)
    del sys.modules[DEEP_EP]
    return measurement.found


@pytest.mark.parametrize("version, names", [("ElasticBuffer", ("ElasticBuffer", "Buffer")), ("Buffer", ("Buffer",))])
def test_beside_deep_ep(pools, version, names):
    for found in pools(2).run(beside_deep_ep, names):
        assert found["notes"] == [] and found["deep_ep"].startswith(f"DeepEP {version} ")
        assert len(found["seconds"]) == 5 and all(len(sides["DeepEP"]) == 3 for sides in found["seconds"].values())
