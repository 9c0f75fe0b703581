"""The benchmark through its command line: a tiny run with the CPU engine, its JSON, its cases and its errors."""

import json
import re

import pytest
import torch
from commands import torchrun

from ep_dispatcher.tools import bench
from ep_dispatcher.tools.benchmark.cases import OPERATIONS, PASSES, STANDARD, Case, suite_cases
from ep_dispatcher.tools.benchmark.parts import BASELINES, ENGINE
from ep_dispatcher.tools.benchmark.wires import WIRES
from ep_dispatcher.tools.testing import make_routing

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK, ITERS = 4, 48, 64, 8, 3, 3
TINY = f"--ranks {RANKS} --tokens {TOKENS} --hidden {HIDDEN} --experts {EXPERTS} --topk {TOPK} --warmup 1".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The JSON of one node, and of two."""
    folder = tmp_path_factory.mktemp("bench")
    assert bench.main([*TINY, "--iters", str(ITERS), "--routing", "masked", "--out", str(folder)]) == 0
    name = f"cpu-{RANKS}ranks-{TOKENS}tokens-{HIDDEN}hidden-{EXPERTS}experts-top{TOPK}-bfloat16-masked-expert"
    return [json.loads((folder / f"{name}{nodes}.json").read_text()) for nodes in ("", "-2per_node")]


def moved_rows(ranks_per_node):
    """Rows of all ranks over every wire, token by token: the least, and what the baseline sends."""
    least, baseline = (dict.fromkeys(WIRES, 0) for _ in range(2))

    def wire(src, dst):
        if src == dst:
            return "local"
        return "inside nodes" if src // ranks_per_node == dst // ranks_per_node else "between nodes"

    for src in range(RANKS):
        topk_idx, _ = make_routing("masked", TOKENS, EXPERTS, TOPK, seed=src)
        for token in topk_idx.tolist():
            ranks = [expert // (EXPERTS // RANKS) for expert in token if expert >= 0]
            for dst in ranks:
                baseline[wire(src, dst)] += 1
            nodes = {dst // ranks_per_node for dst in ranks}
            least["between nodes"] += len(nodes - {src // ranks_per_node})
            for dst in set(ranks):
                holder = dst // ranks_per_node * ranks_per_node + src % ranks_per_node
                least[wire(holder, dst)] += 1
    return least, baseline


def test_both_topologies_and_same_results(runs):
    assert [run["case"]["ranks_per_node"] for run in runs] == [None, 2]
    for run in runs:
        assert set(run["compared"]) == set(BASELINES.values())
        for compared in run["compared"].values():
            assert compared["same"] and compared["largest_relative_error"] <= compared["allowed"]
        assert run["notes"] == []
        assert run["machine"]["git_commit"] and len(run["machine"]["modules"]["_C_cpu"]) == 12, "the build"


@pytest.mark.parametrize("nodes", [1, 2])
def test_bytes_over_the_wires(runs, nodes):
    run = runs[nodes - 1]
    least, baseline = moved_rows(RANKS // nodes)
    assert run["received_rows"] == sum(baseline.values())
    for moved in run["wire_bytes"].values():
        headings = 128 * RANKS * (nodes - 1)  # one in front of what goes to a node
        expected = moved["least"] | {"between nodes": moved["least"]["between nodes"] + headings}
        assert moved["engine"] == expected
        assert moved["least"] == {wire: rows * HIDDEN * 2 for wire, rows in least.items()}
        assert moved["baseline"] == {wire: rows * HIDDEN * 2 for wire, rows in baseline.items()}


def test_every_time_is_there(runs):
    for run in runs:
        assert tuple(run["seconds"]) == tuple(name for name in OPERATIONS if "8" not in name and "quant" not in name)
        for operation, sides in run["seconds"].items():
            assert list(sides) == [ENGINE, *BASELINES.values()]
            for side, times in sides.items():
                assert len(times) == ITERS and min(times) > 0
                figures = run["operations"][operation][side]
                assert [figures["min_s"], figures["median_s"], figures["max_s"]] == sorted(times)
                moved = run["received_rows"] * HIDDEN * 2 * PASSES[operation] / RANKS
                assert figures["gb_per_s"] == round(moved / figures["median_s"] / 1e9, 3)


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
    assert re.search(f"error: (argument )?{argument}: given .*, allowed: ", capsys.readouterr().err)


def test_cuda_needs_gpus_and_no_torchrun(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for world_size in (None, 1):
        with pytest.raises(SystemExit):
            bench.parse_args(["--engine", "cuda"], world_size)
        assert "--engine: given cuda" in capsys.readouterr().err
