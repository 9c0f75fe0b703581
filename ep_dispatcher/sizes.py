"""What a buffer was made with, and the most rows that follow from it."""

from __future__ import annotations

from typing import get_args

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from ep_dispatcher import checks
from ep_dispatcher.argument_types import EngineName, TrainingLayout
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.topology import Topology


class BufferSizes:
    """The read-only properties of ep.Buffer. All but rank and device are the same on all ranks of the group."""

    config: EngineConfig
    _engine_name: EngineName
    _mesh: DeviceMesh | None
    _device: torch.device

    @property
    def group(self) -> ProcessGroup:
        """The process group. ValueError after destroy_process_group."""
        return self.config.group

    @property
    def mesh(self) -> DeviceMesh | None:
        """The DeviceMesh that was given in place of a group, or None."""
        return self._mesh

    @property
    def rank(self) -> int:
        """This rank, in the group."""
        return self.config.topology.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self.config.num_ranks

    @property
    def topology(self) -> Topology:
        """Ranks, nodes and rails of the group."""
        return self.config.topology

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return self.config.hidden

    @property
    def num_experts(self) -> int:
        """Experts on all ranks together: those of the router, without redundant copies."""
        return self.config.num_logical_experts

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank: num_experts / num_ranks. Rank r has those from r * num_local_experts on."""
        return self.config.num_own_experts

    @property
    def redundant_experts_per_rank(self) -> int:
        """Slots of each rank for redundant copies of other ranks' experts."""
        return self.config.redundant_experts_per_rank

    @property
    def num_topk(self) -> int:
        """Columns of topk_idx."""
        return self.config.num_topk

    @property
    def max_tokens_per_rank(self) -> int:
        """The most tokens of a rank in one dispatch."""
        return self.config.max_tokens_per_rank

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows."""
        return self.config.dtype

    @property
    def engine(self) -> EngineName:
        """The engine in use: "cpu" or "cuda"."""
        return self._engine_name

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are: the CPU, or the GPU that was current when the buffer was made."""
        return self._device

    def max_recv_rows(self, layout: TrainingLayout = "expert", *, expert_alignment: int = 1) -> int:
        """Return a number of rows that no routing exceeds: the safe ``max_recv_rows`` of a dispatch.

            expert layout  num_ranks * max_tokens_per_rank * min(num_topk, num_local_experts), and padding; slots of
                           redundant experts count as local experts
            rank layout    num_ranks * max_tokens_per_rank

            out = ep.dispatch(buffer, x, topk_idx, topk_weights, max_recv_rows=buffer.max_recv_rows())

        layout, expert_alignment   those of the dispatch. ep.moe_mlp needs neither; each of its two parts brings half of
                                   the tokens, so half of these rows are enough there

        Routings that come near it are rare. A smaller number saves memory, and more rows are an ep.TooFewRowsError.
        Raises ValueError for decode layout, which takes no max_recv_rows, and for arguments that are not allowed.
        """
        checks.one_of("layout", layout, get_args(TrainingLayout))
        alignment = checks.integer("expert_alignment", expert_alignment, 1)
        num_tokens = self.num_ranks * self.max_tokens_per_rank
        if layout == "rank":
            return num_tokens
        num_local = self.config.num_local_experts
        rows = num_tokens * min(self.num_topk, num_local)
        if alignment > 1:
            # The padding of an expert is shorter than the alignment, and all rows together are a multiple of it.
            padded = (rows + num_local * (alignment - 1)) // alignment * alignment
            of_each_expert = -(-num_tokens // alignment) * alignment
            rows = min(padded, num_local * of_each_expert)
        return min(rows, checks.MAX_INT)
