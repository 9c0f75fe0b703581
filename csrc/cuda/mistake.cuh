// Mistakes of the caller that kernels find. The first one of an operation is kept in device memory, and published to
// the host when the operation is complete, or earlier if the host waits for its counts. docs/protocol.md says why.
#pragma once
#include "cuda/wait.cuh"

namespace ep::cuda {

// [thread] Return true if this is the first mistake of the operation. The caller then writes State::facts.
__device__ inline bool claim_mistake(const Context& context, Mistake mistake) {
  return atomicCAS(&context.state->mistake, 0u, static_cast<uint32_t>(mistake)) == 0;
}

// [thread] Keep an entry of topk_idx that is no expert, or an expert that its row has already.
__device__ __noinline__ inline void keep_bad_entry(const Context& context, int token, int k, bool repeated,
                                                   int64_t entry) {
  if (!claim_mistake(context, Mistake::kBadEntry)) return;
  MistakeFacts& facts = context.state->facts;
  facts.detail[0] = token;
  facts.detail[1] = k;
  facts.detail[2] = repeated;
  facts.value = entry;
}

// [thread, ordered after the one that claimed] Hand the kept mistake to the host, unless it has not taken an earlier
// one yet.
__device__ inline void publish_mistake(const Context& context) {
  State* state = context.state;
  const auto kept = static_cast<int32_t>(__ldcg(&state->mistake));
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

}  // namespace ep::cuda
