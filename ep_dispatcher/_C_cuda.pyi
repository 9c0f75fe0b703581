"""Types of the compiled module of the CUDA engine (csrc/bindings_cuda.cpp), also those of _C_nvshmem.

Addresses and streams are ``int``; an address of 0 stands for None.
"""

from collections.abc import Sequence
from typing import ClassVar

from ep_dispatcher.request import Combined, CombineRequest, DispatchRequest, Planned, Received

_WeightsOfExperts = tuple[int, int, int, int, int]
_GemmOfRows = tuple[int, int, int, _WeightsOfExperts, int, int, int, int, int, "DType", int]

COMPARED: list[str]
WRONG_NUMBERS: list[str]
epoch_offset: int
has_stamps: bool
max_slot_parameters: int
message_rows_bytes: int
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

class NodeSlots:
    def __init__(
        self, *, regions: Sequence[int], ranks: Sequence[int], local_rank: int, num_local_experts: int, num_slots: int
    ) -> None: ...

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
    def dispatch(self, request: DispatchRequest, received: Received, stream: int) -> None: ...
    def plan_and_stage(self, request: DispatchRequest, planned: Planned, stream: int) -> None: ...
    def pull(self, request: DispatchRequest, received: Received, stream: int) -> None: ...
    def combine(self, request: CombineRequest, combined: Combined, stream: int) -> None: ...
    def decode_dispatch(self, request: DispatchRequest, received: Received, stream: int) -> None: ...
    def decode_dispatch_send(self, request: DispatchRequest, received: Received, stream: int) -> None: ...
    def decode_dispatch_receive(self, request: DispatchRequest, received: Received, stream: int) -> None: ...
    def decode_combine(self, request: CombineRequest, combined: Combined, stream: int) -> None: ...
    def decode_combine_send(self, request: CombineRequest, combined: Combined, stream: int) -> None: ...
    def decode_combine_receive(self, request: CombineRequest, combined: Combined, stream: int) -> None: ...
    def share_blocks(self, layout: Layout, num_blocks: int, rail_blocks: int) -> None: ...
    def measure_waits(self, of_dispatches: bool, wait_ns: int) -> None: ...
    def gather_counts(
        self, topk_idx: int, index_bytes: int, num_choices: int, num_experts: int, counts: int, stream: int
    ) -> None: ...
    def compare_routing(
        self, planned: int, given: int, num_tokens: int, where: tuple[int, int], stream: int
    ) -> None: ...
    def send_by(self, comm: NcclComm) -> None: ...
    def has_captured_messages(self) -> bool: ...
    def message_bytes(self) -> int: ...
    def stamp_into(self, stamps: int, num_blocks: int) -> None: ...
    def wait_for_counts(self, slice_s: float) -> int: ...
    def out_of_step(self) -> bool: ...
    def has_report(self) -> bool: ...
    def late(self) -> tuple[str, str, int, list[int], float] | None: ...
    def take_error(self) -> tuple[str, list[int], int, list[tuple[int, int]]] | None: ...

def order_streams(device: int, earlier: int, later: int) -> None: ...
def is_captured(stream: int) -> bool: ...
def cuda_versions() -> tuple[int, int]: ...
def aborted_offset(config: Config) -> int: ...
def counted_rows_offset(config: Config) -> int: ...
def reported_message_rows_offset(config: Config) -> int: ...
def rank_words(config: Config) -> int: ...
def region_offsets(config: Config) -> dict[str, int]: ...
def state_offsets(config: Config) -> dict[str, int]: ...
def excluded_offset(config: Config) -> int: ...
def balance_count(
    topk_idx: int, index_bytes: int, num_choices: int, num_experts: int, counts: int, stream: int
) -> None: ...
def balance_plan(
    num_ranks: int,
    ranks_per_node: int,
    num_local_experts: int,
    num_slots: int,
    smallest_copy: int,
    rank_at: Sequence[int],
    counts: int,
    row_stride: int,
    copies: int,
    rows: int,
    stream: int,
) -> None: ...
def balance_rewrite(
    num_ranks: int,
    ranks_per_node: int,
    num_local_experts: int,
    num_slots: int,
    smallest_copy: int,
    rank: int,
    topk_idx: int,
    index_bytes: int,
    num_tokens: int,
    num_topk: int,
    counts: int,
    row_stride: int,
    copies: int,
    physical: int,
    stream: int,
) -> None: ...
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
def float8_gemm(  # not in _C_nvshmem
    gemm: _GemmOfRows, scales: tuple[int, int, int, int, int], num_sms: int, stream: int
) -> None: ...
def bfloat16_gemm(  # not in _C_nvshmem
    gemm: _GemmOfRows, transposed: bool, copies: _WeightsOfExperts | None, num_own: int, num_sms: int, stream: int
) -> None: ...
def weight_grad(  # not in _C_nvshmem
    sets: Sequence[tuple[int, int, int, int, int, int]],
    out: int,
    dtype: DType,
    accumulate: bool,
    n: int,
    k: int,
    experts: int,
    num_sms: int,
    stream: int,
) -> None: ...
def slots_push(
    node: NodeSlots, copies: int, moves: Sequence[tuple[int, int, int, int, int, int]], num_blocks: int, stream: int
) -> None: ...
def slots_pull(
    node: NodeSlots,
    copies: int,
    moves: Sequence[tuple[int, int, int, int, int, int]],
    dtypes: Sequence[DType],
    num_blocks: int,
    stream: int,
) -> None: ...
def flag_bytes(config: Config) -> int: ...
def plan_capacity(config: Config, num_rows: int) -> int: ...
def region_bytes(config: Config) -> int: ...
def state_bytes(config: Config, num_sms: int) -> int: ...
def report_bytes(config: Config) -> int: ...
