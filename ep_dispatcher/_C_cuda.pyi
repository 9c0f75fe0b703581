"""Types of the compiled module of the CUDA engine (csrc/bindings_cuda.cpp), also those of _C_nvshmem.

Addresses and streams are ``int``; an address of 0 stands for None.
"""

from collections.abc import Sequence
from typing import ClassVar

COMPARED: list[str]
WRONG_NUMBERS: list[str]
epoch_offset: int
has_stamps: bool
message_rows_bytes: int
planned_message_rows_offset: int
stamped_launches: int
stamped_operations: int
stamped_warps: int
state_aborted_offset: int
steps: list[str]

class DType:
    bfloat16: ClassVar[DType]
    float16: ClassVar[DType]
    float32: ClassVar[DType]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Layout:
    decode: ClassVar[Layout]
    expert: ClassVar[Layout]
    rank: ClassVar[Layout]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Config:
    rank: int
    num_nodes: int
    ranks_per_node: int
    num_experts: int
    num_topk: int
    max_tokens: int
    hidden: int
    dtype: DType
    masks: bool
    plans_directly: bool
    log_token_chunk: int
    log_sum_chunk: int
    window_chunk: int
    window_chunks: int
    def __init__(self) -> None: ...

class DispatchArgs:
    row_bytes: int
    scale_bytes: int
    scale_size: int
    quantizes: bool
    powers_of_two: bool
    num_tokens: int
    layout: Layout
    expert_alignment: int
    num_rows: int
    ticket: int
    topk_idx: int
    topk_weights: int
    rows: int
    scales: int
    out_rows: int
    out_scales: int
    out_weights: int
    out_topk_idx: int
    out_tokens_per_expert: int
    out_rows_per_expert: int
    out_counts: int
    wait_ns: int
    message_rows: int
    packs_scales: bool
    num_blocks: int
    rail_blocks: int
    label: int
    def __init__(self) -> None: ...

class CombineArgs:
    num_tokens: int
    num_blocks: int
    rail_blocks: int
    y: int
    topk_weights: int
    combine_weights: int
    out: int
    out_weights: int
    wait_ns: int
    message_rows: int
    def __init__(self) -> None: ...

class NcclComm:
    def __init__(self) -> None: ...
    @staticmethod
    def make_id() -> bytes: ...
    @staticmethod
    def version() -> int: ...
    def join(self, id: bytes, rank: int, num_ranks: int, max_ctas: int) -> None: ...
    def connect(self) -> None: ...
    def free(self, aborts: bool) -> None: ...

class Engine:
    def __init__(
        self,
        *,
        config: Config,
        regions: Sequence[int],
        rail: Sequence[int],
        rail_pes: Sequence[int],
        state: int,
        report: int,
        timeout_s: float,
        num_sms: int,
    ) -> None: ...
    def prepare(self, args: DispatchArgs, plan: int, stream: int) -> None: ...
    def pull(self, args: DispatchArgs, plan: int, stream: int) -> None: ...
    def dispatch(self, args: DispatchArgs, plan: int, stream: int) -> None: ...
    def push(self, args: CombineArgs, plan: int, stream: int) -> None: ...
    def reduce(self, args: CombineArgs, plan: int, stream: int) -> None: ...
    def combine(self, args: CombineArgs, plan: int, stream: int) -> None: ...
    def compare_routing(
        self, planned: int, given: int, num_tokens: int, where: tuple[int, int], stream: int
    ) -> None: ...
    def send_by(self, comm: NcclComm) -> None: ...
    def has_captured_messages(self) -> bool: ...
    def message_bytes(self) -> int: ...
    def stamp_into(self, stamps: int, num_blocks: int) -> None: ...
    def wait_for_counts(self, ticket: int, slice_s: float) -> int: ...
    def out_of_step(self) -> bool: ...
    def has_report(self) -> bool: ...
    def late(self) -> tuple[str, str, int, list[int], float] | None: ...
    def take_error(self) -> tuple[str, list[int], int, list[tuple[int, int]]] | None: ...

def cuda_versions() -> tuple[int, int]: ...
def aborted_offset(config: Config) -> int: ...
def counted_rows_offset(config: Config) -> int: ...
def reported_message_rows_offset(config: Config) -> int: ...
def rank_words(config: Config) -> int: ...
def region_offsets(config: Config) -> dict[str, int]: ...
def state_offsets(config: Config) -> dict[str, int]: ...
def excluded_offset(config: Config) -> int: ...
def copy(to: int, from_: int, bytes: int, stream: int) -> None: ...
def columns_to_map(
    num_tokens: int,
    num_experts: int,
    topk: int,
    slices: int,
    experts_per_rank: int,
    skips_zeros: bool,
    dtype: DType,
    topk_idx: int,
    grad_weights: int,
    grad_probs: int,
    stream: int,
) -> None: ...
def map_to_columns(
    num_tokens: int,
    num_experts: int,
    topk: int,
    slices: int,
    experts_per_rank: int,
    skips_zeros: bool,
    dtype: DType,
    map: int,
    probs: int,
    topk_idx: int,
    weights: int,
    stream: int,
) -> None: ...
def flag_bytes(config: Config) -> int: ...
def plan_capacity(config: Config, num_rows: int) -> int: ...
def region_bytes(config: Config) -> int: ...
def state_bytes(config: Config, num_sms: int) -> int: ...
def report_bytes(config: Config) -> int: ...
