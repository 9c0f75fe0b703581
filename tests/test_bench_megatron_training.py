"""benchmarks/megatron_training.py: its corpus, its jobs, what it reads in logs, and its chart.

A script of a few lines plays pretrain_gpt.py.
"""

import gzip
import json
import lzma
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import megatron_corpus
import megatron_in_turn
import megatron_training
import pytest
import training_curves

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
SCRIPT = """
import os, random, sys
from pathlib import Path

def value(flag, default=None):
    places = [n for n, word in enumerate(sys.argv) if word == flag]
    return sys.argv[places[-1] + 1] if places else default

last, interval = int(value("--train-iters")), int(value("--log-interval"))
first = int(value("--ckpt-step", 0)) if Path(value("--load", "none")).exists() else 0
draw = random.Random(value("--seed") + str(first))
if os.environ["RANK"] == "1":  # the last rank logs
    for n in range(first + 1, last + 1):
        if n == first + 1 or n % interval == 0:
            loss = f" lm loss: {1 + 4 / n + draw.gauss(0, 0.02):.6E} |" if n != 30 else ""
            print(f" [2026-01-01 00:00:00.000000] iteration {n:8d}/{last:8d} | consumed samples: {32 * n:12d} |"
                  f" elapsed time per iteration (ms): {20 + n / last:.1f} | learning rate: 6.000000E-04 |"
                  f" global batch size:    32 |{loss} load_balancing_loss: 1.010000E+00 | loss scale: 1.0 |"
                  f" grad norm: 0.512 | number of skipped iterations: {int(n == 30):3d} |"
                  f" number of nan iterations:   0 |")
            print(f"[Rank 0] (after {n} iterations) memory (MB) | allocated: 10.00 | max allocated: {900 + n:.2f} |"
                  " reserved: 2000.00 | max reserved: 2000.00")
    print(f" validation loss at iteration {last} on validation set | lm loss value: 1.250000E+00 | lm loss PPL: 3.4 |")
    if "--save" in sys.argv:
        Path(value("--save"), f"iter_{last // 2:07d}").mkdir(parents=True)
"""


@pytest.fixture
def given(tmp_path):
    """The arguments of a run with a script that logs, and a data set that nobody reads."""
    (tmp_path / "pretrain.py").write_text(SCRIPT)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").touch()
    options = dict(ranks=2, iterations=60, corpus=tmp_path / "text", out=tmp_path / "out")
    return [f"--{name}={value}" for name, value in options.items()], str(tmp_path / "pretrain.py")


def test_a_text_is_read_back(tmp_path, capsys):
    entries = [b'Aback \\A*back"\\, adv.\n   Backwards.\n\n   2. Behind.', b"Abacus", "Abb\u00e9".encode()]
    (tmp_path / "text.xz").write_bytes(lzma.compress(b"\n\n".join(entries) + b"\n"))
    assert megatron_corpus.main([str(tmp_path / "text.xz"), str(tmp_path / "new" / "set")]) == 0
    assert f"3 documents, {sum(map(len, entries)) + 3} tokens" in capsys.readouterr().out
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = IndexedDataset(str(tmp_path / "new" / "set"))
    assert [bytes(found[n][:-1].astype("uint8").tobytes()) for n in range(3)] == entries
    assert {int(found[n][-1]) for n in range(3)} == {256} and list(found.document_indices) == [0, 1, 2, 3]


def test_jobs_differ_in_what_they_compare(given):
    options, script = given
    args = megatron_training.parse_args([*options, "--ranks=4", script, "--lr", "1"])
    jobs = {name: megatron_training.make_job(name, args) for name in megatron_training.JOBS}
    words = {name: shlex.join(job.arguments) for name, job in jobs.items()}
    assert {name for name, job in jobs.items() if job.launcher is None} == {"alltoall", "alltoall_seed"}
    assert [name for name in words if "--save-interval 30" in words[name]] == ["ep_dispatcher"]
    assert [name for name in words if "--ckpt-step 30" in words[name]] == ["resumed", "resumed_other_ep"]
    assert [name for name in words if "--expert-model-parallel-size 4" not in words[name]] == ["resumed_other_ep"]
    assert "--expert-model-parallel-size 2" in words["resumed_other_ep"], "half the ranks"
    assert "--no-load-optim" not in words["resumed_other_ep"]
    assert megatron_training.common_arguments(args)[-2:] == ["--lr", "1"], "arguments after the script win"


@pytest.mark.exhaustive
def test_jobs_run_and_are_compared(given, capsys):
    options, script = given
    folder = Path(script).parent / "out"
    assert megatron_training.main([*options, "--gpus=4", "--only=alltoall,alltoall_seed", script]) == 0
    chart = (folder / "training.png").stat()
    assert megatron_training.main([*options, "--only=resumed_other_ep,ep_dispatcher", script]) == 0
    found = json.loads((folder / "training.json").read_text())
    assert list(found["runs"]) == ["ep_dispatcher", "alltoall", "resumed_other_ep", "alltoall_seed"]
    assert (folder / "training.png").stat() != chart, "drawn again, with the jobs of both calls"
    run, resumed = found["runs"]["ep_dispatcher"], found["runs"]["resumed_other_ep"]
    assert run["iterations"] == [1, 10, 20, 30, 40, 50, 60] and resumed["iterations"] == [31, 40, 50, 60]
    assert run["losses"][3] is None and (run["skipped"], run["nan"]) == (1, 0)
    assert run["losses"] == found["runs"]["alltoall"]["losses"] != found["runs"]["alltoall_seed"]["losses"]
    assert run["allocated_mb"] == 960 and run["validation"] == {"60": 1.25} and run["grad_norms"] == [0.512] * 7
    said = capsys.readouterr().out
    assert "| ep_dispatcher | 1 to 60 |" in said and "| resumed_other_ep | 31 to 60 |" in said


@pytest.mark.exhaustive
def test_failures_are_told(given, capsys):
    options, script = given
    assert megatron_training.main([*options, "--only=resumed", script]) == 1
    assert "resumed: not run, because there is no checkpoint" in capsys.readouterr().out
    Path(script).write_text("import time\nprint('begun')\ntime.sleep(99)")
    assert megatron_training.main([*options, "--only=alltoall", "--limit-s=1", script]) == 1
    said = capsys.readouterr().out
    assert "alltoall: ended, because it took more than 1 s" in said and "| alltoall (exit code " in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("benchmark", [megatron_training, megatron_in_turn], ids=lambda module: module.__name__)
def test_the_jobs_end_with_a_benchmark_that_is_terminated(given, tmp_path, benchmark):
    """As by `timeout`: they ran on, and kept their GPUs."""
    options, script = given
    if benchmark is megatron_in_turn:
        options = ["--job=one: --lr 1", "--ranks=2", f"--out={tmp_path / 'out'}"]
    Path(script).write_text(
        f"import os, time\nopen({str(tmp_path / 'job')!r}, 'w').write(str(os.getppid()))\ntime.sleep(99)"
    )
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "training.py").write_text("train = None")
    more = ["--only=alltoall"] if benchmark is megatron_training else []
    process = subprocess.Popen([sys.executable, benchmark.__file__, *options, *more, script])
    wait_for(lambda: (tmp_path / "job").exists() and (tmp_path / "job").read_text())
    launcher = Path("/proc", (tmp_path / "job").read_text())
    process.terminate()
    assert process.wait(60) == 143
    wait_for(lambda: not launcher.exists())


def wait_for(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_last_line_of_an_ended_job_may_be_cut(tmp_path):
    line = " iteration {:8d}/    1500 | elapsed time per iteration (ms): 20.0 | lm loss: 1.5E+00 |\n"
    text = "".join(map(line.format, (1, 10, 110, 120)))
    (tmp_path / "log").write_text(text[: text.rindex("20.0")])
    found = megatron_training.read_log(tmp_path / "log")
    assert found["iterations"] == [1, 10, 110, 120] and found["median_ms"] == 20 and found["ms"][-1] is None


def a_run(seed: int, first: int = 0, shift: float = 0.0) -> dict:
    draw = random.Random(seed)
    steps = [first + 1, *range(first + 10, 1501, 10)]
    losses = [1 + 30 / (step + 8) + shift + draw.gauss(0, 0.01) for step in steps]
    about = dict(
        code=0, median_ms=40.0, allocated_mb=1500.5, device_mb=None, skipped=0, nan=0, validation={"1500": 1.1}
    )
    return about | dict(iterations=steps, losses=losses)


def test_noise_of_the_seeds_is_the_limit(tmp_path, capsys):
    runs = {"alltoall": a_run(1), "alltoall_seed": a_run(2, shift=0.004), "ep_dispatcher": a_run(1, shift=0.001)}
    runs |= {"resumed": a_run(1, first=750, shift=0.2)}
    found = dict(runs=runs, log_interval=10, tokens_per_step=16384, ranks=2, machine={"gpus": ["A GPU", "A GPU"]})
    apart = training_curves.differences(found)
    assert apart["ep_dispatcher"] == pytest.approx(dict.fromkeys(range(50, 1501, 50), 0.001))
    assert list(apart["resumed"]) == list(range(800, 1501, 50)), "windows of both"
    assert "alltoall" not in apart
    ended = {name: values[:22] if isinstance(values, list) else values for name, values in a_run(1).items()}
    assert list(training_curves.windows(ended, 10)) == [50, 100, 150, 200], "of 210 steps: no part of a window"
    *_, title, verdict = training_curves.report(found)
    assert verdict.startswith("another seed 0.00") and "within it: ep_dispatcher 0.0010; beyond: resumed 0.2" in verdict
    assert "| alltoall | 1 to 1500 |" in training_curves.report(found)[2] and "| 40.0 | 409,600 |" in "".join(
        training_curves.report(found)
    )
    path = tmp_path / "training.json"
    path.write_text(json.dumps(found))
    training_curves.draw_curves(path)
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "more,said",
    [
        (["--only=alltoall,other"], "it has other, but the jobs are ep_dispatcher, alltoall, resumed"),
        (["--ranks=3"], "--ranks is 3, but has to divide 32"),
        (["--ranks=4", "--gpus=2"], "at most --gpus 2"),
        (["--iterations=30"], "--iterations is 30, but has to be a multiple of 20"),
        (["--corpus=none"], "'none.bin' has to be a file that exists"),
    ],
)
def test_refused(given, capsys, more, said):
    options, script = given
    with pytest.raises(SystemExit):
        megatron_training.main([*options, *more, script])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "more,said", [(["--iterations=40"], "iterations 60, but these have 40"), (["--ranks=4"], "ranks 2, but these")]
)
def test_jobs_of_other_sizes_are_not_compared(given, capsys, more, said):
    options, script = given
    args = megatron_training.parse_args([*options, script])
    args.out.mkdir()
    (args.out / "training.json").write_text(json.dumps(megatron_training.shared_settings(args) | dict(runs={})))
    megatron_training.parse_args([*options, "--only=alltoall", script])
    with pytest.raises(SystemExit):
        megatron_training.parse_args([*options, *more, script])
    assert f"--out has jobs with {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name,content,more,said",
    [
        ("none.txt", None, [], "has to be a file that exists"),
        ("text.txt", b"\n\n\n", [], "of which the first 25000000 bytes have no text"),
        ("text.txt", b"text", ["--bytes=0"], "--bytes is 0, but has to be at least 1"),
        ("text.txt", b"text", ["--bytes=-3"], "--bytes is -3, but has to be at least 1"),
        ("text.gz", b"text", [], "which cannot be read: Not a gzipped file"),
        ("text.gz", gzip.compress(b"some text", mtime=0)[:-12], [], "which cannot be read: Compressed file ended"),
        ("text.xz", b"text", [], "which cannot be read: Input format not supported"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(tmp_path, capsys, name, content, more, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit):
        megatron_corpus.main([*more, str(tmp_path / name), str(tmp_path / "set")])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "set.bin").exists()
