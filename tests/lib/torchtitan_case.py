# ruff: noqa: E402  # torchtitan reads which device there is while it is imported
"""A small model of torchtitan in torchtitan's own trainer, on CPUs, in processes that have a group already."""

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch.distributed.fsdp import FSDPModule

from lib.commands import ROOT

titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu  # without a GPU torchtitan takes "cuda"

from torchtitan.components import metrics as titan_metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.config.override import OverrideConfig, parse_cli_imports
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, TorchAOTokenDispatcher
from torchtitan.models.deepseek_v3 import model_registry, parallelize_deepseekv3
from torchtitan.trainer import Trainer

NUM_STEPS, NUM_MOE_LAYERS = 4, 2
TEXT = torch.frombuffer(bytearray((ROOT / "README.md").read_bytes()), dtype=torch.uint8).long()
CHECKPOINTS = {"selective": SelectiveAC.Config(), "full": FullAC.Config(), None: None}


class Bytes(BaseTokenizer):
    """A token is a byte of the text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode()

    def get_vocab_size(self):
        return 256


class Readme(BaseDataLoader):
    """Pieces of README.md, each for one data-parallel rank and step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        self.rank, self.num_ranks, self.shape = dp_rank, dp_world_size, (local_batch_size, seq_len)

    def __iter__(self):
        size = math.prod(self.shape)
        for start in range(self.rank * size, len(TEXT) - size, self.num_ranks * size):
            piece = TEXT[start : start + size + 1]
            yield {"input": piece[:-1].view(self.shape)}, piece[1:].view(self.shape)

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class Losses(MetricsProcessor):
    """Keeps each step's loss and norm of gradients. torchtitan's own asks a GPU for its memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, **_):
        self.config, self.color, self.seen = config, titan_utils.NoColor(), []
        self.device_memory_monitor, self.device_name = self, "CPU"
        self.max_reserved_gib = self.max_reserved_pct = 0.0
        self.data_loading_times, self.ntokens_since_last_log = [], 0

    def get_peak_stats(self):
        return self

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        self.seen.append((global_avg_loss, grad_norm))

    def close(self):
        pass


class NoMemory:
    """Stands for torchtitan's monitor of a GPU's memory."""

    device_name = "CPU"

    def get_peak_stats(self):
        return DeviceMemStats(*[0] * len(DeviceMemStats._fields))

    def reset_peak_stats(self):
        pass


titan_metrics.build_device_memory_monitor = NoMemory


class PoolTrainer(Trainer):
    """torchtitan's trainer in a group that is there already."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def init_distributed(self):
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())


def parallelize(model, **options):
    """torchtitan's parallelize_deepseekv3, with the reductions that gloo has."""
    model = parallelize_deepseekv3(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def trainer_config(
    overrides=(),
    *,
    parallel,
    ac=None,
    compiles=False,
    dtype="float32",
    pad_multiple=None,
    metrics=None,
    **of_model,
):
    """The configuration of deepseek_v3's debugmodel with two MoE layers. overrides: those of the command line.

    metrics: options of torchtitan's own MetricsProcessor. None: Losses
    """
    spec = model_registry("debugmodel", attn_backend="flex", **of_model)
    spec.parallelize_fn = parallelize
    spec.model.layers = spec.model.layers[: 1 + NUM_MOE_LAYERS]
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())  # of all kinds the one with a backward on CPUs
    if pad_multiple is not None:  # as torchtitan's converters to float8 do
        for _, config, parent, name in list(spec.model.traverse(AllToAllTokenDispatcher.Config)):
            sizes = dict(num_experts=config.num_experts, top_k=config.top_k)
            setattr(parent, name, TorchAOTokenDispatcher.Config(**sizes, pad_multiple=pad_multiple))
    return PoolTrainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        metrics=Losses.Config(log_freq=1) if metrics is None else MetricsProcessor.Config(**metrics),
        tokenizer=Bytes.Config(),
        dataloader=Readme.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=64,
            steps=NUM_STEPS,
            disable_cuda_graphs=of_model.get("non_blocking_capacity_factor") is None,
            mixed_precision_param=dtype,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallel),  # others need PyTorch 2.14
        activation_checkpoint=CHECKPOINTS[ac],
        compile=CompileConfig(enable=compiles, components=["model"], backend="aot_eager"),
        debug=DebugConfig(seed=1, enable_structured_logging=False),
        override=OverrideConfig(imports=parse_cli_imports(list(overrides))),
    )


def train(rank, overrides=(), **options):
    """The losses and norms of all steps."""
    return trained(rank, overrides, **options).metrics_processor.seen


def trained(rank, overrides=(), **options):
    """A trainer after all steps."""
    os.environ["LOCAL_RANK"] = str(rank)
    trainer = trainer_config(overrides, **options).build()
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, NUM_STEPS + 1):  # Trainer.train, the loop around this, needs PyTorch 2.14
        trainer.train_step(batches)
    return trainer
