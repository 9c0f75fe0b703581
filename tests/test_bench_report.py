"""benchmarks/report.py: the figures of RUNS.md, and a choice of them in docs/performance.md, from JSON files."""

import json
import re
from dataclasses import asdict, replace

import libraries
import pytest
import report
from lib.commands import ROOT

from ep_dispatcher.tools.benchmark import suite
from ep_dispatcher.tools.benchmark.cases import FEW_OPERATIONS, OPERATIONS, STANDARD, Case
from ep_dispatcher.tools.benchmark.measurements import BASELINES, ENGINE, GRAPH

RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {"gpus": ["NVIDIA H200"] * 4, "cpu": "a CPU", "cores": 2, "driver": "580.1", "cuda": "13.0", "nccl": "2.28.9"}
MACHINE |= {"torch": "2.11.0", "git_commit": "abc", "date": "2026-11-21T10:00:00+00:00", "compiler": "g++ 12"}
MACHINE |= {"load_average_at_start": [0.1, 0.2, 0.3]}


def made_up(case: Case, **found) -> dict:
    """A run with times that anyone can check: 10 us per operation of the engine, twice as much for the others."""
    machine = MACHINE if case.engine == "cuda" else MACHINE | {"gpus": []}
    result = {"machine": machine, "case": asdict(case), "operations": {}, "seconds": {}, "compared": {}, "notes": []}
    result |= {"passes": {}}
    sides = {ENGINE: [9e-6, 1e-5, 12e-6]} | ({GRAPH: [8e-6] * 3} if case.graph else {})
    seconds = {operation: dict(sides) for operation in case.operations}
    seconds["dispatch+combine"] = sides | {BASELINES[name]: [2e-5] * 3 for name in case.others}
    moved = {"least": dict.fromkeys(("inside nodes", "local"), 2_000_000)}
    moved["engine"] = {"inside nodes": 3_000_000, "local": 2_000_000}
    found = {"received_rows": 400, "wire_bytes": {"dispatch": moved}, "notes": [], "compared": {}, "passes": {}} | found
    suite.merge(result, {"seconds": seconds, **found})
    suite.summarize(result, case)
    return result


@pytest.fixture
def results(tmp_path):
    """Three cases of GPUs, two of the CPU, and one in a folder of its own."""
    folder = tmp_path / "results"
    (folder / "later").mkdir(parents=True)
    first = replace(STANDARD["cuda"], graph=True)
    runs = [made_up(first, notes=["DeepEP: not measured, and why"])]
    runs += [made_up(replace(first, sms=8, graph=False, operations=FEW_OPERATIONS, others=()))]
    runs += [made_up(replace(first, tokens=256, graph=False, operations=(*FEW_OPERATIONS, "dispatch+combine")))]
    without_float8 = ("dispatch", "combine", "dispatch+combine")
    runs += [made_up(replace(STANDARD["cpu"], ranks_per_node=n, operations=without_float8)) for n in (2, None)]
    for n, run in enumerate(runs):
        (folder / f"{n}.json").write_text(suite.to_json(run))
    (folder / "of_something_else.json").write_text("{}")
    (folder / "later" / "0.json").write_text(suite.to_json(made_up(first, deep_ep="DeepEP v9 (rank layout)")))
    return folder


def test_the_parts_of_the_pages(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page, runs = tmp_path / "docs" / "performance.md", tmp_path / "docs" / "RUNS.md"
    page.parent.mkdir()
    for path in (page, runs):
        path.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    command = ["--page", str(page), "--runs", str(runs), "--results", str(results)]
    assert report.main(command) == 0
    for path in (page, runs):
        text = path.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    chosen = page.read_text()
    assert re.findall("^4 [^:]*", chosen, re.MULTILINE) == [
        "4 ranks on a CPU, 2 cores, build abc, 2026-11-21",
        "4 x NVIDIA H200, build abc, 2026-11-21",
    ]
    assert "| 1024, 2 virtual nodes | 0.0 | 0.0 | 0.0 | 0.0 (2.0x) |" in chosen, "no empty columns"
    assert chosen.count("| 4096 | 10 | 10 | 10 | 10 | 10 | 20 (2.0x) |") == 1, "of 8 and 24 SMs the standard one"
    assert "| 256 |" not in chosen and "later" not in chosen, "a choice"
    text = runs.read_text()
    headings = re.findall("^### (.*)$", text, re.MULTILINE)
    assert headings == ["4 ranks on a CPU, 2 cores", "4 x NVIDIA H200", "4 x NVIDIA H200, beside DeepEP"]
    cpu, gpus, beside = text.split("\n### ")[1:]
    assert cpu.count("| dispatch+combine | 0.0 | 0.0 to 0.0 | 41 | 0.0 (2.0x) | 0.0 (2.0x) |") == 2
    assert "| dispatch+combine | 10 | 9 to 12 | 287 | 8 | 20 (2.0x) |" in beside
    assert "| 256 | 7168 | 256 | 8 | uniform | 24 | 10 | 10 | 10 | 10 | 10 |  | 20 (2.0x) |  |  |" in gpus
    assert "- DeepEP: not measured, and why" in gpus and "not measured" not in beside
    images = [results / "cpu-4ranks-a-CPU.png", results / "cuda-4ranks-NVIDIA-H200.png"]
    images += [results / "later" / images[1].name]
    drawn = [image.read_bytes() for image in images]
    assert re.findall(r"!\[times\]\((.*)\)", text) == [f"../{image.relative_to(tmp_path)}" for image in images]
    assert all(image.startswith(b"\x89PNG") for image in drawn) and f"chart: {images[0]}" in capsys.readouterr().out
    assert report.main(command) == 0
    assert page.read_text() == chosen and runs.read_text() == text and [image.read_bytes() for image in images] == drawn


def test_a_page_stays_as_it_is(results, tmp_path, capsys):
    """Without marks, and with --check. This fails for a page with other figures, and passes for ours."""
    page, runs = tmp_path / "performance.md", tmp_path / "RUNS.md"
    for text, check, said in (
        ("no marks", [], "has to have the lines"),
        (f"{report.BEGIN}\nold\n{report.END}\n", ["--check"], "its figures are not those of"),
    ):
        page.write_text(text)
        runs.write_text(text)
        assert report.main(["--page", str(page), "--runs", str(runs), "--results", str(results), *check]) == 1
        assert page.read_text() == runs.read_text() == text
        printed = capsys.readouterr().out
        assert said in printed
    assert report.main(["--check"]) == 0


def test_our_results_are_of_the_schema():
    """The names of files follow from their cases, and the figures from the single times."""
    files = [path for path in RESULTS.rglob("*.json") if path.name.startswith(("cpu-", "cuda-"))]
    assert len(files) > 15
    for path in files:
        run = json.loads(path.read_text())
        case = Case(**run["case"])
        assert path.stem == case.name
        assert all(compared["same"] for compared in run["compared"].values())
        again = {"operations": {}, "seconds": run["seconds"], "received_rows": run["received_rows"]}
        suite.summarize(again | {"passes": dict.fromkeys(set(run["seconds"]) - set(OPERATIONS), 0)}, case)
        for operation in set(OPERATIONS) & set(run["operations"]):
            assert run["operations"][operation] == again["operations"][operation], (path.name, operation)


def test_the_pages_have_the_figures_of_the_libraries(tmp_path):
    page, readme, results = (tmp_path / name for name in ("performance.md", "README.md", "libraries.json"))
    for path in (page, readme):
        path.write_text(f"before\n{libraries.BEGIN}\nold\n{libraries.END}\nafter\n")
    times = {"dispatch FP8": {libraries.ENGINE: 100, "HybridEP": 150}, "combine": {libraries.ENGINE: 80, "DeepEP": 60}}
    case = {"tokens": 128, "hidden": 7168, "experts": 256, "topk": 8, "layout": "decode", "us": times}
    versions = {"DeepEP": "v9"}
    about = dict.fromkeys(["machine", "torch", "build", "date"])
    results.write_text(json.dumps(about | {"versions": versions, "cases": [case]}))
    command = ["--page", str(page), "--readme", str(readme), "--results", str(results)]
    assert libraries.main([*command, "--check"]) == 1 and "old" in page.read_text()
    assert libraries.main(command) == 0 == libraries.main([*command, "--check"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| operation | this engine | DeepEP v9 | HybridEP |" in text
    assert "| dispatch FP8 | 100 |  | 150 (1.50x) |" in text and "| combine | 80 | 60 (0.75x) |  |" in text
    chosen = readme.read_text()
    assert "| 128 x 7168 | dispatch FP8 | 100 |  | 150 (1.50x) |" in chosen and "| combine |" not in chosen
    assert libraries.main(["--check"]) == 0
    rows = libraries.chosen_table_of(json.loads((RESULTS / "libraries.json").read_text())).count("\n|") - 2
    assert rows == sum(map(len, libraries.CHOSEN.values())) <= 12, "every chosen row, in a short table"
