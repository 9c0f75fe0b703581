// Mistakes of the caller, as found by kernels. The first one of an operation is kept in device memory. It is published
// to the host at the end of the operation, or earlier if the host waits for the counts. docs/protocol.md says why.
#pragma once
#include "cuda/sync/wait.cuh"

namespace ep::cuda::EP_KERNELS {

// [thread] Claim the operation's mistake. Return true for the first caller only: it then writes State::facts. All other
// mistakes of the operation are dropped.
__device__ inline bool claim_mistake(const Context& context, Mistake mistake) {
  return atomicCAS(&context.state->mistake, 0u, static_cast<uint32_t>(mistake)) == 0;
}

// [thread] Keep an invalid entry of topk_idx, or a repeated expert of its token. Called by any thread of the first
// scan, or of send_choices.
__device__ __noinline__ inline void keep_bad_entry(const Context& context, int token, int k, bool repeated,
                                                   int64_t entry) {
  if (!claim_mistake(context, Mistake::kBadEntry)) return;
  MistakeFacts& facts = context.state->facts;
  facts.detail[0] = token;
  facts.detail[1] = k;
  facts.detail[2] = repeated;
  facts.value = entry;
}

// [thread] Return the kept mistake, Mistake::kNone if there is none. Called in `complete` and in report_rows.
// Both come after the finder: in `complete` by last_block, in report_rows by `called` of this rank or by the first
// barrier of the block.
__device__ inline int32_t kept_mistake(const Context& context) {
  return static_cast<int32_t>(__ldcg(&context.state->mistake));
}

// [thread] Publish the kept mistake to the host, and clear it for the next operation. If the host has not taken an
// earlier mistake yet, only clear it. `kept`: kept_mistake.
__device__ inline void publish_mistake(const Context& context, int32_t kept) {
  State* state = context.state;
  if (kept == 0) return;
  state->mistake = 0;
  Report* report = context.report;
  if (*static_cast<volatile int32_t*>(&report->mistake) != 0) return;
  for (int i = 0; i < 4; ++i) report->facts.detail[i] = __ldcg(&state->facts.detail[i]);
  report->facts.value = __ldcg(&state->facts.value);
  for (int rank = 0; rank < context.config.num_ranks(); ++rank)
    for (int i = 0; i < 2; ++i) report->facts.rows[rank][i] = __ldcg(&state->facts.rows[rank][i]);
  __threadfence_system();
  *static_cast<volatile int32_t*>(&report->mistake) = kept;
}

}  // namespace ep::cuda::EP_KERNELS
