// Warps of a block that work together, and what the last of many blocks does for all.
#pragma once
#include "cuda/wait.cuh"

namespace ep::cuda {

// Some consecutive warps of a block. Named barrier 0, that of __syncthreads, belongs to the team that is the block.
template <int kBarrier, int kFirstThread, int kNumThreads>
struct Team {
  static constexpr int kThreads = kNumThreads, kWarps = kNumThreads / 32;

  static __device__ bool has_thread() { return static_cast<unsigned>(thread()) < kThreads; }
  static __device__ int thread() { return threadIdx.x - kFirstThread; }
  static __device__ int warp() { return thread() / 32; }
  static __device__ void sync() { ptx::named_barrier(kBarrier, kThreads); }
};

// [team] Let the first warp run `wait()`, and return its result to all threads. They may then read by bulk copies what
// the wait was for.
template <class Team, class Wait>
__device__ auto first_warp_waits(const Wait& wait) {
  __shared__ decltype(wait()) result;
  if (Team::thread() < 32) {
    const auto seen = wait();
    if (Team::thread() == 0) result = seen;
  }
  Team::sync();
  const auto seen = result;
  ptx::fence_before_bulk();
  Team::sync();  // the next wait writes `result`
  return seen;
}

// [team] Wait for one flag of each rank.
template <class Team>
__device__ bool team_waits(const Op& op, Phase phase, const uint64_t* flags, uint64_t expected) {
  return first_warp_waits<Team>([&] { return wait_for_ranks(op, phase, flags, expected); });
}

// [team] Count this block in. Return true in the last of `num_blocks` blocks: its threads see all that the teams of the
// others did before. The counter is 0 again afterwards.
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

// Counts warps in, chunk by chunk, first in the block and then in all blocks: a fence for the whole system takes long,
// and only the block's last warp pays for it.
struct ChunkArrivals {
  uint32_t* in_block;  // [max_chunks] in shared memory, 0 at the start: warps of this block
  uint32_t num_warps;
  uint32_t* in_grid;  // [max_chunks] in device memory, 0 between operations: blocks
  uint32_t num_blocks;
  uint64_t* flags;  // [max_chunks] of this rank, as they lie in its own region

  // [thread] Count a warp in for a chunk, after all that the warp stored for it. The last warp of all raises the flags
  // of chunks [chunk, end) at every rank.
  __device__ void arrive(const Op& op, int chunk, int end) const {
    ptx::fence_block();
    if (atomicAdd(in_block + chunk, 1u) != num_warps - 1) return;
    ptx::fence_system();
    if (atomicAdd(in_grid + chunk, 1u) != num_blocks - 1) return;
    in_grid[chunk] = 0;
    ptx::fence_system();
    for (; chunk < end; ++chunk) raise_everywhere(op.context, flags + chunk, op.epoch);
  }
};

// [team] Raise this rank's flag at every rank, after the team's barrier.
template <class Team>
__device__ void raise_at_all(const Op& op, uint64_t* Region::* flags) {
  const Context& context = op.context;
  if (Team::thread() >= context.config.ranks_per_node) return;
  ptx::fence_system();
  ptx::store_relaxed(context.peers.at(context.own.*flags + op.rank(), Team::thread()), op.epoch);
}

}  // namespace ep::cuda
