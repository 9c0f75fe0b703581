"""Rows, items and bytes of one dispatch or combine over every wire, counted exactly for one routing.

In a dispatch a row of source (n, l), rank l of node n, goes this way:

    for every node m that has an expert of the token:
        m != n: over the NICs from (n, l) to its rail peer (m, l), once        -> nic
        for every rank (m, k) that has an expert of the token:
            k != l: over NVLink from (m, l) to (m, k), once                    -> nvlink
            k == l: no wire                                                    -> own
        (m, k) writes it once per expert that it has of the token              -> copies

In a combine partial sums go the same ways back: sent and received change places. On the NCCL wire these are exact
messages (docs/protocol.md, "Messages of the NCCL wire"). Others have rows and lists of all tokens of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ep_dispatcher import _C_cpu
from ep_dispatcher.checks import num_scales
from ep_dispatcher.memory import Shape, round_up
from ep_dispatcher.tools.estimate.routing import Sizes

MESSAGE_BYTES = 8 << 20  # of a message of rows, at least (csrc/cuda/rail/messages.cu)


@dataclass(frozen=True)
class Counts:
    """What every rank moves in a dispatch: int64 tensors [ranks]. A row here is one token on one wire."""

    nic_out: Tensor  # rows to rail peers on other nodes
    nic_in: Tensor  # rows from rail peers on other nodes
    nvlink_out: Tensor  # rows that other ranks of the node read from this rank
    nvlink_in: Tensor  # rows that this rank reads from other ranks of its node
    own: Tensor  # rows that this rank reads from its own memory
    copies: Tensor  # (token, expert) pairs of this rank's experts: rows of its output in expert layout
    own_node: Tensor  # tokens of this rank that have an expert on its own node
    items_out: Tensor  # (token, receiver) pairs of this rank's tokens with receivers on other nodes
    items_in: Tensor  # (token, receiver) pairs of its rail peers' tokens with receivers on this rank's node
    message_rows: Tensor  # [ranks, nodes] rows of exact messages to each node: all tokens of the rank if few stay away

    @property
    def received(self) -> Tensor:
        """Return the tokens that each rank receives [ranks]: rows of its output in rank layout."""
        return self.nvlink_in + self.own


def count(sizes: Sizes, routing: Iterable[Tensor]) -> Counts:
    """Count one routing: ``routing`` yields topk_idx of every rank in order, int64 [tokens, topk], -1 for no expert."""
    nodes, locals_ = sizes.nodes, sizes.gpus_per_node
    counts = {f.name: torch.zeros(nodes, locals_, dtype=torch.int64, device="cpu") for f in fields(Counts)}
    counts["message_rows"] = torch.zeros(nodes, locals_, nodes, dtype=torch.int64, device="cpu")
    for source, topk_idx in enumerate(routing):
        node, local = divmod(source, locals_)
        chosen = topk_idx[topk_idx >= 0]
        counts["copies"] += torch.bincount(chosen // sizes.local_experts, minlength=sizes.ranks).view(nodes, locals_)
        dst = topk_idx.div(sizes.local_experts, rounding_mode="floor")  # -1 stays -1
        reached = torch.zeros(topk_idx.shape[0], sizes.ranks + 1, dtype=torch.bool, device="cpu")
        reached.scatter_(1, dst + 1, True)
        reached = reached[:, 1:].view(-1, nodes, locals_)
        items = reached.sum(0)  # [nodes, locals]: tokens of the source for every receiver
        rows = reached.any(2).sum(0)  # [nodes]: tokens of the source for every node
        counts["own_node"][node, local] += rows[node]
        rows[node] = 0  # crosses no NIC
        counts["nic_out"][node, local] += rows.sum()
        counts["nic_in"][:, local] += rows
        tokens = topk_idx.shape[0]
        counts["message_rows"][node, local] = torch.where(tokens - rows > tokens // 16, rows, tokens)
        over_nvlink = items.clone()
        over_nvlink[:, local] = 0
        counts["nvlink_in"] += over_nvlink
        counts["nvlink_out"][:, local] += over_nvlink.sum(1)
        counts["own"][:, local] += items[:, local]
        to_nodes = items.sum(1)
        to_nodes[node] = 0
        counts["items_out"][node, local] += to_nodes.sum()
        counts["items_in"][:, local] += to_nodes
    return Counts(**{name: tensor.flatten(0, 1) for name, tensor in counts.items()})


@dataclass(frozen=True)
class Row:
    """Bytes of one row on a wire, and of its tail (scales and weights, each padded to 16 bytes as the engine does)."""

    bytes: int
    scales: int = 0
    weights: int = 0

    @staticmethod
    def make(hidden: int, itemsize: int, num_topk: int, *, float8: bool = False, weights: bool = False) -> Row:
        scales = num_scales(hidden) * 4 if float8 else 0
        return Row(hidden if float8 else hidden * itemsize, scales, num_topk * 4 if weights else 0)

    @property
    def on_wire(self) -> int:
        return self.bytes + round_up(self.scales, _C_cpu.VECTOR) + round_up(self.weights, _C_cpu.VECTOR)

    @property
    def in_output(self) -> int:
        return self.bytes + self.scales


def buffer_config(sizes: Sizes) -> _C_cpu.CudaConfig:
    """Return the engine's configuration, with the sizes of items, of tables and of the counts of one rank in int32."""
    numbers = sizes.nodes, sizes.gpus_per_node, sizes.experts, sizes.topk, sizes.tokens, sizes.hidden
    return Shape(*numbers, torch.bfloat16).cuda_config(_C_cpu.CudaConfig())


@dataclass(frozen=True)
class Traffic:
    """Bytes of one operation: float64 tensors [ranks]. Rows with their tails; with a new plan counts, items, tables."""

    nic_out: Tensor
    nic_in: Tensor
    nvlink_out: Tensor
    nvlink_in: Tensor
    expert_rows: Tensor  # written by a dispatch, read by a combine
    staged: Tensor  # copied into the staging by a dispatch
    hbm: Tensor  # read and written in the rank's own memory, by itself, its peers and its NIC


def dispatch_traffic(sizes: Sizes, counts: Counts, row: Row, *, new_plan: bool) -> Traffic:
    """Return the bytes of a dispatch of these rows; with ``new_plan`` also those of counts, items and tables.

    HBM: rows and tails are staged (read, written), leave by the NIC (read), arrive by it (written), are read by
    receivers, and are written once per local expert. HBM leaves out the bytes of a plan.
    """
    wire = row.on_wire
    out, into = counts.nic_out.double() * wire, counts.nic_in.double() * wire
    over_out, over_in = counts.nvlink_out.double() * wire, counts.nvlink_in.double() * wire
    staged = torch.full_like(out, sizes.tokens * wire)
    expert_rows = counts.copies.double() * row.in_output
    hbm = 2 * staged + out + into + over_out + counts.own.double() * wire + expert_rows
    if new_plan:
        config, others = buffer_config(sizes), sizes.nodes - 1
        lists, counts_bytes = 4 * config.item_ints, 4 * config.counts_ints
        fixed = others * (counts_bytes + sizes.tokens * 4 * config.table_ints)
        out, into = out + counts.items_out * lists + fixed, into + counts.items_in * lists + fixed
        to_node = (sizes.gpus_per_node - 1) * sizes.nodes * counts_bytes  # from source or rail peer to its node
        over_out, over_in = over_out + counts.nvlink_out * lists + to_node, over_in + counts.nvlink_in * lists + to_node
    return Traffic(out, into, over_out, over_in, expert_rows, staged, hbm)


def combine_traffic(sizes: Sizes, counts: Counts, row: Row) -> Traffic:
    """Return the bytes of the combine of a dispatch with these counts: sent and received change places.

    HBM: rows of y are read once per expert. Slots are written by receivers, and read by the owner or its rail peer.
    Sums for other nodes are written, leave by the NIC (read), arrive (written) and are read. The output is written.
    """
    wire = row.on_wire
    out, into, over_out, over_in, own = (
        t.double() * wire for t in (counts.nic_in, counts.nic_out, counts.nvlink_in, counts.nvlink_out, counts.own)
    )
    expert_rows = counts.copies.double() * row.bytes
    hbm = expert_rows + 2 * (over_in + own) + 2 * out + 2 * into + sizes.tokens * wire
    return Traffic(out, into, over_out, over_in, expert_rows, torch.zeros_like(out), hbm)


@dataclass(frozen=True)
class Messages:
    """What every rank exchanges with its rail peers in one operation over the NCCL wire."""

    out: Tensor  # [ranks] bytes, as the next
    into: Tensor
    number: int
    tokens: int  # of a message of rows or sums, at most

    @staticmethod
    def make(
        sizes: Sizes, row: Row, rows: Tensor, chunk_tokens: int, *, new_plan: bool = False, back: bool = False
    ) -> Messages:
        """Count the Call, with the counts of both parities, the rows of whole chunks, and the lists of a new plan.

        ``rows``: as Counts.message_rows. ``back``: of a combine, which sends what the dispatch received.
        """
        config = buffer_config(sizes)
        step = -(-MESSAGE_BYTES // (chunk_tokens * row.on_wire)) * chunk_tokens
        lists = sizes.gpus_per_node * config.item_ints + config.table_ints if new_plan else 0
        out, into = rows.sum(1), rows.view(sizes.nodes, sizes.gpus_per_node, sizes.nodes).sum(0).t().flatten()
        if back:
            out, into = into, out
        row_bytes, calls = row.on_wire + 4 * lists, (sizes.nodes - 1) * 2 * 4 * config.counts_ints
        number = 1 + -(-int(rows.max()) // step) + new_plan
        return Messages(out.double() * row_bytes + calls, into.double() * row_bytes + calls, number, step)


def all_tokens(sizes: Sizes, max_tokens: int) -> Tensor:
    """Return the rows of messages that are not exact, as Counts.message_rows."""
    others = 1 - torch.eye(sizes.nodes, dtype=torch.int64, device="cpu").repeat_interleave(sizes.gpus_per_node, 0)
    return others * max_tokens


def over_nccl(traffic: Traffic, messages: Messages) -> Traffic:
    """Return ``traffic`` with these messages in place of what the routing needs between nodes."""
    out, into = messages.out, messages.into
    return replace(traffic, nic_out=out, nic_in=into, hbm=traffic.hbm - traffic.nic_out - traffic.nic_in + out + into)
