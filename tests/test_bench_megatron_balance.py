"""benchmarks/megatron_balance.py: all sides train the same model with the routing that was asked for."""

import json

import balance
import pytest
import torch
from conftest import exhaustive
from lib.commands import ROOT, torchrun

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import megatron_balance

SCRIPT = str(ROOT / "benchmarks" / "megatron_balance.py")
TINY = "--popularity lognormal:1.0 --redundant 2 --rounds 2 --steps 1 --warm-up 1 --seq-length 128".split()
SIDES = list(megatron_balance.SIDES)


def run(path, *flags: str) -> dict:
    code, output, errors = torchrun(2, SCRIPT, *TINY, "--sides", *SIDES, "--json", str(path), *flags, timeout_s=400)
    assert code == 0, output + errors
    (case,) = json.loads(path.read_text())["cases"]
    assert all(f"| {name} | {case['milliseconds'][name]:.2f} |" in output for name in SIDES)
    return case


def check(case: dict, losses: float, gradient_norm: float) -> None:
    """The figures of a run; ``losses`` and ``gradient_norm``: the largest relative differences."""
    turns = case["turns"]
    assert list(turns) == SIDES and all(len(of_side) == 2 for of_side in turns.values())
    for name, of_side in turns.items():
        first, again = of_side
        assert len(first["milliseconds"]) == 1 and len(first["losses"]) == 2
        assert first["losses"][1] < first["losses"][0]
        assert first["losses"] == pytest.approx(again["losses"], rel=losses), f"{name}: the turns differ"
    assert set(case["differences"]) == {*SIDES} - {"balanced"}
    for name, found in case["differences"].items():
        assert found["losses"] <= losses and found["gradient_norm"] <= gradient_norm, (name, found)

    before, after = turns["copies"][0]["imbalance"]  # as the buffer has counted it
    assert before == turns["today"][0]["imbalance"][0] > 1.3, "the router has not chosen the experts of the case"
    assert after < 1.05 and turns["copies"][0]["copies"] >= 1 and turns["copies"][0]["slot_bytes"] > 0
    assert turns["balanced"][0]["imbalance"] == [1, 1] and turns["balanced"][0]["losses"] != turns["today"][0]["losses"]
    assert turns["today"][0]["buffer_bytes"] > 0 and turns["today"][0]["slot_bytes"] == 0


@pytest.mark.exhaustive
def test_a_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    case = run(tmp_path / "new" / "figures.json", "--cases", "512x64x16x32x2")
    check(case, losses=1e-6, gradient_norm=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_on_gpus(tmp_path):
    case = run(tmp_path / "figures.json", "--cases", "1024x256x16x128x2")
    check(case, losses=1e-3, gradient_norm=2e-2)
    turns = case["turns"]
    assert all(turn["peak_bytes"] > 0 for of_side in turns.values() for turn in of_side)


@pytest.mark.parametrize("layout", ["sequence first", exhaustive("tokens first")])
def test_the_chosen_experts_are_chosen_and_the_router_learns(layout):
    case = balance.Case(24, 16, 16, 8, "lognormal:1.0", 1.6, 1, 2, 2, "cpu")
    chosen = balance.choices_of(case, 1)
    weight = torch.randn(16, 16, requires_grad=True)
    shape = (6, 4, 16) if layout == "sequence first" else (24, 16)
    hidden_states = torch.randn(shape)
    logits = megatron_balance.add_to_chosen(lambda x: x @ weight.t(), chosen, hidden_states)
    assert logits.shape == (*shape[:-1], 16)
    top = logits.view(24, 16).topk(balance.TOPK, dim=1)
    assert torch.equal(top.indices.sort(1).values, chosen.sort(1).values)
    own = (hidden_states.view(24, 16) @ weight.t()).gather(1, top.indices)
    torch.testing.assert_close(top.values.softmax(1), own.softmax(1), rtol=1e-4, atol=1e-6)
    top.values.softmax(1)[:, 0].sum().backward()
    assert float(weight.grad.abs().sum()) > 0


def turn(ms: float, loss: float, **figures) -> megatron_balance.Turn:
    return megatron_balance.Turn([ms, ms + 2], [7.0, loss], 2.0, **figures)


def test_a_report():
    routing = balance.Case(8192, 2048, 128, 768, "trace", 1.6, 8, 2, 2, "cuda")
    case = megatron_balance.Case(4, routing, 4096, 2)
    turns = {
        "alltoall": [turn(200, 5.0, imbalance=(1.6, 1.6)), turn(204, 5.0)],
        "copies": [turn(99, 5.001, imbalance=(1.6, 1.0), copies=6.0, peak_bytes=10**10, slot_bytes=2 * 10**9)],
        "balanced": [turn(90, 4.0)],
    }
    *_, first, second, third = megatron_balance.report(case, turns).splitlines()
    assert first == "| alltoall | 203.00 | 1.000 | 1.60 -> 1.60 | 0.0 | 0.0 | 0.00, 0.00 | 7.0000, 5.0000 | 0.0e+00 |"
    assert second == "| copies | 100.00 | 0.493 | 1.60 -> 1.00 | 6.0 | 10.0 | 0.00, 2.00 | 7.0000, 5.0010 | 2.0e-04 |"
    assert third.endswith("| 7.0000, 4.0000 | another routing |")


def test_without_torchrun_it_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        megatron_balance.main(["--steps", "1"])
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
