// The shared memory of one rank, and views of it. All offsets come from the carve functions. Without a base their
// cursor measures.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/cursor.h"
#include "cpu/call.h"
#include "cpu/config.h"
#include "cpu/flags.h"

namespace ep::cpu {

// The Call and counts of one source rank in a dispatch, one message. Every rank needs those of every rank.
struct Counts {
  struct Start {
    Call call;
    int32_t max_recv_rows, num_tokens;  // may differ between ranks, unlike the Call
  };
  Start* start;
  int32_t* node_tokens;    // [num_nodes] tokens for a node; for the source's own node all tokens
  int32_t* rank_tokens;    // [num_ranks] tokens for a rank
  int32_t* expert_tokens;  // [num_experts] tokens for an expert
};

template <class C>
Counts carve_counts(C& c, const Config& config) {
  Counts counts;
  c.take(counts.start, kFlags, 1);
  c.take(counts.node_tokens, kFlags, config.num_nodes);
  c.take(counts.rank_tokens, kFlags, config.num_ranks());
  c.take(counts.expert_tokens, kFlags, config.num_experts);
  return counts;
}

// The lists of one source rank for one node, a list per receiver. Items are in the order of the source's tokens. The
// copies of an item ascend by expert.
struct Lists {
  struct OfRank {
    int32_t num_items, num_copies;
    int32_t* payload_row;  // [num_items] row of the payload
    int32_t* slot;         // [num_items] slot of the partial sum on the way back
    int32_t* copy_begin;   // [num_items + 1]
    int32_t* expert;       // [num_copies] local expert
    int32_t* k;            // [num_copies] column of topk_idx
  };
  // [node_tokens + 1] first slot of each row of the payload; with masks instead a bit for each local rank with a slot
  int32_t* slot_begin;
  std::vector<OfRank> of_rank;
};

inline Lists carve_lists(Cursor& c, const Config& config, const Counts& counts, int node) {
  Lists lists;
  lists.slot_begin = c.take<int32_t>(counts.node_tokens[node] + 1);
  for (int local = 0; local < config.ranks_per_node; ++local) {
    const int rank = config.rank_at[node * config.ranks_per_node + local];
    const int experts = config.num_local_experts();
    Lists::OfRank of;
    of.num_items = counts.rank_tokens[rank];
    of.num_copies = 0;
    for (int e = 0; e < experts; ++e) of.num_copies += counts.expert_tokens[rank * experts + e];
    of.payload_row = c.take<int32_t>(of.num_items);
    of.slot = c.take<int32_t>(of.num_items);
    of.copy_begin = c.take<int32_t>(of.num_items + 1);
    of.expert = c.take<int32_t>(of.num_copies);
    of.k = c.take<int32_t>(of.num_copies);
    lists.of_rank.push_back(of);
  }
  return lists;
}

// Return the bytes of the largest Lists.
inline size_t max_lists_bytes(const Config& config) {
  // At most, every token goes to as many ranks of the node as its top-k can reach. Each array is padded.
  const size_t tokens = config.max_tokens, items = tokens * config.max_partials(), copies = tokens * config.num_topk;
  const size_t arrays = 1 + 5 * static_cast<size_t>(config.ranks_per_node);
  return (tokens + 3 * items + 2 * copies + arrays) * sizeof(int32_t) + arrays * Cursor::kAlignment;
}

// Calls at the start of a message with rows or sums between nodes. Different Calls make messages of different sizes: a
// receiver has room for the largest message, and compares these Calls before it reads on.
struct SenderCalls {
  Call sender;
  Call other;  // the first Call seen by the sender that differs from its own, or its own again
};

inline SenderCalls* carve_calls(Cursor& c) { return c.take<SenderCalls>(1); }

// The rows of one source rank for one node, as one message. Staging has the same layout.
struct Payload {
  SenderCalls* calls;       // written only in messages between nodes
  std::vector<char*> rows;  // each [num_rows, bytes_per_row]
  float* weights;           // [num_rows, num_topk], or null
};

inline Payload carve_payload(Cursor& c, const Config& config, const std::vector<size_t>& bytes_per_row,
                             bool has_weights, size_t num_rows) {
  Payload payload;
  payload.calls = carve_calls(c);
  for (size_t bytes : bytes_per_row) payload.rows.push_back(c.take<char>(num_rows * bytes));
  payload.weights = has_weights ? c.take<float>(num_rows * config.num_topk) : nullptr;
  return payload;
}

// Return the bytes of the largest Payload.
inline size_t max_payload_bytes(const Config& config) {
  // Rows of a dtype take at least 2 bytes an element. float8 rows take less: 16 take 20 with their scale.
  Cursor c;
  carve_calls(c);
  return c.size() + config.max_tokens * (config.row_bytes() + config.weights_bytes()) + 3 * Cursor::kAlignment;
}

// Partial sums of one source's tokens: written by the ranks of this node, read by the owner of the inbox.
struct Slots {
  char* rows;      // [max_tokens * max_partials, row_bytes]; with masks by local rank of the writer and token
  float* weights;  // [max_tokens * max_partials, num_topk]
};

// Memory kept of one source: of itself, or of its rail peer on another node.
struct Inbox {
  Counts counts;
  char* lists;    // [max_lists_bytes] Lists of the source for this node
  char* payload;  // [max_payload_bytes] staging: Payload of the source for this node
  Slots slots;
};

// The shared memory of one rank. Flags and Calls are written by this rank and read by its peers on the node.
struct Region {
  Flag* aborted;             // 0, or an AbortReason
  Flag* masked;              // [ranks_per_node] not 0: this rank has masked that one. Only with masks
  Flag* called;              // this rank's Call is written
  Call* calls;               // [2] by the parity of the epoch: a peer can be one epoch ahead
  Flag* counted;             // [num_nodes] the counts from the node are in the inbox
  Flag* listed;              // [num_nodes] the lists from the node are in the inbox
  Flag* staged;              // [num_nodes] the rows from the node are in the inbox
  Flag* pushed;              // [num_nodes] this rank has written all its partial sums of the node's tokens
  Flag* consumed;            // this rank has read all it reads in this epoch
  std::vector<Inbox> inbox;  // [num_nodes] by the node of the source
};

template <class C>
Region carve_region(C& c, const Config& config) {
  Region region;
  c.take(region.aborted, kFlags, 1);
  c.take(region.masked, kFlags, config.masks ? config.ranks_per_node : 0);
  c.take(region.called, kFlags, 1);
  c.take(region.calls, kFlags, 2);
  c.take(region.counted, kFlags, config.num_nodes);
  c.take(region.listed, kFlags, config.num_nodes);
  c.take(region.staged, kFlags, config.num_nodes);
  c.take(region.pushed, kFlags, config.num_nodes);
  c.take(region.consumed, kFlags, 1);
  const size_t slots = static_cast<size_t>(config.max_tokens) * config.max_partials();
  for (int node = 0; node < config.num_nodes; ++node) {
    Inbox inbox;
    inbox.counts = carve_counts(c, config);
    c.take(inbox.lists, "lists", max_lists_bytes(config));
    c.take(inbox.payload, "rows", max_payload_bytes(config));
    c.take(inbox.slots.rows, "slots", slots * config.row_bytes());
    c.take(inbox.slots.weights, "weights", slots * config.num_topk);
    region.inbox.push_back(inbox);
  }
  return region;
}

}  // namespace ep::cpu
