// One launch of a dispatch kernel: its parameters, and the tasks of its warps.
#pragma once
#include "cuda/device/team.cuh"
#include "cuda/dispatch/pieces.cuh"
#include "cuda/engine.h"
#include "cuda/plan/plan.h"
#include "cuda/sync/call.cuh"

namespace ep::cuda {

// Eight of a block's warps are pull warps: they plan, then pull rows to their final rows in the output. Meanwhile the
// others, the stage warps, stage this rank's rows and metadata, deliver the metadata of received rows, and clear rows
// without a token. With direct plans the few tokens wait until their rows are quantized, which more warps do sooner.
constexpr int kPullThreads = 256;
template <Kernels K>
constexpr int kStageThreads = K == Kernels::kDirect || K == Kernels::kDecodeDirect ? 384 : 256;
template <Kernels K>
using DispatchBlock = Team<0, 0, kPullThreads + kStageThreads<K>>;
static_assert(DispatchBlock<Kernels::kDirect>::kWarps <= kStampedWarps);
using PullWarps = Team<1, 0, kPullThreads>;
template <Kernels K>
using StageWarps = Team<2, kPullThreads, kStageThreads<K>>;

enum class PlanKind { kNew, kGiven };  // made by this operation, or taken from a handle

// What every dispatch kernel is told beside the arguments of the call. Written by the host, read by all threads.
struct RowParams {
  Plan plan;
  PlanKind plan_kind;
  uint32_t inverse, inverse_topk;         // 2^32 / num_local_experts and 2^32 / num_topk, rounded up, for `quotient`
  int rail_blocks;                        // last blocks of the launch
  int plan_blocks, plan_warps;            // blocks with pull warps at work on the plan, and such warps per block
  int batches_of_block, batches_of_warp;  // batches of 32 tokens that they scan
  int parts_of_row;                       // number of parts in which a row is staged
  uint32_t row_stride;                    // [bytes] from one staged row to the next
  uint32_t metadata_bytes;                // [bytes] of one token
  Pieces pulled;                          // pieces of a row in the pull warps' rings
  bool bulk_scales;                       // the last piece of a row takes its scales along
  uint32_t counters_at;                   // [bytes] from the start of shared memory to the stage warps' counters
  uint32_t seen_at;                       // [bytes] from there to int16 [warps of a block, num_ranks] for StagedFlags

  // [host] [thread] Return whether this operation makes the plan.
  EP_HOST_DEVICE bool new_plan() const { return plan_kind == PlanKind::kNew; }
};

// A dispatch in expert or rank layout.
struct DispatchParams : RowParams {
  static constexpr bool kScalesByColumn = false;  // scales of a row are adjacent in the output
  static constexpr bool kAllFit = false;  // the output may have too few rows for those received, and has padding

  DispatchArgs args;
  // If the host needs the counts to make the outputs, it launches twice for one epoch. The first launch plans or
  // announces, exchanges the Calls, and stages. The second one compares the Calls, moves lists and rows between nodes,
  // pulls, delivers, and completes the operation.
  Launch launch;
  bool stages_rows;  // there are readers of this rank's staged rows
  int weights_at;    // [floats] from the start of the metadata to its weights

  // [host] [thread] Return whether this launch stages; pulls; sends rows to other nodes; makes a plan.
  EP_HOST_DEVICE bool stages() const { return launch != Launch::kPull; }
  EP_HOST_DEVICE bool pulls() const { return launch != Launch::kPlanAndStage; }
  EP_HOST_DEVICE bool sends() const { return pulls(); }
  EP_HOST_DEVICE bool plans() const { return stages() && new_plan(); }
  // [host] [thread] Return whether rows of this rank for itself are read from the caller's tensor.
  EP_HOST_DEVICE bool reads_own_rows() const { return !args.quantizes; }

  // [host] [thread] Return whether weights travel along; whether the host waits for the counts, and its ticket.
  EP_HOST_DEVICE bool has_weights() const { return args.topk_weights != nullptr; }
  __device__ bool has_rank_layout() const { return args.layout == Layout::kRank; }
  EP_HOST_DEVICE bool reports_counts() const { return args.num_rows < 0; }
  EP_HOST_DEVICE uint64_t ticket() const { return args.ticket; }

  // [thread] Return the first output row of an expert of a rank, of which the rows of earlier experts end at `end`.
  __device__ int64_t group_begin(int, int64_t end) const { return end; }
  // [thread] Give the caller the counts of one expert: its tokens, and its rows with padding.
  __device__ void write_counts(int expert, int tokens, int rows) const {
    args.out_tokens_per_expert[expert] = tokens;
    args.out_rows_per_expert[expert] = rows;
  }
  // [thread] Return the words of a row's scales in the output, and write one of them. `scales`: of its token.
  __device__ int num_scale_words() const { return args.scale_bytes / 4; }
  __device__ void write_scale(int row, int word, const float* scales) const {
    args.out_scales[static_cast<int64_t>(row) * num_scale_words() + word] = scales[word];
  }
};

// [thread] Return n / d, given 2^32 / d, rounded up (0 for d = 1). Exact while n * d is below 2^32.
__device__ inline int quotient(int n, uint32_t inverse) { return inverse == 0 ? n : __umulhi(n, inverse); }

// [thread] Return the staged row of a received token, and its metadata: in the inbox of its source on this node.
template <Kernels K>
__device__ inline const char* row_in_inbox(const Op<K>& op, const RowParams& params, int source, int token) {
  return op.inbox_holding(source, &Inbox::staging) + static_cast<size_t>(token) * params.row_stride;
}
template <Kernels K>
__device__ inline const char* metadata_in_inbox(const Op<K>& op, const RowParams& params, int source, int token) {
  return op.inbox_holding(source, &Inbox::metadata) + static_cast<size_t>(token) * params.metadata_bytes;
}
template <Kernels K>
__device__ inline const char* row_of(const Op<K>& op, const DispatchParams& params, int source, int token) {
  return row_in_inbox(op, params, source, token);
}
template <Kernels K>
__device__ inline const char* metadata_of(const Op<K>& op, const DispatchParams& params, int source, int token) {
  return metadata_in_inbox(op, params, source, token);
}

// [warp] Return this warp's flags of staged chunks, with none seen.
template <Kernels K>
__device__ inline StagedFlags staged_flags(const Op<K>& op, const RowParams& params, char* shared) {
  auto* const seen = reinterpret_cast<int16_t*>(shared + params.counters_at + params.seen_at);
  return {op, seen + threadIdx.x / 32 * op.num_ranks()};
}

}  // namespace ep::cuda
