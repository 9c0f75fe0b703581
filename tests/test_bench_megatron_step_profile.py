"""benchmarks/megatron_step_profile.py: a profiled job of a few lines that play megatron.training, and the chart."""

import json
import os
import subprocess
import sys

import megatron_step_profile
import pytest
from lib.commands import ROOT

SCRIPT = str(ROOT / "benchmarks/megatron_step_profile.py")
TRAINING = """
import time

def train_step(number):
    time.sleep(0.001)
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    return number

def train(steps):
    return [train_step(number) for number in range(steps)]
"""
PRETRAIN = """
import sys
from megatron.training import training

assert sys.argv[1:] == ["24"] and training.train(int(sys.argv[1])) == list(range(24))
"""


def test_a_job_is_profiled(tmp_path):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "training.py").write_text(TRAINING)
    (tmp_path / "pretrain.py").write_text(PRETRAIN)
    environment = os.environ | dict(
        PROFILE=str(tmp_path / "out.json"), PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES=""
    )
    subprocess.run([sys.executable, SCRIPT, str(tmp_path / "pretrain.py"), "24"], env=environment, check=True)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["step"] > 20 and sum(found["owners"].values()) == pytest.approx(found["step"])
    assert next(iter(found["owners"])) == "Megatron" and next(iter(found["lines"])).startswith("megatron/training/")
    assert found["busy"] == 0 and found["kernels"] == {}, "no GPU"


def test_a_sample_stands_for_its_time():
    from host_samples import shares

    ours, torch = ("ep_dispatcher/autograd.py", "dispatch", 3), ("torch/_ops.py", "apply", 5)
    found = shares([(0.1, [torch, ours]), (0.3, [torch])], 8.0)
    assert found["owners"] == pytest.approx({"others": 6.0, "this dispatcher and its experts": 2.0})
    assert found["lines"] == pytest.approx({"torch/_ops.py:5 apply": 8.0})


def test_kernels_that_overlap_are_busy_once():
    assert megatron_step_profile.busy_time([(5, 9), (0, 4), (1, 2), (8, 10)]) == 9


def test_the_steps_of_a_trace_are_busy_one_after_the_other(tmp_path):
    """PyTorch counts the times of each trace from its own begin. Together they looked like one step."""
    one = megatron_step_profile.Profiled(None, tmp_path / "out.json")
    one.times = [0.01]
    one.traces = [[("gemm", (0.0, 2000.0)), ("adam", (1000.0, 3000.0))]] * megatron_step_profile.TRACED
    calls = [("cudaStreamSynchronize", (500.0, 900.0)), ("cudaLaunchKernel", (0.0, 200.0))]
    one.calls = [calls] * megatron_step_profile.TRACED
    found = one.figures()
    assert found["busy"] == pytest.approx(3.0) and found["kernels"] == pytest.approx({"GEMMs": 2.0, "optimizer": 2.0})
    assert found["waits"] == pytest.approx(0.4)
    assert found["names"] == pytest.approx({"GEMMs: gemm": 2.0, "optimizer: adam": 2.0})


@pytest.mark.parametrize(
    "kernel,kind",
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gradients and weights"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "dispatch, combine"),
        ("void deep_ep::intranode::cached_notify_combine<2>(void**, int*)", "dispatch, combine"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "GEMMs"),
        ("_outer_products", "GEMMs"),
        ("_multiply", "GEMMs"),
        ("ep::cuda::(anonymous namespace)::float8_gemm_kernel(ep::cuda::(anonymous namespace)::Params)", "GEMMs"),
        ("ep::cuda::(anonymous namespace)::weight_grad_kernel(ep::cuda::(anonymous namespace)::Params)", "GEMMs"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128", "attention"),
        ("void multi_tensor_apply_kernel<transformer_engine::multi_tensor_adam::AdamFunctorMaster>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "others"),
    ],
)
def test_kernels_have_a_kind(kernel, kind):
    assert megatron_step_profile.kind_of(kernel).startswith(kind)


def test_the_chart(tmp_path, capsys):
    one = dict(
        step=250.0,
        busy=170.0,
        waits=30.0,
        names={},
        kernels={"GEMMs": 95.0, "others": 40.0, "dispatch, combine, permutes": 35.0},
    )
    one |= dict(owners={"Megatron": 150.0, "Transformer Engine": 60.0, "others": 40.0}, lines={"a.py:1 f": 9.0})
    for name in ("alltoall", "ep_dispatcher"):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    files = [str(tmp_path / name) for name in ("chart.png", "alltoall.json", "ep_dispatcher.json")]
    assert megatron_step_profile.main(["--draw", *files]) == 0
    assert "alltoall: a step takes 250.0 ms, and its GPU is busy for 170.0 ms" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
