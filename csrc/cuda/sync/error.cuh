// Errors of the caller, as found by kernels. The first one of an operation is recorded in device memory. It is
// published to the host at the end of the operation, or earlier if the host waits for the counts.
// docs/protocol_faults.md says why.
#pragma once
#include "cuda/sync/wait.cuh"

namespace ep::cuda {

// [thread] Record the operation's error. Return true for the first caller only: it then writes State::facts. All other
// errors of the operation are dropped.
__device__ inline bool try_record_error(const Context& context, Error error) {
  return atomicCAS(&context.state->error, 0u, static_cast<uint32_t>(error)) == 0;
}

// [thread] Record an invalid entry of topk_idx, or a repeated expert of its token. Called by any thread of the first
// scan, or of send_choices.
__device__ __noinline__ inline void record_bad_topk_idx(const Context& context, int token, int k, bool repeated,
                                                        int64_t entry) {
  if (!try_record_error(context, Error::kBadEntry)) return;
  ErrorFacts& facts = context.state->facts;
  facts.detail[0] = token;
  facts.detail[1] = k;
  facts.detail[2] = repeated;
  facts.value = entry;
}

// [thread] Return the recorded error, Error::kNone if there is none. Called in `complete` and in report_rows.
// Both come after the finder: in `complete` by last_block, in report_rows by `called` of this rank or by the first
// barrier of the block.
__device__ inline int32_t recorded_error(const Context& context) {
  return static_cast<int32_t>(__ldcg(&context.state->error));
}

// [thread] Publish the recorded error to the host, and clear it for the next operation. If the host has not taken an
// earlier error yet, only clear it. `recorded`: recorded_error.
__device__ inline void publish_error(const Context& context, int32_t recorded) {
  State* state = context.state;
  if (recorded == 0) return;
  state->error = 0;
  Report* report = context.report;
  if (*static_cast<volatile int32_t*>(&report->error) != 0) return;
  for (int i = 0; i < 4; ++i) report->facts.detail[i] = __ldcg(&state->facts.detail[i]);
  report->facts.value = __ldcg(&state->facts.value);
  for (int rank = 0; rank < context.config.num_ranks(); ++rank)
    for (int i = 0; i < 2; ++i) context.reports.error_rows[rank][i] = __ldcg(&context.arrays.error_rows[rank][i]);
  __threadfence_system();
  *static_cast<volatile int32_t*>(&report->error) = recorded;
}

}  // namespace ep::cuda
