// The plan of one routing as one rank holds it: a block of int32. Python owns the block; a handle keeps it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "common/cursor.h"
#include "cpu/config.h"

namespace ep::cpu {

// The start of a plan: its origin and sizes.
struct PlanHead {
  static constexpr int32_t kMagic = 0x45504c4e;

  int32_t magic, plan_id;
  int64_t buffer_uid;
  int32_t layout, expert_alignment;
  int32_t num_tokens;   // of this rank, as a source
  int32_t num_rows;     // rows of the output, zero rows included
  int32_t num_items;    // (source rank, source token) pairs, received here
  int32_t num_copies;   // (source rank, source token, local expert) triples, received here
  int32_t num_reduced;  // tokens reduced here: this rank's own, and those of its rail peers
  uint64_t checksum;    // of the whole plan but itself; the memory is the caller's, who may have changed it
};

// Return whether an output row is for one local expert, not for all local experts of a token.
inline bool has_expert_rows(const PlanHead& head) { return head.layout != static_cast<int32_t>(Layout::kRank); }
inline bool decodes(const PlanHead& head) { return head.layout == static_cast<int32_t>(Layout::kDecode); }

struct Plan {
  PlanHead* head;
  int32_t* tokens_per_expert;  // [num_local_experts]
  int32_t* rows_per_expert;    // [num_local_experts] with padding
  int32_t* num_sent_rows;      // [num_nodes] of this rank's tokens; 0 for its own node
  int32_t* reduced_begin;      // [num_nodes + 1] first row to reduce from each node; its own node: its tokens
  int32_t* num_payload_rows;   // [num_ranks] rows of each source's payload on this node
  int32_t* item_begin;         // [num_ranks + 1] items by source rank
  int32_t* payload_row;        // [num_items] row in the source's payload on this node
  int32_t* item_slot;          // [num_items] slot of the partial sum, at the source or its rail peer
  int32_t* copy_begin;         // [num_items + 1]
  int32_t* output_row;         // [num_copies] row of the output
  int32_t* copy_expert;        // [num_copies] local expert
  int32_t* copy_k;             // [num_copies] column of the source's topk_idx
  int32_t* slot_begin;         // [num_reduced + num_nodes] node by node: slots of its rows (Lists::slot_begin)
  int32_t* sent_row;           // [num_nodes, num_tokens] row in the payload for a node, or -1

  // Return the number of rows to reduce from a node.
  int32_t num_reduced_from(int node) const { return reduced_begin[node + 1] - reduced_begin[node]; }
  // Return [num_reduced_from + 1]: first slot of each row to reduce from a node, then the end.
  const int32_t* slot_begin_of(int node) const { return slot_begin + reduced_begin[node] + node; }
};

// Lay the plan out. Without `sizes` take them from the block itself, a plan made before.
inline Plan carve_plan(Cursor& c, const Config& config, const PlanHead* sizes) {
  Plan plan;
  plan.head = c.take<PlanHead>(1);
  if (!sizes) sizes = plan.head;
  plan.tokens_per_expert = c.take<int32_t>(config.num_local_experts());
  plan.rows_per_expert = c.take<int32_t>(config.num_local_experts());
  plan.num_sent_rows = c.take<int32_t>(config.num_nodes);
  plan.reduced_begin = c.take<int32_t>(config.num_nodes + 1);
  plan.num_payload_rows = c.take<int32_t>(config.num_ranks());
  plan.item_begin = c.take<int32_t>(config.num_ranks() + 1);
  plan.payload_row = c.take<int32_t>(sizes->num_items);
  plan.item_slot = c.take<int32_t>(sizes->num_items);
  plan.copy_begin = c.take<int32_t>(sizes->num_items + 1);
  plan.output_row = c.take<int32_t>(sizes->num_copies);
  plan.copy_expert = c.take<int32_t>(sizes->num_copies);
  plan.copy_k = c.take<int32_t>(sizes->num_copies);
  plan.slot_begin = c.take<int32_t>(sizes->num_reduced + config.num_nodes);
  plan.sent_row = c.take<int32_t>(static_cast<size_t>(config.num_nodes) * sizes->num_tokens);
  return plan;
}

// Return a view of a plan made before.
inline Plan read_plan(const Config& config, const int32_t* block) {
  Cursor c(const_cast<int32_t*>(block));
  return carve_plan(c, config, nullptr);
}

// Return the checksum of a plan of `bytes`, a multiple of Cursor::kAlignment. A changed integer always changes it.
inline uint64_t checksum_of(const PlanHead* plan, size_t bytes) {
  static_assert(sizeof(PlanHead) <= Cursor::kAlignment);
  constexpr size_t kLanes = Cursor::kAlignment / sizeof(uint32_t);  // sums side by side, which compilers vectorise
  uint32_t sum[kLanes] = {}, sum_of_sums[kLanes] = {};              // the latter also notice another order
  uint32_t line[kLanes];
  for (size_t at = 0; at < bytes; at += Cursor::kAlignment) {
    std::memcpy(line, reinterpret_cast<const char*>(plan) + at, sizeof(line));
    if (at == 0) std::memset(reinterpret_cast<char*>(line) + offsetof(PlanHead, checksum), 0, sizeof(uint64_t));
    for (size_t i = 0; i < kLanes; ++i) {
      sum[i] += line[i];
      sum_of_sums[i] += sum[i];
    }
  }
  uint32_t low = 0, high = 0;
  for (uint32_t i = 0; i < kLanes; ++i) {
    low += sum[i] * (2 * i + 1);
    high += sum_of_sums[i] * (2 * i + 1);
  }
  return uint64_t{high} << 32 | low;
}

// Return the number of int32 of the largest plan with `num_rows` output rows and `num_tokens` tokens of this rank.
inline size_t plan_capacity(const Config& config, int num_tokens, int64_t num_rows, Layout layout) {
  const int64_t max_items = static_cast<int64_t>(config.num_ranks()) * config.max_tokens;
  const int64_t copies_per_item = std::min(config.num_topk, config.num_local_experts());
  const int64_t items = std::min(max_items, num_rows);
  const int64_t copies =
      layout == Layout::kRank ? items * copies_per_item : std::min(max_items * copies_per_item, num_rows);
  if (copies > INT32_MAX) throw std::length_error("a plan of more than 2^31 rows");
  PlanHead sizes{};
  sizes.num_tokens = num_tokens;
  sizes.num_items = static_cast<int32_t>(items);
  sizes.num_copies = static_cast<int32_t>(copies);
  sizes.num_reduced = num_tokens + (config.num_nodes - 1) * config.max_tokens;
  Cursor c;
  carve_plan(c, config, &sizes);
  return c.size() / sizeof(int32_t);
}

}  // namespace ep::cpu
