"""Computes the bytes that one rank of a Buffer takes, before anything is allocated. Needs no GPU or compiled module.

The layout is that of the engines. Every function here names the C++ that it follows, array by array and in the same
order. `tests/test_memory.py` compares the sums with those of the engines, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_dispatcher import checks, envs
from ep_dispatcher.topology import Topology

# Limits of the CUDA engine, and its default number of multiprocessors.
MAX_NODES, MAX_LOCAL = 8, 8  # as compiled (csrc/cuda/config.h)
MAX_EXPERTS = 8192  # the counts of a warp have to fit into shared memory
MAX_TOKENS, MAX_TOKENS_BETWEEN_NODES = 2**22, 2**19  # the counters of a block's chunks have to fit too
# Enough for NVLink on 4 H200. More make a combine faster, but take as many from the kernels beside it.
DEFAULT_SMS = 24

ALIGNMENT = 64  # bytes; arrays begin at multiples, and are rounded up to them (csrc/common/cursor.h)
LINE = 1024  # bytes; kLine of csrc/cuda/config.h
VECTOR = 16  # bytes; kVector
ITEM_CHUNK = 512  # kItemChunk
SCALE_BLOCK = 128  # kScaleBlock

# Between nodes each rank of the node has slots for the partial sums of so many tokens at a time, of all rail peers
# together. So slots do not grow with the number of nodes. The window of a rail peer is cut into chunks: while one is
# reduced, pushes fill the others.
WINDOW_TOKENS, WINDOW_CHUNKS = 2048, 4
MAX_WINDOW_CHUNKS = 1024  # the most window chunks in max_tokens: each has counters in a block's shared memory

STATE_BYTES = 2528  # sizeof(State), csrc/cuda/state.h
CUDA_CALL_BYTES = 80  # of a Call as tagged words, csrc/cuda/sync/call.h
CPU_CALL_BYTES = 64  # sizeof(Call), csrc/cpu/call.h
CPU_FLAG_BYTES = 64  # sizeof(Flag), csrc/cpu/flags.h
COUNTS_START_BYTES = CPU_CALL_BYTES + 8  # sizeof(Counts::Start), csrc/cpu/region.h
SENDER_CALLS_BYTES = 2 * CPU_CALL_BYTES  # sizeof(SenderCalls)

FLAGS, PADDING = "flags and counts", "padding"


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def table_bytes(ranks_per_node: int) -> int:
    """Bytes of a token's item numbers at the ranks of a node: an int32 for each (``csrc/cuda/config.h``)."""
    return 4 * round_up(ranks_per_node, 4)


def item_bytes(num_topk: int, num_local_experts: int) -> int:
    """Bytes of an item: token, number of copies, a value and a byte for each copy (``csrc/cuda/config.h``)."""
    copies = min(num_topk, num_local_experts)
    return 4 * round_up(2 + copies + (copies + 3) // 4, 4)


def counts_bytes(num_ranks: int, num_experts: int) -> int:
    """Bytes of the counts of one rank: int32 for every rank and every expert."""
    return 4 * round_up(num_ranks + num_experts, 4)


@dataclass(frozen=True)
class BufferBytes:
    """Bytes of one rank, by kind of array. An array includes the padding after it; ``"padding"`` has the rest.

    ``region``: memory that the node's ranks share; ``state``: memory that only this rank uses (CUDA engine).
    """

    region: dict[str, int]
    state: dict[str, int]

    @property
    def region_bytes(self) -> int:
        return sum(self.region.values())

    @property
    def state_bytes(self) -> int:
        return sum(self.state.values())

    @property
    def total(self) -> int:
        return self.region_bytes + self.state_bytes


@dataclass(frozen=True)
class Shape:
    """The sizes of a buffer, unchecked: ``Config`` of csrc/cuda/config.h and csrc/cpu/config.h."""

    num_nodes: int
    ranks_per_node: int
    num_experts: int
    num_topk: int
    max_tokens: int
    hidden: int
    itemsize: int  # bytes of an element
    masks: bool = False  # mask_late_ranks

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.itemsize

    @property
    def slot_stride(self) -> int:
        return round_up(self.row_bytes, 128 if self.row_bytes < 4 * LINE else LINE)

    @property
    def item_bytes(self) -> int:
        return item_bytes(self.num_topk, self.num_experts // self.num_ranks)

    @property
    def table_bytes(self) -> int:
        return table_bytes(self.ranks_per_node)

    @property
    def tail_bytes(self) -> int:
        return round_up(self.hidden // SCALE_BLOCK * 4, VECTOR) + round_up(self.num_topk * 4, VECTOR)

    @property
    def weights_bytes(self) -> int:
        return 4 * self.num_topk

    @property
    def choices(self) -> int:
        """Entries for the choices of all ranks, padded to whole vectors."""
        return self.num_ranks * self.max_tokens * round_up(self.num_topk, 8)

    @property
    def plans_directly(self) -> bool:
        """Whether new plans of the CUDA engine are direct plans (csrc/cuda/plan/direct.cuh).

        One node, and so few tokens that such a plan takes at most 92 KiB of a block's shared memory.
        """
        words = self.num_experts * -(-self.max_tokens // 32)
        return self.num_nodes == 1 and self.choices <= 16384 and words <= 4096

    @property
    def token_chunk(self) -> int:
        """Tokens that share a flag, raised once their rows are staged or have crossed to another node. A power of two.

        On 2 H200, one node, smaller chunks cost more in flags than they save. Between nodes the last chunk can be
        pulled only when all has crossed: at 50 GB/s chunks of 256 took 0.95 of the time of chunks of 1024, those of 128
        took more (benchmarks/paced_wire.py --chunks).
        """
        return 1024 if self.num_nodes == 1 else 256

    @property
    def sum_chunk(self) -> int:
        """Tokens that share a flag, raised once their sums have crossed to another node. A power of two.

        At 50 GB/s, one H200, 2 nodes (benchmarks/paced_wire.py --chunks), with window chunks of this size too: chunks
        of 128 took 0.97 to 0.99 of the time of 256 with one rank per node, and 1.02 to 1.03 with two.
        """
        return 128 if self.ranks_per_node == 1 else 256

    @property
    def window_chunk(self) -> int:
        """Tokens in a chunk of the window of a source on another node. A multiple of 16: a warp takes 16 at once."""
        share = WINDOW_TOKENS // (WINDOW_CHUNKS * max(1, self.num_nodes - 1)) // 16 * 16
        return max(min(share, self.sum_chunk), round_up(self.chunks(MAX_WINDOW_CHUNKS), 16))

    @property
    def window_chunks(self) -> int:
        return WINDOW_CHUNKS

    @property
    def window_slots(self) -> int:
        """Slots of a rank for a source on another node."""
        return min(self.max_tokens, self.window_chunks * self.window_chunk)

    def chunks(self, length: int) -> int:
        """How many chunks of ``length`` hold all tokens."""
        return -(-self.max_tokens // length)


class Cursor:
    """Measures arrays one after the other, as csrc/common/cursor.h does, and adds up the bytes of each name."""

    def __init__(self):
        self.size = 0
        self.arrays: dict[str, int] = {}

    def take(self, name: str, num_bytes: int, alignment: int = ALIGNMENT) -> None:
        begin = round_up(self.size, alignment)
        self._add(PADDING, begin - self.size)
        self._add(name, round_up(num_bytes, ALIGNMENT))

    def repeat(self, times: int, carve: Callable[[Cursor, Shape], None], shape: Shape) -> None:
        """Take what ``carve`` takes, ``times`` times. Each begins and ends at a multiple of a line."""
        self.take(PADDING, 0, LINE)
        once = Cursor()  # measured from a multiple of a line, like each of them
        carve(once, shape)
        once.take(PADDING, 0, LINE)
        for name, num_bytes in once.arrays.items():
            self._add(name, times * num_bytes)

    def _add(self, name: str, num_bytes: int) -> None:
        self.size += num_bytes
        if num_bytes:
            self.arrays[name] = self.arrays.get(name, 0) + num_bytes


def buffer_bytes(
    *,
    num_ranks: int,
    ranks_per_node: int | None = None,
    hidden: int,
    num_experts: int,
    num_topk: int,
    max_tokens_per_rank: int,
    dtype: torch.dtype = torch.bfloat16,
    num_sms: int | None = None,
    mask_late_ranks: bool = False,
    engine: str = "cuda",
) -> BufferBytes:
    """Return the bytes that one rank allocates when it makes this Buffer: the same on every rank, and exact.

        one = ep.buffer_bytes(num_ranks=8, hidden=7168, num_experts=256, num_topk=8, max_tokens_per_rank=4096)
        one.total                     # bytes: one.region_bytes + one.state_bytes
        one.region["slots"]           # bytes by kind of array

    num_ranks       ranks of the group
    ranks_per_node  ranks of a node; None: EP_DISPATCHER_RANKS_PER_NODE, or all ranks if that is unset
    num_sms         as Buffer takes it; on a GPU with fewer multiprocessors the state is a little smaller
    engine          "cuda": memory of the GPU; "cpu": shared memory of the host, whose pages count once they are used

    All other arguments are those of Buffer. Raises the ValueErrors that Buffer raises for these sizes. Formulas and
    examples: docs/memory.md. Left out: about a kilobyte of pinned host memory, what an allocator adds by rounding up,
    what operations allocate (outputs, plans, messages of the CPU engine between nodes), and the caller's tensors.
    """
    checks.one_of("engine", engine, ("cuda", "cpu"))
    num_ranks = checks.integer("num_ranks", num_ranks, 1)
    per_node = envs.ranks_per_node() if ranks_per_node is None else ranks_per_node
    if per_node is not None:
        per_node = checks.integer("ranks_per_node", per_node, 1)
    num_sms = envs.num_sms() if num_sms is None else num_sms
    sizes = checks.buffer_config(
        num_ranks=num_ranks,
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        max_tokens_per_rank=max_tokens_per_rank,
        dtype=dtype,
        timeout_s=envs.default("EP_DISPATCHER_TIMEOUT_S"),
        num_sms=num_sms,
    )
    num_experts = sizes.pop("num_experts")
    topology = Topology.make(0, ["one host"] * num_ranks, per_node)
    checks.buffer_size(num_nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node, **sizes)
    shape = Shape(
        topology.num_nodes,
        topology.ranks_per_node,
        num_experts,
        sizes["num_topk"],
        sizes["max_tokens_per_rank"],
        sizes["hidden"],
        dtype.itemsize,
        checks.boolean("mask_late_ranks", mask_late_ranks),
    )
    if shape.masks:
        checks.masks(topology.num_nodes, topology.ranks_per_node, suspendable=False)
    if engine == "cpu":
        return cpu_bytes(shape)
    num_sms = DEFAULT_SMS if num_sms is None else int(num_sms)
    check_cuda_sizes(topology, shape.num_experts, shape.max_tokens)
    check_cuda_sms(topology, num_sms)
    check_cuda_masks(shape)
    return cuda_bytes(shape, num_sms)


def check_cuda_sizes(topology: Topology, num_experts: int, max_tokens_per_rank: int) -> None:
    """Raise ValueError if the kernels of the CUDA engine cannot serve a buffer of these sizes."""
    given = "with engine='cuda'"
    if topology.num_nodes > MAX_NODES or topology.ranks_per_node > MAX_LOCAL:
        text = f"{topology.num_nodes} nodes of {topology.ranks_per_node} ranks"
        checks.fail("group", text, f"at most {MAX_NODES} nodes of {MAX_LOCAL} ranks {given}")
    if [rank for ranks in topology.nodes for rank in ranks] != list(range(topology.num_ranks)):
        checks.fail("group", f"nodes {list(topology.nodes)}", f"neighbouring ranks in a node {given}")
    if num_experts > MAX_EXPERTS:
        checks.fail("num_experts", num_experts, f"at most {MAX_EXPERTS} {given}")
    most_tokens = MAX_TOKENS if topology.num_nodes == 1 else MAX_TOKENS_BETWEEN_NODES
    if max_tokens_per_rank > most_tokens:
        nodes = f" and {topology.num_nodes} nodes" * (topology.num_nodes > 1)
        checks.fail("max_tokens_per_rank", max_tokens_per_rank, f"at most {most_tokens} {given}{nodes}")


def check_cuda_masks(shape: Shape) -> None:
    """Raise ValueError if the kernels of the CUDA engine cannot mask ranks at this shape."""
    if shape.masks and not shape.plans_directly:
        given = f"True with max_tokens_per_rank={shape.max_tokens}, num_topk={shape.num_topk}"
        allowed = "it with direct plans: fewer tokens, choices and experts (docs/memory.md) with engine='cuda'"
        checks.fail("mask_late_ranks", f"{given}, num_experts={shape.num_experts}", allowed)


def check_cuda_sms(topology: Topology, num_sms: int) -> None:
    """Raise ValueError if the kernels of the CUDA engine would have too few multiprocessors."""
    if topology.num_nodes > 1 and num_sms < 2:
        checks.fail("num_sms", num_sms, "at least 2 with several nodes: one serves the wire between them")


# ---- the CUDA engine ------------------------------------------------------------------------------------------------


def cuda_bytes(shape: Shape, num_sms: int = DEFAULT_SMS) -> BufferBytes:
    """Return the bytes of one rank, for any number of nodes, even for more than the engine serves."""
    region, state = Cursor(), Cursor()
    _carve_cuda_region(region, shape)
    _carve_state(state, shape, num_sms)
    return BufferBytes(region.arrays, state.arrays)


def _carve_inbox(c: Cursor, s: Shape) -> None:
    """``carve_inbox`` of csrc/cuda/region.h."""
    c.take("staging", s.max_tokens * s.slot_stride, LINE)
    c.take("items", s.ranks_per_node * s.max_tokens * s.item_bytes)
    c.take("tails", s.max_tokens * s.tail_bytes)
    c.take("weights", s.max_tokens * s.weights_bytes)


def _carve_rail(c: Cursor, s: Shape) -> None:
    """``carve_rail`` of csrc/cuda/region.h."""
    c.take("sums", s.max_tokens * s.slot_stride, LINE)
    c.take("items", s.ranks_per_node * s.max_tokens * s.item_bytes)
    c.take("tables", s.max_tokens * s.table_bytes)  # that go out
    c.take(FLAGS, 2 * CUDA_CALL_BYTES)  # call
    c.take("tables", s.max_tokens * s.table_bytes)  # that come in
    c.take("weights", s.max_tokens * s.weights_bytes)
    c.take("slots", s.ranks_per_node * s.window_slots * s.slot_stride, LINE)


def _carve_cuda_region(c: Cursor, s: Shape) -> None:
    """``carve_region`` of csrc/cuda/region.h."""
    others = s.num_nodes - 1
    token_chunks, item_chunks, sum_chunks = s.chunks(s.token_chunk), s.chunks(ITEM_CHUNK), s.chunks(s.sum_chunk)
    far_chunks = s.chunks(s.window_chunk) if others else 0
    flags = [s.num_ranks] * (3 if s.masks else 2)  # aborted, excluded (with masks), listed
    flags += [s.num_ranks * token_chunks]  # staged
    flags += [s.ranks_per_node] * 2  # consumed, slots_free
    flags += [s.ranks_per_node * (far_chunks + item_chunks)]  # pushed
    flags += [s.ranks_per_node * far_chunks]  # freed
    flags += [others * far_chunks, others * sum_chunks]  # summed, sums_here
    flags += [others] * 3  # inbox_free, call_arrived, items_arrived
    flags += [others * token_chunks, others * sum_chunks]  # rows_arrived, sums_arrived
    for count in flags:
        c.take(FLAGS, 8 * count)
    c.take(FLAGS, 2 * s.num_ranks * CUDA_CALL_BYTES)  # called
    # Four choices and their epoch take 16 bytes, as do two factors and theirs.
    c.take("choices", 2 * 4 * s.choices if s.plans_directly else 0)
    factor_words = -(-s.max_tokens * s.num_topk // 2)
    c.take("factors", 2 * s.num_ranks * 16 * factor_words if s.plans_directly else 0)
    c.take(FLAGS, 2 * s.num_ranks * counts_bytes(s.num_ranks, s.num_experts))  # counts
    c.take("slots", s.ranks_per_node * s.max_tokens * s.slot_stride, LINE)
    c.repeat(s.num_nodes, _carve_inbox, s)
    if others:
        c.repeat(others, _carve_rail, s)


def _carve_state(c: Cursor, s: Shape, num_blocks: int) -> None:
    """``carve_state`` of csrc/cuda/state.h."""
    others, sum_chunks, token_chunks = s.num_nodes - 1, s.chunks(s.sum_chunk), s.chunks(s.token_chunk)
    far_chunks = s.chunks(s.window_chunk) if others else 0
    counters = [token_chunks]  # staged_done
    counters += [far_chunks + s.chunks(ITEM_CHUNK)]  # pushed_done
    counters += [others * far_chunks, others]  # summed_done, items_sent
    counters += [others * token_chunks, others * sum_chunks]  # rows_sent, sums_sent
    c.take("counters", STATE_BYTES)
    for count in counters:
        c.take("counters", 4 * count)
    c.take("counts by block", 4 * num_blocks * s.num_experts)  # block_num_tokens
    c.take("counts by block", 4 * num_blocks * s.num_ranks)  # block_num_items
    c.take("counts by block", 4 * num_blocks * s.num_experts)  # block_num_first
    c.take("counts by block", 4 * s.num_experts)  # first_number


# ---- the CPU engine -------------------------------------------------------------------------------------------------


def cpu_bytes(shape: Shape) -> BufferBytes:
    """Return the bytes of one rank's shared memory: ``carve_region`` of csrc/cpu/region.h."""
    c, s = Cursor(), shape
    # Partial sums of one token from the ranks of a node. With masks each rank has its own slot.
    partials = s.ranks_per_node if s.masks else min(s.ranks_per_node, s.num_topk)
    c.take(FLAGS, CPU_FLAG_BYTES)  # aborted
    c.take(FLAGS, s.ranks_per_node * CPU_FLAG_BYTES if s.masks else 0)  # masked
    c.take(FLAGS, CPU_FLAG_BYTES)  # called
    c.take(FLAGS, 2 * CPU_CALL_BYTES)  # calls
    for _ in range(4):  # counted, listed, staged, pushed
        c.take(FLAGS, s.num_nodes * CPU_FLAG_BYTES)
    c.take(FLAGS, CPU_FLAG_BYTES)  # consumed
    for _ in range(s.num_nodes):
        c.take(FLAGS, COUNTS_START_BYTES)
        for count in (s.num_nodes, s.num_ranks, s.num_experts):  # node_tokens, rank_tokens, expert_tokens
            c.take(FLAGS, 4 * count)
        c.take("lists", _max_lists_bytes(s, partials))
        c.take("rows", SENDER_CALLS_BYTES + s.max_tokens * (s.row_bytes + s.weights_bytes) + 3 * ALIGNMENT)
        c.take("slots", s.max_tokens * partials * s.row_bytes)
        c.take("weights", s.max_tokens * partials * s.weights_bytes)
    return BufferBytes(c.arrays, {})


def _max_lists_bytes(s: Shape, partials: int) -> int:
    """``max_lists_bytes`` of csrc/cpu/region.h."""
    arrays = 1 + 5 * s.ranks_per_node
    ints = s.max_tokens * (1 + 3 * partials + 2 * s.num_topk) + arrays
    return 4 * ints + arrays * ALIGNMENT
