// Waiting for peers and waking them. Every wait goes through wait_until, ends after the limit, and says for whom it
// was.
#pragma once
#include "cuda/context.h"
#include "cuda/ptx.cuh"

namespace ep::cuda {

__device__ __forceinline__ bool has_failed(const Context& context) {
  return *static_cast<volatile uint32_t*>(&context.state->failed) != 0;
}

// This rank gives up: the first to say so writes the report, and no peer need wait for this rank.
__device__ __noinline__ inline void give_up(const Context& context, Operation operation, Phase phase, uint64_t epoch,
                                            uint32_t late, uint64_t waited_ns) {
  if (atomicExch(&context.state->failed, 1u) != 0) return;
  Report* report = context.report;
  report->operation = static_cast<int32_t>(operation);
  report->phase = static_cast<int32_t>(phase);
  report->waited_ms = static_cast<uint32_t>(waited_ns / 1000000);
  report->epoch = epoch;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&report->late) = late;
  for (int rank = 0; rank < context.sizes.num_ranks; ++rank)
    ptx::store_relaxed(context.region[rank].gave_up + context.sizes.rank, 1);
}

// Called by a whole warp: until the flag of every lane that has one is at least `expected` (of that lane). False when
// this rank has given up, now or before.
__device__ __noinline__ inline bool wait_until(const Context& context, Operation operation, Phase phase, uint64_t epoch,
                                               const uint64_t* flag, uint64_t expected, int rank) {
  bool waits = flag != nullptr && ptx::load_acquire(flag) < expected;
  if (!__any_sync(~0u, waits)) {
    __syncwarp();  // orders what one lane has seen before what the others do
    return true;
  }
  const uint64_t begin = ptx::nanoseconds();
  for (int turn = 1;; ++turn) {
    if (waits) waits = ptx::load_acquire(flag) < expected;
    if (!__any_sync(~0u, waits)) {
      __syncwarp();
      return true;
    }
    if (turn % 32 != 0) continue;
    bool hopeless = waits && ptx::load_acquire(context.own().gave_up + rank) != 0;
    const uint64_t waited = ptx::nanoseconds() - begin;
    if (hopeless) waits = ptx::load_acquire(flag) < expected;  // it may have raised the flag before it gave up
    hopeless = hopeless && waits;
    const bool over = __any_sync(~0u, waited > context.timeout_ns || hopeless);
    if (over) {
      uint32_t late = __reduce_or_sync(~0u, waits ? 1u << rank : 0u);
      if (late == 0) continue;
      if (threadIdx.x % 32 == 0) give_up(context, operation, phase, epoch, late, waited);
    }
    if (over || __any_sync(~0u, has_failed(context))) return false;
  }
}

// Called by a whole warp: wait_until for one flag of each rank.
__device__ inline bool wait_for_ranks(const Context& context, Operation operation, Phase phase, uint64_t epoch,
                                      const uint64_t* flags, uint64_t expected) {
  const int lane = threadIdx.x % 32;
  const uint64_t* flag = lane < context.sizes.num_ranks ? flags + lane : nullptr;
  return wait_until(context, operation, phase, epoch, flag, expected, lane);
}

// Some warps of a block that work together; number 0 is the whole block.
template <int kNumber, int kFirstThread, int kNumThreads>
struct Team {
  static constexpr int kThreads = kNumThreads, kWarps = kNumThreads / 32;

  static __device__ bool has_thread() { return static_cast<unsigned>(thread()) < kThreads; }
  static __device__ int thread() { return threadIdx.x - kFirstThread; }
  static __device__ void sync() { ptx::named_barrier(kNumber, kThreads); }
};

// Called by all threads of a team: wait_for_ranks, by one warp for all of them. What is seen may be read by bulk
// copies.
template <class Team>
__device__ bool team_waits(const Context& context, Operation operation, Phase phase, uint64_t epoch,
                           const uint64_t* flags, uint64_t expected) {
  __shared__ bool arrived;
  if (Team::thread() < 32) {
    const bool ok = wait_for_ranks(context, operation, phase, epoch, flags, expected);
    if (Team::thread() == 0) arrived = ok;
  }
  Team::sync();
  const bool ok = arrived;
  ptx::fence_before_bulk();
  Team::sync();  // the next wait writes it
  return ok;
}

// Called by all threads of a team of `num_blocks` blocks: true in the last of them, whose threads come after all that
// the threads of all these teams did before. The counter is 0 again afterwards.
template <class Team>
__device__ bool last_block(uint32_t* counter, uint32_t num_blocks) {
  __shared__ bool last;
  Team::sync();
  if (Team::thread() == 0) {
    ptx::fence_system();
    last = atomicAdd(counter, 1u) == num_blocks - 1;
    if (last) *counter = 0;
    ptx::fence_system();
  }
  Team::sync();
  return last;
}

// Called by the threads of a team after its barrier: raises this rank's flag at every rank.
template <class Team>
__device__ void raise_at_all(const Context& context, uint64_t* Region::* flags, uint64_t epoch) {
  if (Team::thread() >= context.sizes.num_ranks) return;
  ptx::fence_system();
  ptx::store_relaxed(context.region[Team::thread()].*flags + context.sizes.rank, epoch);
}

}  // namespace ep::cuda
