// The dispatch kernels of decode layout. With few tokens on one node a new plan is a direct plan, made in every block
// (direct.cuh): direct_decode_kernel. Then somebody waits for each instruction, so this kernel has no code for
// anything else. With a handle, more tokens or several nodes decode_dispatch_kernel does the same steps as
// dispatch_kernel. The second launch of a dispatch with a hook mostly only places rows: place_kernel.
#pragma once
#include "cuda/decode/direct.cuh"
#include "cuda/decode/excluded.cuh"
#include "cuda/decode/place.cuh"
#include "cuda/decode/push_rows.cuh"
#include "cuda/dispatch/deliver.cuh"
#include "cuda/dispatch/pull.cuh"
#include "cuda/dispatch/steps.cuh"
#include "cuda/plan/plan.cuh"
#include "cuda/rail/rail_rows.cuh"

namespace ep::cuda {

// [team] Make a direct plan, then place rows. Called by the pull warps of each block. Return kAborted after an abort of
// this rank, and kDiffer without rows. After kAgree this block's rows are stored, unless another launch places them;
// then the plan is kept for it. In all cases no load of the pull warps is under way. `is_free` as in
// wait_for_free_slots.
template <Kernels K>
__device__ Verdict run_direct_decode_pull(const Op<K>& op, const DirectDecodeParams& params, char* shared,
                                          bool is_free) {
  // Announce, and plan.
  const bool ok = announce_direct(op, params, is_free);
  if (params.pulls()) make_ring(op, params, shared);
  const Verdict verdict = make_direct_plan(op, params, shared, ok);
  stamp(op, Step::kPlanned);
  if (verdict != Verdict::kAgree) return verdict;
  // Place, or keep the plan.
  if (params.pulls()) return place_direct(op, params, shared) ? Verdict::kAgree : Verdict::kAborted;
  keep_direct_table<PullWarps>(op, params, params.direct_plan.in(shared));
  keep_items<PullWarps>(op, params, shared);
  stamp(op, Step::kKept);
  return verdict;
}

// [team] Push rows, then keep the plan for later operations. Called by the stage warps of each block. Return kAborted
// after an abort of this rank.
template <bool kMayQuantize, Kernels K>
__device__ Verdict run_direct_decode_stage(const Op<K>& op, const DirectDecodeParams& params, char* shared,
                                           bool is_free) {
  // Push.
  if (!wait_for_free_slots<StageWarps<K>>(op, params, is_free)) {
    // The pull warps arrive at the barrier of a direct plan also after an abort.
    if (params.pulls()) wait_for_direct_plan<K>(params, shared);
    return Verdict::kAborted;
  }
  stamp(op, Step::kFree);
  push_rows<kMayQuantize>(op, params, shared);
  stamp(op, Step::kStaged);
  if (!params.pulls()) return Verdict::kAgree;
  // Wait for the plan. The pull warps place rows meanwhile.
  const Verdict verdict = wait_for_direct_plan<K>(params, shared);
  stamp(op, Step::kListed);
  if (verdict == Verdict::kAborted) return verdict;
  const DirectPlan plan = params.direct_plan.in(shared);
  if (op.block == 0 && StageWarps<K>::warp() == StageWarps<K>::kWarps - 1) publish_plan(op, params, plan);
  if (verdict == Verdict::kDiffer || !plan.head->usable) return verdict;
  // Keep the plan.
  keep_direct_table<StageWarps<K>>(op, params, plan);
  stamp(op, Step::kKept);
  keep_items<StageWarps<K>>(op, params, shared);
  // Deliver scales that do not come with the rows.
  const bool has_scales = params.args.scale_bytes > 0 && !params.bulk_scales;
  if (has_scales && !deliver_direct_scales(op, params, shared)) return Verdict::kAborted;
  stamp(op, Step::kDelivered);
  return verdict;
}

// Launched by Engine::decode_dispatch: all blocks are resident at the same time.
template <Kernels K, bool kMayQuantize>
__global__ void __launch_bounds__(DispatchBlock<K>::kThreads, 1)
    direct_decode_kernel(const __grid_constant__ Context context, const __grid_constant__ DirectDecodeParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Op<K> op{context,
                 Operation::kDispatch,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x),
                 false};
  stamp(op, Step::kDispatch);
  prefetch_rows(op, params);
  // Clear the caller's counts: they stay 0 after an early abort.
  if (op.block == 0)
    for (int e = threadIdx.x; e < context.num_local_experts; e += DispatchBlock<K>::kThreads)
      params.write_counts(e, 0, 0);
  // Send the choices. Look whether the slots are free. These loads overlap. Then do the work of this warp. All threads
  // of the block begin, or none.
  const bool aborted = has_aborted(context);
  if (op.block == 0) send_choices(op, params, aborted);
  const bool is_free = poll_free_slots(op, params);
  Verdict verdict = Verdict::kAborted;
  if (!__syncthreads_or(aborted))
    verdict = PullWarps::has_thread() ? run_direct_decode_pull(op, params, shared, is_free)
                                      : run_direct_decode_stage<kMayQuantize>(op, params, shared, is_free);
  // Complete the operation as dispatch_kernel does. This rank has read staging and slots.
  const bool ok = __syncthreads_and(verdict != Verdict::kAborted);
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!params.pulls() || !ok) return;
  if (!last_block<DispatchBlock<K>>(&context.state->pull_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (was_masked_by_a_peer<DispatchBlock<K>>(op)) return;
  if (!differs) count_bytes_read(op, params);
  complete<DispatchBlock<K>>(op, &Region::consumed, &State::staged_epoch, differs, true);
  stamp(op, Step::kComplete);
}

// [team] As run_pull of dispatch_kernel.cuh, in decode layout.
template <Kernels K>
__device__ Verdict run_decode_pull(const Op<K>& op, const DecodeDispatchParams& params, char* shared, bool is_free) {
  // Plan, or announce. Each way announces only after its wait for free slots.
  const bool plans = params.plans() && op.block < params.plan_blocks;
  Verdict verdict = Verdict::kAgree;
  if (plans) {
    if (!wait_for_free_slots<PullWarps>(op, params, is_free)) return Verdict::kAborted;
    verdict = make_plan(op, params, shared);
    stamp(op, Step::kPlanned);
  } else if (params.stages() && !params.new_plan() && op.block == 0) {
    repeat_counts(op, params);
    if (!wait_for_free_slots<PullWarps>(op, params, is_free)) return Verdict::kAborted;
    if (PullWarps::warp() == 0) announce(op, call_of(params), false);
    stamp(op, Step::kSent);
  }
  if (verdict != Verdict::kAgree || !params.pulls()) return verdict;
  // Agree, and wait for the lists of items.
  verdict = wait_for_items<PullWarps>(op, params, plans);
  stamp(op, Step::kListed);
  if (verdict != Verdict::kAgree || !params.plan.head->usable) return verdict;
  // Pull.
  return Puller<K, DecodeDispatchParams, kDealtItems>(op, params, shared).run() ? Verdict::kAgree : Verdict::kAborted;
}

// [team] As run_stage of dispatch_kernel.cuh, in decode layout: there is no padding.
template <Kernels K>
__device__ Verdict run_decode_stage(const Op<K>& op, const DecodeDispatchParams& params, char* shared, bool is_free) {
  // Push or stage.
  if (params.stages()) {
    if (!wait_for_free_slots<StageWarps<K>>(op, params, is_free)) return Verdict::kAborted;
    stamp(op, Step::kFree);
    push_rows<true>(op, params, shared);
    stamp(op, Step::kStaged);
  }
  if (!params.pulls()) return Verdict::kAgree;
  // Agree, and wait for the lists of items.
  const Verdict verdict = wait_for_items<StageWarps<K>>(op, params, false);
  stamp(op, Step::kListed);
  if (verdict != Verdict::kAgree || !params.plan.head->usable) return verdict;
  // Keep the items, and deliver scales that do not come with the rows.
  if (params.new_plan()) keep_tables(op, params);
  stamp(op, Step::kKept);
  if (!deliver_metadata(op, params, shared)) return Verdict::kAborted;
  stamp(op, Step::kDelivered);
  return verdict;
}

// Launched by Engine::decode_dispatch: all blocks are resident at the same time. The rail blocks come last.
template <Kernels K>
__global__ void __launch_bounds__(DispatchBlock<K>::kThreads, 1)
    decode_dispatch_kernel(const __grid_constant__ Context context,
                           const __grid_constant__ DecodeDispatchParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Op<K> op{context,
                 Operation::kDispatch,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x) - params.rail_blocks,
                 !params.stages()};
  stamp(op, Step::kDispatch);
  prefetch_rows(op, params);
  // Clear the caller's counts: they stay 0 after an early abort.
  if (params.stages() && op.block == 0)
    for (int e = threadIdx.x; e < context.num_local_experts; e += DispatchBlock<K>::kThreads)
      params.write_counts(e, 0, 0);
  // Look whether staging and slots are free, then do the work of this warp, as in dispatch_kernel.
  const bool aborted = has_aborted(context);
  const bool is_free = poll_free_slots(op, params);
  Verdict verdict = Verdict::kAborted;
  if (!__syncthreads_or(aborted)) {
    if (op.is_rail())
      verdict = run_rail(op, params, shared, is_free);
    else if (PullWarps::has_thread())
      verdict = run_decode_pull(op, params, shared, is_free);
    else
      verdict = run_decode_stage(op, params, shared, is_free);
  }
  // Complete the operation as dispatch_kernel does. With pushes this rank has read staging and slots.
  const bool ok = __syncthreads_and(verdict != Verdict::kAborted);
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!params.pulls() || !ok) return;
  if (!last_block<DispatchBlock<K>>(&context.state->pull_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (was_masked_by_a_peer<DispatchBlock<K>>(op)) return;
  if (!differs) count_bytes_read(op, params);
  complete<DispatchBlock<K>>(op, &Region::consumed, &State::staged_epoch, differs, params.pushes);
  stamp(op, Step::kComplete);
}

// A block of the kernel that only places rows. So many warps have a ring with room for a row of 7168 bfloat16, and an
// item each with 128 tokens of 2 ranks on 24 multiprocessors.
using PlaceWarps = Team<0, 0, 384>;

// The second launch of a dispatch with a hook, if rows were pushed: without what the first launch has done. Launched by
// Engine::decode_dispatch; all blocks are resident at the same time.
template <Kernels K>
__global__ void __launch_bounds__(PlaceWarps::kThreads, 1)
    place_kernel(const __grid_constant__ Context context, const __grid_constant__ DecodeDispatchParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Op<K> op{context,
                 Operation::kDispatch,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x),
                 true};
  stamp(op, Step::kDispatch);
  const bool aborted = has_aborted(context);
  Cursor c(shared);
  const auto [ring, full] = carve_rings(c, params.pulled, PlaceWarps::kWarps, PlaceWarps::warp());
  if (threadIdx.x % 32 == 0) init_places(full);
  // With a new plan the first launch has compared the Calls. Else one warp of the block does.
  __shared__ Verdict posted;
  if (threadIdx.x < 32) {
    const Verdict its = agree(op);
    if (threadIdx.x == 0) posted = its;
  }
  if (__syncthreads_or(aborted)) return;
  Verdict verdict = posted;
  stamp(op, Step::kListed);
  if (verdict == Verdict::kAgree && params.plan.head->usable && !place_planned(op, params, ring, full))
    verdict = Verdict::kAborted;
  // Complete the operation as dispatch_kernel does.
  if (!__syncthreads_and(verdict != Verdict::kAborted)) return;
  stamp(op, Step::kArrived);
  if (!last_block<PlaceWarps>(&context.state->pull_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  const bool differs = verdict == Verdict::kDiffer;
  if (!differs) count_bytes_read(op, params);
  complete<PlaceWarps>(op, &Region::consumed, &State::staged_epoch, differs, true);
  stamp(op, Step::kComplete);
}

}  // namespace ep::cuda
