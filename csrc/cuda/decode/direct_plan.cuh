// The memory of a direct plan (direct.cuh). Tokens of all ranks have a bit each, in words of 32. Each source has
// `source_words` words of its own.
#pragma once
#include "cuda/plan/plan.h"
#include "cuda/sync/call.cuh"

namespace ep::cuda {

// Shared memory of one block. Written by its pull warps, read by its pull warps and stage warps.
struct DirectPlan {
  PlanHead* head;          // as in Plan
  Verdict* verdict;        // of the pull warps, for the stage warps
  int* decided;            // of the Calls, for the planners: 1 + its Verdict; 0: not yet known
  int32_t* expert_rows;    // as in Plan
  int32_t* expert_begin;   // as in Plan; before lay_out the rows of each group
  int64_t* needed;         // [num_ranks] output rows of each rank. Only if not all rows fit (Params::kAllFit)
  int* max_rows;           // [num_ranks] rows in the output of each rank. Only as `needed`
  uint32_t* received;      // [words] a bit per token with an expert here
  uint32_t* sent;          // [num_ranks, source_words] a bit per token of this rank with an expert at the rank
  uint16_t* before;        // [words, num_local_experts] tokens of the expert before the word
  int16_t* choices;        // [num_ranks, max_tokens, choices_per_token] experts of every token, -1 for none
  uint32_t* chosen;        // [words, num_local_experts] a bit per token of the expert. 0 at first, as the next two
  int32_t* expert_tokens;  // [num_experts] tokens of all ranks. Only as `needed`
  int32_t* rank_items;     // [num_ranks] items of each rank. Only as `needed`
  char* end;
  int choices_per_token, source_words, words;

  // [host] Lay the plan out, or measure it. `all_fit`: as Params::kAllFit.
  static DirectPlan carve(Cursor& c, const Config& config, bool all_fit) {
    const size_t ranks = config.num_ranks(), experts = config.num_local_experts();
    DirectPlan p;
    p.choices_per_token = config.choices_per_token();
    p.source_words = (config.max_tokens + 31) / 32;
    p.words = static_cast<int>(ranks) * p.source_words;
    p.head = PlanHead::take(c, config);
    p.verdict = c.take<Verdict>(1);
    p.decided = c.take<int>(1);
    p.expert_rows = c.take<int32_t>(experts);
    p.expert_begin = c.take<int32_t>(experts + 1);
    p.needed = c.take<int64_t>(all_fit ? 0 : ranks);
    p.max_rows = c.take<int>(all_fit ? 0 : ranks);
    p.received = c.take<uint32_t>(p.words);
    p.sent = c.take<uint32_t>(ranks * p.source_words);
    p.before = c.take<uint16_t>(experts * p.words);
    p.choices = c.take<int16_t>(ranks * config.max_tokens * p.choices_per_token);
    p.chosen = c.take<uint32_t>(experts * p.words);
    p.expert_tokens = c.take<int32_t>(all_fit ? 0 : config.num_experts);
    p.rank_items = c.take<int32_t>(all_fit ? 0 : ranks);
    p.end = c.take<char>(0);
    return p;
  }

  // [thread] Return the plan in the shared memory of a block. The arrays of this one are offsets.
  __device__ DirectPlan in(char* shared) const {
    DirectPlan p = *this;
    set_base(shared, p.head, p.verdict, p.decided, p.expert_rows, p.expert_begin, p.needed, p.max_rows, p.received,
             p.sent, p.before, p.choices, p.chosen, p.expert_tokens, p.rank_items, p.end);
    return p;
  }

  // [thread] Write the verdict: for the pull warps and stage warps, then for the planners.
  __device__ void post(Verdict value) const {
    *verdict = value;
    ptx::fence_block();  // planners read who is absent
    *static_cast<volatile int*>(decided) = 1 + static_cast<int>(value);
  }

  // [thread] Return the choices of one token.
  template <Kernels K>
  __device__ int16_t* choices_of(const Op<K>& op, int source, int token) const {
    return choices + (static_cast<size_t>(source) * op.context.config.max_tokens + token) * choices_per_token;
  }

  // [thread] Return the number of tokens of `source` received here. The choices are counted.
  __device__ int items_of(int source) const {
    int num = 0;
#pragma unroll 1
    for (int word = 0; word < source_words; ++word) num += __popc(received[source * source_words + word]);
    return num;
  }
};

}  // namespace ep::cuda
