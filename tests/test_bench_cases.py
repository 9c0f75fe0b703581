"""How the benchmark measures a case: with the CPU engine, and with a stand-in for DeepEP."""

import importlib
import importlib.util
import json
import sys
import types
from dataclasses import replace

import pytest
import torch

from ep_dispatcher.tools.benchmark import parts, suite
from ep_dispatcher.tools.benchmark.cases import HOT, OPERATIONS, Case, suite_cases
from ep_dispatcher.tools.benchmark.parts import BASELINES, ENGINE, GRAPH
from ep_dispatcher.tools.testing import make_hot_routing

ALL_TO_ALL = BASELINES["all_to_all"]
MEGATRON, DEEP_EP = "ep_dispatcher.tools.benchmark.megatron", "ep_dispatcher.tools.benchmark.deep_ep"
CASE = Case(2, engine="cpu", tokens=24, hidden=128, experts=16, topk=4, iters=3, warmup=1)
MACHINE = {"gpus": [], "cpu": "a CPU"}


# ---- what is measured -----------------------------------------------------------------------------------------------


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
    assert {c.sms for c in cases if replace(c, sms=24).name == cases[0].name} == {8, 12, 16, 24, 32}
    grown = {c.tokens for c in cases if replace(c, tokens=4096).name == cases[0].name}
    assert grown == {128, *(2**n for n in range(8, 16))}
    assert {(c.hidden, c.experts) for c in cases} == {(7168, 256), (2048, 128)}
    assert any(c.topk == 1 for c in cases) and any(c.routing == HOT for c in cases)
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
        patch.setattr(parts, "make_clock", lambda engine: clock)
        part = parts.Part(CASE)
    part.time({side: {"dispatch": lambda side=side: side} for side in ("first", "second", "third")})
    return clock.calls, part.found


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


class FakeBuffer:
    """Of DeepEP, both versions: takes the arguments that they take, and gives as many results."""

    calls: list[str] = []

    def __init__(self, group, *sizes, **options):
        self.is_elastic = "num_topk" in options

    set_num_sms = staticmethod(lambda num_sms: None)

    @staticmethod
    def get_dispatch_config(num_ranks):
        return types.SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, num_ranks: 1 << 20)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        return None, None, None, None, None

    def dispatch(self, x, *, handle=None, **options):
        self.calls.append("dispatch" if handle is None else "cached")
        rows = x[0] if isinstance(x, tuple) else x
        return (rows, None, None, "handle", None) if self.is_elastic else (rows, None, None, [], "handle", None)

    def combine(self, x, handle, **options):
        assert handle == "handle"
        self.calls.append("combine")

    def destroy(self):
        self.calls.append("destroy")


@pytest.mark.parametrize("names", [("ElasticBuffer", "Buffer"), ("Buffer",)])
def test_deep_ep_has_the_operations(names, monkeypatch):
    module = types.ModuleType("deep_ep")
    module.topk_idx_t = torch.int64
    for name in names:
        setattr(module, name, FakeBuffer)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.delitem(sys.modules, "ep_dispatcher.tools.benchmark.deep_ep", raising=False)
    deep_ep = importlib.import_module("ep_dispatcher.tools.benchmark.deep_ep")
    monkeypatch.setattr(FakeBuffer, "calls", [])
    case = replace(CASE, operations=("dispatch", "combine", "cached dispatch", "dispatch+combine", "dispatch FP8"))
    timed = {}

    class FakePart:
        group, found, inputs = types.SimpleNamespace(size=lambda: 2), {}, case.inputs(0, torch.device("cpu"))

        def time(self, sides):
            timed.update(sides["DeepEP"])
            for call in timed.values():
                call()

    FakePart.case = case
    deep_ep.measure(FakePart())
    assert set(timed) == set(case.operations)
    assert FakePart.found["deep_ep"].startswith("DeepEP ElasticBuffer" if len(names) == 2 else "DeepEP Buffer")
    first, *calls, last = FakeBuffer.calls
    assert (first, last) == ("dispatch", "destroy")
    assert sorted(calls) == ["cached", "combine", "combine", "dispatch", "dispatch", "dispatch"]
    del sys.modules["ep_dispatcher.tools.benchmark.deep_ep"]
