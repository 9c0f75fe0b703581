// Slots of pushed rows: a rank stores a row straight into the memory of each rank of the node with an expert of the
// token. Rows are pushed in decode layout, and with direct plans in every layout. They share the slots with the partial
// sums of combines.
#pragma once
#include "cuda/dispatch/dispatch.cuh"

namespace ep::cuda {

// The inbox among the targets of a row, which are bits of 32 (Targets). With several nodes those before it are ranks of
// the node. With one node no row goes to an inbox, unless rows are not pushed.
constexpr int kInboxTarget = 31;

// What a launch that may push rows is told. Written by the host, read by all threads.
struct PushParams {
  uint32_t row_targets;       // a bit per local rank, and one for the inbox: rows go there (Targets)
  int first_staging_block;    // earlier blocks stage nothing
  uint32_t prefetched_bytes;  // of the caller's rows, with few tokens
};

// [thread] Return the place of a pushed row in the slots of local rank `owner`: of a token of `source`, a rank of this
// node.
template <Kernels K>
__device__ inline char* row_slot(const Op<K>& op, int owner, int source, int token) {
  const Context& context = op.context;
  const size_t slot = static_cast<size_t>(op.local_of(source)) * context.config.max_tokens + token;
  return context.peers.at(context.own.slots, owner) + slot * context.slot_stride;
}

// [team] Wait until all ranks of the node have read this rank's staging, metadata and slots of earlier operations.
// `is_free`: they had done so when this block began (poll_free_slots). Then there is no wait, and no barrier. Return
// false after an abort of this rank. Called by the stage warps of each block, and by the pull warps about to announce.
// waits: consumed (free staging), slots_free (free slots)
template <class Team, Kernels K, class Params>
__device__ bool wait_for_free_slots(const Op<K>& op, const Params& params, bool is_free) {
  const Context& context = op.context;
  return is_free || first_warp_waits<Team>([&] {
           return wait_for_node(op, Phase::kFreeStaging, context.own.consumed, context.state->staged_epoch) &&
                  (!params.pushes ||
                   wait_for_node(op, Phase::kFreeSlots, context.own.slots_free, context.state->pushed_epoch));
         });
}

// [block] Bring the caller's rows to the L2 cache, all blocks together.
template <Kernels K, class Params>
__device__ inline void prefetch_rows(const Op<K>&, const Params& params) {
  constexpr int kThreads = DispatchBlock<K>::kThreads;
  for (uint32_t at = (blockIdx.x * kThreads + threadIdx.x) * 128; at < params.prefetched_bytes;
       at += gridDim.x * kThreads * 128)
    ptx::prefetch(params.args.rows + at);
}

// [block] Look once whether this memory is free, each thread for a rank. Return the same in all threads.
template <Kernels K, class Params>
__device__ bool poll_free_slots(const Op<K>& op, const Params& params) {
  const Context& context = op.context;
  const bool sees_free =
      PullWarps::has_thread() || !params.pushes
          ? poll_once(op, context.own.consumed, context.state->staged_epoch, threadIdx.x)
          : poll_once(op, context.own.slots_free, context.state->pushed_epoch, StageWarps<K>::thread());
  return __syncthreads_and(!params.stages() || sees_free);
}

}  // namespace ep::cuda
