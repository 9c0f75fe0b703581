// Waiting for peers. Every wait goes through wait_until: it ends after the limit, and says whom it was for.
#pragma once
#include "cuda/context.h"
#include "cuda/ptx.cuh"
#include "cuda/wire.cuh"

namespace ep::cuda {

// One operation under way, as every step of it sees it. Functions that are not inlined take it by value: a reference
// would keep it in memory.
struct Op {
  const Context& context;
  Operation operation;
  uint64_t epoch;
  int block, num_blocks;  // this block, of those that do the operation's work; rail blocks come behind them

  __device__ int rank() const { return context.config.rank; }
  __device__ int num_ranks() const { return context.num_ranks; }
  __device__ int ranks_per_node() const { return context.config.ranks_per_node; }
  __device__ int first_local_rank() const { return context.node * context.config.ranks_per_node; }
};

__device__ __forceinline__ bool has_aborted(const Context& context) {
  return *static_cast<volatile uint32_t*>(&context.state->aborted) != 0;
}

// [thread] Store a flag at every rank of the node.
__device__ inline void raise_on_node(const Context& context, uint64_t* flag_here, uint64_t value) {
  for (int local = 0; local < context.config.ranks_per_node; ++local)
    ptx::store_relaxed(context.peers.at(flag_here, local), value);
}

// The ranks that a wait was for, a bit each.
struct RankMask {
  uint32_t words[kRankWords];

  __device__ bool any() const {
    uint32_t all = 0;
    for (uint32_t word : words) all |= word;
    return all != 0;
  }
};

// [thread] Abort this rank: write the report, once, and signal the peers that this rank's flags may never come.
__device__ __noinline__ inline void abort_rank(Op op, Phase phase, RankMask late, uint64_t waited_ns) {
  const Context& context = op.context;
  if (atomicExch(&context.state->aborted, 1u) != 0) return;
  Report* report = context.report;
  report->operation = static_cast<int32_t>(op.operation);
  report->phase = static_cast<int32_t>(phase);
  report->waited_ms = static_cast<uint32_t>(waited_ns / 1000000);
  report->epoch = op.epoch;
  for (int word = 0; word < kRankWords; ++word) report->late[word] = late.words[word];
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&report->aborted) = 1;
  uint64_t* const aborted = context.own.aborted + context.config.rank;
  raise_on_node(context, aborted, 1);
  for (int node = 0; node < context.config.num_nodes; ++node)
    if (node != context.node) Wire{context}.signal(node, aborted, 1);
}

// [warp] Wait until each lane's flag is at least `expected`. It is about `rank` of that lane, and `raiser` raises it. A
// lane without a flag gives null. Return false when this rank has aborted, now or before.
__device__ __noinline__ inline bool wait_until(Op op, Phase phase, const uint64_t* flag, uint64_t expected, int rank,
                                               int raiser) {
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
    // A raiser that has aborted may have raised this flag before: read the flag again, after `aborted`. Blame the
    // raiser: where it relays, nobody can tell whether the rank behind it is late.
    bool hopeless = waits && ptx::load_acquire(context.own.aborted + raiser) != 0;
    const uint64_t waited = ptx::nanoseconds() - begin;
    if (hopeless) waits = ptx::load_acquire(flag) < expected;
    hopeless = hopeless && waits;
    const bool over = __any_sync(~0u, waited > context.timeout_ns || hopeless);
    if (over) {
      RankMask late;
      const int blamed = hopeless ? raiser : rank;
      for (int word = 0; word < kRankWords; ++word)
        late.words[word] = __reduce_or_sync(~0u, waits && blamed / 32 == word ? 1u << blamed % 32 : 0u);
      if (!late.any()) continue;
      if (threadIdx.x % 32 == 0) abort_rank(op, phase, late, waited);
    }
    if (over || __any_sync(~0u, has_aborted(context))) return false;
  }
}

// [warp] Wait for one flag of each rank: wait_until.
__device__ inline bool wait_for_ranks(const Op& op, Phase phase, const uint64_t* flags, uint64_t expected) {
#pragma unroll 1
  for (int first = 0; first < op.num_ranks(); first += 32) {
    const int rank = min(first + static_cast<int>(threadIdx.x) % 32, op.num_ranks() - 1);
    if (!wait_until(op, phase, flags + rank, expected, rank, op.context.relay_of(rank))) return false;
  }
  return true;
}

// [warp] Wait for one flag of each rank of the node: wait_until.
__device__ inline bool wait_for_node(const Op& op, Phase phase, const uint64_t* flags, uint64_t expected) {
  const int local = threadIdx.x % 32, rank = op.first_local_rank() + local;
  return wait_until(op, phase, local < op.ranks_per_node() ? flags + local : nullptr, expected, rank, rank);
}

// [warp] Wait for one flag about a rank.
__device__ inline bool wait_for_one(const Op& op, Phase phase, const uint64_t* flag, uint64_t expected, int rank,
                                    int raiser) {
  return wait_until(op, phase, threadIdx.x % 32 == 0 ? flag : nullptr, expected, rank, raiser);
}

// Flags per chunk, and what one warp knows of them. Each lane looks after one rank at most.
struct ChunkFlags {
  const uint64_t* flags;  // [max_chunks] of the lane's rank; null: the lane has none
  int rank, raiser;       // of the lane's flags, as wait_until has it
  int last_seen = -1;     // last chunk that this warp has seen

  // [warp] Wait until the lane's rank has raised the flag of `chunk`; -1: nothing is awaited. What was awaited may then
  // be read by bulk copies. Return false when this rank has aborted.
  __device__ bool wait(const Op& op, Phase phase, int chunk) {
    const bool waits = chunk > last_seen;
    if (!__any_sync(~0u, waits)) return true;
    if (!wait_until(op, phase, waits ? flags + chunk : nullptr, op.epoch, rank, raiser)) return false;
    last_seen = max(last_seen, chunk);
    ptx::fence_before_bulk();
    return true;
  }
};

// [warp] Lane i looks after the i-th of `num` ranks: flags [num, max_chunks].
__device__ inline ChunkFlags chunk_flags(const uint64_t* flags, int max_chunks, int num, int first_rank) {
  const int lane = threadIdx.x % 32;
  return {lane < num ? flags + static_cast<size_t>(lane) * max_chunks : nullptr, first_rank + lane, first_rank + lane};
}

// The flags of staged chunks, and what one warp knows of them: the last chunk that it has seen, -1 for none. Lane i
// looks after rank i and rank 32 + i. (An array of two would lie in memory.)
struct StagedFlags {
  int of_low = -1, of_high = -1;
  static_assert(kMaxRanks <= 64, "a lane looks after two ranks");

  // [warp] Return the last chunk of a rank, the same in all lanes, that this warp has seen.
  __device__ int seen(int rank) const { return __shfl_sync(~0u, rank < 32 ? of_low : of_high, rank % 32); }

  // [warp] See which ranks have raised all flags. Soon all have, and nothing is looked at any more.
  __device__ void look(const Op& op) {
    const int lane = threadIdx.x % 32;
    look_at(op, lane, of_low);
    if (op.num_ranks() > 32) look_at(op, 32 + lane, of_high);
    __syncwarp();
    ptx::fence_before_bulk();
  }

  // [warp] Wait for the chunk of a rank, the same in all lanes. It may then be read by bulk copies. Return false when
  // this rank has aborted.
  __device__ bool wait(const Op& op, int rank, int chunk) {
    const uint64_t* flag = flag_of(op, rank, chunk);
    if (!wait_for_one(op, Phase::kRows, flag, op.epoch, rank, op.context.relay_of(rank))) return false;
    if (static_cast<int>(threadIdx.x) % 32 == rank % 32) {
      if (rank < 32)
        of_low = max(of_low, chunk);
      else
        of_high = max(of_high, chunk);
    }
    ptx::fence_before_bulk();
    return true;
  }

 private:
  static __device__ const uint64_t* flag_of(const Op& op, int rank, int chunk) {
    return op.context.own.staged + static_cast<size_t>(rank) * op.context.max_token_chunks + chunk;
  }
  static __device__ void look_at(const Op& op, int rank, int& seen) {
    const int last = op.context.max_token_chunks - 1;
    if (rank < op.num_ranks() && seen < last && ptx::load_acquire(flag_of(op, rank, last)) >= op.epoch) seen = last;
  }
};

}  // namespace ep::cuda
