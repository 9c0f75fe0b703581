"""MoE layers inside CUDA graphs: on a CPU with what stands for captures and replays, on GPUs with PyTorch's graphs."""

import contextlib
import inspect
import io
import re
import types
from functools import partial

import pytest
import torch
from conftest import exhaustive
from lib.megatron_experts import GROUPED, GROUPED_GEMMS, OVERLAP, TWO_PARTS, make_grouped_layer, switched_on
from lib.megatron_graphs import Output, forget_grads, make_bfloat16_layer, take_grads
from lib.megatron_layer import (
    assert_agree,
    assert_same_bits,
    environment,
    error_of,
    graph_kinds,
    make_config,
    make_layer,
    on_gpu,
    on_ranks,
    random,
    scope_field,
    step,
    tokens_of,
    with_graphs,
)
from lib.megatron_main_grad import ddp_of, iterations, main_grads

from ep_dispatcher import te_version
from ep_dispatcher.integrations.megatron.dispatcher import buffers, graphs, megatron_config, registration, skipped_step
from ep_dispatcher.integrations.megatron.grouped_experts.experts import decide_grouped, experts_of
from ep_dispatcher.moe import grouped_gemm

FACTOR = "--ep-dispatcher-rank-capacity-factor"
LIMIT = dict(rank_capacity_factor=3)
ON_CPU = pytest.mark.skipif(on_gpu(), reason="what stands for a capture is for CPUs; GPUs have graphs")
ON_GPU = pytest.mark.skipif(not on_gpu(), reason="CUDA graphs need GPUs: EP_DISPATCHER_ENGINE=cuda")


# ---- what stands for a capture --------------------------------------------------------------------------------------


@contextlib.contextmanager
def megatron_captures(stream_is_captured: bool):
    """Megatron makes graphs meanwhile: warms up, or captures."""
    from megatron.core.transformer import cuda_graphs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "stream_is_captured", lambda: stream_is_captured)
        cuda_graphs._set_capture_start()
        try:
            yield
        finally:
            cuda_graphs._set_capture_end()


class Graphed:
    """Stands for Megatron's graphs of a MoE layer: replays run the kernels alone, and autograd sees few weights.

    Whatever the layer's Python does beside kernels is made undone after a replay. Hooks of DistributedDataParallel do
    nothing in it, as while Megatron captures.
    """

    def __init__(self, layer, x: torch.Tensor, impl: str):
        self.layer, self.forward = layer, layer.forward
        warm_up = self.warm_up if impl == "local" else self.warm_up_of_transformer_engine
        with megatron_captures(stream_is_captured=False):
            for _ in range(2):
                warm_up(torch.zeros_like(x).requires_grad_())
        with megatron_captures(stream_is_captured=True):
            self.weights = warm_up(x.requires_grad_())
        self.added = {w: w.grad_added_to_main_grad for w in self.weights} if impl == "local" else {}

    def warm_up(self, x: torch.Tensor) -> tuple[torch.nn.Parameter, ...]:
        """What Megatron's own graphs do. Return the weights that autograd sees."""
        from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

        out = self.forward(x)[0]
        runner = types.SimpleNamespace(base_module=self.layer, get_tensors=lambda outputs, check_types: outputs)
        weights = _CudaGraphRunner.get_connected_params(runner, (out,))
        torch.autograd.grad(out, (x, *weights), torch.zeros_like(out), allow_unused=True)
        return weights

    def warm_up_of_transformer_engine(self, x: torch.Tensor) -> tuple[torch.nn.Parameter, ...]:
        """What its graphs do: weights that have got a gradient are those that autograd sees."""
        out = self.forward(x)[0]
        torch.autograd.backward(out, torch.zeros_like(out))
        weights = tuple(weight for weight in self.layer.parameters() if weight.grad is not None)
        for weight in weights:
            weight.grad = None
        return weights

    @contextlib.contextmanager
    def replay(self):
        flags = {w: w.grad_added_to_main_grad for w in self.layer.parameters()}
        with megatron_captures(stream_is_captured=True), torch.enable_grad():
            yield
        for weight, flag in flags.items():
            weight.grad_added_to_main_grad = flag

    def __call__(self, x: torch.Tensor):
        for module in self.layer.modules():  # Megatron calls them before a replay
            for hook in module._forward_pre_hooks.values():
                hook(module)
        return Replay.apply(self, x, *self.weights), None


class Replay(torch.autograd.Function):
    """What Megatron's _CudagraphReplayNode does."""

    @staticmethod
    def forward(ctx, graphed, x, *weights):
        ctx.graphed, ctx.x = graphed, x.detach().requires_grad_()
        with graphed.replay():
            ctx.out = graphed.forward(ctx.x)[0]
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        graphed = ctx.graphed
        with graphed.replay():
            of_x, *of_weights = torch.autograd.grad(ctx.out, (ctx.x, *graphed.weights), grad)
        for weight, added in graphed.added.items():
            weight.grad_added_to_main_grad = added
        return None, of_x, *(grad.clone() for grad in of_weights)


@ON_CPU
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(overlap_grad_reduce=False),
        dict(use_distributed_optimizer=True, bucket_size=3000, overlap_param_gather=True),
    ],
    ids=["overlapped", "at the end", "distributed optimizer, weights gathered meanwhile"],
)
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("mode", [GROUPED_GEMMS, exhaustive(TWO_PARTS)])
@on_ranks(4)
def test_gradients_of_replays_reach_main_grad_and_are_reduced(rank: int, impl: str, settings: dict, mode: str):
    """Gradients reach main_grad and are reduced once, in eager steps and in replays."""
    config = make_config(**GROUPED)
    wanted = iterations(ddp_of(make_grouped_layer(config), config, **settings), rank)
    with environment(**LIMIT), switched_on(mode):
        config.gradient_accumulation_fusion = True
        layer = make_grouped_layer(with_graphs(config, impl))
        ddp = ddp_of(layer, config, **settings)
        assert_agree(iterations(ddp, rank), wanted, "eager")
        graphed = Graphed(layer, tokens_of(rank, 5), impl)
        experts = [weight for weight in graphed.weights if any(weight is one for one in layer.experts.parameters())]
        assert [weight is layer.experts.linear_fc2.weight0 for weight in experts] == [True], "one for all"
        layer.forward = graphed
        assert_agree(iterations(ddp, rank), wanted, "replayed")
        assert all(weight.grad_added_to_main_grad for weight in layer.experts.parameters())


@ON_CPU
@on_ranks()
def test_main_grad_without_a_wrapper(rank: int):
    """A script's own main_grad gets the sums; the anchor's dummy does not stay in .grad."""
    wanted = main_grads(make_grouped_layer(make_config(**GROUPED)), tokens_of(rank))
    with environment(**LIMIT), switched_on():
        layer = make_grouped_layer(with_graphs(make_config(**GROUPED)))
        layer.config.gradient_accumulation_fusion = True
        torch.testing.assert_close(main_grads(layer, tokens_of(rank)), wanted, rtol=1e-4, atol=1e-4)


@ON_CPU
@on_ranks()
def test_warm_ups_send_nothing(rank: int):
    """Tokens that are all alike all go to one rank, and are too many there. A warm-up sends none."""
    from megatron.core.transformer import cuda_graphs

    with environment(rank_capacity_factor=1), switched_on():
        layer = make_layer(with_graphs(make_config()))
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[:2] = 1
        alike = torch.ones_like(tokens_of(rank))
        with megatron_captures(stream_is_captured=False):
            step(layer, alike.clone())
            assert not layer.token_dispatcher.topk_idx.add(1).any()
        cuda_graphs._set_warmup_start()
        cuda_graphs._set_warmup_end()  # 0.16.1 forgets to take it back
        assert not graphs.is_warm_up()
        text = error_of(lambda: layer(alike))
        (enough,) = re.findall(FACTOR + r" ([\d.]+) is enough for this dispatch$", text)
        assert text.startswith("max_recv_rows is too small: rank 0 needs 96 rows, but has 48") and enough == "2"
    with environment(rank_capacity_factor=float(enough)), switched_on():
        layer(alike)


# ---- errors of replays ----------------------------------------------------------------------------------------------


class Found(Exception):
    pass


@ON_CPU
@on_ranks()
def test_errors_are_looked_for_after_a_step(rank: int, monkeypatch):
    """Schedules look for errors when a step is over, where graphs may contain experts, and nowhere else."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import schedules

    def find(*_):
        raise Found

    def whole_step(**_):
        return "done"

    given = dict(model=[None], data_iterator=None, num_microbatches=1, seq_length=1, forward_only=False)
    wrapper = FullCudaGraphWrapper(whole_step, cuda_graph_warmup_steps=10)
    own = schedules.get_forward_backward_func()
    assert own.__wrapped__ is schedules.forward_backward_no_pipelining
    checked = skipped_step.wrap_schedule(whole_step)
    assert own.__code__ is checked.__code__, "registered"
    assert inspect.signature(own) == inspect.signature(own.__wrapped__)
    monkeypatch.setattr(registration.process_wide(graphs.Graphs), "are_used", False)
    with environment(**LIMIT), switched_on():
        layer = make_layer(make_config())
        layer(tokens_of(rank))
        (buffer,) = buffers.all_buffers()
        monkeypatch.setattr(buffer, "check", find)
        assert checked() == wrapper(**given) == "done", "no graphs"
        make_layer(with_graphs(make_config(), "transformer_engine", "attn", "moe_router"))
        assert checked() == "done", "nor of experts"
        make_layer(with_graphs(make_config(), "transformer_engine", "moe"))
        error_of(checked, Found)
        error_of(lambda: wrapper(**given), Found)
        assert buffer.note == graphs.NOTE
        monkeypatch.setattr(graphs, "stream_is_captured", lambda: True)
        assert checked() == "done", "a graph of the whole step is captured"


# ---- which configurations -------------------------------------------------------------------------------------------


@on_ranks()
def test_megatrons_checks_allow_graphs_of_moe(rank: int):
    """Megatron allows graphs of moe for experts padded to a capacity; for ours without."""
    field = scope_field()
    for impl in ("local", "transformer_engine"):
        for modules in ("moe", "attn,moe", ["moe"]):
            given = {"cuda_graph_impl": impl, field: modules}
            config = make_config(**given)
            assert "moe" in [one.name for one in getattr(config, field)]
            assert config.moe_expert_capacity_factor is None and not config.moe_pad_expert_input_to_capacity
            config = make_config(**given, moe_expert_capacity_factor=1.5)
            assert config.moe_expert_capacity_factor == 1.5 and not config.moe_pad_expert_input_to_capacity
            assert make_config(**given, moe_expert_capacity_factor=-1.0).moe_expert_capacity_factor is None
            assert "drop-padding" in error_of(partial(make_config, "alltoall", **given), AssertionError)
        given[field] = ["moe", "moe_router"]
        assert "both moe and moe_router" in error_of(partial(make_config, **given), AssertionError)


@ON_CPU
@on_ranks()
def test_what_layers_in_graphs_need(rank: int):
    flag = "--" + scope_field().replace("_", "-")

    def build(impl: str, *modules: str, **later):
        config = with_graphs(make_config(), impl, *modules)
        for name, value in later.items():  # Megatron's checks want a GPU for some
            setattr(config, name, value)
        return make_layer(config)

    def refused(*given, **later) -> str:
        return error_of(lambda: build(*given, **later))

    build("local", "attn")
    build("transformer_engine", "attn", "moe_router", "moe_preprocess")
    needs_limit = [("local",), ("local", "attn", "moe"), ("transformer_engine", "moe"), ("transformer_engine",)]
    for given in needs_limit + [("local", "full_iteration")] * hasattr(graph_kinds(), "full_iteration"):
        text = refused(*given)
        assert flag in text and FACTOR in text
    refused("local", cuda_graph_impl="full_iteration")
    with environment(experts="auto", **LIMIT):
        build("local", cuda_graph_impl="full_iteration")
        for given in needs_limit:
            build(*given)
            for name in ("variable_seq_lengths", "overlap_moe_expert_parallel_comm"):
                assert refused(*given, **{name: True}).startswith(f"--{name.replace('_', '-')} is True")

    # Whose weights autograd sees one of: not with a graph of the whole iteration, which has the hooks in it.
    for impl, modules, of_layers in (
        ("none", (), False),
        ("local", (), True),
        ("local", ("attn",), True),
        ("local", ("moe_router",), False),
        ("transformer_engine", ("attn", "moe_router"), False),
        ("transformer_engine", ("moe",), True),
        ("full_iteration", (), False),
    ):
        config = with_graphs(make_config(), impl, *modules)
        assert megatron_config.can_capture_layers(config) is of_layers, (impl, modules)
        assert megatron_config.can_capture_experts(config) is (of_layers or impl == "full_iteration")


@ON_CPU
@on_ranks()
def test_experts_that_run_megatrons_way_are_refused_in_graphs(rank: int):
    """Experts that cannot run in grouped GEMMs are named before a capture would fail."""
    with environment(**LIMIT), switched_on() as printed:
        layer = make_layer(with_graphs(make_config(activation_func=torch.tanh)), 3)
        layer(tokens_of(rank))  # not in a graph
        for captured in (False, True):
            with megatron_captures(captured):
                text = error_of(lambda: layer(tokens_of(rank)))
            assert text.startswith("layer 3's dispatch is inside a CUDA graph (--cuda-graph-impl local)"), text
        assert "activation_func is tanh" in printed.getvalue() or rank > 0


@ON_CPU
@on_ranks()
def test_hooks_of_transformer_engines_warm_up_do_not_count(rank: int):
    """Transformer Engine has hooks on every module while it warms up. A first forward pass there decides as ever."""
    with environment(**LIMIT), switched_on(OVERLAP):
        layer = make_grouped_layer(with_graphs(make_config(**GROUPED), "transformer_engine", "moe"))
        for module in layer.modules():
            module.register_forward_hook(lambda *given: None)
        with megatron_captures(stream_is_captured=False):
            assert decide_grouped(layer.experts) and experts_of(layer.experts).why_no_overlap is None


# ---- on GPUs --------------------------------------------------------------------------------------------------------


@ON_GPU
@on_ranks()
def test_a_layer_in_cuda_graphs_is_the_eager_layer(rank: int):
    """Replays of a layer's forward and backward give what an eager layer gives, bit by bit, whatever the routing."""
    x = tokens_of(rank, dtype=torch.bfloat16)
    limit = dict(rank_capacity_factor=1.6, max_tokens_per_rank=x[..., 0].numel())
    with environment(**limit), switched_on(dtypes=grouped_gemm.KERNEL_DTYPES):
        eager, layer = make_bfloat16_layer(False), make_bfloat16_layer(True)
        first = step(eager, x.clone())["output"]
        seen = [eager.token_dispatcher.topk_idx.clone()]
        sample = x.clone().requires_grad_()
        graphed = torch.cuda.make_graphed_callables(Output(layer), (sample,), allow_unused_input=True)
        forget_grads(layer)
        forget_grads(eager)

        def compare(x):
            for _ in range(2):  # microbatches, whose gradients add up
                wanted = step(eager, x.clone())
                given = x.clone().requires_grad_()
                out = graphed(given)
                (out * random(*x.shape, seed=7, dtype=out.dtype)).sum().backward()
                assert torch.equal(out, wanted["output"]) and torch.equal(given.grad, wanted["input gradient"])
            wanted = take_grads(eager)
            assert_same_bits(take_grads(layer), wanted)
            assert wanted["router"].any() and any(grad.any() for name, grad in wanted.items() if "linear_fc" in name)

        for number in range(1, 6):
            compare(tokens_of(rank, number, dtype=torch.bfloat16))
            seen.append(eager.token_dispatcher.topk_idx.clone())
            graphs.check_replays()
        assert not any(torch.equal(seen[0], other) for other in seen[1:]), "other routings"
        assert torch.equal(step(eager, x.clone())["output"], first)

        # Too many rows for rank 0: the error comes after the step, on all ranks, and the next step is right again.
        weight = layer.router.weight
        kept, alike = weight.detach().clone(), torch.ones_like(x)
        with torch.no_grad():
            weight.zero_()
            weight[:2] = 1
        graphed(alike.requires_grad_()).sum().backward()
        text = error_of(graphs.check_replays)
        assert "rank 0 needs 96 rows, but has 77" in text and f"{FACTOR} 2 is enough" in text, text
        with torch.no_grad():
            weight.copy_(kept)
        forget_grads(layer)
        forget_grads(eager)
        compare(tokens_of(rank, 9, dtype=torch.bfloat16))
        graphs.check_replays()


# ---- gradients that graphs of Transformer Engine lose ---------------------------------------------------------------


@on_ranks()
def test_graphs_of_an_old_transformer_engine_keep_gradients(rank: int, monkeypatch):
    """The field that prevents their loss is set where all conditions hold, and a line says so once."""
    hit = dict(params_dtype=torch.bfloat16, bf16=True, gradient_accumulation_fusion=True)
    graphed = dict(cuda_graph_impl="transformer_engine", **{scope_field(): ["attn"]})

    def is_set(version: str | None = "2.12.0", **other) -> bool:
        monkeypatch.setattr(te_version, "version", lambda: version)
        with contextlib.redirect_stdout(printed):
            return make_config(**hit | graphed | other).disable_parameter_transpose_cache

    printed = io.StringIO()
    registration.process_wide(graphs.Graphs).has_printed_keep_gradients = False
    assert is_set() and is_set() and is_set("2.13.0") and is_set(params_dtype=torch.float16, bf16=False, fp16=True)
    assert printed.getvalue().count("Transformer Engine 2.12.0") == printed.getvalue().count("\n") == (rank == 0)
    assert is_set(disable_parameter_transpose_cache=True, cuda_graph_impl="none"), "the user's own"
    assert not any(is_set(version) for version in ("2.14.0", "3.0", None))
    for other in (
        dict(cuda_graph_impl="none"),
        dict(cuda_graph_impl="local"),
        dict(params_dtype=torch.float32, bf16=False),
        dict(gradient_accumulation_fusion=False),
        dict(pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16),
    ):
        assert not is_set(**other), other
    monkeypatch.setattr(te_version, "version", lambda: "2.12.0")
    for name, value in (("fp8", "e4m3"), ("fp4", "e2m1")):  # Megatron wants Transformer Engine for them
        config = with_graphs(make_config(**hit), "transformer_engine")
        setattr(config, name, value)
        graphs.keep_gradients(config)
        assert not config.disable_parameter_transpose_cache, name
