"""benchmarks/megatron_steps.py: its file, its table, and its chart, from made-up times."""

import json
import random

import megatron_steps
import pytest
from lib.commands import ROOT
from megatron_jobs import StepTime

MACHINE = dict(gpus=["A GPU", "A GPU"], torch="2.11", date="2026-01-02T03:04:05", modules={"_C_cuda": "abc"})


def times(jobs: dict[str, int], arguments: str, rounds: int = 3) -> dict:
    """What megatron_in_turn.py writes. The first iterations of a run are slow."""
    draw = random.Random(1)
    runs = [
        dict(job=job, code=0, ms=[9 * ms] * 2 + [ms + draw.randint(-1, 1) for _ in range(9)])
        for _ in range(rounds)
        for job, ms in jobs.items()
    ]
    failed = dict(job="hybridep", code=1, ms=[7.0])
    return dict(machine=MACHINE, ranks=2, last=9, arguments=arguments, runs=[*runs, failed])


JOB = "--num-layers 4 --hidden-size 64 --moe-router-topk 2 --num-experts 8 --moe-ffn-hidden-size 32 --num-layers 2"
JOBS = {"alltoall": 400, "deepep": 300, "ep_dispatcher": 200, "ep_dispatcher-fp8": 180}
GRAPHS = {"alltoall-graphs": 300, "ep_dispatcher-graphs": 150, "ep_dispatcher-graphs-fp8": 120}


@pytest.fixture
def command(tmp_path) -> list[str]:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{megatron_steps.BEGIN}\nold\n{megatron_steps.END}\nafter\n")
    return ["--page", str(page), "--results", str(tmp_path / "steps.json")]


def test_the_table_has_dispatchers_as_columns(tmp_path, command):
    given = []
    for name, jobs in (("job", JOBS), ("graphs", GRAPHS), ("model", {"alltoall": 100, "ep_dispatcher": 90})):
        (tmp_path / f"{name}.json").write_text(json.dumps(times(jobs, JOB)))
        given.append(f"A-235B={tmp_path}/{name}.json" if name == "model" else f"{tmp_path}/{name}.json")
    assert megatron_steps.main([*command, "--take", *given]) == 0 == megatron_steps.main([*command, "--check"])
    text = (tmp_path / "performance.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "2 x A GPU, PyTorch 2.11, build abc, 2026-01-02:" in text
    assert "| job | alltoall | deepep | ep_dispatcher |" in text, "hybridep has no run that ended well"
    sizes = "2 layers, hidden 64, top-2 of 8 experts of 32"
    assert f"| {sizes} | 400 | 300 (0.75) | 200 (0.50) |" in text
    assert "| the same, fp8 |  |  | 180 (0.45) |" in text, "of alltoall without the variant"
    assert "| the same, graphs | 300 |  | 150 (0.50) |" in text
    assert "| the same, graphs, fp8 |  |  | 120 |" in text
    assert f"| A-235B: {sizes} | 100 |  | 90 (0.90) |" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "steps.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "page, results",
    [
        ("docs/performance.md", "megatron-steps.json"),
        ("benchmarks/results/RUNS.md", "megatron-steps-1xH200.json"),
    ],
)
def test_the_page_has_the_figures_of_its_results(page, results):
    given = ["--page", str(ROOT / page), "--results", str(ROOT / "benchmarks/results" / results)]
    assert megatron_steps.main([*given, "--check"]) == 0


def test_other_figures_are_found(tmp_path, command, capsys):
    (tmp_path / "steps.json").write_text(json.dumps([{"model": ""} | times(JOBS, JOB)]))
    assert megatron_steps.main([*command, "--check"]) == 1
    assert "its figures are not those of" in capsys.readouterr().out
    assert not (tmp_path / "steps.png").exists() and "old" in (tmp_path / "performance.md").read_text()


def test_a_time_is_of_the_last_iterations():
    step = StepTime.of([[99.0, *range(10)], [99.0, *range(20, 30)], [99.0, *range(10, 20)]], last=10)
    assert (step.medians, step.median, step.low, step.high) == ([4.5, 24.5, 14.5], 14.5, 3, 26)
