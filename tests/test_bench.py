"""The benchmark through its command line: a tiny run, its JSON and chart, and its errors."""

import json

import pytest
import torch

from ep_dispatcher import bench
from ep_dispatcher.testing import make_routing

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK, ITERS = 4, 48, 64, 8, 3, 3
TINY = f"--ranks {RANKS} --tokens {TOKENS} --hidden {HIDDEN} --experts {EXPERTS} --topk {TOPK} --warmup 1".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    code = bench.main([*TINY, "--iters", str(ITERS), "--routing", "masked", "--out", str(folder)])
    (path,) = folder.glob("*.json")
    return {"code": code, "path": path, "json": json.loads(path.read_text())}


def moved_rows(ranks_per_node):
    """Rows of all ranks over every wire, token by token: the least, and what the baseline sends."""
    least, baseline = (dict.fromkeys(bench.WIRES, 0) for _ in range(2))

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


def test_both_topologies_and_same_results(run):
    assert run["code"] == 0
    assert [t["num_nodes"] for t in run["json"]["topologies"]] == [1, 2]
    for topology in run["json"]["topologies"]:
        assert set(topology["compared"]) == {"baseline", "baseline, fast sum"}
        for compared in topology["compared"].values():
            assert compared["same"] and compared["largest_relative_error"] <= compared["allowed"]
        assert len(set(topology["received_rows"].values())) == 1
        assert topology["targets"] == []


def test_bytes_over_the_wires(run):
    for topology in run["json"]["topologies"]:
        least, baseline = moved_rows(topology["ranks_per_node"])
        assert topology["received_rows"]["baseline"] == sum(baseline.values())
        for moved in topology["wire_bytes"].values():
            headings = 128 * RANKS * (topology["num_nodes"] - 1)  # one in front of what goes to a node
            expected = moved["least"] | {"between nodes": moved["least"]["between nodes"] + headings}
            assert moved["engine"] == expected
            assert moved["least"] == {wire: rows * HIDDEN * 2 for wire, rows in least.items()}
            assert moved["baseline"] == {wire: rows * HIDDEN * 2 for wire, rows in baseline.items()}


def test_every_time_is_there(run):
    for topology in run["json"]["topologies"]:
        assert tuple(topology["seconds"]) == bench.OPERATIONS
        for operation, sides in topology["seconds"].items():
            for side, times in sides.items():
                assert torch.tensor(times).shape == (ITERS, RANKS) and torch.tensor(times).min() > 0
                figures = topology["operations"][operation][side]
                assert 0 < figures["p10_s"] <= figures["median_s"] <= figures["p90_s"]
                assert figures["gb_per_s"] > 0 and figures["cpu_s"] > 0


def test_chart_from_json(run, capsys):
    pytest.importorskip("matplotlib")
    image = run["path"].with_suffix(".png")
    image.unlink()
    assert bench.main(["--chart", str(run["path"])]) == 0
    assert image.read_bytes().startswith(b"\x89PNG") and str(image) in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--ranks 0", "--ranks: given 0, allowed 1 or more"),
        ("--experts 6", "--experts: given 6, allowed multiples of the 4 ranks"),
        ("--topk 65", "--topk: given 65, allowed at most the 64 experts"),
        ("--ranks-per-node 4 3", "--ranks-per-node: given 3, allowed divisors of the 4 ranks"),
        ("--warmup -1", "--warmup: given -1, allowed 0 or more"),
        ("--chart nowhere.json", "--chart: given nowhere.json, allowed a JSON file that this benchmark wrote"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    assert message in capsys.readouterr().err
