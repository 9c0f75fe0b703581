"""The benchmark of cases, which is for GPUs, as far as a CPU goes: with the CPU engine, and with stand-ins for CUDA."""

import contextlib
import importlib
import json
import sys
import types
from dataclasses import replace

import pytest
import torch
from commands import ROOT

import ep_dispatcher as ep
from ep_dispatcher import bench
from ep_dispatcher.benchmark import clock, parts, report, suite
from ep_dispatcher.benchmark.cases import FEW_OPERATIONS, HOT, OPERATIONS, Case, suite_cases
from ep_dispatcher.benchmark.parts import ALL_TO_ALL, ENGINE, GRAPH
from ep_dispatcher.testing import make_hot_routing

RESULTS = ROOT / "benchmarks" / "results"
CASE = Case(2, engine="cpu", tokens=24, hidden=128, experts=16, topk=4, iters=3, warmup=1, others=("all_to_all",))
MACHINE = {"gpus": ["NVIDIA H200"] * 4, "cpu": "a CPU", "driver": "580.1", "cuda": "13.0", "nccl": "2.28.9"}
MACHINE |= {"torch": "2.11.0", "git_commit": "abc", "date": "2026-11-21T10:00:00+00:00"}


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


def test_hot_routing_needs_enough_experts():
    with pytest.raises(ValueError, match="given 8, of which 100% to one rank, allowed: no more than its 4 experts"):
        make_hot_routing(10, 16, 8, 4, seed=0)


def test_the_suite_has_every_case():
    cases = list(suite_cases(4))
    assert len({case.name for case in cases}) == len(cases)
    first = cases[0]
    assert first == Case(4, graph=True) and first.sms == 24
    assert {c.sms for c in cases if replace(c, sms=24).name == first.name} == {8, 12, 16, 24, 32}
    grown = {c.tokens for c in cases if replace(c, tokens=4096).name == first.name}
    assert grown == {128, *(2**n for n in range(8, 16))}
    assert {(c.hidden, c.experts) for c in cases} == {(7168, 256), (2048, 128)}
    assert any(c.topk == 1 for c in cases) and any(c.routing == HOT for c in cases)
    assert next(c for c in cases if c.tokens == 128).graph


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
                assert 0 < figures["min_s"] <= figures["median_s"] <= figures["max_s"] and figures["gb_per_s"] > 0
        assert run["compared"][ALL_TO_ALL]["same"]
        for moved in run["wire_bytes"].values():
            assert moved["engine"] == moved["least"]


def test_rows_of_the_cases(results):
    uniform, hot, by_rank = results[1]
    assert uniform["received_rows"] == 2 * 24 * 4 > uniform["max_recv_rows"] >= 24 * 4
    assert hot["received_rows"] == hot["max_recv_rows"] == 2 * 24 * 4
    assert by_rank["max_recv_rows"] <= 2 * 24


def test_what_fails_is_a_note(results):
    """There are no CUDA graphs here: everything else of the case is measured all the same."""
    notes = results[1][1]["notes"]
    assert len(notes) == len(OPERATIONS)
    assert notes[0] == f"{GRAPH}, dispatch: NotImplementedError: there are CUDA graphs on GPUs alone (rank 0)"


def test_a_case_that_fails_leaves_the_others(tmp_path, capfd):
    cases = [replace(CASE, experts=15, iters=1, warmup=0), replace(CASE, iters=1, warmup=0, operations=("dispatch",))]
    assert suite.run(cases, MACHINE, tmp_path) == 1
    failed, done = (json.loads((tmp_path / f"{case.name}.json").read_text()) for case in cases)
    assert failed["operations"] == {} and "measure_engine: ValueError: num_experts" in failed["notes"][0]
    assert list(done["operations"]) == ["dispatch"] and done["notes"] == []
    assert "num_experts" in capfd.readouterr().err


def test_megatron_and_deep_ep_or_why_not(tmp_path):
    case = replace(CASE, others=("megatron", "deep_ep"), operations=("dispatch",), iters=1, warmup=1)
    assert suite.run([case], MACHINE, tmp_path) == 0
    run = json.loads((tmp_path / f"{case.name}.json").read_text())
    if parts._why_missing("megatron.core") is None:
        assert run["megatron"].startswith("megatron-core ") and run["compared"]["Megatron alltoall"]["same"]
        for operation in ("six steps, forward", "six steps, forward+backward"):
            assert run["operations"][operation]["Megatron alltoall"]["speedup"] > 0
    else:
        assert "Megatron: not measured, megatron.core cannot be imported here" in run["notes"]
    if parts._why_missing("deep_ep") is not None:
        assert "DeepEP: not measured, deep_ep cannot be imported here" in run["notes"]


# ---- with stand-ins for CUDA and for DeepEP -------------------------------------------------------------------------


class FakeStream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def fake_cuda(monkeypatch):
    """A DeviceClock without a device, and the list of what it did."""
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("record")

        def elapsed_time(self, end):
            return 0.5

    class Graph:
        def replay(self):
            done.append("replay")

    @contextlib.contextmanager
    def capture(graph):
        done.append("begin capture")
        yield
        done.append("end capture")

    fakes = dict(Event=Event, CUDAGraph=Graph, graph=capture, Stream=FakeStream, current_stream=FakeStream)
    fakes |= dict(stream=lambda stream: contextlib.nullcontext(), empty_cache=lambda: None)
    fakes |= dict(synchronize=lambda: done.append("synchronize"), _sleep=lambda cycles: done.append("sleep"))
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(clock.dist, "all_reduce", lambda tensor, **options: done.append("meet"))
    fake = clock.DeviceClock.__new__(clock.DeviceClock)
    fake.device, fake._flushed, fake._meeting = torch.device("cpu"), torch.ones(4), torch.zeros(1)
    return fake, done


def test_a_device_is_timed_by_events_after_the_ranks_meet(fake_cuda):
    fake, done = fake_cuda
    assert fake.seconds(lambda: done.append("call"), 2, 1) == [0.0005, 0.0005]
    once = ["sleep", "meet", "record", "call", "record", "synchronize"]
    assert done == ["call", "synchronize", *once, *once]
    assert fake._flushed.sum() == 0
    assert fake.release()


def test_a_graph_is_captured_after_a_warm_up_on_another_stream(fake_cuda):
    fake, done = fake_cuda
    replay = fake.capture(lambda: done.append("call"))
    assert done == ["call", "call", "synchronize", "meet", "begin capture", "call", "end capture"]
    replay()
    assert done[-1] == "replay"


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
    monkeypatch.delitem(sys.modules, "ep_dispatcher.benchmark.deep_ep", raising=False)
    deep_ep = importlib.import_module("ep_dispatcher.benchmark.deep_ep")
    monkeypatch.setattr(FakeBuffer, "calls", [])
    group = types.SimpleNamespace(size=lambda: 2)
    with deep_ep.make_side(group, CASE) as side:
        assert (type(side).__name__ == "Elastic") == (len(names) == 2)
        calls = side.operations(*CASE.inputs(0, torch.device("cpu")))
        assert set(calls) == {"dispatch", "dispatch FP8", "combine", "cached dispatch", "dispatch+combine"}
        for call in calls.values():
            call()
    assert FakeBuffer.calls.count("combine") == 2 and FakeBuffer.calls[-1] == "destroy"
    del sys.modules["ep_dispatcher.benchmark.deep_ep"]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def test_cases_of_the_command(four_gpus):
    args = bench.parse_args("--engine cuda".split(), None)
    assert args.cases == [Case(4)]
    args = bench.parse_args("--engine cuda --sms 8,12 --tokens 256,512 --graph --no-baseline --topk 1".split(), None)
    expected = [Case(4, tokens=t, sms=s, topk=1, graph=True, others=()) for t in (256, 512) for s in (8, 12)]
    assert args.cases == expected
    args = bench.parse_args("--engine cuda --ranks-per-node 4 2".split(), None)
    assert args.cases == [Case(4), Case(4, ranks_per_node=2)]
    assert [case.name.partition("24sms")[2] for case in args.cases] == ["", "-2per_node"]
    args = bench.parse_args("--engine cuda --ranks 2 --suite somewhere --iters 5".split(), None)
    assert args.cases == list(suite_cases(2, iters=5)) and args.out.name == "somewhere"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--engine cuda --sms 8,0", "--sms: given 0, allowed 1 or more"),
        ("--engine cuda --ranks 8", "--ranks: given 8, allowed at most the 4 GPUs"),
        ("--engine cuda --ranks 2 --ranks-per-node 3", "--ranks-per-node: given 3, allowed divisors of the 2 ranks"),
        ("--engine cuda --suite x --topk 2", "--topk: given beside --suite, allowed without it"),
        ("--engine cuda --suite x --no-baseline", "--baseline: given beside --suite, allowed without it"),
        (
            "--engine cuda --routing hot_rank --experts 8 --topk 3",
            "--routing: given hot_rank, allowed num_topk: given 3",
        ),
        ("--sms 8", "--sms: given with --engine cpu, allowed with --engine cuda"),
        ("--suite x", "--suite: given with --engine cpu"),
        ("--graph", "--graph: given with --engine cpu"),
        ("--tokens 1,2", "--tokens: given [1, 2], allowed one number with --engine cpu"),
        ("--tokens a", "argument --tokens: invalid numbers value: 'a'"),
        ("--routing hot_rank", "--routing: given hot_rank, allowed with --engine cuda"),
        ("--report --out nowhere", "--out: given nowhere, allowed the folder of the JSON files"),
    ],
)
def test_bad_arguments(arguments, message, four_gpus, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    assert message in capsys.readouterr().err


def test_cuda_needs_gpus_and_no_torchrun(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        bench.parse_args(["--engine", "cuda"], None)
    assert "--engine: given cuda, allowed cpu: there is no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.parse_args(["--engine", "cuda"], 1)
    assert "--engine: given cuda under torchrun, allowed without torchrun" in capsys.readouterr().err


# ---- docs/performance.md --------------------------------------------------------------------------------------------


def made_up(case: Case) -> dict:
    """A run with times that anyone can check: 10 us per operation of the engine, twice as much for the others."""
    result = {"machine": MACHINE, "case": vars(case) | {}, "operations": {}, "seconds": {}, "compared": {}, "notes": []}
    sides = {ENGINE: [9e-6, 1e-5, 12e-6]} | ({GRAPH: [8e-6] * 3} if case.graph else {})
    seconds = {operation: dict(sides) for operation in case.operations}
    if "all_to_all" in case.others:
        seconds["dispatch+combine"] = sides | {ALL_TO_ALL: [2e-5] * 3}
    notes = ["DeepEP: not measured, deep_ep cannot be imported here"] if "deep_ep" in case.others else []
    moved = {"least": {"inside nodes": 2_000_000}, "engine": {"inside nodes": 3_000_000}}
    found = {"seconds": seconds, "notes": notes, "received_rows": 400, "wire_bytes": {"dispatch": moved}}
    suite.merge(result, found)
    suite.summarise(result, case)
    return result


@pytest.fixture
def made_up_results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    growth = (*FEW_OPERATIONS, "dispatch+combine")
    first = Case(4, graph=True)
    cases = [first, replace(first, sms=8, graph=False, operations=FEW_OPERATIONS, others=())]
    cases += [replace(first, tokens=256, graph=False, operations=growth, others=("all_to_all",))]
    for case in cases:
        (folder / f"{case.name}.json").write_text(suite.to_json(made_up(case)))
    (folder / "of_something_else.json").write_text("{}")
    return folder


def test_the_part_of_the_page(made_up_results, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert bench.main(["--report", "--out", "results"]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "### 4 x NVIDIA H200" in text
    assert "driver 580.1, CUDA 13.0, PyTorch 2.11.0, NCCL 2.28.9; build abc; 2026-11-21." in text
    assert "| dispatch+combine | 10 | 9 to 12 | 287 | 8 | 20 (2.0x) |" in text
    assert "| 256 | 7168 | 256 | 8 | uniform | 24 | 10 | 10 | 10 | 10 | 10 |  | 20 (2.0x) |  |  |" in text
    assert "A dispatch moves 3.0 MB between all GPUs together; the least is 2.0 MB." in text
    assert "- DeepEP: not measured, deep_ep cannot be imported here" in text
    image = tmp_path / "results" / "cuda-4ranks-NVIDIA-H200.png"
    assert "![times](../results/cuda-4ranks-NVIDIA-H200.png)" in text
    drawn = image.read_bytes()
    assert drawn.startswith(b"\x89PNG") and f"chart: results/{image.name}" in capsys.readouterr().out
    assert bench.main(["--report", "--out", "results"]) == 0
    assert page.read_text() == text and image.read_bytes() == drawn


def test_a_page_without_marks_stays_as_it_is(made_up_results, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text("no marks")
    assert bench.main(["--report", "--out", "results"]) == 1
    assert page.read_text() == "no marks" and "docs/performance.md: given without" in capsys.readouterr().out


def test_our_page_is_made_of_our_results():
    part = report.part(report.load(RESULTS), RESULTS, ROOT / "docs")
    assert part in (ROOT / "docs" / "performance.md").read_text()
    for group in report.machines(report.load(RESULTS)):
        assert report.chart_path(group, RESULTS).exists()


def test_fp8_rows_are_smaller():
    assert Case(4).row_bytes("dispatch") == 14336 and Case(4).row_bytes("dispatch FP8") == 7168 + 224
    pair = ep.quantize(torch.randn(2, 7168))
    assert sum(t[0].numel() * t.itemsize for t in pair) == Case(4).row_bytes("dispatch FP8")
