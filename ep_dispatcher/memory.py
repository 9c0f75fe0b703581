"""The sizes of a Buffer: the bytes that a rank takes, before anything is allocated, and limits of the CUDA engine.

The compiled module of the CPU engine measures both engines' layouts, by the code that lays the memory out
(``csrc/cuda/region.h``, ``csrc/cuda/state.h``, ``csrc/cpu/region.h``). So it needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ep_dispatcher import _C_cpu, checks, envs
from ep_dispatcher.argument_types import EngineName
from ep_dispatcher.topology import Topology

# Limits of the CUDA engine, and its default number of multiprocessors.
MAX_NODES, MAX_LOCAL, MAX_RANKS = _C_cpu.MAX_NODES, _C_cpu.MAX_LOCAL, _C_cpu.MAX_RANKS  # csrc/cuda/config.h
MAX_NODE_BYTES = 2**46  # memory of a node's ranks together, which each rank maps: half of a process's addresses
MAX_EXPERTS = 8192  # the counts of a warp have to fit into shared memory
MAX_TOKENS, MAX_TOKENS_BETWEEN_NODES = 2**22, 2**19  # the counters of a block's chunks have to fit too
# On H200 10 multiprocessors fill NVLink. But each row is stored once per expert, and one multiprocessor stores at most
# 59 GB/s: with 4 ranks 24 balance both. More make an operation faster, but take as many from the kernels beside it.
DEFAULT_SMS = 24
# In decode layout little runs beside an operation. With 128 tokens on 2 H200, dispatch and combine in a CUDA graph took
# 66 us with 24 multiprocessors, 51 with 64, 49 with 128.
DECODE_SMS = 64
DEFAULT_NCCL_SMS, MAX_NCCL_SMS = 4, 32  # of NCCL, for the NCCL wire; 36 GB/s through NVLink on H200

# Between nodes each rank of the node has slots for the partial sums of so many tokens at a time, of all rail peers
# together. So slots do not grow with the number of nodes. The window of a rail peer is cut into chunks: while one is
# reduced, pushes fill the others.
WINDOW_TOKENS, WINDOW_CHUNKS = 2048, 4
# The most window chunks in max_tokens, and chunks of sums for all other nodes: a block counts them in shared memory.
MAX_WINDOW_CHUNKS, MAX_SUMMED_CHUNKS = 1024, 8192


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


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
    """The sizes of a buffer, unchecked, and how the CUDA engine divides its tokens."""

    num_nodes: int
    ranks_per_node: int
    num_experts: int
    num_topk: int
    max_tokens_per_rank: int
    hidden: int
    dtype: torch.dtype
    mask_late_ranks: bool = False

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def choices(self) -> int:
        """Entries for the choices of all ranks, padded to whole vectors."""
        return self.num_ranks * self.max_tokens_per_rank * round_up(self.num_topk, 8)

    @property
    def plans_directly(self) -> bool:
        """Whether new plans are direct plans on the CUDA engine (csrc/cuda/decode/direct.cuh).

        One node, a lane per rank and per choice of a token, and plans of at most 92 KiB of a block's shared memory.
        """
        words = self.num_experts * -(-self.max_tokens_per_rank // 32)
        few = self.num_nodes == 1 and max(self.num_ranks, self.num_topk) <= 32
        return few and self.choices <= 16384 and words <= 4096

    @property
    def token_chunk(self) -> int:
        """Tokens that share a flag, raised once their rows are staged or have crossed to another node. A power of two.

        On 2 H200, one node, smaller chunks cost more in flags than they save. Between nodes the last chunk can be
        pulled only when all has crossed: over a peer wire that was held to 50 GB/s chunks of 256 took 0.95 of the time
        of chunks of 1024, those of 128 took more.
        """
        return 1024 if self.num_nodes == 1 else 256

    @property
    def sum_chunk(self) -> int:
        """Tokens that share a flag, raised once their sums have crossed to another node. A power of two.

        On one H200, 2 nodes, over a peer wire that was held to 50 GB/s, with window chunks of this size too: chunks of
        128 took 0.97 to 0.99 of the time of 256 with one rank per node, and 1.02 to 1.03 with two.
        """
        return 128 if self.ranks_per_node == 1 else 256

    @property
    def window_chunk(self) -> int:
        """Tokens in a chunk of the window of a source on another node. A multiple of 16: a warp takes 16 at once."""
        others = max(1, self.num_nodes - 1)
        share = WINDOW_TOKENS // (WINDOW_CHUNKS * others) // 16 * 16
        most = min(MAX_WINDOW_CHUNKS, MAX_SUMMED_CHUNKS // others)
        return max(min(share, self.sum_chunk), round_up(self.chunks(most), 16))

    def chunks(self, length: int) -> int:
        """How many chunks of ``length`` hold all tokens."""
        return -(-self.max_tokens_per_rank // length)

    def fill_sizes(self, config: Any) -> Any:
        """Return ``config``, a new ``Config`` of either engine's compiled module, with these sizes."""
        for name in ("num_nodes", "ranks_per_node", "num_experts", "num_topk", "hidden"):
            setattr(config, name, getattr(self, name))
        config.max_tokens, config.masks = self.max_tokens_per_rank, self.mask_late_ranks
        config.dtype = getattr(type(config.dtype), str(self.dtype).removeprefix("torch."))
        return config

    def cuda_config(self, config: Any) -> Any:
        """Return ``config``, a new one of the CUDA engine, with these sizes and chunks."""
        self.fill_sizes(config).plans_directly = self.plans_directly
        config.log_token_chunk, config.log_sum_chunk = (n.bit_length() - 1 for n in (self.token_chunk, self.sum_chunk))
        config.window_chunk, config.window_chunks = self.window_chunk, WINDOW_CHUNKS
        return config


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
    redundant_experts_per_rank: int = 0,
    engine: EngineName = "cuda",
) -> BufferBytes:
    """Return the bytes that one rank allocates when it makes this Buffer: the same on every rank, and exact.

        one = ep.buffer_bytes(num_ranks=8, hidden=7168, num_experts=256, num_topk=8, max_tokens_per_rank=4096)
        one.total                     # bytes: one.region_bytes + one.state_bytes
        one.region["slots"]           # bytes by kind of array

    num_ranks       ranks of the group
    ranks_per_node  ranks of a node; None: EP_DISPATCHER_RANKS_PER_NODE, or all ranks if that is unset
    num_sms         as Buffer takes it; where fewer multiprocessors are there or ranks share them the state is a little
                    smaller
    engine          "cuda": memory of the GPU; "cpu": shared memory of the host, whose pages count once they are used

    All other arguments are those of Buffer. Raises the ValueErrors that Buffer raises for these sizes. Formulas and
    examples: docs/memory.md. Left out: slots of redundant experts, whose size the first layer decides; about a kilobyte
    of pinned host memory, what an allocator adds by rounding up, what operations allocate (outputs, plans, messages of
    the CPU engine between nodes), and the caller's tensors.
    """
    checks.one_of("engine", engine, ("cuda", "cpu"))
    num_ranks = checks.integer("num_ranks", num_ranks, 1)
    per_node = envs.ranks_per_node() if ranks_per_node is None else ranks_per_node
    if per_node == "nvlink":
        per_node = None
    if per_node is not None:
        per_node = checks.integer("ranks_per_node", per_node, 1)
    sizes = checks.buffer_sizes(num_ranks, hidden, num_experts, num_topk, max_tokens_per_rank, dtype)
    sms = default_sms(None if num_sms is None else checks.integer("num_sms", num_sms, 1)).values()
    topology = Topology.make(0, ["one host"] * num_ranks, per_node)
    masks = checks.boolean("mask_late_ranks", mask_late_ranks)
    sizes["num_experts"] += num_ranks * checks.integer("redundant_experts_per_rank", redundant_experts_per_rank, 0)
    shape = Shape(topology.num_nodes, topology.ranks_per_node, **sizes, mask_late_ranks=masks)
    check_size(shape)
    check_masks(shape, suspendable=False)
    if engine == "cuda":
        check_cuda_sizes(topology, shape)
        check_cuda_sms(topology.num_nodes, min(sms))
    return bytes_of(shape, engine, max(sms))


def check_size(shape: Shape) -> None:
    """Refuse a buffer that no machine can address, or whose slots int32 cannot count.

    Counts rows and weights of all ranks of a node: for each node in the group a staged row of every token, and a slot
    for each of its partial sums. Leaves out lists and flags.
    """
    tokens, num_nodes = shape.max_tokens_per_rank, shape.num_nodes
    slots = tokens * min(shape.ranks_per_node, shape.num_topk)
    row = shape.hidden * shape.dtype.itemsize + 4 * shape.num_topk
    needed = shape.num_ranks * (tokens + slots) * row
    given = f"{tokens} with hidden={shape.hidden}"
    if needed > MAX_NODE_BYTES:
        checks.refuse(
            f"max_tokens_per_rank is {given}, for which the ranks of a node need more than {needed} bytes; at most "
            f"{tokens * MAX_NODE_BYTES // needed} with this hidden are allowed, as the ranks of a node may need "
            f"{MAX_NODE_BYTES} bytes"
        )
    if slots > checks.MAX_INT:
        checks.refuse(
            f"max_tokens_per_rank is {given}, which makes {slots} partial sums; at most {checks.MAX_INT} are allowed"
        )
    if num_nodes * tokens > checks.MAX_INT:  # of a rank and its rail peers
        checks.refuse(
            f"max_tokens_per_rank is {given}; on {num_nodes} nodes at most {checks.MAX_INT // num_nodes} are allowed"
        )


def check_masks(shape: Shape, suspendable: bool) -> None:
    """Refuse ``mask_late_ranks`` where no engine has it."""
    if not shape.mask_late_ranks:
        return
    if shape.num_nodes > 1:
        checks.refuse(f"mask_late_ranks is True on {shape.num_nodes} nodes, but needs one node")
    if shape.ranks_per_node > 32:
        checks.refuse(f"mask_late_ranks is True with {shape.ranks_per_node} ranks; at most 32 are allowed")
    if suspendable:
        checks.refuse("mask_late_ranks and suspendable are both True: a buffer can have one of them")


def check_cuda_sizes(topology: Topology, shape: Shape) -> None:
    """Raise ValueError if the kernels of the CUDA engine cannot serve a buffer of this shape."""
    given = "with engine='cuda'"
    num_nodes, per_node = topology.num_nodes, topology.ranks_per_node
    if num_nodes > MAX_NODES or per_node > MAX_LOCAL or num_nodes * per_node > MAX_RANKS:
        allowed = f"at most {MAX_NODES} nodes of {MAX_LOCAL} ranks, and {MAX_RANKS} ranks, are allowed {given}"
        checks.refuse(f"group has {num_nodes} nodes of {per_node} ranks, but {allowed}")
    if [rank for ranks in topology.nodes for rank in ranks] != list(range(topology.num_ranks)):
        checks.refuse(f"group has nodes {list(topology.nodes)}, but a node has to be of neighbouring ranks {given}")
    if shape.num_experts > MAX_EXPERTS:
        checks.fail("num_experts", shape.num_experts, f"at most {MAX_EXPERTS} {given}")
    most_tokens = MAX_TOKENS if topology.num_nodes == 1 else MAX_TOKENS_BETWEEN_NODES
    if shape.max_tokens_per_rank > most_tokens:
        nodes = f" and {topology.num_nodes} nodes" * (topology.num_nodes > 1)
        checks.fail("max_tokens_per_rank", shape.max_tokens_per_rank, f"at most {most_tokens} {given}{nodes}")
    if shape.mask_late_ranks and not shape.plans_directly:
        sizes = f"max_tokens_per_rank={shape.max_tokens_per_rank}, num_topk={shape.num_topk}"
        allowed = f"it needs fewer tokens, choices and experts {given} (docs/memory.md)"
        checks.refuse(f"mask_late_ranks is True with {sizes}, num_experts={shape.num_experts}: {allowed}")


def default_sms(num_sms: int | None) -> dict[str, int]:
    """Return the most multiprocessors of an operation by layout: ``num_sms``, if given."""
    return {"expert": num_sms or DEFAULT_SMS, "rank": num_sms or DEFAULT_SMS, "decode": num_sms or DECODE_SMS}


def check_cuda_sms(num_nodes: int, num_sms: int) -> int:
    """Return the least multiprocessors that serve the wire between nodes. ValueError if there are no others."""
    config = _C_cpu.CudaConfig()
    config.num_nodes = num_nodes
    least = config.least_rail_blocks
    if num_sms <= least:
        checks.fail(
            "num_sms", num_sms, f"at least {least + 1} with {num_nodes} nodes: {least} for the wire between them"
        )
    return least


def bytes_of(shape: Shape, engine: str, num_sms: int) -> BufferBytes:
    """Return the bytes of one rank, for any number of nodes, even for more than the engine serves."""
    if engine == "cpu":
        return BufferBytes(_C_cpu.region_bytes(shape.fill_sizes(_C_cpu.Config())), {})
    config = shape.cuda_config(_C_cpu.CudaConfig())
    return BufferBytes(_C_cpu.cuda_region_bytes(config), _C_cpu.cuda_state_bytes(config, num_sms))
