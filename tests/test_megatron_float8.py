"""Experts in FP8: close to bfloat16; weights quantized once a step, never old; rows quantized before the dispatch."""

import contextlib
import types

import pytest
import torch
from conftest import exhaustive
from lib.megatron_eligibility import hook
from lib.megatron_experts import (
    EP2,
    EP4,
    ETP2,
    GROUPED,
    GROUPED_GEMMS,
    MODES,
    MOE_ACT,
    TWO_PARTS,
    family,
    make_grouped_layer,
    said,
    switched_on,
)
from lib.megatron_layer import (
    BATCH,
    HIDDEN,
    OURS,
    assert_same_bits,
    checkpointed,
    environment,
    grads_of,
    make_config,
    on_ranks,
    outcome,
    random,
    step,
    tokens_of,
    with_graphs,
)
from lib.megatron_main_grad import main_grads
from lib.megatron_recompute import Microbatch

import ep_dispatcher as ep
from ep_dispatcher.integrations.megatron.dispatcher import experts_interface, graphs
from ep_dispatcher.integrations.megatron.grouped_experts import experts, float8, wrappers
from ep_dispatcher.moe import grouped_gemm
from ep_dispatcher.moe.float8_gemm import quantize_weights
from ep_dispatcher.moe.grouped_mlp import Parameters

BFLOAT16 = dict(bf16=True, params_dtype=torch.bfloat16)


class Float8BlockwiseQTensor(torch.Tensor):
    """Stands for Transformer Engine's quantized parameter: its attributes, a transposed copy once it is needed."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=torch.bfloat16, device=weight.device, requires_grad=True
        )
        made._is_param = made._is_2D_scaled = True
        made._columnwise_data = made._columnwise_scale_inv = None
        made.quantize_(weight)
        return made

    def quantize_(self, weight: torch.Tensor) -> None:
        found = quantize_weights([weight.to(torch.bfloat16)])
        self._rowwise_data, self._rowwise_scale_inv = found.rows[0].view(torch.uint8), padded(found.scales[0])

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage and columnwise_usage and self._columnwise_data is None
        self._columnwise_data = self._rowwise_data.t().contiguous()
        blocks = -(-self.shape[1] // 128)
        self._columnwise_scale_inv = padded(self._rowwise_scale_inv[:, :blocks].t())

    def dequantize(self) -> torch.Tensor:
        scales = self._rowwise_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        exact = self._rowwise_data.view(torch.float8_e4m3fn).float()
        return (exact * scales[: self.shape[0], : self.shape[1]]).to(torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        exact = [one.dequantize() if isinstance(one, cls) else one for one in args]
        return func(*exact, **(kwargs or {}))


def padded(scales: torch.Tensor) -> torch.Tensor:
    """Their last dimension is a multiple of 4, and nobody reads what is behind."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4), value=float("nan"))


def quantize_parameters(layer) -> None:
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        for name, weight in list(linear._parameters.items()):
            if name.startswith("weight"):
                linear._parameters[name] = Float8BlockwiseQTensor(weight.detach())


def make_float8_layer(number: int = 1, parameters: bool = False, dispatcher: str = OURS, **settings):
    """A layer with stand-ins for Transformer Engine's layers, whose configuration says FP8 from now on."""
    layer = make_bfloat16_layer(dispatcher, number, **settings)
    if parameters:
        quantize_parameters(layer)
    config = layer.config
    config.fp8, config.fp8_recipe, config.fp8_param = "e4m3", "blockwise", parameters
    return layer


def make_bfloat16_layer(dispatcher: str = OURS, number: int = 1, **settings):
    return make_grouped_layer(make_config(dispatcher, **GROUPED, **BFLOAT16, **settings), number)


def bfloat16_tokens(rank: int, number: int = 0, length: int = 12) -> torch.Tensor:
    return tokens_of(rank, number, length, torch.bfloat16)


@contextlib.contextmanager
def in_float8(mode: str = GROUPED_GEMMS):
    """As switched_on, for bfloat16 on GPUs, and with every pass inside the FP8 context of a Transformer Engine."""
    with switched_on(mode, grouped_gemm.KERNEL_DTYPES) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "_manager", lambda: None)
        yield printed


@contextlib.contextmanager
def counted():
    """Yield a list that gets an entry whenever a layer's weights are quantized."""
    calls, quantize = [], float8._quantized
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "_quantized", lambda *given: calls.append(1) or quantize(*given))
        yield calls


@contextlib.contextmanager
def dispatched():
    """Yield a list with the dtype of the rows of each dispatch, and how many zero rows pad them."""
    found, send = [], ep.dispatch

    def look(*given, **options):
        out = send(*given, **options)
        rows = out.x[0] if isinstance(out.x, tuple) else out.x
        found.append((rows.dtype, int((out.rows_per_expert - out.tokens_per_expert).sum())))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep, "dispatch", look)
        yield found


def assert_close(got: dict, wanted: dict, low: float = 0.002, high: float = 0.1) -> None:
    """Relative errors are those of FP8: more than bfloat16's, at most 10 % or so."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = float((got[name].float() - tensor.float()).norm() / tensor.float().norm())
        if "linear_fc2.bias" in name:  # sums of the gradients of the results
            low = -1
        assert low < error < high, f"{name}: {error}"


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, dispatcher, settings, mode",
    [
        (EP2, OURS, {}, GROUPED_GEMMS),
        (EP2, OURS, {}, TWO_PARTS),
        (EP2, OURS, MOE_ACT, GROUPED_GEMMS),
        (EP2, "alltoall", {}, GROUPED_GEMMS),
        (ETP2, OURS, dict(moe_ffn_hidden_size=96), GROUPED_GEMMS),
    ],
    ids=str,
)
@pytest.mark.parametrize("parameters", [exhaustive(False), True], ids=["bfloat16 weights", "quantized weights"])
@on_ranks(4)
def test_a_layer_is_close_to_bfloat16(rank, layout, dispatcher, settings, mode, parameters):
    sizes = {name: size for name, size in settings.items() if name == "moe_ffn_hidden_size"}
    layer = make_bfloat16_layer(dispatcher, **sizes)
    wanted = outcome(layer, bfloat16_tokens(rank))
    with in_float8(mode) as printed, dispatched() as sent:
        layer = make_float8_layer(parameters=parameters, dispatcher=dispatcher, **settings)
        got = outcome(layer, bfloat16_tokens(rank))
    assert_close(got, wanted)
    assert "1 of 1 MoE layers in grouped GEMMs, 1 of them in FP8 (" in said(printed) or rank > 0
    assert mode == TWO_PARTS or sent == [(torch.float8_e4m3fn, 0)] * (dispatcher == OURS)


@pytest.mark.parametrize("name", ["gpt-oss", "squared ReLU", "probabilities on the input"])
@on_ranks()
def test_families(rank: int, name: str):
    """Biases stay bfloat16. Probabilities on the input multiply rows that have arrived in bfloat16."""
    settings = family(name)
    if "activation_func_clamp_value" in settings:
        settings["activation_func_clamp_value"] = 7.0  # clamped values have no gradient
    with in_float8():
        layer = make_bfloat16_layer(**settings)
        wanted = outcome(layer, bfloat16_tokens(rank))
        with dispatched() as sent:
            layer = make_float8_layer(**settings)
            got = outcome(layer, bfloat16_tokens(rank))
    assert_close(got, wanted, high=0.15)
    assert sent[0][0] == (torch.bfloat16 if "input" in name else torch.float8_e4m3fn)


@pytest.mark.parametrize("parameters", [False, True], ids=["bfloat16 weights", "quantized weights"])
@MODES
@on_ranks(4)
def test_gradients_reach_main_grad_in_float32(rank, mode, parameters):
    wanted = main_grads(make_bfloat16_layer(), bfloat16_tokens(rank), bfloat16_tokens(rank, 1))
    with in_float8(mode):
        layer = make_float8_layer(parameters=parameters)
        layer.config.gradient_accumulation_fusion = True
        assert_close(main_grads(layer, bfloat16_tokens(rank), bfloat16_tokens(rank, 1)), wanted)


@on_ranks()
def test_losses_of_several_steps_stay_close(rank: int):
    """Ten steps of SGD: each loss is within 2 % of that in bfloat16, and they fall."""

    def losses(layer) -> list[float]:
        found, target = [], random(12, BATCH, HIDDEN, seed=5, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.1)
        for _ in range(10):
            layer.set_is_first_microbatch()
            optimizer.zero_grad()
            loss = (layer(bfloat16_tokens(rank))[0] - target).float().square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
        return found

    wanted = losses(make_bfloat16_layer())
    with in_float8(), counted() as calls:
        got = losses(make_float8_layer())
    assert len(calls) == 10
    assert got[-1] < 0.9 * got[0] and got != wanted
    assert all(abs(one - other) < 0.02 * other for one, other in zip(got, wanted)), (got, wanted)


@MODES
@on_ranks()
def test_a_recompute_is_the_same(rank, mode):
    """It uses the plan and the weights of its forward pass, and sends quantized rows again."""
    with in_float8(mode), counted() as calls, dispatched() as sent:
        layer = make_float8_layer()
        wanted = outcome(layer, bfloat16_tokens(rank))
        layer.zero_grad()
        got = step(checkpointed(layer), bfloat16_tokens(rank)) | grads_of(layer)
    assert len(calls) == 1
    assert_same_bits(got, wanted)
    assert sent == [(torch.float8_e4m3fn, 0)] * (3 * (mode == GROUPED_GEMMS))


@on_ranks()
def test_nodes_of_the_overlap_schedule(rank: int):
    """1F1B detaches what the steps return: the gradient of the rows arrives through the argument of the experts."""
    with in_float8():
        layer, results = make_float8_layer(), []
        for cut in (False, True):
            layer.zero_grad()
            x = bfloat16_tokens(rank).requires_grad_()
            probs, routing_map = layer.router(x)
            steps = layer.token_dispatcher
            sent = steps.token_dispatch(*steps.dispatch_preprocess(x, routing_map, probs))
            given = [t.detach().requires_grad_() for t in sent] if cut else sent
            rows, counts, row_probs = steps.dispatch_postprocess(*given)
            assert isinstance(counts, experts_interface.QuantizedInput) and rows.untyped_storage().nbytes() == 2
            out = steps.combine_postprocess(steps.token_combine(layer.experts(rows, counts, row_probs)[0]))
            out.backward(random(*out.shape, seed=7, dtype=out.dtype))
            if cut:
                torch.autograd.backward(sent, [t.grad for t in given])
            results.append({"output": out.detach(), "input gradient": x.grad} | grads_of(layer))
    assert_same_bits(*results)


# ---- weights --------------------------------------------------------------------------------------------------------


@on_ranks()
def test_weights_are_quantized_once_a_step_and_are_never_old(rank: int, monkeypatch):
    """Whatever renews them: the result is that of a new layer with the same weights."""
    x = bfloat16_tokens(rank)

    def expect(number: int) -> None:
        calls.clear()
        with torch.no_grad():
            for _ in range(3):
                got = layer(x)[0]
            assert len(calls) == number
            assert torch.equal(got, result_of_a_new_layer(layer, x))

    with in_float8(), counted() as calls:
        layer = make_float8_layer()
        expect(1)
        expect(0)
        change_without_a_trace(layer)
        layer.set_is_first_microbatch()
        expect(1)
        with torch.no_grad():
            layer.experts.linear_fc2.weight1.mul_(2)  # as PyTorch's optimizers do
        expect(1)
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
        expect(1)
        # Megatron's way, in the middle of a step or of several, and back.
        handle = layer.experts.linear_fc1.register_forward_hook(lambda *given: None)
        with plain_matrices():
            layer(x)
        change_without_a_trace(layer)
        handle.remove()
        expect(1)
        # A capture keeps nothing, and each of its passes quantizes.
        monkeypatch.setattr(graphs, "stream_is_captured", lambda: True)
        expect(3)
        monkeypatch.undo()
        change_without_a_trace(layer)
        expect(1)
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            linear.disable_parameter_transpose_cache = True
        expect(3)


def result_of_a_new_layer(layer, x: torch.Tensor) -> torch.Tensor:
    """What these weights give in an eager layer that has quantized none before."""
    new = make_float8_layer()
    new.load_state_dict(layer.state_dict())
    with torch.no_grad():
        return new(x)[0]


def change_without_a_trace(layer) -> None:
    """As Megatron's distributed optimizer writes weights: no version of a parameter changes."""
    for weight in layer.experts.parameters():
        weight.data.mul_(1.5)


@contextlib.contextmanager
def flagged(flag: torch.Tensor | None):
    """With a Transformer Engine that has this flag on the device for the replays of its graphs."""
    manager = types.SimpleNamespace(is_fp8_enabled=lambda: True, skip_fp8_weight_update_tensor=flag)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "_manager", lambda: manager)
        yield


@contextlib.contextmanager
def replayed():
    """Passes inside stand for replays: on a CPU a pass does what its graph would do."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(graphs, "stream_is_captured", lambda: True)
        yield


def addresses(layer) -> list[int]:
    held = experts.experts_of(layer.experts).weights._quantized
    return [field.data_ptr() for matrices in held or () for field in matrices]


@pytest.mark.parametrize("trains_before", [True, False])
@on_ranks()
def test_replays_quantize_in_the_first_microbatch_of_a_step(rank: int, trains_before: bool):
    """All replays share one memory. Eager passes between them, and replays after those, have the weights of then."""
    x, skip = bfloat16_tokens(rank), torch.zeros(1)

    def replay(is_first: bool) -> torch.Tensor:
        skip.fill_(not is_first)
        with replayed():
            return layer(x)[0]

    def step_of_three() -> None:
        right = result_of_a_new_layer(layer, x)
        layer.set_is_first_microbatch()
        assert all(torch.equal(replay(microbatch == 0), right) for microbatch in range(3))
        assert addresses(layer) == memory

    with in_float8(), flagged(skip), counted() as calls:
        layer = make_float8_layer()
        with_graphs(layer.config, "transformer_engine", "attn", "moe")
        if trains_before:
            step(layer, x.clone())
        eager = addresses(layer)
        replay(True)
        memory = addresses(layer)
        assert len(set(memory)) == 8 and eager == (memory if trains_before else [])
        for _ in range(3):
            before = result_of_a_new_layer(layer, x)
            change_without_a_trace(layer)
            assert torch.equal(replay(False), before), "it has skipped"
            step_of_three()
        # An evaluation without graphs, in the middle of which nothing changes.
        calls.clear()
        with torch.no_grad():
            assert all(torch.equal(layer(x)[0], result_of_a_new_layer(layer, x)) for _ in range(2))
        assert len(calls) == 1 + 2 and addresses(layer) == memory, "one, and two of new layers"
        change_without_a_trace(layer)
        step_of_three()
        with torch.no_grad():
            assert torch.equal(layer(x)[0], result_of_a_new_layer(layer, x))
        # A checkpoint, and experts that change and change back: graphs read the same memory later.
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
        step_of_three()
        handle = layer.experts.linear_fc1.register_forward_hook(lambda *given: None)
        with plain_matrices():
            layer(x)
        handle.remove()
        change_without_a_trace(layer)
        step_of_three()


def test_copies_of_other_sizes_are_not_written_to():
    """As after experts whose weights have changed their shape, or have moved."""
    weights = [torch.randn(4, 128, 256).bfloat16(), torch.randn(4, 256, 128).bfloat16()]
    earlier = float8._quantized(Parameters(*weights))
    again = float8._quantized(Parameters(*(2 * one for one in weights)), earlier)
    assert [one.rows.data_ptr() for one in again] == [one.rows.data_ptr() for one in earlier]
    for others in (weights[::-1], [one[:3] for one in weights]):
        found = float8._quantized(Parameters(*others), earlier)
        assert [one.rows.shape for one in found] == [one.shape for one in others]
        assert all(torch.equal(a, b) for one, other in zip(found, others) for a, b in zip(one, quantize_weights(other)))


@on_ranks()
def test_a_backward_after_other_replays_reads_the_weights_of_its_step(rank: int):
    """Microbatches of a pipeline: two forwards before the first backward, each a graph of its own."""
    skip = torch.zeros(1)
    with in_float8(), flagged(skip):
        layer = make_float8_layer()
        with_graphs(layer.config, "transformer_engine", "attn", "moe")
        with replayed():
            layer(bfloat16_tokens(rank))
        change_without_a_trace(layer)
        new = make_float8_layer()
        new.load_state_dict(layer.state_dict())
        wanted = [outcome(new, bfloat16_tokens(rank, number)) for number in range(2)]
        flying = []
        for number in range(2):
            skip.fill_(number > 0)
            with replayed(), torch.enable_grad():
                flying.append(Microbatch(layer, bfloat16_tokens(rank, number)))
        for one, right in zip(flying, wanted):
            layer.zero_grad()
            assert_same_bits(one.backward(may_wait=True), right)


@pytest.mark.parametrize(
    "impl, modules, is_told",
    [
        ("transformer_engine", ["attn", "moe"], True),
        ("transformer_engine", [], True),
        ("transformer_engine", ["moe"], False),
        ("local", ["attn", "moe"], False),
        ("none", [], False),
    ],
)
@on_ranks()
def test_which_replays_are_told_of_the_first_microbatch(rank: int, impl: str, modules: list[str], is_told: bool):
    x, skip = bfloat16_tokens(rank), torch.ones(1)
    with in_float8():
        layer = make_float8_layer()
        with_graphs(layer.config, impl, *modules)
        assert float8.skip_flag(layer.config) is None, "without Transformer Engine"
        with flagged(None):
            assert float8.skip_flag(layer.config) is None, "graphs without cached weights"
        with flagged(skip):
            assert (float8.skip_flag(layer.config) is skip) == is_told
            manager = float8._manager()
            manager.quantization_state = types.SimpleNamespace(skip_fp8_weight_update_tensor=torch.ones(1))
            newer = manager.quantization_state.skip_fp8_weight_update_tensor
            assert (float8.skip_flag(layer.config) is newer) == is_told, "as newer versions have it"
            del manager.quantization_state
            if is_told:  # weights of no step are kept where graphs may not quantize
                for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
                    linear.disable_parameter_transpose_cache = True
            for _ in range(2):
                change_without_a_trace(layer)
                with replayed():
                    assert torch.equal(layer(x)[0], result_of_a_new_layer(layer, x))
                assert not addresses(layer), "nothing is kept"


@contextlib.contextmanager
def plain_matrices():
    """Megatron's experts in FP8 pad rows with Transformer Engine: here they run as in bfloat16."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    forward = TEGroupedMLP.forward.__wrapped__

    def run(module, *given):
        recipe, module.config.fp8 = module.config.fp8, None
        try:
            return forward(module, *given)
        finally:
            module.config.fp8 = recipe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TEGroupedMLP, "forward", wrappers.wrap_experts_forward(run))
        yield


@on_ranks()
def test_a_backward_reads_the_weights_of_its_forward(rank: int):
    """New weights are new tensors: microbatches in flight keep theirs."""
    with in_float8():
        layer = make_float8_layer()
        wanted = outcome(layer, bfloat16_tokens(rank))
        flying = Microbatch(layer, bfloat16_tokens(rank))
        layer.set_is_first_microbatch()
        with torch.no_grad():
            layer(bfloat16_tokens(rank, 1))
        assert_same_bits(flying.backward(may_wait=True), wanted)


@on_ranks()
def test_quantized_parameters_are_read_where_they_lie(rank: int):
    with in_float8(), counted() as calls:
        layer = make_float8_layer(parameters=True)
        layer(bfloat16_tokens(rank))
        one = experts.experts_of(layer.experts)
        weight, (w1, _) = layer.experts.linear_fc1.weight1, one.weights._quantized
        read = [field[1].data_ptr() for field in w1]
        names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
        assert read == [getattr(weight, name).data_ptr() for name in names] and not calls
        # An optimizer writes the rows in place and throws the copies away, or writes both.
        before = layer(bfloat16_tokens(rank))[0]
        for one in layer.experts.parameters():
            one.quantize_(one.dequantize() * 2)
            one._columnwise_data = None
        after = step(layer, bfloat16_tokens(rank))
        for one in layer.experts.parameters():
            one._rowwise_scale_inv.mul_(0.5)
            one._columnwise_scale_inv.mul_(0.5)
        assert torch.equal(layer(bfloat16_tokens(rank))[0], before) and not torch.equal(after["output"], before)


# ---- rows -----------------------------------------------------------------------------------------------------------


@on_ranks()
def test_rows_of_experts_in_fp8_are_not_padded(rank: int):
    """Megatron's experts need groups of 16 rows. They get them if some rank's experts run so from the beginning."""
    with in_float8(), dispatched() as sent, plain_matrices():
        for number in (1, 2):
            layer = make_float8_layer(number)
            layer.token_dispatcher.expert_alignment = 16
            if (number, rank) == (2, 1):
                hook(layer.experts.linear_fc1)
            layer(bfloat16_tokens(rank))
    assert sent[0] == (torch.float8_e4m3fn, 0) and sent[1][0] == torch.bfloat16 and sent[1][1] > 0


@MODES
@on_ranks()
def test_experts_of_one_rank_that_change_get_dequantized_rows(rank, mode):
    """All ranks go on to quantize. Experts with a hook of their own see rows, those run by Megatron multiply them."""
    with in_float8(mode) as printed, dispatched() as sent, plain_matrices():
        layer = make_float8_layer()
        wanted = outcome(layer, bfloat16_tokens(rank))
        seen: list[torch.Tensor] = []
        hooks = [layer.experts.linear_fc1.register_forward_hook(lambda *given: None)]
        if mode == GROUPED_GEMMS:
            hooks.append(layer.experts.register_forward_pre_hook(lambda module, given: seen.append(given[0])))
        for one in hooks if rank == 0 else ():
            one.remove()
        for one in hooks:
            assert_close(outcome(layer, bfloat16_tokens(rank)), wanted, low=-1)
            one.remove()
    assert rank == 0 or mode == TWO_PARTS or len(seen) == 2 and all(rows.any(1).all() for rows in seen)
    assert mode == TWO_PARTS or {dtype for dtype, _ in sent} == {torch.float8_e4m3fn}
    assert rank == 0 or "TEColumnParallelGroupedLinear has hooks (forward_hooks)" in printed.getvalue()


@on_ranks(4, EP4)
def test_all_ranks_quantize_or_none(rank: int):
    """A hook on the experts of one rank wants rows: all send bfloat16, and their experts quantize them."""
    with in_float8() as printed, dispatched() as sent:
        wanted = step(make_float8_layer(), bfloat16_tokens(rank))
        other = make_float8_layer(2)
        if rank == 2:
            hook(other.experts)
        for _ in range(2):  # quantizing twice changes nothing
            assert_same_bits(step(other, bfloat16_tokens(rank)), wanted)
    assert [dtype for dtype, _ in sent] == [torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16]
    text = "the ranks of layer 2 do not dispatch quantized rows: 1 of 4 ranks cannot, the first is rank 2"
    assert printed.getvalue().splitlines().count(f"ep_dispatcher: {text}") == (rank == 0)


# ---- which layers ---------------------------------------------------------------------------------------------------


@on_ranks()
def test_layers_are_named_with_their_reasons(rank: int):
    def change(**settings):
        return lambda layer: [setattr(layer.config, name, value) for name, value in settings.items()]

    def mix(layer):
        quantize_parameters(layer)
        for name, weight in layer.experts.linear_fc1._parameters.items():
            layer.experts.linear_fc1._parameters[name] = torch.nn.Parameter(weight.dequantize())

    def scale_rows(layer):
        quantize_parameters(layer)
        layer.experts.linear_fc1.weight0._is_2D_scaled = False

    def capture(layer):
        quantize_parameters(layer)
        with_graphs(layer.config, "local", "attn")

    recipe = "fp8 is {} with the recipe {}, not e4m3 with blockwise".format
    reasons = [
        (change(fp8="hybrid"), recipe("hybrid", "blockwise")),
        (change(fp8_recipe="tensorwise"), recipe("e4m3", "tensorwise")),
        (change(fp8_recipe="delayed"), recipe("e4m3", "delayed")),
        (change(fp8_recipe="mxfp8"), recipe("e4m3", "mxfp8")),
        (change(fp8=None, fp4="e2m1"), "fp4 is e2m1"),
        (lambda layer: layer.experts.float(), "params_dtype is torch.float32 in FP8"),
        (mix, "some of its weights are quantized"),
        (scale_rows, "its weights have scales for blocks of 1 x 128"),
        (capture, "CUDA graphs may contain its quantized weights, whose copies this Transformer Engine throws away"),
    ]
    with in_float8() as printed:
        layers = []
        for number, (make, _) in enumerate(reasons, 1):
            layers.append(make_float8_layer(number, dispatcher="alltoall"))
            make(layers[-1])
        layers.append(make_float8_layer(10, dispatcher="alltoall", moe_ffn_hidden_size=40))
        # The first and last two of 20 layers stay bfloat16, with whatever recipe.
        bfloat16 = dict(num_layers=20, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
        bfloat16 |= dict(num_layers_at_end_in_bf16=2)
        for number in (2, 3, 18, 19):
            layers.append(make_float8_layer(number, dispatcher="alltoall", **bfloat16))
        layers[-1].config.fp8_recipe = "tensorwise"
        grouped = [experts.decide_grouped(layer.experts) for layer in layers]
        ones = [experts.experts_of(layer.experts) for layer in layers]
        line = said(printed)
    assert grouped == [False] * 10 + [True] * 4
    assert [one.is_float8 for one in ones[10:]] == [False, True, True, False]
    assert [one.can_take_quantized for one in ones[10:]] == [False, True, True, False]
    if rank == 0:
        head, _, others = line.partition(". Megatron's own way: ")
        assert "4 of 14 MoE layers in grouped GEMMs, 2 of them in FP8" in head
        wanted = [f"layer {number}: {reason}" for number, (_, reason) in enumerate(reasons, 1)]
        wanted.append("layer 10: sizes of its weights are not multiples of 16, as FP8 needs")
        assert others.split("; ") == wanted, others
    with in_float8(), environment(NVTE_FP8_BLOCK_SCALING_FP32_SCALES="1"):
        layer = make_float8_layer(dispatcher="alltoall")
        assert not experts.decide_grouped(layer.experts)
        assert experts.experts_of(layer.experts).why_not == "NVTE_FP8_BLOCK_SCALING_FP32_SCALES is 1"


@pytest.mark.parametrize("parameters", [False, True], ids=["bfloat16 weights", "quantized weights"])
@on_ranks()
def test_gradients_are_not_written_to_a_transposed_main_grad(rank: int, parameters: bool):
    """Kernels write it in the order of memory. Those of quantized weights were not looked at."""
    with in_float8():
        layer = make_float8_layer(dispatcher="alltoall", parameters=parameters)
        for weight in layer.experts.parameters():
            weight.main_grad = torch.zeros(weight.shape, device=weight.device)
        assert experts.decide_grouped(layer.experts)
        layer = make_float8_layer(2, dispatcher="alltoall", parameters=parameters)
        for weight in layer.experts.parameters():
            weight.main_grad = torch.zeros(weight.shape[::-1], device=weight.device).t()
        assert not experts.decide_grouped(layer.experts)
        why_not = experts.experts_of(layer.experts).why_not
        assert why_not.startswith("main_grad of linear_fc1.weight0 has shape") and why_not.endswith("not contiguous")


@on_ranks()
def test_layers_outside_the_context_run_in_bfloat16(rank: int, monkeypatch):
    """As Transformer Engine's own: the context says whether a pass is in FP8."""
    with in_float8():
        wanted = step(make_bfloat16_layer(), bfloat16_tokens(rank))
        layer = make_float8_layer()
        monkeypatch.setattr(float8, "is_on", lambda: False)
        with dispatched() as sent:
            assert_same_bits(step(layer, bfloat16_tokens(rank)), wanted)
        assert sent[0][0] == torch.bfloat16
        monkeypatch.undo()
        in_context = step(layer, bfloat16_tokens(rank))["output"]
        assert not torch.equal(in_context, wanted["output"])
        # A layer of multi-token prediction has the number of one that stays bfloat16.
        layer, other = (make_float8_layer(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1) for _ in "12")
        for one in (layer, other):
            assert torch.equal(step(one, bfloat16_tokens(rank))["output"], wanted["output"])
        with monkeypatch.context() as patch, dispatched() as sent:
            patch.setattr(float8, "_manager", lambda: types.SimpleNamespace(is_fp8_enabled=lambda: True))
            assert torch.equal(step(layer, bfloat16_tokens(rank))["output"], in_context)
        assert sent[0][0] == torch.float8_e4m3fn
        assert not experts.experts_of(other.experts).is_float8, "it has not run inside the context"
