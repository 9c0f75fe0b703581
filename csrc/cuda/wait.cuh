// Waiting for peers. Every wait goes through wait_until: it ends after the limit, and says whom it was for.
#pragma once
#include "cuda/context.h"
#include "cuda/ptx.cuh"

namespace ep::cuda {

// One operation under way, as every step of it sees it. Functions that are not inlined take it by value: a reference
// would keep it in memory.
struct Op {
  const Context& context;
  Operation operation;
  uint64_t epoch;
  int block, num_blocks;  // this block, of those that do the operation's work

  __device__ int rank() const { return context.config.rank; }
  __device__ int num_ranks() const { return context.config.num_ranks(); }
};

__device__ __forceinline__ bool has_aborted(const Context& context) {
  return *static_cast<volatile uint32_t*>(&context.state->aborted) != 0;
}

// [thread] Store a flag of this rank at every rank.
__device__ inline void raise_everywhere(const Context& context, uint64_t* flag_here, uint64_t value) {
  for (int local = 0; local < context.config.ranks_per_node; ++local)
    ptx::store_relaxed(context.peers.at(flag_here, local), value);
}

// [thread] Abort this rank: write the report, once, and signal the peers that this rank's flags may never come.
__device__ __noinline__ inline void abort_rank(Op op, Phase phase, uint32_t late, uint64_t waited_ns) {
  const Context& context = op.context;
  if (atomicExch(&context.state->aborted, 1u) != 0) return;
  Report* report = context.report;
  report->operation = static_cast<int32_t>(op.operation);
  report->phase = static_cast<int32_t>(phase);
  report->waited_ms = static_cast<uint32_t>(waited_ns / 1000000);
  report->epoch = op.epoch;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&report->late) = late;
  raise_everywhere(context, context.own.aborted + context.config.rank, 1);
}

// [warp] Wait until each lane's flag, raised by `rank` of that lane, is at least `expected`. A lane without a flag
// gives null. Return false when this rank has aborted, now or before.
__device__ __noinline__ inline bool wait_until(Op op, Phase phase, const uint64_t* flag, uint64_t expected, int rank) {
  bool waits = flag != nullptr && ptx::load_acquire(flag) < expected;
  if (!__any_sync(~0u, waits)) {
    __syncwarp();  // orders what one lane has seen before what the others do
    return true;
  }
  const Context& context = op.context;
  const uint64_t begin = ptx::nanoseconds();
  for (int turn = 1;; ++turn) {
    if (waits) waits = ptx::load_acquire(flag) < expected;
    if (!__any_sync(~0u, waits)) {
      __syncwarp();
      return true;
    }
    if (turn % 32 != 0) continue;
    // A peer that has aborted may have raised this flag before: read the flag again, after `aborted`.
    bool hopeless = waits && ptx::load_acquire(context.own.aborted + rank) != 0;
    const uint64_t waited = ptx::nanoseconds() - begin;
    if (hopeless) waits = ptx::load_acquire(flag) < expected;
    hopeless = hopeless && waits;
    const bool over = __any_sync(~0u, waited > context.timeout_ns || hopeless);
    if (over) {
      const uint32_t late = __reduce_or_sync(~0u, waits ? 1u << rank : 0u);
      if (late == 0) continue;
      if (threadIdx.x % 32 == 0) abort_rank(op, phase, late, waited);
    }
    if (over || __any_sync(~0u, has_aborted(context))) return false;
  }
}

// [warp] Wait for one flag of each rank: wait_until.
__device__ inline bool wait_for_ranks(const Op& op, Phase phase, const uint64_t* flags, uint64_t expected) {
  for (int first = 0; first < op.num_ranks(); first += 32) {
    const int rank = first + threadIdx.x % 32;
    if (!wait_until(op, phase, rank < op.num_ranks() ? flags + rank : nullptr, expected, rank)) return false;
  }
  return true;
}

// Flags per chunk, [num_ranks, max_chunks], and what one warp knows of them. Lane r looks after rank r.
struct ChunkFlags {
  const uint64_t* flags;
  int max_chunks;
  int arrived = -1;  // last chunk of the lane's rank that this warp has seen

  // [warp] Wait until lane r's rank has raised the flag of `chunk`; -1: nothing is awaited. What was awaited may then
  // be read by bulk copies. Return false when this rank has aborted.
  __device__ bool wait(const Op& op, Phase phase, int chunk) {
    if (!__any_sync(~0u, chunk > arrived)) return true;
    const int rank = threadIdx.x % 32;
    const uint64_t* flag = flags + static_cast<size_t>(rank) * max_chunks + chunk;
    if (!wait_until(op, phase, chunk > arrived ? flag : nullptr, op.epoch, rank)) return false;
    arrived = max(arrived, chunk);
    ptx::fence_before_bulk();
    return true;
  }

  // [warp] See which ranks have raised all flags. Soon all have, and nothing is looked at any more.
  __device__ void look(const Op& op) {
    const int rank = threadIdx.x % 32, last = max_chunks - 1;
    const uint64_t* flag = flags + static_cast<size_t>(rank) * max_chunks + last;
    if (rank < op.num_ranks() && arrived < last && ptx::load_acquire(flag) >= op.epoch) arrived = last;
    __syncwarp();
    ptx::fence_before_bulk();
  }
};
static_assert(kMaxRanks <= 32, "ChunkFlags gives every rank a lane");

__device__ inline ChunkFlags staged_flags(const Context& context) {
  return {context.own.staged, context.max_token_chunks};
}

__device__ inline ChunkFlags pushed_flags(const Context& context) {
  return {context.own.pushed, context.max_item_chunks};
}

}  // namespace ep::cuda
