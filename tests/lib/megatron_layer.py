"""Megatron-core's MoE layer on every rank of a pool, with its own token dispatchers and with ours.

    @on_ranks(4, Layout(ep=4))
    def test_a_layer_runs(rank):
        layer = make_layer(make_config(...))

Without megatron-core the importing file is skipped. What Megatron needs to run on a CPU, and its process groups,
exist in the ranks alone. With EP_DISPATCHER_ENGINE=cuda the layers are on GPUs, which ranks share where there are fewer
(their group is gloo's).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import as_test
from torch import Tensor

from ep_dispatcher import envs
from ep_dispatcher.tools.testing import RankPool

HIDDEN, FFN, EXPERTS, SEQUENCE, BATCH = 32, 48, 8, 12, 2
OURS = "ep_dispatcher"
CLASSES = {
    OURS: "MoEEPTokenDispatcher",
    "allgather": "MoEAllGatherTokenDispatcher",
    "alltoall": "MoEAlltoAllTokenDispatcher",
}
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'ep_dispatcher[megatron]'")


_pools: dict[int, RankPool] = {}


def megatron_pool(num_ranks: int) -> RankPool:
    """A pool of ranks in which Megatron runs on the CPU, which makes them no place for other tests.

    Started at the first use, replaced after a failure closed it, and shared by all files: importing Megatron in every
    rank takes longer than most tests.
    """
    if num_ranks not in _pools or _pools[num_ranks].closed:
        _pools[num_ranks] = RankPool(num_ranks, timeout_s=120)
    return _pools[num_ranks]


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()


def on_gpu() -> bool:
    return envs.engine() == "cuda"


# ---- in the ranks ---------------------------------------------------------------------------------------------------


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def _use_device() -> None:
    if on_gpu():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.compiler.set_stance("force_eager")  # compiling Megatron's activations takes longer than all that uses them
    from ep_dispatcher.integrations.megatron.dispatcher.cpu import let_megatron_run_on_cpu

    let_megatron_run_on_cpu()


@dataclass(frozen=True)
class Layout:
    """Sizes of Megatron's groups. Ranks that are left over are replicas (data parallel)."""

    ep: int = 2
    tp: int = 1
    etp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in vars(self).items() if name == "ep" or size > 1)


_layout: Layout | None = None


def on_ranks(num_ranks: int = 2, layout: Layout | None = Layout(ep=2), **options: Any) -> Callable:
    """Run ``test(rank, *parameters)`` on every rank of a pool, in this layout or that of its parameter `layout`.

    The parameter `monkeypatch` is one of the rank. ``options`` are of RankPool.run.
    """

    def run(body: Callable, **given: Any) -> None:
        megatron_pool(num_ranks).run(_run_body, body, given.get("layout", layout), given, **options)

    return lambda body: as_test(body, [name for name in _parameters(body) if name not in ("rank", "monkeypatch")], run)


def _parameters(body: Callable) -> list[str]:
    return list(inspect.signature(body).parameters)


def _run_body(rank: int, body: Callable, layout: Layout | None, given: dict) -> None:
    from ep_dispatcher.integrations.megatron import unregister

    unregister()  # whatever the test before has left
    if layout is not None:
        use_layout(layout)
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in _parameters(body):
            given["monkeypatch"] = patch
        body(rank, **given)


def use_layout(layout: Layout) -> None:
    """Form these groups of the ranks of the pool, with no buffers from before, and register ours."""
    global _layout
    from ep_dispatcher.integrations.megatron import destroy_buffers, register
    from ep_dispatcher.integrations.megatron.dispatcher import buffers, rank_capacity, registration

    _use_device()
    settings = register().settings
    if "overlap" not in settings:
        settings.setdefault("experts", "megatron")  # unless a test asks for grouped GEMMs
    from megatron.core import parallel_state, tensor_parallel

    destroy_buffers()
    registration.forget(rank_capacity.CapacityState)
    registration.process_wide(buffers.Buffers).has_warned = False
    if layout != _layout:
        leave_layout()
        parallel_state.initialize_model_parallel(
            create_gloo_process_groups=False,  # they all are: these would be a second set of the same
            tensor_model_parallel_size=layout.tp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            pipeline_model_parallel_size=layout.pp,
        )
        _layout = layout
        if on_gpu():
            tensor_parallel.model_parallel_cuda_manual_seed(1)


def leave_layout() -> None:
    global _layout
    from megatron.core import parallel_state

    if _layout is not None:
        parallel_state.destroy_model_parallel()
        end_groups()
    _layout = None


def end_groups() -> None:
    """Megatron only forgets its groups. Each has threads, and one of them looks for messages 100 times a second."""
    dist.barrier()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    while groups:
        dist.destroy_process_group(groups.pop())
    gc.collect()  # they end with the last layer that knows them


def make_config(dispatcher: str = OURS, **settings):
    """A TransformerConfig of the layout in use; ``settings`` are fields of it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    chosen = dict(moe_token_dispatcher_type=dispatcher)
    if dispatcher == OURS:
        chosen = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=OURS)
    defaults = dict(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=_layout.tp,
        expert_model_parallel_size=_layout.ep,
        expert_tensor_parallel_size=_layout.etp,
        sequence_parallel=_layout.tp > 1,
        pipeline_model_parallel_size=_layout.pp,
        pipeline_dtype=torch.float32,
    )
    return TransformerConfig(**(defaults | chosen | settings))


def with_graphs(config, impl: str = "local", *modules: str):
    """Put CUDA graphs on a config whose own checks want a GPU for them."""
    config.cuda_graph_impl = impl
    setattr(config, scope_field(), [getattr(graph_kinds(), name) for name in modules])
    return config


def scope_field() -> str:
    return "cuda_graph_modules" if hasattr(make_config(), "cuda_graph_modules") else "cuda_graph_scope"


def graph_kinds():
    from megatron.core.transformer import enums

    return getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope


def make_layer(config, layer_number: int = 1, *, own_router: bool = False):
    """A MoELayer of SequentialMLP experts, with the same weights whatever dispatches.

    Megatron's own router fails on a rank without tokens, so here another one stands in for it there. ``own_router``
    leaves Megatron's alone.
    """
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer = build_module(spec, config=config) if hasattr(spec, "module") else spec(config=config)  # 0.18: a partial
    layer.set_layer_number(layer_number)
    if not own_router:
        _route_no_tokens_too(layer)
    set_weights(layer, layer)
    return layer.to(device())


def _route_no_tokens_too(layer) -> None:
    config, route = layer.config, layer.router.forward

    def route_any_number(x: Tensor, *args, **kwargs):
        if x.numel():
            return route(x, *args, **kwargs)
        # With a gradient: alltoall's backward is collective.
        probs = torch.nn.functional.linear(x.flatten(0, -2), layer.router.weight)
        probs = probs.to({"fp32": torch.float32, "fp64": torch.float64}.get(config.moe_router_dtype, x.dtype))
        return probs, probs.bool()

    layer.router.forward = route_any_number


def set_weights(module, moe_layer) -> None:
    """Random weights by name, for an expert by its global number and the slice of it that this rank has."""
    first, expert_tp_rank = moe_layer.local_expert_indices[0], dist.get_rank(moe_layer.experts.tp_group)
    for name, parameter in module.named_parameters():
        head, found, tail = name.partition("local_experts.")
        if found:
            number, _, tail = tail.partition(".")
            name = f"{head}{first + int(number)}.{expert_tp_rank}.{tail}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that every rank has the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


def tokens_of(rank: int, step: int = 0, length: int = SEQUENCE, dtype=torch.float32, hidden=HIDDEN) -> Tensor:
    """A microbatch [length, BATCH, hidden] of this rank."""
    return random(length, BATCH, hidden, seed=1000 * step + rank + 1, dtype=dtype)


@contextlib.contextmanager
def environment(**values) -> Iterator[None]:
    """Variables of the environment, and settings of register(), which are in lower case; None: not set."""
    from ep_dispatcher.integrations.megatron import register

    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            if name.islower():
                settings = register().settings
                patch.setitem(settings, name, value)
            else:
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        yield


class PlainLinear(torch.nn.Module):
    """Stands for Transformer Engine's TELinear, which latent MoE is made of, where that is not installed."""

    def __init__(self, in_features: int, out_features: int, *, config, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


@contextlib.contextmanager
def plain_latent_projections() -> Iterator[None]:
    from megatron.core.transformer.moe import moe_layer

    with pytest.MonkeyPatch.context() as patch:
        if not moe_layer.HAVE_TE:
            patch.setattr(moe_layer, "HAVE_TE", True)
            patch.setattr(moe_layer, "TELinear", PlainLinear, raising=False)
        yield


# ---- one layer, two steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What a layer is built of and what it is given."""

    layout: Layout = Layout(ep=4)
    settings: dict = field(default_factory=dict)
    references: tuple[str, ...] = ("allgather", "alltoall")
    lengths: tuple[int, ...] | None = None  # of the sequence, by rank; None: SEQUENCE on all of them
    environment: dict[str, str] = field(default_factory=dict)
    later: dict = field(default_factory=dict)  # put on the config when its checks, which want a GPU for them, are over
    checkpointed: bool = False  # the whole layer, as recompute_granularity "full" does
    own_router: bool = False  # Megatron's, also on ranks without tokens, where it fails


def run_layer(rank: int, case: Case, dispatcher: str, **settings) -> dict[str, Tensor | None]:
    """Outputs and input gradients of two steps, parameter gradients of their sum."""
    use_layout(case.layout)
    with environment(**case.environment), plain_latent_projections():
        config = make_config(dispatcher, **(case.settings | settings))
        for name, value in case.later.items():
            assert hasattr(config, name), name
            setattr(config, name, value)
        layer = make_layer(config, own_router=case.own_router)
        assert ("forward" in vars(layer.router)) != case.own_router
        assert type(layer.token_dispatcher).__name__ == CLASSES[dispatcher]
        length = SEQUENCE if case.lengths is None else case.lengths[rank]
        found = {}
        for number in range(2):  # what a step leaves behind must not count in the next
            x = tokens_of(rank, number, length, torch.bfloat16 if config.bf16 else torch.float32)
            run = checkpointed(layer) if case.checkpointed else layer
            for name, tensor in step(run, x.to(config.params_dtype), rank + 77).items():
                found[f"{name} {number}"] = tensor
        if dispatcher == OURS:  # tokens travel at the latent size
            row = getattr(config, "moe_latent_size", None) or config.hidden_size
            assert layer.token_dispatcher.buffer.config.hidden == row
    return found | grads_of(layer)


def checkpointed(layer):
    """The layer, which runs again in the backward."""
    from megatron.core.tensor_parallel import checkpoint

    return lambda x: (checkpoint(lambda x: layer(x)[0], False, x), None)


def step(layer, x: Tensor, seed: int = 7) -> dict[str, Tensor]:
    """A forward and a backward pass."""
    x = x.requires_grad_()
    output = layer(x)[0]
    assert output.shape == x.shape and output.dtype == x.dtype
    (output.float() * random(*x.shape, seed=seed)).sum().backward()
    return {"output": output.detach(), "input gradient": x.grad}


def outcome(layer, x: Tensor) -> dict[str, Tensor | None]:
    """A step of a layer without gradients from before, and the gradients of its parameters."""
    layer.zero_grad()
    return step(layer, x.detach().clone()) | grads_of(layer)


def all_steps(dispatcher, x: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The six steps with an expert that multiplies by the probability: (rows, counts, probs, output)."""
    sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
    rows, counts, permuted_probs = dispatcher.dispatch_postprocess(*sent)
    expert_output = dispatcher.combine_preprocess(rows * permuted_probs.unsqueeze(-1))
    return rows, counts, permuted_probs, dispatcher.combine_postprocess(dispatcher.token_combine(expert_output))


# ---- comparing ------------------------------------------------------------------------------------------------------

# Between two float32 runs, relative to the largest absolute value of the tensor: sums of a few dozen products in
# another order. The largest seen is 4 units of the last place, so that a wrong term of any size stands out.
ROUNDING = 16 * torch.finfo(torch.float32).eps


def difference(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference, relative to the largest absolute value of ``wanted``."""
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if not got.numel() or torch.equal(got, wanted):
        return 0.0
    return float((got - wanted).abs().max() / wanted.abs().max())


def assert_agree(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], what: str = "") -> None:
    assert got.keys() == wanted.keys()
    apart = {name: difference(got[name], wanted[name]) for name in wanted}
    wrong = [f"{name} by {by:.1e}" for name, by in apart.items() if not by <= ROUNDING]
    assert not wrong, f"{what}: relative to the largest value differ {', '.join(wrong)}"


def assert_same_bits(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name] is tensor or torch.equal(got[name], tensor), f"{name} differs"


def grads_of(layer) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in sorted(layer.named_parameters())}


def error_of(run: Callable[[], object], kind: type[BaseException] = ValueError) -> str:
    """The text of the error that a call raises; in ranks, where pytest.raises would do as well but says less."""
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} on process {os.getpid()}")
