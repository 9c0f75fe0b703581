"""torchtitan: tokens between experts go through this engine, in the place of any of its expert-parallel backends.

    torchrun ... -m torchtitan.train --module deepseek_v3 --config ... --override.imports \\
        ep_dispatcher.integrations.torchtitan.token_dispatcher ep_dispatcher.integrations.torchtitan.selective_ac

full_ac is selective_ac's twin for full activation checkpointing.

    dispatch    ep.dispatch: rows grouped by local expert, with the score of each
    combine     scores times expert outputs in float32, rounded to the dtype of the rows; ep.combine sums them

An option follows its target: ``...token_dispatcher={"non_blocking_capacity_factor": 0.5}``. Arguments have torchtitan's
names.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher

import ep_dispatcher as ep
from ep_dispatcher import checks, recompute
from ep_dispatcher.errors import TooFewRowsError, again


class TitanBuffer(ep.Buffer):
    """A buffer whose errors speak of torchtitan's capacity factor."""

    def explained(self, error: ep.PeerTimeoutError | ValueError) -> ep.PeerTimeoutError | ValueError:
        if isinstance(error, TooFewRowsError):
            error = again(error, ": non_blocking_capacity_factor is too small for this routing")
        return super().explained(error)


_buffers: dict[tuple[object, ...], list[TitanBuffer]] = {}  # by group and kind of rows; the last one is the largest
_dispatchers: WeakSet[EPTokenDispatcher] = WeakSet()


@functools.cache
def _check_before_steps() -> None:
    """Raise the errors of a forward and backward before the optimizer uses them. A replayed CUDA graph raises none."""

    def check(*_: object) -> None:
        for buffers in _buffers.values():
            for buffer in buffers:
                buffer.check()

    register_optimizer_step_pre_hook(check)


class EPTokenDispatcher(BaseEPTokenDispatcher):
    """A token dispatcher of torchtitan on this engine.

    Its Config is that of torchtitan's hybridep backend, so that torchtitan captures the layer in its CUDA graphs:

    non_blocking_capacity_factor  None: the host waits for the counts. A number in (0, 1]: room for that part of the
                                  most rows that a rank can get, and no host waits. More rows are a ValueError, at the
                                  latest before the optimizer's step
    pad_multiple                  every expert's rows are padded with zeros to a multiple of it, as torchao needs it
    num_max_tokens_per_rank       the most tokens of a rank in a forward pass; None: those of the first one. If more
                                  come, on all ranks, a larger buffer follows
    hidden_dim                    not read: the first forward pass tells
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        factor = config.non_blocking_capacity_factor
        if factor is not None and not 0 < factor <= 1:
            checks.fail("non_blocking_capacity_factor", f"{factor}", "None, or a number in (0, 1]")
        self.capacity_factor, self.most_tokens = factor, config.num_max_tokens_per_rank
        self.alignment = config.pad_multiple or 1
        self.buffer: TitanBuffer | None = None
        _dispatchers.add(self)

    def init_buffer(self) -> None:
        """Refuse a job without expert parallelism. The first forward pass makes the buffer, as it knows the rows."""
        if self.ep_mesh is None:
            checks.fail("expert_parallel_degree", "1", "2 or more with this token dispatcher")

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
        held = self.held_tokens(hidden, x_TD.dtype)
        if num_tokens > held:
            most = self.most_tokens or (2 * held if held else num_tokens)
            while most < num_tokens:  # in a graph of dynamic shapes this is the way to a number
                most *= 2
            self.make_buffer(most, hidden, x_TD.dtype)
        buffer = recompute.planned_buffer() or self.buffer
        assert buffer is not None
        out = ep.dispatch(
            buffer,
            x_TD,
            topk_expert_ids_TK,
            topk_scores_TK.float(),
            expert_alignment=self.alignment,
            max_recv_rows=self.max_recv_rows(num_tokens),
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

    def max_recv_rows(self, num_tokens: int) -> int | None:
        """Return the rows that every rank has room for, or None without a limit."""
        if self.capacity_factor is None:
            return None
        num_ranks = self.ep_mesh.size()
        num_local = self.num_experts // num_ranks
        rows = math.ceil(num_tokens * num_ranks * min(num_local, self.top_k) * self.capacity_factor)
        return -(-rows // self.alignment) * self.alignment + num_local * (self.alignment - 1)

    # Called while a graph is traced, not in the graph. What they see there is no reason to trace it again.
    @torch.compiler.assume_constant_result
    def held_tokens(self, hidden: int, dtype: torch.dtype) -> int:
        """Return how many tokens the buffer holds, 0 without one for such rows."""
        config = None if self.buffer is None else self.buffer.config
        return 0 if config is None or (config.hidden, config.dtype) != (hidden, dtype) else config.max_tokens_per_rank

    @torch.compiler.assume_constant_result
    def make_buffer(self, max_tokens: int, hidden: int, dtype: torch.dtype) -> None:
        """Set ``buffer`` of all such layers to one for so many tokens. Collective: all ranks bring as many.

        Layers that differ in nothing share a graph too: a layer without a buffer would be compiled again.
        """
        self.init_buffer()
        group = self.ep_mesh.get_group()
        made = _buffers.setdefault((group, hidden, dtype, self.num_experts, self.top_k), [])
        if not made or max_tokens > made[-1].config.max_tokens_per_rank:
            with _disable_current_modes():  # what watches the operators of this forward pass is not to see these
                buffer = TitanBuffer(
                    group,
                    hidden=hidden,
                    num_experts=self.num_experts,
                    num_topk=self.top_k,
                    max_tokens_per_rank=max_tokens,
                    dtype=dtype,
                )
            made.append(buffer)
        mine = self.ep_mesh, self.num_experts, self.top_k
        for other in _dispatchers:
            is_free = other is self or other.buffer is None or other.held_tokens(hidden, dtype)
            if is_free and (other.ep_mesh, other.num_experts, other.top_k) == mine:
                other.buffer = made[-1]
        if self.capacity_factor is not None:
            _check_before_steps()


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
        checks.fail("activation_checkpoint", type(cfg).__qualname__, ours)
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
