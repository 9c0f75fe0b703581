// Teams: warps of a block with a common job. Also the hand-over from all blocks to the last one to arrive.
#pragma once
#include "cuda/sync/wait.cuh"

namespace ep::cuda {

// Consecutive warps of a block with a named barrier of their own. Barrier 0 is also that of __syncthreads: it belongs
// to the team of the whole block.
template <int kBarrier, int kFirstThread, int kNumThreads>
struct Team {
  static constexpr int kThreads = kNumThreads, kWarps = kNumThreads / 32;

  // [thread] Return whether this thread belongs to the team.
  static __device__ bool has_thread() { return static_cast<unsigned>(thread()) < kThreads; }
  // [thread] Number this thread, and its warp, in the team.
  static __device__ int thread() { return threadIdx.x - kFirstThread; }
  static __device__ int warp() { return thread() / 32; }
  // [team] Wait for all threads of the team.
  static __device__ void sync() { ptx::named_barrier(kBarrier, kThreads); }
};

// [team] Call `wait()` in the first warp, and return its result to all threads. Two barriers of the team. Afterwards
// all threads may read the awaited memory, also by bulk loads. Two teams may be here at once: each Team and kind of
// wait has its own `result`.
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
  Team::sync();  // `result` is free for the next call
  return seen;
}

// [team] Wait for one flag about each rank of the node: wait_for_node. Return false after an abort of this rank.
template <class Team, Kernels K>
__device__ bool team_waits(const Op<K>& op, Phase phase, const uint64_t* flags, uint64_t expected) {
  return first_warp_waits<Team>([&] { return wait_for_node(op, phase, flags, expected); });
}

// [team] Count this block in, and reset the counter in the last of `num_blocks` blocks. Return true in the last one:
// its team sees all earlier stores of the other blocks' teams. No block waits for another one. Two barriers of the
// team.
template <class Team>
__device__ bool last_block(uint32_t* counter, uint32_t num_blocks) {
  __shared__ bool last;
  Team::sync();
  // Release this block's stores, count it in, acquire the stores of the others. All this is on one GPU. The fence of
  // the system before a later flag covers the stores of the others too.
  if (Team::thread() == 0) {
    ptx::fence_gpu();
    last = atomicAdd(counter, 1u) == num_blocks - 1;
    if (last) {
      ptx::fence_gpu();
      *counter = 0;
    }
  }
  Team::sync();
  return last;
}

// Arrivals of warps at each chunk: in shared memory for this block, then in device memory for all blocks. A fence waits
// for the stores of its multiprocessor: 8 to 14 us in one that stores to peers, for the GPU as for the system (H200).
// So only the last warp of each block fences the GPU, and only the last of all the system.
struct ChunkArrivals {
  uint32_t* in_block;  // [max_chunks] in shared memory, 0 at the start: arrived warps of this block
  uint32_t num_warps;
  uint32_t* in_grid;  // [max_chunks] in device memory, 0 between operations: arrived blocks
  uint32_t num_blocks;

  // [thread] Count the calling warp in for `chunk`, after its last store for the chunk and __syncwarp. Return true in
  // the last warp of all blocks: the caller then raises the chunk's flag. It sees the stores of all warps.
  __device__ bool arrive(int chunk) const {
    ptx::fence_block();
    if (atomicAdd(in_block + chunk, 1u) != num_warps - 1) return false;
    ptx::fence_gpu();
    if (atomicAdd(in_grid + chunk, 1u) != num_blocks - 1) return false;
    in_grid[chunk] = 0;
    ptx::fence_system();
    return true;
  }
};

// [team] Raise one flag, or two, at every rank of the node, one thread per rank. Call it after a barrier of the team:
// the flags cover all earlier stores of the team.
template <class Team, Kernels K>
__device__ void team_raises(const Op<K>& op, uint64_t* local_flag, uint64_t* other_flag = nullptr) {
  const Context& context = op.context;
  if (Team::thread() >= op.ranks_per_node()) return;
  ptx::fence_system();
  ptx::store_relaxed(context.peers.at(local_flag, Team::thread()), op.epoch);
  if (other_flag) ptx::store_relaxed(context.peers.at(other_flag, Team::thread()), op.epoch);
}

}  // namespace ep::cuda
