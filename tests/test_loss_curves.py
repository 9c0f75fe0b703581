"""benchmarks/loss_curves.py: what it reads, the distances, and what it refuses."""

import importlib
import json

import pytest
from commands import ROOT

pytest.importorskip("matplotlib", reason="the chart needs it")


@pytest.fixture
def loss_curves(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # for the charts too, which are imported later
    return importlib.import_module("loss_curves")


def write_log(path, losses: dict[int, float]) -> str:
    lines = [
        f" [2026] iteration {n:8d}/     300 | consumed samples: 4 | elapsed time per iteration (ms): 20.1 | "
        f"learning rate: 2.0E-05 | global batch size: 4 | lm loss: {loss:.6E} | loss scale: 1.0 |"
        for n, loss in losses.items()
    ]
    path.write_text("setting up\n" + "\n".join(lines) + "\n")
    return str(path)


def test_distances_of_a_run_that_was_resumed(loss_curves, tmp_path, capsys):
    first = write_log(tmp_path / "a.log", {1: 10.0, 2: 8.0, 3: 5.0, 4: 4.0})
    until = write_log(tmp_path / "b.log", {1: 10.0, 2: 8.8, 3: 7.0})
    since = write_log(tmp_path / "c.log", {3: 5.5, 4: 4.0})
    other = write_log(tmp_path / "d.log", {1: 1.0, 2: 2.0})
    figures, chart = tmp_path / "out.json", tmp_path / "out.svg"
    runs = [f"seed 1: alltoall={first}", f"seed 1: ours={until},{since}", f"seed 2: alltoall={other}"]
    assert loss_curves.main([str(figures), str(chart), *runs, "--tail", "3"]) == 0
    made = json.loads(figures.read_text())["runs"]
    assert made[1]["losses"] == {"1": 10.0, "2": 8.8, "3": 5.5, "4": 4.0}, "the later log counts"
    assert made[0]["relative"] == 0 and made[1]["relative"] == pytest.approx((0.1 + 0.1 + 0) / 3)
    assert made[1]["final"] == pytest.approx((8.8 + 5.5 + 4) / 3) and made[2]["final"] == 1.5
    assert "| seed 1 | ours | 6.1000 | 6.67% |" in capsys.readouterr().out
    drawn = chart.read_text()
    assert drawn.startswith("<?xml") and "<dc:date>" not in drawn
    assert loss_curves.main([str(figures), str(chart), *runs, "--tail", "3"]) == 0
    assert chart.read_text() == drawn, "the same file from the same figures"


@pytest.mark.parametrize("run,said", [("a.log", "allowed: 'SEED: NAME=LOG'"), ("s: n=LOG", "no losses")])
def test_what_is_refused(loss_curves, tmp_path, capsys, run, said):
    log = tmp_path / "empty.log"
    log.write_text("nothing\n")
    with pytest.raises(SystemExit):
        loss_curves.main([str(tmp_path / "f"), str(tmp_path / "c.png"), run.replace("LOG", str(log))])
    assert said in capsys.readouterr().err
