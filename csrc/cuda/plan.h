// The plan of one routing as one rank holds it: a block of int32 on the device, owned by Python, kept by the handle.
#pragma once
#include <algorithm>
#include <stdexcept>

#include "cuda/config.h"

namespace ep::cuda {

struct PlanHead {
  int32_t made;  // the epoch of the dispatch that made it, its last 32 bits
  int32_t layout;
  int32_t num_rows;                   // rows of the output that the plan fills, padding included
  int32_t usable;                     // 0: the rows do not fit or the ranks differ; then there are no items
  int32_t num_items;                  // (source rank, source token) pairs that this rank receives
  int32_t num_sent;                   // (receiving rank, token) pairs that this rank sends
  int32_t item_begin[kMaxRanks + 1];  // items by source rank

#ifdef __CUDACC__
  __device__ bool has_expert_layout() const { return layout == static_cast<int32_t>(Layout::kExpert); }
#endif
};

// The arrays of an unusable plan are not written.
struct Plan {
  PlanHead* head;
  int32_t* expert_rows;   // [num_local_experts] true counts
  int32_t* expert_begin;  // [num_local_experts + 1] first row of each expert's group, then the end
  int32_t* sent_item;     // [max_tokens, sent_ints] of this rank's tokens: number of the item at every rank, or -1
  uint32_t* sent_k;       // [max_tokens] bit mask of the columns of topk_idx that have an expert
  int32_t* items;         // [capacity, item_ints] received items by source rank and number
};

inline Plan carve_plan(Cursor& c, const Config& config, size_t capacity) {
  Plan plan;
  plan.head = c.take<PlanHead>(1);
  plan.expert_rows = c.take<int32_t>(config.num_local_experts());
  plan.expert_begin = c.take<int32_t>(config.num_local_experts() + 1);
  plan.sent_item = c.take<int32_t>(static_cast<size_t>(config.max_tokens) * config.sent_ints());
  plan.sent_k = c.take<uint32_t>(config.max_tokens);
  plan.items = c.take<int32_t>(capacity * config.item_ints());
  return plan;
}

inline Plan read_plan(const Config& config, int32_t* block) {
  Cursor c(block);
  return carve_plan(c, config, 0);
}

// [int32] that hold every plan of at most `num_rows` output rows (-1: of any number).
inline size_t plan_capacity(const Config& config, int64_t num_rows) {
  int64_t items = static_cast<int64_t>(config.num_ranks()) * config.max_tokens;
  if (num_rows >= 0) items = std::min(items, num_rows);
  Cursor c;
  carve_plan(c, config, items);
  return c.size() / sizeof(int32_t);
}

}  // namespace ep::cuda
