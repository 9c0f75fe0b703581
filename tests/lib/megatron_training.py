"""A GPT in Megatron's training loop, on a CPU: a model, an optimizer, a schedule, and routing that can be skewed."""

import contextlib
import io
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ep_dispatcher.integrations.megatron.dispatcher import rank_capacity, registration
from lib.megatron_layer import environment, make_config

VOCABULARY, LENGTH, MICROBATCHES, BATCH = 64, 16, 2, 4
MODEL = dict(
    num_layers=2,
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
OF_DDP = ("use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce")


# ---- Megatron on a CPU ----------------------------------------------------------------------------------------------


class OnCpu:
    """Stands for torch in modules of Megatron that make tensors with device="cuda"."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def zeros(*size, device=None, **options):
        return torch.zeros(*size, **options)

    @staticmethod
    def tensor(*given, device=None, **options):
        return torch.tensor(*given, **options)


def let_it_run_on_cpu(patch: pytest.MonkeyPatch) -> None:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, grad_scaler, optimizer
    from megatron.core.pipeline_parallel import schedules

    for module in (schedules, optimizer, clip_grads, grad_scaler, utils):
        patch.setattr(module, "torch", OnCpu())
    old = torch.Tensor.type

    def name_of_cuda(tensor, *given, **options):  # optimizers ask for torch.cuda.FloatTensor
        name = old(tensor, *given, **options)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    patch.setattr(torch.Tensor, "type", name_of_cuda)


# ---- a job ----------------------------------------------------------------------------------------------------------


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


def make_model(dense_stages: Collection[int] = (), **settings):
    """A GPT, or this rank's stage of one. ``dense_stages``: stages without MoE layers, whose configuration has none."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    forget_earlier_models()
    of_ddp = {name: settings.pop(name) for name in OF_DDP if name in settings}
    if parallel_state.get_pipeline_model_parallel_rank() in dense_stages:
        settings |= dict(num_moe_experts=None, expert_model_parallel_size=1, moe_token_dispatcher_type="alltoall")
        settings |= dict(moe_flex_dispatcher_backend="deepep")
    config = make_config(**MODEL | settings)
    torch.manual_seed(5 + dist.get_rank())
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    model = GPTModel(
        config, spec, VOCABULARY, LENGTH, pre_process=first, post_process=last, position_embedding_type="rope"
    )
    if config.params_dtype != torch.float32:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    of_ddp = dict(overlap_grad_reduce=True, grad_reduce_in_fp32=True) | of_ddp
    ddp_config = DistributedDataParallelConfig(**of_ddp)
    ddp = DistributedDataParallel(config, ddp_config, model)
    ddp.broadcast_params()
    config.no_sync_func, config.finalize_model_grads_func = ddp.no_sync, finalize_model_grads
    return ddp


def make_optimizer(model, **settings):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    given = dict(optimizer="adam", lr=1e-3, weight_decay=0.1, clip_grad=1.0, log_num_zeros_in_grad=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(**given | settings), [model], use_gloo_process_groups=False)
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


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
    """What Megatron has added up, which is zero after it, as after Megatron's own log."""
    entries = {
        name: entry["values"] if isinstance(entry, dict) else entry.values for name, entry in log_of_losses().items()
    }
    values = {name: value.clone() for name, value in entries.items()}
    for value in entries.values():
        value.zero_()
    return values


@dataclass
class Training:
    """A model, its optimizer, what skews its routing, a step of Megatron's schedule, and what is printed."""

    model: torch.nn.Module
    optimizer: object
    skew: Skew
    schedule: Callable[..., list]
    printed: io.StringIO


@contextlib.contextmanager
def training(
    factor: float = 1.35,
    is_skewed: bool = True,
    num_microbatches: int = MICROBATCHES,
    optimizer: dict | None = None,
    has_optimizer: bool = True,
    node_factor: float | None = None,
    **settings,
):
    from megatron.core.pipeline_parallel import schedules

    registration.forget(rank_capacity.CapacityState)
    with (
        environment(
            experts="auto",
            rank_capacity_factor=factor,
            node_capacity_factor=node_factor,
            max_tokens_per_rank=BATCH * LENGTH,
        ),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        let_it_run_on_cpu(patch)
        model = make_model(**settings)
        made = make_optimizer(model, **(optimizer or {})) if has_optimizer else None
        given = dict(forward_step_func=forward_step, data_iterator=[batches()], model=[model], seq_length=LENGTH)
        given |= dict(num_microbatches=num_microbatches, micro_batch_size=BATCH)
        schedule = partial(schedules.get_forward_backward_func(), **given)
        yield Training(model, made, Skew(model, is_skewed), schedule, printed)
