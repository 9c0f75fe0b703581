// The end of an operation with masks: a rank that another one has masked aborts.
#pragma once
#include "cuda/sync/call.cuh"

namespace ep::cuda {

// [block] With masks: abort this rank if another one has masked it, because that rank may have overwritten memory read
// here. Return whether it has aborted. Called in the last block, before `complete`.
template <class Block, Kernels K>
__device__ bool was_masked_by_a_peer(const Op<K>& op) {
  if (!has_masks(op)) return false;
  bool excluded = false;
  if (Block::thread() < 32) {
    const Phase phase = op.operation == Operation::kDispatch ? Phase::kRows : Phase::kSums;
    excluded = aborts_if_excluded(op, phase);
  }
  return __syncthreads_or(excluded);
}

}  // namespace ep::cuda
