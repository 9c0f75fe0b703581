// Masks of late ranks, in decode layout on one node: late ranks are masked, and the others go on
// (docs/protocol_faults.md). A wait asks whom it need not wait for (sync/wait.cuh), and the agreement who takes part
// (sync/call.cuh). Only the build kDecodeExtras has code for masks.
#pragma once
#include "cuda/device/ptx.cuh"
#include "cuda/op.cuh"

namespace ep::cuda {

// In sync/wait.cuh, which includes this header. So is abort_because_of, which a call with an Op finds.
__device__ __forceinline__ bool has_aborted(const Context& context);

// [thread] Return whether this buffer masks late ranks instead of aborting.
template <Kernels K>
__device__ inline bool has_masks(const Op<K>& op) {
  return K == Kernels::kDecodeExtras && op.context.config.masks;
}

// [thread] Return whether this rank has masked `rank`.
template <Kernels K>
__device__ inline bool is_masked(const Op<K>& op, int rank) {
  return has_masks(op) && static_cast<volatile int32_t*>(op.context.arrays.masked)[rank] != 0;
}

// [warp] Return a bit for each masked rank. With masks there are at most 32 ranks.
template <Kernels K>
__device__ inline uint32_t masked_ranks(const Op<K>& op) {
  const int lane = threadIdx.x % 32;
  return __ballot_sync(~0u, lane < op.num_ranks() && is_masked(op, lane));
}

// [thread] Mask a rank of the node: from now on no warp of this rank waits for it. Raise `excluded` at the masked rank
// first. It may be slow, not dead, and may read memory that this rank overwrites after this call. So it reads the flag
// after its last load.
// raises: excluded
template <Kernels K>
__device__ inline void mask_rank(const Op<K>& op, int rank) {
  const Context& context = op.context;
  ptx::store_relaxed(context.peers.at(context.own.excluded + context.config.rank, op.local_of(rank)), 1);
  ptx::fence_system();
  atomicExch(context.arrays.masked + rank, 1);
}

// [warp] Return whether a rank that is not masked has masked this one. Called with masks, which have one node.
template <Kernels K>
__device__ inline bool is_excluded(const Op<K>& op) {
  const int lane = threadIdx.x % 32;
  ptx::fence_system();
  return __any_sync(
      ~0u, lane < op.num_ranks() && !is_masked(op, lane) && ptx::load_acquire(op.context.own.excluded + lane) != 0);
}

// [warp] With masks: abort this rank if another one has masked it. Return whether it has.
// reports: late (this rank itself, masked by another one)
template <Kernels K>
__device__ inline bool aborts_if_excluded(const Op<K>& op, Phase phase) {
  if (!has_masks(op) || !is_excluded(op)) return false;
  if (threadIdx.x % 32 == 0) abort_because_of(op, phase, op.rank(), 0);
  return true;
}

// [warp] With masks: decide once for all blocks which ranks take part in the operation. One warp of block 0 waits for
// all ranks and decides, and all other callers wait for it. Called by every warp that compares the Calls, to wait for
// which it calls `wait_for_calls()` in this `phase`. Return false after an abort of this rank.
template <Kernels K, class WaitForCalls>
__device__ inline bool decide(const Op<K>& op, Phase phase, const WaitForCalls& wait_for_calls) {
  const Context& context = op.context;
  const auto has_decided = [&] { return ptx::load_acquire(&context.state->decided) >= op.epoch; };
  const bool decides = op.block == 0 && (op.operation == Operation::kCombine || threadIdx.x < 32);
  if (decides && !__any_sync(~0u, has_decided())) {
    if (!wait_for_calls()) return false;
    if (aborts_if_excluded(op, phase)) return false;
    const uint32_t absent = masked_ranks(op);
    if (threadIdx.x % 32 == 0) {
      *static_cast<volatile uint32_t*>(&context.state->absent) = absent;
      ptx::fence_system();
      ptx::store_relaxed(&context.state->decided, op.epoch);
    }
    __syncwarp();
    return true;
  }
  for (int turn = 1; !__any_sync(~0u, has_decided()); ++turn)
    if (turn % 32 == 0 && __any_sync(~0u, has_aborted(context))) return false;
  ptx::fence_system();
  __syncwarp();
  return true;
}

// [thread] Return a bit for each rank that takes no part in this operation. Called after `agree`.
template <Kernels K>
__device__ inline uint32_t absent_ranks(const Op<K>& op) {
  return has_masks(op) ? *static_cast<volatile uint32_t*>(&op.context.state->absent) : 0;
}

}  // namespace ep::cuda
