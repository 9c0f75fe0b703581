// Short steps of a dispatch, the same in every layout.
#pragma once
#include "cuda/dispatch/dispatch.cuh"

namespace ep::cuda {

// [team] Copy the counts of an old plan to the caller. Called by the pull warps of block 0.
template <Kernels K, class Params>
__device__ inline void repeat_counts(const Op<K>& op, const Params& params) {
  const Plan& plan = params.plan;
  for (int e = threadIdx.x; e < op.context.num_local_experts; e += PullWarps::kThreads) {
    const bool usable = plan.head->usable;
    params.write_counts(e, usable ? plan.expert_rows[e] : 0,
                        usable ? plan.expert_begin[e + 1] - plan.expert_begin[e] : 0);
  }
}

// [team] Wait until all ranks have begun this dispatch (unless `agreed`) and until all lists of a new plan are in their
// inboxes. After kAgree all items and the head of the plan may be read, after kDiffer neither. Return kAborted after an
// abort of this rank. Called by the pull warps and by the stage warps of each block.
// waits: listed (lists)
template <class Team, Kernels K, class Params>
__device__ inline Verdict wait_for_items(const Op<K>& op, const Params& params, bool agreed) {
  return first_warp_waits<Team>([&] {
    // The second of two launches keeps no difference if the first one made a plan: that one has kept it.
    const Verdict verdict = agreed ? Verdict::kAgree : agree(op, params.stages() || !params.new_plan());
    if (verdict != Verdict::kAgree || !params.new_plan()) return verdict;
    return wait_for_ranks(op, Phase::kLists, op.context.own.listed, op.epoch) ? verdict : Verdict::kAborted;
  });
}

// [block] Count the bytes read by this rank, by rank of the inbox. The second warp does this, because the first one
// raises flags next. Called in the last block, once all ranks agree.
template <Kernels K, class Params>
__device__ inline void count_bytes_read(const Op<K>& op, const Params& params) {
  const Config& config = op.context.config;
  const int local = static_cast<int>(threadIdx.x) - 32;
  if (local < 0 || local >= config.ranks_per_node) return;
  const PlanHead& head = *params.plan.head;
  uint64_t num_items = 0;
#pragma unroll 1
  for (int source = local; source < op.num_ranks(); source += config.ranks_per_node) num_items += head.items_of(source);
  op.context.arrays.bytes_read[op.first_local_rank() + local] +=
      num_items * (params.args.row_bytes + params.metadata_bytes);
}

}  // namespace ep::cuda
