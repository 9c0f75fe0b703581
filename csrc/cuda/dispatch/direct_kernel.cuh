// The dispatch kernel of expert and rank layout for few tokens on one node: a new plan is a direct plan
// (decode/direct.cuh), and rows are pushed (decode/push_rows.cuh). The results and the plan are those of
// dispatch_kernel, bit by bit. The warps of a block have two roles:
//
//   pull warps    plan:    announce the Call, count the choices of all ranks, lay out the rows    (direct.cuh)
//                 place:   bring pushed rows from the slots to their final rows                   (place.cuh)
//   stage warps   push:    copy this rank's rows to the slots of the ranks that get them, and its
//                          weights and scales to its inbox                                        (push_rows.cuh)
//                 keep:    write the plan to memory, for later operations
//                 deliver: weights, local experts and scales; zeros in rows without a token
//
// If the host needs the counts, the first launch pushes, and block 0 plans and reports. The second one makes the plan
// again, in each block and from the same choices: this takes less time than to keep it.
#pragma once
#include "cuda/decode/place.cuh"
#include "cuda/decode/push_rows.cuh"
#include "cuda/dispatch/deliver.cuh"
#include "cuda/dispatch/steps.cuh"

namespace ep::cuda {

// A dispatch in expert or rank layout whose rows are pushed. Metadata are staged in the inbox: a slot has no room for
// weights behind a row.
struct PushedDispatchParams : DispatchParams, PushParams {
  static constexpr bool kPushesMetadata = false;
};
using DirectDispatchParams = DirectParams<PushedDispatchParams>;

// [thread] Return the metadata of a pushed row of `source`: in the inbox of its source.
template <Kernels K>
__device__ inline char* pushed_metadata(const Op<K>& op, const DispatchParams& params, int, int source, int token) {
  return op.inbox_holding(source, &Inbox::metadata) + static_cast<size_t>(token) * params.metadata_bytes;
}

// [thread] Return where the caller has metadata: scales and weights.
template <Kernels K>
__device__ inline Metadata metadata_of_caller(const Op<K>& op, const DispatchParams& params) {
  return {params.args, params.args.topk_weights, op.context.config.num_topk, params.weights_at};
}

// [warp] Write the weights of one item, and in rank layout its local experts; a lane has a choice of its token. The
// results are those of deliver_weights. `index`: of the item in the plan. `e`: the lane's local expert, or -1. `row`:
// in expert layout the output row of this choice. `metadata`: of the token; read only if there are weights.
template <Kernels K>
__device__ inline void deliver_choices(const Op<K>& op, const DispatchParams& params, int index, int e, int row,
                                       const float* metadata) {
  const DispatchArgs& args = params.args;
  const int lane = threadIdx.x % 32, num_topk = op.context.config.num_topk;
  const float weight = args.out_weights && e >= 0 ? metadata[params.weights_at + lane] : 0;
  if (!params.has_rank_layout()) {
    if (args.out_weights && e >= 0) args.out_weights[row] = weight;
  } else if (lane < num_topk) {
    const size_t at = static_cast<size_t>(index) * num_topk + lane;
    if (args.out_weights) args.out_weights[at] = weight;
    args.out_topk_idx[at] = e;
  }
}

// [warp] Write the scales of one item to its output rows: a lane has one of them, or -1. `scales`: of its token. Not
// inlined: few launches call it, and it costs registers.
template <Kernels K>
__device__ __noinline__ inline void deliver_row_scales(const DispatchParams& params, int row, const float* scales) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t rows = __ballot_sync(~0u, row >= 0); rows != 0; rows &= rows - 1) {
    const int its_row = __shfl_sync(~0u, row, __ffs(rows) - 1);
#pragma unroll 1
    for (int word = lane; word < params.num_scale_words(); word += 32) params.write_scale(its_row, word, scales);
  }
}

// [team] Write the items of a usable direct plan to memory, and deliver their metadata: weights, local experts, and
// scales that do not come with the rows. The warps share the items. Wait for staged metadata, if there are any. Called
// by the stage warps of each block of a launch that pulls. Return false after an abort of this rank: a warp may then
// leave alone, so no barrier of the team may follow.
template <Kernels K>
__device__ bool deliver_direct(const Op<K>& op, const DirectDispatchParams& params, char* shared) {
  const DirectPlan plan = params.direct_plan.in(shared);
  const StagedFlags staged = staged_flags(op, params, shared);
  const int lane = threadIdx.x % 32, item_ints = op.context.item_ints;
  const bool has_scales = params.args.scale_bytes > 0 && !params.bulk_scales;
  int source, token;
#pragma unroll 1
  for (int n = op.block + op.num_blocks * StageWarps<K>::warp(); find_in_warp(plan, 0, n, source, token);
       n += op.num_blocks * StageWarps<K>::kWarps) {
    int32_t* const item = params.plan.items + static_cast<size_t>(n) * item_ints;
    write_items(op, params, shared, source, lane == 0 ? token : -1, lane == 0 ? item : nullptr);
    const int e = local_choice(op, plan, source, token);
    int row = -1;
    if (params.has_rank_layout())
      row = lane == 0 ? n : -1;
    else if (e >= 0)
      row = row_of_choice(op, params, plan, source, token, e);
    // Wait for the metadata, and deliver.
    if (params.metadata_bytes > 0 && !wait_for_token(op, staged, source, token)) return false;
    const auto* const metadata = reinterpret_cast<const float*>(metadata_of(op, params, source, token));
    deliver_choices(op, params, n, e, row, metadata);
    if (has_scales) deliver_row_scales<K>(params, row, metadata);
  }
  return true;
}

// [team] Make a direct plan, then place rows. Called by the pull warps of each block. Return kAborted after an abort of
// this rank, and kDiffer without rows. After kAgree this block's rows are stored, unless the plan is unusable or
// another launch pulls. In all cases no load of the pull warps is under way. `is_free` as in wait_for_free_slots.
template <Kernels K>
__device__ Verdict run_direct_pull(const Op<K>& op, const DirectDispatchParams& params, char* shared, bool is_free) {
  // Announce, and plan. In the first of two launches block 0 alone needs a plan.
  const bool ok = announce_direct(op, params, is_free);
  if (!params.pulls() && op.block != 0) return ok ? Verdict::kAgree : Verdict::kAborted;
  if (params.pulls()) make_ring(op, params, shared);
  const Verdict verdict = make_direct_plan(op, params, shared, ok);
  stamp(op, Step::kPlanned);
  if (verdict != Verdict::kAgree || !params.pulls() || !params.direct_plan.in(shared).head->usable) return verdict;
  // Place.
  return place_direct(op, params, shared) ? Verdict::kAgree : Verdict::kAborted;
}

// [team] Push rows, then keep the plan, and deliver the metadata of received rows. Called by the stage warps of each
// block. Return kAborted after an abort of this rank. Otherwise this block's share is written: zeros if the ranks
// differ or the plan is unusable.
template <bool kMayQuantize, Kernels K>
__device__ Verdict run_direct_stage(const Op<K>& op, const DirectDispatchParams& params, char* shared, bool is_free) {
  // Push.
  if (params.stages()) {
    if (!wait_for_free_slots<StageWarps<K>>(op, params, is_free)) {
      // The pull warps arrive at the barrier of a direct plan also after an abort.
      if (params.pulls()) wait_for_direct_plan<K>(params, shared);
      return Verdict::kAborted;
    }
    stamp(op, Step::kFree);
    push_rows<kMayQuantize>(op, params, shared);
    stamp(op, Step::kStaged);
  }
  if (!params.pulls()) return Verdict::kAgree;
  // Wait for the plan. Without a usable one, clear the output.
  const Verdict verdict = wait_for_direct_plan<K>(params, shared);
  stamp(op, Step::kListed);
  if (verdict == Verdict::kAborted) return verdict;
  const DirectPlan plan = params.direct_plan.in(shared);
  const bool publishes = params.stages() && op.block == 0;  // the first of two launches has published the plan
  if (publishes && StageWarps<K>::warp() == StageWarps<K>::kWarps - 1) publish_plan(op, params, plan);
  if (verdict == Verdict::kDiffer || !plan.head->usable) {
    clear_from<StageWarps<K>>(op, params, 0);
    return verdict;
  }
  // Keep the plan, deliver, and clear.
  keep_direct_table<StageWarps<K>>(op, params, plan);
  stamp(op, Step::kKept);
  if (!deliver_direct(op, params, shared)) return Verdict::kAborted;
  stamp(op, Step::kDelivered);
  clear_padding(op, params, *plan.head, plan.expert_begin, plan.expert_rows);
  stamp(op, Step::kCleared);
  return verdict;
}

// Launched by Engine::dispatch: all blocks are resident at the same time.
template <Kernels K, bool kMayQuantize>
__global__ void __launch_bounds__(DispatchBlock<K>::kThreads, 1)
    direct_dispatch_kernel(const __grid_constant__ Context context,
                           const __grid_constant__ DirectDispatchParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Op<K> op{context,
                 Operation::kDispatch,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x),
                 !params.stages()};
  stamp(op, Step::kDispatch);
  prefetch_rows(op, params);
  // Clear the caller's counts: they stay 0 after an early abort.
  if (params.stages() && op.block == 0)
    for (int e = threadIdx.x; e < context.num_local_experts; e += DispatchBlock<K>::kThreads)
      params.write_counts(e, 0, 0);
  // Send the choices. Look whether the slots are free. These loads overlap. Then do the work of this warp. All threads
  // of the block begin, or none.
  const bool aborted = has_aborted(context);
  if (params.stages() && op.block == 0) send_choices(op, params, aborted);
  const bool is_free = poll_free_slots(op, params);
  Verdict verdict = Verdict::kAborted;
  if (!__syncthreads_or(aborted))
    verdict = PullWarps::has_thread() ? run_direct_pull(op, params, shared, is_free)
                                      : run_direct_stage<kMayQuantize>(op, params, shared, is_free);
  // Complete the operation as dispatch_kernel does. This rank has read staging and slots.
  const bool ok = __syncthreads_and(verdict != Verdict::kAborted);
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!params.pulls()) return;
  if (!ok) return clear_after_abort(op, params);
  if (!last_block<DispatchBlock<K>>(&context.state->pull_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (!differs) count_bytes_read(op, params);
  complete<DispatchBlock<K>>(op, &Region::consumed, &State::staged_epoch, differs, true);
  stamp(op, Step::kComplete);
}

}  // namespace ep::cuda
