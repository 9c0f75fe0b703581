"""A token dispatcher for torchtitan, in place of any of its expert-parallel backends.

    torchrun ... -m torchtitan.train --module deepseek_v3 --config ... --override.imports \\
        ep_dispatcher.integrations.torchtitan.token_dispatcher ep_dispatcher.integrations.torchtitan.selective_ac

full_ac does for full activation checkpointing what selective_ac does for selective checkpointing. metrics adds
imbalance and waits to the metrics that torchtitan logs.

    dispatch    ep.dispatch: rows grouped by local expert, with the score of each
    combine     scores times expert outputs in float32, rounded to the dtype of the rows; ep.combine sums them

Options are appended to the target: ``...token_dispatcher={"non_blocking_capacity_factor": 0.5}``. Arguments have the
names that torchtitan gives them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher

import ep_dispatcher as ep
from ep_dispatcher import checks
from ep_dispatcher.buffer import find_buffer, planned_buffer
from ep_dispatcher.errors import TooFewRowsError, copy_error
from ep_dispatcher.integrations import collectives, messages
from ep_dispatcher.integrations.job_stats import JobSums
from ep_dispatcher.observers import is_observed
from ep_dispatcher.wording import Wording

__all__ = [
    "EPMetricsProcessor",
    "EPTokenDispatcher",
    "TooManyTokensError",
    "full_ac",
    "metrics",
    "selective_ac",
    "token_dispatcher",
]
_ADVICE = "Set num_max_tokens_per_rank to the most tokens of any rank in any forward pass, also in validation."


def __dir__() -> list[str]:
    """List the public names alone."""
    return __all__


class TooManyTokensError(ValueError, AssertionError):
    """A rank brings more tokens than its buffer holds.

    It is an AssertionError too, because torch.compile raises that as it is. A ValueError of code that it traces would
    become an InternalTorchDynamoError.
    """


class TitanWording(Wording):
    """Errors that speak of torchtitan's capacity factor."""

    def reword(self, error: ep.PeerTimeoutError | ValueError) -> ep.PeerTimeoutError | ValueError:
        if isinstance(error, TooFewRowsError):
            error = copy_error(error, ": non_blocking_capacity_factor is too small for this routing")
        return super().reword(error)


class TitanBuffer(ep.Buffer):
    """A buffer of torchtitan's layers."""

    def make_wording(self) -> TitanWording:
        return TitanWording()


_buffers: dict[tuple[object, ...], TitanBuffer] = {}  # by group, kind of rows, and tokens per rank
_dispatchers: WeakSet[EPTokenDispatcher] = WeakSet()


@functools.cache
def _check_before_steps() -> None:
    """Raise the errors of a forward and backward before the optimizer uses them. A replayed CUDA graph raises none."""

    def check(*_: object) -> None:
        for buffer in _buffers.values():
            buffer.check()

    register_optimizer_step_pre_hook(check)


def _set_label(topk_idx: Tensor, label: Tensor, buffer_id: str) -> Tensor:
    """Set ``Buffer.label``, and return a copy of topk_idx [num_tokens, top_k], so that its dispatch comes after this.

    label: int64 [] on the CPU. As a number it would be a constant of a compiled graph, which several layers share.
    """
    find_buffer(buffer_id).label = int(label)
    return topk_idx.clone()


_set_label_op = torch.library.custom_op(
    "ep_dispatcher::set_label",
    _set_label,
    mutates_args=(),
    schema="(Tensor topk_idx, Tensor label, str buffer_id) -> Tensor",
)
_set_label_op.register_fake(lambda topk_idx, label, buffer_id: torch.empty_like(topk_idx))


class EPTokenDispatcher(BaseEPTokenDispatcher):
    """A token dispatcher of torchtitan on this engine.

    Its Config is that of torchtitan's hybridep backend, so that torchtitan captures the layer in its CUDA graphs:

    non_blocking_capacity_factor  None: the host waits for the counts. A number in (0, 1]: room for that part of the
                                  most rows that a rank can get from num_max_tokens_per_rank tokens of every rank, and
                                  no host waits. More rows are a ValueError, at the latest before the optimizer's step
    pad_multiple                  every expert's rows are padded with zeros to a multiple of it, as torchao needs it
    num_max_tokens_per_rank       the most tokens of a rank in a forward pass. None: in the first one all ranks agree on
                                  the most that any of them brings
    hidden_dim                    not read: the first forward pass tells

    The number of tokens is fixed from the first forward pass on, whoever set it. If a rank brings more in that pass,
    all ranks raise ValueError together. A rank that brings more later raises ValueError at once, and leaves: its peers,
    which wait for it, raise PeerTimeoutError at once and name it. No rank can make the buffers larger later, because
    the others would not know of it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        factor, most = config.non_blocking_capacity_factor, config.num_max_tokens_per_rank
        if factor is not None and not 0 < factor <= 1:
            checks.fail("non_blocking_capacity_factor", f"{factor}", "None, or a number in (0, 1]")
        if most is not None:
            most = checks.integer("num_max_tokens_per_rank", most, 1)
        self.capacity_factor, self.most_tokens = factor, most
        self.alignment = config.pad_multiple or 1
        self.buffers: dict[tuple[int, torch.dtype], TitanBuffer] = {}  # by hidden and dtype of the rows
        self.buffer: TitanBuffer | None = None  # the one of these in use
        self.label: Tensor | None = None  # the layer's number, int64 [] on the CPU; set by `count`, like `sums`
        self.sums: JobSums | None = None  # None: nothing is counted

    def init_buffer(self) -> None:
        """Refuse a job without expert parallelism. The first forward pass makes the buffer, as it knows the rows."""
        if self.ep_mesh is None:
            checks.fail("expert_parallel_degree", "1", "2 or more with this token dispatcher")
        _dispatchers.add(self)  # not in __init__, because pipeline stages have copies of a model's dispatchers

    def count(self, label: int, sums: JobSums) -> None:
        """Count tokens and waits for these sums, tokens as those of layer ``label``. Before the first forward pass."""
        self.label, self.sums = torch.tensor(label, dtype=torch.int64, device="cpu"), sums

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, tuple[ep.Buffer, Tensor, ep.Handle]]:
        """Return rows [rows, hidden] grouped by local expert, their int64 numbers [num_local_experts], and metadata.

        x_TD [num_tokens, hidden], topk_scores_TK float32 and topk_expert_ids_TK int64 [num_tokens, top_k].
        """
        del num_local_tokens_per_expert_E  # the plan counts
        num_tokens, hidden = x_TD.shape
        if not self.select_buffer(hidden, x_TD.dtype):
            self.make_buffer(_number(num_tokens), hidden, x_TD.dtype)
        buffer = planned_buffer() or self.buffer
        assert buffer is not None
        most_tokens = buffer.config.max_tokens_per_rank
        if num_tokens > most_tokens:
            self.leave(_number(num_tokens))
        out = ep.dispatch(
            buffer,
            x_TD,
            self.labelled(topk_expert_ids_TK, buffer),
            topk_scores_TK.float(),
            expert_alignment=self.alignment,
            max_recv_rows=self.max_recv_rows(most_tokens),
        )
        assert isinstance(out.x, Tensor) and out.topk_weights is not None
        return out.x, out.rows_per_expert, (buffer, out.topk_weights, out.handle)

    def combine(
        self,
        routed_output_RD: Tensor,
        metadata: tuple[ep.Buffer, Tensor, ep.Handle],
        x_TD: Tensor,
    ) -> Tensor:
        """Return the sums [num_tokens, hidden] of scores times expert outputs [rows, hidden]."""
        buffer, scores, handle = metadata
        scored = (routed_output_RD.float() * scores[:, None]).to(routed_output_RD.dtype)
        return ep.combine(buffer, scored, handle)

    def labelled(self, topk_expert_ids_TK: Tensor, buffer: ep.Buffer) -> Tensor:
        """Return the expert numbers [num_tokens, top_k] for a dispatch that counts for this layer."""
        if self.label is None:
            return topk_expert_ids_TK
        if is_observed((topk_expert_ids_TK,)):  # a traced graph sets the label when it runs
            return _set_label_op(topk_expert_ids_TK, self.label, buffer.id)
        buffer.label = int(self.label)
        return topk_expert_ids_TK

    def max_recv_rows(self, most_tokens: int) -> int | None:
        """Return the rows that every rank has room for, or None without a limit.

        most_tokens: of any rank. Ranks may bring fewer, in other numbers each, and their outputs keep this shape.
        """
        if self.capacity_factor is None:
            return None
        num_ranks = self.ep_mesh.size()
        num_local = self.num_experts // num_ranks
        rows = math.ceil(most_tokens * num_ranks * min(num_local, self.top_k) * self.capacity_factor)
        return -(-rows // self.alignment) * self.alignment + num_local * (self.alignment - 1)

    # These are called while a graph is traced, not in the graph. What they see there is no reason to trace it again.
    @torch.compiler.assume_constant_result
    def select_buffer(self, hidden: int, dtype: torch.dtype) -> bool:
        """Set ``buffer`` to the one for such rows. Return whether there is one."""
        self.buffer = self.buffers.get((hidden, dtype))
        return self.buffer is not None

    @torch.compiler.assume_constant_result
    def make_buffer(self, num_tokens: int, hidden: int, dtype: torch.dtype) -> None:
        """Set ``buffer`` of all such layers to one that holds these tokens of every rank. Collective.

        Every rank comes here in its first forward pass, with any number of tokens, also 0. Layers that differ in
        nothing share a graph too: a layer without a buffer would be compiled again.
        """
        self.init_buffer()
        with _disable_current_modes():  # modes that observe this forward pass must not see these operators
            buffer = self.agreed_buffer(num_tokens, hidden, dtype)
        for other in _dispatchers:
            if other.makes_same_buffers_as(self):
                other.buffer = other.buffers.setdefault((hidden, dtype), buffer)
        if self.capacity_factor is not None:
            _check_before_steps()

    def agreed_buffer(self, num_tokens: int, hidden: int, dtype: torch.dtype) -> TitanBuffer:
        """Return the buffer that all ranks take or make together. No rank decides by what it knows alone."""
        group, note = self.ep_mesh.get_group(), "the first forward pass of a layer"
        brought = collectives.max_over_group(num_tokens, group, about="agree on the number of tokens", note=note)
        most_tokens = max(1, brought) if self.most_tokens is None else self.most_tokens
        if brought > most_tokens:
            raise TooManyTokensError(
                f"x_TD has {brought} tokens on a rank, and {num_tokens} on this one, but num_max_tokens_per_rank is "
                f"{most_tokens}. {_ADVICE}"
            )
        key = (group, hidden, dtype, self.num_experts, self.top_k, most_tokens)
        known = _buffers.get(key)
        is_missing = known is None or known.is_destroyed or known.live_engine().health.ended
        if collectives.max_over_group(int(is_missing), group, about="agree on a buffer", note=note):
            _buffers[key] = known = TitanBuffer(
                group,
                hidden=hidden,
                num_experts=self.num_experts,
                num_topk=self.top_k,
                max_tokens_per_rank=most_tokens,
                dtype=dtype,
            )
            messages.announce(messages.name_and_version("torchtitan"), known)
        assert known is not None
        if self.sums is not None:
            self.sums.start(known)  # now, so that CUDA graphs that are captured later count
        return known

    @torch.compiler.assume_constant_result
    def leave(self, num_tokens: int) -> NoReturn:
        """Raise the ValueError of too many tokens. Peers that wait for this rank learn at once that it has left."""
        assert self.buffer is not None
        held = self.buffer.config.max_tokens_per_rank
        for key in [key for key, buffer in _buffers.items() if buffer is self.buffer]:
            del _buffers[key]  # it is of no use to later models
        collectives.abandon(self.buffer)
        if self.most_tokens is None:
            why = f"num_max_tokens_per_rank was not given, and in the first forward pass no rank had more than {held}"
        else:
            why = f"num_max_tokens_per_rank is {held}"
        raise TooManyTokensError(
            f"x_TD has {num_tokens} tokens on rank {self.ep_mesh.get_local_rank()}, but {why}. {_ADVICE}"
        )

    def makes_same_buffers_as(self, other: EPTokenDispatcher) -> bool:
        """Return whether this layer needs the buffers that the other one makes."""
        mine = (self.ep_mesh, self.num_experts, self.top_k, self.most_tokens)
        return mine == (other.ep_mesh, other.num_experts, other.top_k, other.most_tokens)


def _number(size: int) -> int:
    """Return a size of a tensor as a number, also while a graph is traced, where it may be a symbol."""
    return len(range(size))


@override(target=BaseEPTokenDispatcher.Config, description="ep_dispatcher carries the tokens")
def token_dispatcher(cfg: BaseEPTokenDispatcher.Config, **options: object) -> EPTokenDispatcher.Config:
    """Replace the token dispatcher of every MoE layer. ``options`` are fields of ``EPTokenDispatcher.Config``."""
    return derive(cfg, EPTokenDispatcher.Config, **options)


class EPSelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing, which also keeps what dispatch and combine have received."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        ours = torch.ops.ep_dispatcher
        return super().get_save_ops() | {ours.dispatch.default, ours.combine.default}


@override(target=SelectiveAC.Config, description="selective checkpoints keep the rows of ep_dispatcher")
def selective_ac(cfg: SelectiveAC.Config) -> EPSelectiveAC.Config:
    """Replace the selective checkpointing. ValueError for a subclass, whose own get_save_ops would be lost."""
    if type(cfg) is not SelectiveAC.Config:
        ours = (
            "SelectiveAC.Config; add torch.ops.ep_dispatcher.dispatch.default and combine.default to get_save_ops there"
        )
        checks.fail("activation_checkpoint", f"a {type(cfg).__qualname__}", f"a {ours}")
    return derive(cfg, EPSelectiveAC.Config)


class EPFullAC(FullAC):
    """torchtitan's full activation checkpointing, whose recompute uses the plans of its forward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        block = super()._wrap_block(module, base_fqn=base_fqn)
        block.checkpoint_fn = functools.partial(block.checkpoint_fn, context_fn=ep.recompute_contexts)
        return block


@override(target=FullAC.Config, description="full checkpoints keep the plans of ep_dispatcher")
def full_ac(cfg: FullAC.Config) -> EPFullAC.Config:
    """Replace the full checkpointing. PyTorch refuses it with debug=True."""
    return derive(cfg, EPFullAC.Config)


class EPMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics, and with them at each log step the imbalance and waits of the job (JobStats.scalars).

    The sum over all ranks begins before the forward pass of a log step, so that no host waits for it. It covers the
    steps since the previous log step, with that step and without the new one; the first step of a run logs none.
    Forward passes of a validation and recomputes that dispatch again count too.

    The sums rely on torchtitan's trainers, which call should_log on all ranks, before the forward pass of each step. A
    layer's number is the one in the name of its module, such as "layers.3.moe", or 0 without one. Raises ValueError on
    all ranks in the first step if no layer has this library's token dispatcher.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **options: Any):
        super().__init__(config, **options)
        self.sums = JobSums()
        self.dispatchers: list[EPTokenDispatcher] = []
        self.next_step: int | None = None  # the first step that no sum has. None: no step has begun

    def should_log(self, step: int) -> bool:
        logs = super().should_log(step)
        if self.next_step is None:
            self.count_layers()
            self.next_step = step
        elif logs and step > self.next_step:
            self.sums.begin(step - self.next_step)
            self.next_step = step
        return logs

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        found = self.sums.newest()
        if found is not None:
            extra_metrics = {**(extra_metrics or {}), **found.scalars()}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def count_layers(self) -> None:
        """Let the layers of this rank count. Collective: the ranks of all stages agree on the sizes of the sums."""
        num_labels = num_experts = 0
        for part in self.model_parts or ():
            for name, module in part.named_modules():
                dispatcher = getattr(module, "token_dispatcher", None)
                if isinstance(dispatcher, EPTokenDispatcher):
                    label = next((int(word) for word in name.split(".") if word.isdigit()), 0)
                    dispatcher.count(label, self.sums)
                    self.dispatchers.append(dispatcher)
                    num_labels, num_experts = max(num_labels, label + 1), max(num_experts, dispatcher.num_experts)
        num_labels, num_experts = collectives.max_over_job(num_labels, num_experts)
        if not num_experts:
            checks.refuse(f"metrics need a model with {__name__}.token_dispatcher, and this one has none")
        self.sums.grow(num_labels, num_experts)


@override(target=MetricsProcessor.Config, description="imbalance and waits of ep_dispatcher are logged")
def metrics(cfg: MetricsProcessor.Config) -> EPMetricsProcessor.Config:
    """Replace the metrics processor. ValueError for a subclass, whose own methods would be lost."""
    if type(cfg) is not MetricsProcessor.Config:
        ours = "MetricsProcessor.Config; derive your class from EPMetricsProcessor instead, without this override"
        checks.fail("metrics", f"a {type(cfg).__qualname__}", f"a {ours}")
    return derive(cfg, EPMetricsProcessor.Config)
