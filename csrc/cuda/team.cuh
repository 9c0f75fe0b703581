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

// [team] Wait for one flag of each rank of the node.
template <class Team>
__device__ bool team_waits(const Op& op, Phase phase, const uint64_t* flags, uint64_t expected) {
  return first_warp_waits<Team>([&] { return wait_for_node(op, phase, flags, expected); });
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

  // [thread] Count a warp in for a chunk, after all that the warp stored for it. Return true in the last warp of all:
  // it may raise the chunk's flag.
  __device__ bool arrive(int chunk) const {
    ptx::fence_block();
    if (atomicAdd(in_block + chunk, 1u) != num_warps - 1) return false;
    ptx::fence_system();
    if (atomicAdd(in_grid + chunk, 1u) != num_blocks - 1) return false;
    in_grid[chunk] = 0;
    ptx::fence_system();
    return true;
  }
};

// [team] Raise a flag of this rank at every rank of its node, after the team's barrier.
template <class Team>
__device__ void team_raises(const Op& op, uint64_t* flag_here) {
  const Context& context = op.context;
  if (Team::thread() >= op.ranks_per_node()) return;
  ptx::fence_system();
  ptx::store_relaxed(context.peers.at(flag_here, Team::thread()), op.epoch);
}

}  // namespace ep::cuda
