"""benchmarks/megatron_in_turn.py: jobs start together and train one after the other; what it prints and refuses.

A package of a few lines plays megatron.training. Its steps write down when they ran.
"""

import argparse
import importlib
import json
import os
import subprocess

import pytest
from lib.commands import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    in_turn = importlib.import_module("megatron_in_turn")

TRAINING = """
import os, time

def train(name, milliseconds):
    with open(os.environ["EVENTS"], "a") as events:
        events.write(f"{name} {os.environ['RANK']} begins\\n")
    time.sleep(0.3)
    if os.environ["RANK"] == "0":
        for n in range(1, 5):
            print(f"iteration {n}/ 4 | elapsed time per iteration (ms): {milliseconds + n} | lm loss: {10 - n}.0 |"
                  f" grad norm: {n}.5 |")
    if name == "fails":
        raise SystemExit(3)
    with open(os.environ["EVENTS"], "a") as events:
        events.write(f"{name} {os.environ['RANK']} ends\\n")
"""
SCRIPT = """
import os, sys
from megatron.training import training

assert sys.argv[1] == "--all"
training.train(os.environ["NAME"], float(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()  # megatron-core has none, and does not shadow this one
    (package / "training.py").write_text(TRAINING)
    (tmp_path / "pretrain.py").write_text(SCRIPT)
    monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "pretrain.py"


def run(script, *jobs: str, rounds: int = 1, at_once: int = 3) -> tuple[int, list[str]]:
    """Return the exit code, and who began and ended when."""
    out = script.parent / "out"
    given = [word for job in jobs for word in ("--job", job)]
    options = ["--ranks", "2", "--rounds", str(rounds), "--at-once", str(at_once), "--last", "3", "--out", str(out)]
    code = in_turn.main([*given, *options, str(script), "--all"])
    return code, (script.parent / "events").read_text().splitlines()


@pytest.mark.exhaustive
def test_jobs_train_one_after_the_other(script, capsys):
    code, events = run(script, "a: NAME=a 100", "b: NAME=b 50", rounds=2, at_once=4)
    assert code == 0
    order = [events[n].split()[0] for n in range(0, len(events), 4)]
    assert order == ["a", "b", "b", "a"] and len(events) == 16, "the second round goes backwards"
    for n in range(0, 16, 4):  # no rank of another job in between
        assert {line.split()[0] for line in events[n : n + 4]} == {order[n // 4]}
    said = capsys.readouterr().out
    norms = "1.500, 3.500, 4.500"
    assert f"| a | 103.0, 103.0 | 102.0 to 104.0 | 1.000 | 9.0000, 7.0000, 6.0000 | {norms} |" in said
    assert "| b | 53.0, 53.0 | 52.0 to 54.0 | 0.515 |" in said
    runs = json.loads((script.parent / "out/times.json").read_text())["runs"]
    assert [(r["job"], r["code"], r["ms"][-1]) for r in runs] == [
        ("a", 0, 104),
        ("b", 0, 54),
        ("b", 0, 54),
        ("a", 0, 104),
    ]
    assert sorted(os.listdir(script.parent / "out")) == ["a.1.log", "a.2.log", "b.1.log", "b.2.log", "times.json"]


@pytest.mark.exhaustive
def test_variables_of_a_job_win(script, monkeypatch):
    """A job's PYTHONPATH was dropped. It replaces this process's, and the script's folder stays importable."""
    folder = script.parent
    for name in ("ours", "theirs"):
        (folder / name).mkdir()
        (folder / name / "beside.py").write_text(f"import os\nos.environ['NAME'] = {name!r}\n")
    script.write_text("import beside\n" + script.read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "ours"), os.environ.get("PYTHONPATH", "")]))
    for given, found in (("", "ours"), (f"PYTHONPATH={folder / 'theirs'} ", "theirs")):
        code, events = run(script, f"a: {given}7", at_once=1)
        assert code == 0 and events[-1].split()[0] == found
    code = in_turn.main(
        ["--job", "a: PYTHONPATH= 7", "--ranks", "1", "--out", str(folder / "none"), str(script), "--all"]
    )
    assert code == 1 and "No module named 'beside'" in (folder / "none/a.1.log").read_text()
    assert in_turn.Job.parse("a: 7").environment(folder)["PYTHONPATH"].split(os.pathsep)[0] == str(folder)


@pytest.mark.exhaustive
def test_a_job_that_fails_does_not_hold_up_the_others(script, capsys):
    code, events = run(script, "fails: NAME=fails 7", "b: NAME=b 50")
    assert code == 1 and events[-1].startswith("b") and events[-1].endswith("ends")
    said = capsys.readouterr().out
    assert "| fails | no run ended well |  |  |  |  |" in said and "| b | 53.0 | 52.0 to 54.0 | 1.000 |" in said


def test_a_run_that_the_limit_ends_has_figures(tmp_path, monkeypatch):
    """The docstring promised what jobs had reached, but their logs were not read."""
    log = tmp_path / "a.1.log"
    log.write_text("iteration 1/ 4 | elapsed time per iteration (ms): 7.0 | lm loss: 9.0 | grad norm: 2.5 |\n")
    monkeypatch.setattr(in_turn, "start", lambda *_: subprocess.Popen(["sleep", "60"]))
    one = in_turn.Run(in_turn.Job.parse("a:"), log)
    with pytest.raises(TimeoutError, match="^--limit: "):
        in_turn.run_batch([one], argparse.Namespace(out=tmp_path, limit=0.1))
    assert (one.code, one.milliseconds, one.losses, one.norms) == (-1, [7.0], [9.0], [2.5])
    assert os.listdir(tmp_path) == ["a.1.log"]


def test_what_is_a_job_of_ep_dispatcher():
    plain = in_turn.Job.parse("alltoall: A=1 --moe-token-dispatcher-type alltoall")
    assert (plain.variables, plain.arguments) == ({"A": "1"}, ["--moe-token-dispatcher-type", "alltoall"])
    assert plain.launcher is None
    for ours in ("x: EP_DISPATCHER_TIMEOUT_S=1", "x: --moe-flex-dispatcher-backend ep_dispatcher"):
        assert in_turn.Job.parse(ours).launcher == "ep_dispatcher.integrations.megatron"
    other = in_turn.Job.parse("x: EP_DISPATCHER_TIMEOUT_S=8 -m a.launcher --moe-flex-dispatcher-backend deepep")
    assert other.launcher == "a.launcher" and other.arguments == ["--moe-flex-dispatcher-backend", "deepep"]


@pytest.mark.exhaustive
def test_a_job_runs_through_the_launcher_that_it_names(script):
    """What a launcher puts in front of the path stays there: deep_ep is ours."""
    text = "import deep_ep, os\nos.environ['NAME'] = deep_ep.Buffer.__module__\n"
    script.write_text(text + script.read_text())
    code, events = run(script, "a: -m ep_dispatcher.integrations.deep_ep 7", at_once=1)
    assert code == 0 and {line.split()[0] for line in events} == {"ep_dispatcher.integrations.deep_ep.buffer"}


@pytest.mark.parametrize(
    "given,said",
    [
        (
            ["--job", "no colon", "--ranks", "2"],
            "but has to be 'NAME: [VARIABLE=VALUE ...] [-m MODULE] [ARGUMENT ...]'",
        ),
        (["--job", "a: -m", "--ranks", "2"], "it is 'a: -m', but has to be 'NAME: [VARIABLE=VALUE ...] [-m MODULE]"),
        (["--job", "a:", "--job", "a:", "--ranks", "2"], "has the names a, a"),
        (["--job", "a:", "--ranks", "0"], "it is '0', but has to be "),
    ],
)
def test_refused(script, capsys, given, said):
    with pytest.raises(SystemExit):
        in_turn.main([*given, str(script)])
    assert said in capsys.readouterr().err
