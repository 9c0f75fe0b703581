"""The margin of multiprocessors of GEMMs beside communication: when it is set, where, and what it is set back to."""

import os
import types

import pytest
import torch
from lib.megatron_layer import make_config, make_layer, on_gpu, on_ranks, tokens_of

from ep_dispatcher.integrations.megatron import register, unregister
from ep_dispatcher.integrations.megatron.dispatcher import buffers, gemm_sm_margin, megatron_config, registration

TE = gemm_sm_margin.TE_VARIABLE
ON, OFF = types.SimpleNamespace(ep_dispatcher_gemm_sm_margin=True), types.SimpleNamespace()
GPU_SMS, SMS_IN_USE = 132, 24
BESIDE, ALONE = (str(SMS_IN_USE), SMS_IN_USE), (str(GPU_SMS), None)  # a target of 0 multiprocessors stands for none


class Carveout:
    """Stands for PyTorch's setting."""

    def __init__(self, patch, value=None):
        self.value = value
        patch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: self.value)
        patch.setattr(torch._C, "_set_sm_carveout_experimental", lambda value: setattr(self, "value", value))


def stand_in_for_a_gpu(patch) -> Carveout:
    """A GPU whose dispatch and combine use 24 of 132 multiprocessors, and nothing set by the user."""
    registration.forget(gemm_sm_margin.Margins)
    patch.delenv(TE, raising=False)
    patch.setattr(buffers, "max_sms_in_use", lambda: SMS_IN_USE)
    properties = types.SimpleNamespace(multi_processor_count=GPU_SMS)
    patch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    return Carveout(patch)


@pytest.fixture
def carveout(monkeypatch):
    yield stand_in_for_a_gpu(monkeypatch)
    registration.forget(gemm_sm_margin.Margins)


def now(carveout: Carveout) -> tuple:
    return os.environ.get(TE), carveout.value


def test_the_margin_is_set_and_set_back(capsys, carveout):
    for _ in range(2):
        with gemm_sm_margin.margin(ON):
            assert now(carveout) == BESIDE
            with gemm_sm_margin.margin(ON):
                pass
            assert now(carveout) == BESIDE, "until the outermost ends"
        assert now(carveout) == ALONE
    with pytest.raises(KeyError), gemm_sm_margin.margin(ON):
        raise KeyError
    assert now(carveout) == ALONE
    said = capsys.readouterr().out
    assert said.count("\n") == 1, "once"
    assert f"{SMS_IN_USE} multiprocessors" in said and TE in said and "SM carve-out" in said


@pytest.mark.parametrize("config, sms_in_use", [(OFF, SMS_IN_USE), (ON, 0)], ids=["not asked for", "without a GPU"])
def test_nothing_is_set(monkeypatch, capsys, carveout, config, sms_in_use):
    monkeypatch.setattr(buffers, "max_sms_in_use", lambda: sms_in_use)
    with gemm_sm_margin.margin(config):
        assert now(carveout) == (None, None)
    assert now(carveout) == (None, None) and capsys.readouterr().out == ""


def test_what_the_user_has_set_stays(monkeypatch, capsys, carveout):
    monkeypatch.setenv(TE, "8")
    with gemm_sm_margin.margin(ON):
        assert now(carveout) == ("8", SMS_IN_USE)
    assert now(carveout) == ("8", None)
    assert capsys.readouterr().out.endswith("Libraries: PyTorch's cuBLASLt (SM carve-out)\n")

    registration.forget(gemm_sm_margin.Margins)
    carveout.value = 4
    with gemm_sm_margin.margin(ON):
        assert now(carveout) == ("8", 4)
    assert now(carveout) == ("8", 4)
    assert capsys.readouterr().out.endswith("Libraries: none, because the user has set their margins\n")


def test_pytorch_without_a_carveout(monkeypatch, carveout):
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with gemm_sm_margin.margin(ON):
        assert now(carveout) == (str(SMS_IN_USE), None)


@on_ranks()
def test_layers_of_two_passes_leave_multiprocessors(rank: int):
    """Set around a layer of each pass, and not where one pass is alone: nothing runs beside its communication."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    unregister()
    with pytest.MonkeyPatch.context() as patch:
        carveout, seen = stand_in_for_a_gpu(patch), []
        look = staticmethod(lambda f_layer, b_layer, f_input=None, b_grad=None: seen.append(now(carveout)))
        patch.setattr(TransformerLayerSchedulePlan, "run", look)
        register()
        one = types.SimpleNamespace(config=ON)
        for layers in ((one, one), (one, None), (None, one)):
            TransformerLayerSchedulePlan.run(*layers, f_input=3)
        assert seen == [BESIDE] + 2 * [ALONE]
        unregister()
        assert vars(TransformerLayerSchedulePlan)["run"] is look
    registration.forget(gemm_sm_margin.Margins)


@pytest.mark.skipif(on_gpu(), reason="what stands for a GPU is for CPUs")
@on_ranks()
def test_overlapped_shared_experts_leave_multiprocessors(rank: int):
    """Set in both linear layers of overlapped shared experts, and nowhere else in the layer."""
    settings = dict(moe_shared_expert_intermediate_size=40, moe_shared_expert_overlap=True)
    layer, seen = make_layer(make_config(**settings)), []
    layer.config.ep_dispatcher_gemm_sm_margin = True
    with pytest.MonkeyPatch.context() as patch:
        carveout = stand_in_for_a_gpu(patch)
        for name in ("linear_fc1", "linear_fc2"):
            hook = getattr(layer.shared_experts, name).register_forward_pre_hook
            hook(lambda module, given: seen.append(now(carveout)))
        layer.experts.register_forward_pre_hook(lambda module, given: seen.append(now(carveout)))
        layer(tokens_of(rank))
    registration.forget(gemm_sm_margin.Margins)
    assert seen == [BESIDE, ALONE, BESIDE]


@on_ranks()
def test_the_multiprocessors_are_those_of_buffers_on_gpus(rank: int):
    assert buffers.max_sms_in_use() == 0
    make_layer(make_config())(tokens_of(rank))
    (buffer,) = buffers.all_buffers()
    assert buffers.max_sms_in_use() == (megatron_config.ALONE_SMS if buffer.engine == "cuda" else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer.live_engine(), "used_sms", 29)
        assert buffers.max_sms_in_use() == 29
    buffer.destroy()
    assert buffers.max_sms_in_use() == 0
