"""``python -m ep_dispatcher.bench --compare``, on the results of this repository and on changed copies of them."""

import json
import shutil
import subprocess
import sys

import pytest
from lib.commands import ROOT

from ep_dispatcher.tools import bench
from ep_dispatcher.tools.benchmark.measurements import ENGINE, GRAPH

RESULTS = ROOT / "benchmarks" / "results"
MAIN = "cuda-4ranks-4096tokens-7168hidden-256experts-top8-bfloat16-uniform-expert-24sms.json"
OTHER_SIZE = MAIN.replace("4096", "2048")


@pytest.fixture
def copy(tmp_path):
    """Two of the results, in a folder."""
    for name in (MAIN, OTHER_SIZE):
        shutil.copy(RESULTS / name, tmp_path)
    return tmp_path


def change(path, how):
    run = json.loads(path.read_text())
    how(run)
    path.write_text(json.dumps(run))


def slow_down(operation, factor, side=ENGINE):
    def how(run):
        run["operations"][operation][side]["median_s"] *= factor

    return how


def compare(a, b, *options):
    return bench.main(["--compare", str(a), str(b), *options])


def test_two_builds_beside_each_other(capsys):
    """Ratios of two runs of the main case. One has no graphs: that is no regression."""
    a, b = RESULTS / MAIN, RESULTS / "beside-deep-ep" / MAIN
    assert compare(a, b) == 0
    output = capsys.readouterr().out
    medians = [json.loads(path.read_text())["operations"]["combine"][ENGINE]["median_s"] * 1e6 for path in (a, b)]
    row = next(line for line in output.splitlines() if line.startswith("combine ") and " engine " in line)
    assert row.split()[2:] == [f"{medians[0]:.1f}", f"{medians[1]:.1f}", f"{medians[1] / medians[0]:.3f}"]
    assert GRAPH not in output and "regression" not in output


@pytest.mark.parametrize("side", [ENGINE, GRAPH])
@pytest.mark.parametrize("factor, tolerance, code", [(1.04, 0.05, 0), (1.06, 0.05, 1), (1.06, 0.1, 0), (0.5, 0.0, 0)])
def test_a_slower_engine_is_a_regression(copy, capsys, side, factor, tolerance, code):
    change(copy / MAIN, slow_down("cached dispatch", factor, side))
    assert compare(RESULTS / MAIN, copy / MAIN, "--tolerance", str(tolerance)) == code
    expected = f"regression: {MAIN}: {side}, cached dispatch: {factor:.3f} times as long, allowed {1 + tolerance:g}"
    assert (expected in capsys.readouterr().out) == bool(code)


def test_what_else_is_judged(copy, capsys):
    """The baseline's time is not, wrong results are."""
    change(copy / MAIN, slow_down("dispatch", 3.0, "all_to_all_single"))
    assert compare(RESULTS / MAIN, copy / MAIN) == 0
    change(copy / MAIN, lambda run: run["compared"]["all_to_all_single"].update(same=False))
    assert compare(RESULTS / MAIN, copy / MAIN) == 1
    assert "results differ from those of all_to_all_single" in capsys.readouterr().out


def test_folders_are_matched_by_names(copy, tmp_path_factory, capsys):
    newer = tmp_path_factory.mktemp("newer")
    for path in copy.iterdir():
        shutil.copy(path, newer)
    (newer / "of_something_else.json").write_text("{}")
    change(newer / OTHER_SIZE, slow_down("combine", 1.2))
    assert compare(copy, newer) == 1
    output = capsys.readouterr().out
    assert f"regression: {OTHER_SIZE}: engine, combine: 1.200 times" in output and f"{MAIN}:" not in output
    assert compare(newer, copy) == 0
    assert compare(copy, newer / MAIN) == 0  # a file with that of its name
    assert compare(RESULTS / MAIN, copy) == 0


@pytest.mark.parametrize(
    "how, message",
    [
        (lambda run: run["case"].update(hidden=2048), "hidden 7168 and 2048"),
        (lambda run: run["case"].update(ranks=8, ranks_per_node=4), "ranks 4 and 8, ranks_per_node None and 4"),
        (lambda run: run["operations"].pop("combine"), "combine of the engine is not in B"),
        (lambda run: run["operations"]["dispatch"].pop(ENGINE), "dispatch of the engine is not in B"),
    ],
)
def test_what_cannot_be_compared_is_named(copy, capsys, how, message):
    change(copy / MAIN, slow_down("dispatch FP8", 2.0))
    change(copy / MAIN, how)
    assert compare(RESULTS / MAIN, copy / MAIN) == 2
    assert f"cannot be compared: {MAIN}: {message}\n" in capsys.readouterr().out


def test_missing_cases_are_named(copy, capsys):
    assert compare(RESULTS, copy) == 2
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cannot be compared")]
    cases = [path for path in RESULTS.glob("*.json") if path.name.startswith(("cpu", "cuda"))]
    assert len(missing) == len(cases) - 2 and all(f".json: not in {copy}" in line for line in missing)
    empty = copy / "empty"
    empty.mkdir()
    assert compare(empty, empty) == 2
    assert f"{empty}: no JSON of this benchmark" in capsys.readouterr().out


# ---- two builds in turn ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("tolerance, code", [(1000.0, 0), (-1.0, 1)])
def test_two_builds_in_turn(tolerance, code):
    """Here both are this one. With the second tolerance everything is slower than it may be. Many tokens: no decode."""
    script = [ROOT / "benchmarks" / "compare_builds.py", ROOT, ROOT, "--engine", "cpu", "--ranks", "1", "--rounds", "1"]
    given = ["--cases", "16x128x8", "513x128x8", "--tolerance", str(tolerance)]
    found = subprocess.run([sys.executable, *script, *given], capture_output=True, text=True, timeout=300)
    assert found.returncode == code, found.stderr
    lines = found.stdout.splitlines()
    operations = ["dispatch", "dispatch FP8", "dispatch, quantize", "cached dispatch", "combine"]
    expected = [f"16x128 {name}" for name in [*operations, "decode dispatch FP8", "decode combine"]]
    expected += [f"513x128 {name}" for name in operations]
    assert [line[:32].strip() for line in lines[1:]] == expected
    assert all(line[32:].split()[1] == "1.000" and line.count(" to ") == 2 for line in lines[1:])


@pytest.mark.exhaustive
def test_a_build_without_the_package_is_an_error(tmp_path):
    script = [ROOT / "benchmarks" / "compare_builds.py", tmp_path, "--engine", "cpu", "--ranks", "1"]
    found = subprocess.run([sys.executable, *script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 1 and f"a rank of {tmp_path} has ended" in found.stderr
