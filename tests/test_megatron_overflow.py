"""Steps that run again because more rows arrive than the rank capacity has room for."""

import contextlib
import io
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_layer import Layout, assert_same_bits, environment, error_of, make_config, on_gpu, on_ranks

from ep_dispatcher.errors import TooFewRowsError
from ep_dispatcher.integrations.megatron import capacity, graphs, limits, overflow, repeated_steps

pytestmark = pytest.mark.skipif(on_gpu(), reason="Megatron's training loop on GPUs needs more than these ranks have")

VOCABULARY, LENGTH, MICROBATCHES, BATCH = 64, 16, 4, 4
STEPS, EVALUATE_AFTER = 10, 5
HALF, ALL = 0.6, 1.0  # share of the tokens that go to experts 0 and 1, both of the first rank of a group
SKEWED = {3: HALF, 7: ALL}
ENOUGH = 4.0

MODEL = dict(
    num_layers=4,
    hidden_dropout=0.1,
    attention_dropout=0.0,
    masked_softmax_fusion=False,
    bias_dropout_fusion=False,
    perform_initialization=True,
    moe_router_dtype="fp32",
    moe_aux_loss_coeff=0.01,
    moe_router_load_balancing_type="aux_loss",
    batch_p2p_comm=False,
)

OF_DDP = ("use_distributed_optimizer", "overlap_param_gather")


class OnCpu:
    """Stands for torch in Megatron's schedules, which make tensors with device="cuda"."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def zeros(*size, device=None, **options):
        return torch.zeros(*size, **options)


class Skew:
    """Sends a share of the tokens to the first two experts, in one step and on some ranks."""

    def __init__(self, model, is_skewed: bool):
        self.share, self.is_skewed = 0.0, is_skewed
        for module in model.modules():
            if hasattr(module, "gating"):
                module.gating = partial(self.route, module.gating)

    def route(self, gating, tokens: torch.Tensor) -> torch.Tensor:
        logits = gating(tokens)
        skewed = torch.zeros_like(logits)
        if self.is_skewed and self.share:
            skewed[: int(self.share * len(logits))] = torch.tensor([30.0, 20.0] + [0.0] * (logits.shape[-1] - 2))
        return logits + skewed


@dataclass
class Job:
    """What a job gives. Its tensors: losses, logged values, evaluations, weights and the next random numbers."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    printed: str = ""
    repeated: int = 0


def batches():
    """Batches drawn with the random numbers that dropout uses too, and with others of the host."""
    while True:
        tokens = torch.randint(VOCABULARY - 1, (BATCH, LENGTH + 1)) + random.randint(0, 1)
        yield {"tokens": tokens, "scale": float(np.random.rand())}


def forward_step(batch_of, model):
    batch = next(batch_of)
    tokens, scale = batch.pop("tokens"), batch.pop("scale")
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    out = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

    def loss_of(out):
        loss = out.float().mean() * scale
        return loss, {"lm loss": loss.detach().clone()}

    return out, loss_of


def make_model(**settings):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    forget_earlier_models()
    of_ddp = {name: settings.pop(name) for name in OF_DDP if name in settings}
    config = make_config(**MODEL | settings)
    torch.manual_seed(5 + dist.get_rank())
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    model = GPTModel(
        config, spec, VOCABULARY, LENGTH, pre_process=first, post_process=last, position_embedding_type="rope"
    )
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, **of_ddp)
    ddp = DistributedDataParallel(config, ddp_config, model)
    ddp.broadcast_params()
    config.no_sync_func, config.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    return ddp


def log_of_losses() -> dict:
    """Where Megatron adds up auxiliary losses, for the whole process."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):
        return moe_utils.get_moe_layer_wise_logging_tracker()
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return get_moe_metrics_tracker().metrics


def forget_earlier_models() -> None:
    """They may have had fewer layers, and another form of the scale of auxiliary losses."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    log_of_losses().clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def logged_values() -> dict:
    entries = {
        name: entry["values"] if isinstance(entry, dict) else entry.values for name, entry in log_of_losses().items()
    }
    values = {name: value.clone() for name, value in entries.items()}
    for value in entries.values():
        value.zero_()
    return values


@dataclass
class Training:
    """A model, what skews its routing, a step of Megatron's schedule, and what is printed."""

    model: torch.nn.Module
    skew: Skew
    step: Callable[..., list]
    printed: io.StringIO


@contextlib.contextmanager
def training(factor: float = 1.35, is_skewed: bool = True, num_microbatches: int = 1, **settings):
    from megatron.core.pipeline_parallel import schedules

    capacity.grown = 0.0
    with (
        environment(experts="auto", rank_capacity_factor=factor, max_tokens_per_rank=BATCH * LENGTH),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        patch.setattr(schedules, "torch", OnCpu())
        model = make_model(**settings)
        given = dict(forward_step_func=forward_step, data_iterator=[batches()], model=[model], seq_length=LENGTH)
        given |= dict(num_microbatches=num_microbatches, micro_batch_size=BATCH)
        step = partial(schedules.get_forward_backward_func(), **given)
        yield Training(model, Skew(model, is_skewed), step, printed)


def run_job(rank: int, factor: float, skewed=SKEWED, ranks=None, evaluates: bool = False, **settings) -> Job:
    job, before = Job(), repeated_steps()
    with training(factor, ranks is None or rank in ranks, MICROBATCHES, **settings) as of:
        model = of.model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        random.seed(3 + rank), np.random.seed(4 + rank)
        for step in range(1, STEPS + 1):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            of.skew.share = skewed.get(step, 0.0)
            job.tensors |= losses_of(f"step {step}", of.step())
            job.tensors |= {f"{name} of step {step}": one for name, one in logged_values().items()}
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
            optimizer.step()
            if evaluates and step == EVALUATE_AFTER:
                grads = [parameter.main_grad.clone() for parameter in model.parameters()]
                of.skew.share = ALL
                model.eval()
                with torch.no_grad():
                    job.tensors |= losses_of("an evaluation", of.step(forward_only=True))
                model.train()
                assert all(map(torch.equal, grads, (one.main_grad for one in model.parameters())))
                logged_values()
        job.tensors |= {name: one.clone() for name, one in model.state_dict().items() if torch.is_tensor(one)}
        numbers = dict(host=torch.tensor(random.random()), numpy=torch.tensor(np.random.rand()), torch=torch.rand(1))
        job.tensors |= {f"next random number of {name}": one for name, one in numbers.items()}
    job.printed, job.repeated = of.printed.getvalue(), repeated_steps() - before
    return job


def losses_of(what: str, of_microbatches: list[dict]) -> dict[str, torch.Tensor]:
    return {f"loss of {what}, microbatch {number}": one["lm loss"] for number, one in enumerate(of_microbatches)}


EXPERT_BIAS = dict(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="seq_aux_loss",
)


@pytest.mark.parametrize(
    "layout, small, settings",
    [
        (Layout(ep=2), 1.35, {}),
        (Layout(ep=4), 2, EXPERT_BIAS),
        (Layout(ep=2), 1.35, dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
        (Layout(ep=2, pp=2), 1.35, {}),
    ],
    ids=["dp2-ep2", "ep4-expert bias", "recompute", "ep2-pp2"],
)
@on_ranks(4)
def test_steps_with_too_many_rows_run_again(rank: int, layout: Layout, small: float, settings: dict):
    """Losses, logged values and weights are those of a job with room enough, bit by bit."""
    wanted = run_job(rank, ENOUGH, **settings)
    assert wanted.repeated == 0 and "again" not in wanted.printed
    got = run_job(rank, small, **settings)
    lines = [line for line in got.printed.splitlines() if "runs this step again" in line]
    assert got.repeated == 2 and len(lines) == 2 * (rank == 0), lines or got.repeated
    assert_same_bits(got.tensors, wanted.tensors)
    assert all("Repeated steps: " in line for line in lines)
    assert rank > 0 or f"rank capacity factor {small:g} has room for" in lines[0]


@on_ranks(4, Layout(ep=2))
def test_groups_without_too_many_rows_run_again_too(rank: int):
    """Of two expert parallel groups one has too many rows, in steps and in an evaluation."""
    from megatron.core import parallel_state

    ranks = [dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group())]
    dist.broadcast_object_list(ranks)
    assert len(ranks[0]) == 2
    given = dict(skewed={2: HALF}, ranks=ranks[0], evaluates=True)
    wanted = run_job(rank, ENOUGH, **given)
    got = run_job(rank, 1.35, **given)
    assert (got.repeated, wanted.repeated) == (2, 0) and any("evaluation" in name for name in wanted.tensors)
    assert [got.printed.count(f"runs this {kind} again") for kind in ("step", "evaluation step")] == [rank == 0] * 2
    assert_same_bits(got.tensors, wanted.tensors)


@on_ranks(2)
def test_other_errors_are_raised(rank: int):
    """An error of a step that is not too many rows is raised, and the next too many rows run a step again."""

    class Fault(Exception):
        pass

    def broken(batch_of, model):
        next(batch_of)
        raise Fault

    with training(num_microbatches=2) as of:
        before = repeated_steps()
        error_of(lambda: of.step(forward_step_func=broken), Fault)
        assert capacity.found is None
        of.skew.share = ALL
        of.step()
        assert repeated_steps() == before + 1 and capacity.grown == 2.2
        capacity.grown = 0.0
        with pytest.raises(TooFewRowsError, match="2 is enough"):  # a loop of one's own
            forward_step(batches(), of.model)


@on_ranks(2)
def test_a_capacity_that_does_not_reach_a_layer_is_an_error(rank: int, monkeypatch):
    """Where a layer keeps its rows, as in graphs that cannot be captured again, the step does not run for ever."""
    with training() as of:
        of.skew.share = ALL
        monkeypatch.setattr(limits, "max_rows_by_factor", lambda *given: 150)
        text = error_of(of.step, RuntimeError)
    assert "layer 4 needs 256 rows" in text and "cannot capture again" in text


class Helper:
    """Stands for Megatron's TECudaGraphHelper."""

    def __init__(self, model):
        self.model, self.did, self._capture_finished = [model], [], False

    def create_cudagraphs(self):
        assert not self._capture_finished
        assert not self.model[0].remove_forward_pre_hook_handles, "graphs would contain the hooks"
        self._capture_finished = True
        self.did.append("create")

    def graphs_created(self):
        return self.did.count("create") > self.did.count("delete")

    def delete_cuda_graphs(self):
        self.did.append("delete")

    def cuda_graph_set_manual_hooks(self):
        assert self.model[0].remove_forward_pre_hook_handles
        self.did.append("hooks")


@on_ranks(2)
def test_graphs_are_captured_again(rank: int, monkeypatch):
    """A capacity that grows discards all graphs. Transformer Engine captures before the next step that trains."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper as Whole
    from megatron.core.transformer import cuda_graphs

    create = cuda_graphs.TECudaGraphHelper.create_cudagraphs
    assert create.__code__ is graphs.note_helper(Helper.create_cudagraphs).__code__, "registered"
    monkeypatch.setattr(graphs, "are_used", True)
    with training(use_distributed_optimizer=True, overlap_param_gather=True) as of:
        model = of.model
        helper, manager = Helper(model), torch.nn.Module.__new__(cuda_graphs.CudaGraphManager)
        torch.nn.Module.__init__(manager)
        model.disable_forward_pre_hook(param_sync=False)
        model.module.manager, manager.cudagraph_runners = manager, ["captured"]
        graphs.note_helper(Helper.create_cudagraphs)(helper)
        model.enable_forward_pre_hook()
        monkeypatch.setitem(Whole.cuda_graph, "training", "captured")
        monkeypatch.setitem(Whole.result, "training", "a result")
        monkeypatch.setitem(Whole.curr_iteration, "training", 9)
        monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", True)
        of.step()
        assert helper.did == ["create"] and manager.cudagraph_runners
        of.skew.share = HALF
        with torch.no_grad():
            of.step(forward_only=True)
        assert helper.did == ["create", "delete"], "an evaluation captures nothing"
        assert (Whole.cuda_graph["training"], Whole.result["training"]) == (None, None)
        assert Whole.curr_iteration["training"] == 0 and not manager.cudagraph_runners
        assert not cuda_graphs._CudagraphGlobalRecord.cudagraph_created
        of.skew.share = 0
        model.zero_grad_buffer()
        of.step()
        assert helper.did[2:] == ["create", "hooks"]
        of.skew.share = ALL
        model.zero_grad_buffer()
        of.step()
        assert helper.did[4:] == ["delete", "create", "hooks"], "before the step runs again"
        graphs.capture_again()
        assert len(helper.did) == 7


def test_the_counter_goes_to_megatrons_logs(monkeypatch):
    seen = []
    module = types.SimpleNamespace(
        _GLOBAL_ARGS=types.SimpleNamespace(curr_iteration=7),
        _GLOBAL_TENSORBOARD_WRITER=types.SimpleNamespace(add_scalar=lambda *given: seen.append(given)),
        _GLOBAL_WANDB_WRITER=types.SimpleNamespace(log=lambda *given: seen.append(given)),
    )
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    overflow._log(3)
    assert seen == [("ep_dispatcher/repeated_steps", 3, 7), ({"ep_dispatcher/repeated_steps": 3}, 7)]
