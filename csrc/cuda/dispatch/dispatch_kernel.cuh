// The dispatch kernel of expert and rank layout, from the first step to the last. The warps of a block have two roles,
// and the last blocks of a launch between nodes have a third one:
//
//   pull warps    plan:    count this rank's tokens, announce the Call, agree, list the items    (plan.cuh)
//                 pull:    bring rows from all inboxes to their final rows                       (pull.cuh)
//   stage warps   stage:   copy this rank's rows and metadata to its inbox, chunk by chunk       (stage.cuh)
//                 deliver: weights, local experts and scales; zeros in rows without a token      (deliver.cuh)
//   rail blocks   send to the rail peers, and relay what comes from there                        (rail_rows.cuh)
//
// One launch does all of it. If the host needs the counts to make the outputs, a first launch plans and stages, and a
// second one pulls and delivers (Launch). In a buffer for few tokens on one node new plans are made in another kernel
// (direct_kernel.cuh).
#pragma once
#include "cuda/dispatch/deliver.cuh"
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/dispatch/pull.cuh"
#include "cuda/dispatch/stage.cuh"
#include "cuda/dispatch/steps.cuh"
#include "cuda/plan/plan.cuh"
#include "cuda/rail/rail_rows.cuh"

namespace ep::cuda {

// [team] Make a new plan, or announce the plan of a handle. Called by the pull warps of each block. Return kAborted
// after an abort of this rank. Otherwise return what all ranks agreed on, or kAgree if this block has not compared the
// Calls yet.
// `is_free` as in wait_for_free_staging.
template <Kernels K>
__device__ Verdict plan_or_announce(const Op<K>& op, const DispatchParams& params, char* shared, bool is_free) {
  if (params.plans() && op.block < params.plan_blocks) {
    if (!wait_for_free_staging<PullWarps>(op, is_free)) return Verdict::kAborted;
    const Verdict verdict = make_plan(op, params, shared);
    stamp(op, Step::kPlanned);
    return verdict;
  }
  if (params.stages() && !params.new_plan() && op.block == 0) {
    repeat_counts(op, params);
    if (!wait_for_free_staging<PullWarps>(op, is_free)) return Verdict::kAborted;
    if (PullWarps::warp() == 0) announce(op, call_of(params), false);
    stamp(op, Step::kSent);
  }
  return Verdict::kAgree;
}

// [team] Plan, then pull. Called by the pull warps of each block. Return kAborted after an abort of this rank, and
// kDiffer without a pull. After kAgree this block's rows are stored, unless the plan is unusable or another launch
// pulls. In all cases no load of the pull warps is under way.
template <Kernels K, int kTogether>
__device__ Verdict run_pull(const Op<K>& op, const DispatchParams& params, char* shared, bool is_free) {
  // Plan.
  Verdict verdict = plan_or_announce(op, params, shared, is_free);
  if (verdict != Verdict::kAgree || !params.pulls()) return verdict;
  // Agree, and wait for the lists of items.
  const bool has_agreed = params.plans() && op.block < params.plan_blocks;
  verdict = wait_for_items<PullWarps>(op, params, has_agreed);
  stamp(op, Step::kListed);
  if (verdict != Verdict::kAgree || !params.plan.head->usable) return verdict;
  // Pull.
  return Puller<K, DispatchParams, kTogether>(op, params, shared).run() ? Verdict::kAgree : Verdict::kAborted;
}

// [team] Stage this rank's rows, then deliver the metadata of received rows. Called by the stage warps of each block.
// Return kAborted after an abort of this rank. Otherwise this block's share is written: zeros if the ranks differ or
// the plan is unusable.
template <Kernels K>
__device__ Verdict run_stage(const Op<K>& op, const DispatchParams& params, char* shared, bool is_free) {
  // Stage.
  if (params.stages()) {
    if (!wait_for_free_staging<StageWarps<K>>(op, is_free)) return Verdict::kAborted;
    stamp(op, Step::kFree);
    stage(op, params, shared);
    stamp(op, Step::kStaged);
  }
  if (!params.pulls()) return Verdict::kAgree;
  // Agree, and wait for the lists of items. Without a usable plan, clear the output.
  const Verdict verdict = wait_for_items<StageWarps<K>>(op, params, false);
  stamp(op, Step::kListed);
  if (verdict == Verdict::kAborted) return verdict;
  if (verdict == Verdict::kDiffer || !params.plan.head->usable) {
    clear_from<StageWarps<K>>(op, params, 0);
    return verdict;
  }
  // Deliver, and clear.
  if (params.new_plan()) keep_tables(op, params);
  stamp(op, Step::kKept);
  if (!deliver_metadata(op, params, shared)) return Verdict::kAborted;
  stamp(op, Step::kDelivered);
  clear_padding(op, params, *params.plan.head, params.plan.expert_begin, params.plan.expert_rows);
  stamp(op, Step::kCleared);
  return verdict;
}

// Launched by Engine::dispatch: all blocks are resident at the same time. The rail blocks come last.
// kTogether: kDealtItems or kTakenItems
template <Kernels K, int kTogether>
__global__ void __launch_bounds__(DispatchBlock<K>::kThreads, 1)
    dispatch_kernel(const __grid_constant__ Context context, const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Op<K> op{context,
                 Operation::kDispatch,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x) - params.rail_blocks,
                 !params.stages()};
  stamp(op, Step::kDispatch);
  // Clear the caller's counts: they stay 0 after an early abort.
  if (params.stages() && op.block == 0)
    for (int e = threadIdx.x; e < context.num_local_experts; e += DispatchBlock<K>::kThreads)
      params.write_counts(e, 0, 0);
  // Check whether staging is free. It usually is, and then no warp has to wait. These two loads overlap.
  const bool aborted = has_aborted(context);
  const bool sees_free = poll_once(op, context.own.consumed, context.state->staged_epoch, threadIdx.x);
  const bool is_free = __syncthreads_and(!params.stages() || sees_free);
  // Do the work of this warp. All threads of the block begin, or none.
  Verdict verdict = Verdict::kAborted;
  if (!__syncthreads_or(aborted)) {
    if (op.is_rail())
      verdict = run_rail(op, params, shared, is_free);
    else if (PullWarps::has_thread())
      verdict = run_pull<K, kTogether>(op, params, shared, is_free);
    else
      verdict = run_stage(op, params, shared, is_free);
  }
  // Complete the operation in the last block. After the first of two launches the operation goes on. An aborted block
  // does not count itself in: then no block is the last one.
  const bool ok = __syncthreads_and(verdict != Verdict::kAborted);
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!params.pulls()) return;
  if (!ok) return clear_after_abort(op, params);
  if (!last_block<DispatchBlock<K>>(&context.state->pull_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (!differs) count_bytes_read(op, params);
  complete<DispatchBlock<K>>(op, &Region::consumed, &State::staged_epoch, differs);
  stamp(op, Step::kComplete);
}

}  // namespace ep::cuda
