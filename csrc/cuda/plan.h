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
  int32_t num_addends;                // partial sums that come to this rank's inboxes
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
  // [num_nodes, max_tokens, table_ints] of the tokens of this rank and of its rail peers: number of the item at every
  // rank of the own node, or -1.
  int32_t* tables;
  uint32_t* sent_k;      // [max_tokens] of this rank's tokens: bit mask of the columns of topk_idx that have an expert
  uint32_t* sent_nodes;  // [max_tokens] bit mask of the nodes, without the own one, that have an expert; and
  uint8_t* k_node;       // [max_tokens, num_topk] node of each column's expert. Both only for several nodes.
  int32_t* items;        // [capacity, item_ints] received items by source rank and number
};

inline Plan carve_plan(Cursor& c, const Config& config, size_t capacity) {
  Plan plan;
  plan.head = c.take<PlanHead>(1);
  plan.expert_rows = c.take<int32_t>(config.num_local_experts());
  plan.expert_begin = c.take<int32_t>(config.num_local_experts() + 1);
  const size_t tokens = config.max_tokens, tokens_of_nodes = config.num_nodes > 1 ? tokens : 0;
  plan.tables = c.take<int32_t>(config.num_nodes * tokens * config.table_ints());
  plan.sent_k = c.take<uint32_t>(tokens);
  plan.sent_nodes = c.take<uint32_t>(tokens_of_nodes);
  plan.k_node = c.take<uint8_t>(tokens_of_nodes * config.num_topk);
  plan.items = c.take<int32_t>(capacity * config.item_ints());
  return plan;
}

inline Plan read_plan(const Config& config, int32_t* block) {
  Cursor c(block);
  return carve_plan(c, config, 0);
}

// [int32] that hold every plan of at most `num_rows` output rows (-1: of any number).
inline size_t plan_capacity(const Config& config, int64_t num_rows) {
  int64_t num_items = static_cast<int64_t>(config.num_ranks()) * config.max_tokens;
  if (num_rows >= 0) num_items = std::min(num_items, num_rows);
  Cursor c;
  carve_plan(c, config, num_items);
  return c.size() / sizeof(int32_t);
}

}  // namespace ep::cuda
