// Plan of one routing on one rank: int32 in device memory, allocated by Python and kept by the handle.
#pragma once
#include <algorithm>
#include <stdexcept>

#include "cuda/config.h"

namespace ep::cuda {

// Numbers of a plan, loaded together.
struct alignas(16) PlanSizes {
  int32_t num_rows;     // rows of the output used by the plan, with padding. Decode layout: with tokens
  int32_t num_items;    // received items: pairs of source rank and source token
  int32_t most_items;   // most items of a source on this node
  int32_t num_addends;  // partial sums that a combine brings to this rank's inboxes
};

// Start of a plan, for all later kernels with it, and behind it in memory `item_begin`. Written by block 0: in
// write_head, and other blocks read it after `listed` of this rank; or in publish_plan, and each block has a head of
// its own in this operation.
struct PlanHead : PlanSizes {
  int32_t made;              // epoch of its dispatch, low 32 bits
  int32_t layout;            // Layout of the output
  int32_t usable;            // 0: the rows do not fit, or the ranks differ; then the plan has no items
  MessageRows message_rows;  // only with several nodes

  // [host] Take the memory of a head.
  static PlanHead* take(Cursor& c, const Config& config) {
    return reinterpret_cast<PlanHead*>(c.take<int32_t>(num_ints(config.num_ranks())));
  }
  // [host] [thread] Return the number of int32 of a head.
  EP_HOST_DEVICE static int num_ints(int num_ranks) {
    return static_cast<int>(sizeof(PlanHead) / sizeof(int32_t)) + num_ranks + 1;
  }

#ifdef __CUDACC__
  // [num_ranks + 1] first item of each source rank, then the end.
  __device__ int32_t* item_begin() { return reinterpret_cast<int32_t*>(this + 1); }
  __device__ const int32_t* item_begin() const { return reinterpret_cast<const int32_t*>(this + 1); }
  // [thread] Return whether the output has a row for each local expert of a token: expert and decode layout.
  __device__ bool has_expert_layout() const { return layout != static_cast<int32_t>(Layout::kRank); }
  // [thread] Return the source of item `index`, one of num_items.
  __device__ int source_of(int index, int num_ranks) const {
    int source = 0;
#pragma unroll 1
    for (int end = num_ranks; end - source > 1;) {
      const int middle = (source + end) / 2;
      (index < item_begin()[middle] ? end : source) = middle;
    }
    return source;
  }
  // [thread] Return the number of items of a source.
  __device__ int items_of(int source) const { return item_begin()[source + 1] - item_begin()[source]; }
#endif
};

// Written by the planning blocks and stage warps of one dispatch, read by this and later operations. The arrays of an
// unusable plan may be unwritten.
struct Plan {
  PlanHead* head;
  int32_t* expert_rows;  // [num_local_experts] received tokens, without padding
  // [num_local_experts + 1] first row of each expert group, then the end. In decode layout as if the groups were
  // adjacent.
  int32_t* expert_begin;
  // [num_nodes, max_tokens, table_ints] by node, for tokens of this rank, or by row for those of its rail peer there:
  // the number of the token's item at each rank of this node, or -1. Read by combines.
  int32_t* tables;
  // [ceil(num_topk / 32), max_tokens] own tokens: a bit per column of topk_idx with an expert, 32 columns in a word
  uint32_t* sent_k;
  uint32_t* sent_nodes;  // [max_tokens] own tokens: a bit per other node with an expert. Only with several nodes.
                         // Also written for a plan that turns out unusable
  // [num_nodes, max_tokens] own tokens: the row for a node; of a token without one, that of the last token before it,
  // or -1. Only for nodes in MessageRows::packed; for other nodes the row is the token.
  int32_t* sent_rows;
  uint8_t* k_node;  // [max_tokens, num_topk] node of each column's expert. Only with several nodes
  // [max_far_chunks, num_ranks] by chunk of tokens and source on another node: the number of its first item here with a
  // token in this chunk or a later one. Unwritten for chunk 0, where it is 0, and for sources without items here.
  int32_t* chunk_begin;
  int32_t* items;  // [capacity, item_ints] received items, by source rank and number
};

// [host] Lay out a plan for `capacity` received items, or measure it.
inline Plan carve_plan(Cursor& c, const Config& config, size_t capacity) {
  Plan plan;
  plan.head = PlanHead::take(c, config);
  plan.expert_rows = c.take<int32_t>(config.num_local_experts());
  plan.expert_begin = c.take<int32_t>(config.num_local_experts() + 1);
  const size_t tokens = config.max_tokens, tokens_of_nodes = config.num_nodes > 1 ? tokens : 0;
  plan.tables = c.take<int32_t>(config.num_nodes * tokens * config.table_ints());
  plan.sent_k = c.take<uint32_t>((config.num_topk + 31) / 32 * tokens);
  plan.sent_nodes = c.take<uint32_t>(tokens_of_nodes);
  plan.sent_rows = c.take<int32_t>(tokens_of_nodes * config.num_nodes);
  plan.k_node = c.take<uint8_t>(tokens_of_nodes * config.num_topk);
  plan.chunk_begin = c.take<int32_t>(static_cast<size_t>(config.max_far_chunks()) * config.num_ranks());
  plan.items = c.take<int32_t>(capacity * config.item_ints());
  return plan;
}

// [host] Find the arrays of a plan in its memory. `items` comes last, so its capacity does not matter.
inline Plan read_plan(const Config& config, int32_t* memory) {
  Cursor c(memory);
  return carve_plan(c, config, 0);
}

// [host] Return the number of int32 of a plan with at most `num_rows` output rows (-1: any number).
inline size_t plan_capacity(const Config& config, int64_t num_rows) {
  int64_t num_items = static_cast<int64_t>(config.num_ranks()) * config.max_tokens;
  if (num_rows >= 0) num_items = std::min(num_items, num_rows);
  Cursor c;
  carve_plan(c, config, num_items);
  return c.size() / sizeof(int32_t);
}

}  // namespace ep::cuda
