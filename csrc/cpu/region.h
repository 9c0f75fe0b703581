// What every rank keeps in shared memory, and the views of it. All offsets come from the carve functions.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/cursor.h"
#include "cpu/call.h"
#include "cpu/config.h"
#include "cpu/flags.h"

namespace ep::cpu {

// The call of one dispatch and the counts of one source rank: what every rank needs from every rank.
struct Counts {
  struct Start {
    Call call;
    int32_t max_recv_rows, num_tokens;  // may differ between ranks
  };
  Start* start;
  int32_t* node_tokens;    // [num_nodes] tokens that go to a node; on the source's own node all tokens
  int32_t* rank_tokens;    // [num_ranks] tokens that go to a rank
  int32_t* expert_tokens;  // [num_experts] tokens that go to an expert
};

inline Counts carve_counts(Cursor& c, const Config& config) {
  Counts counts;
  counts.start = c.take<Counts::Start>(1);
  counts.node_tokens = c.take<int32_t>(config.num_nodes);
  counts.rank_tokens = c.take<int32_t>(config.num_ranks());
  counts.expert_tokens = c.take<int32_t>(config.num_experts);
  return counts;
}

// For one source rank and one receiving node: which row goes where. An item is a (row, rank of the node), a copy
// is one local expert of an item; items are in the order of the source's tokens, copies ascend by expert.
struct Lists {
  struct OfRank {
    int32_t num_items, num_copies;
    int32_t* payload_row;  // [num_items] row of the message
    int32_t* slot;         // [num_items] slot of the partial sum on the way back
    int32_t* copy_begin;   // [num_items + 1]
    int32_t* expert;       // [num_copies] local expert
    int32_t* k;            // [num_copies] column of topk_idx
  };
  int32_t* slot_begin;  // [node_tokens + 1] slots of a row
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

inline size_t max_lists_bytes(const Config& config) {
  // Every token to every rank of the node that its top-k can reach, and the padding of each array.
  const size_t tokens = config.max_tokens, items = tokens * config.max_partials(), copies = tokens * config.num_topk;
  const size_t arrays = 1 + 5 * static_cast<size_t>(config.ranks_per_node);
  return (tokens + 3 * items + 2 * copies + arrays) * sizeof(int32_t) + arrays * Cursor::kAlignment;
}

// Stands in front of rows and sums that travel between nodes. Different calls make messages of different sizes, so a
// receiver has room for the largest one, and looks here first.
struct SenderCalls {
  Call sender;
  Call other;  // of a rank of the sender's node whose call differs, or the sender's again
};

inline SenderCalls* carve_calls(Cursor& c) { return c.take<SenderCalls>(1); }

// The rows of one source rank for one node, as they travel.
struct Payload {
  SenderCalls* calls;       // not of rows that stay on their node
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

inline size_t max_payload_bytes(const Config& config) {
  // float8 rows with scales take 1 + 4/128 bytes an element, the rows of every dtype 2 or more.
  Cursor c;
  carve_calls(c);
  return c.size() + config.max_tokens * (config.row_bytes() + config.weights_bytes()) + 3 * Cursor::kAlignment;
}

// Where the partial sums of one source rank's tokens meet.
struct Slots {
  char* rows;      // [max_tokens * max_partials, row_bytes]
  float* weights;  // [max_tokens * max_partials, num_topk]
};

// What a rank holds for the source on its own rail of one node (for its own node: itself).
struct Inbox {
  Counts counts;
  char* lists;    // max_lists_bytes
  char* payload;  // max_payload_bytes
  Slots slots;
};

// The shared memory of one rank, in full.
struct Region {
  Flag* aborted;   // 0, or a AbortReason once this rank has given up on this buffer
  Flag* called;    // the call of this epoch is written
  Call* calls;     // [2] by the parity of the epoch: a peer can be one epoch ahead
  Flag* counted;   // [num_nodes] the counts from this node is here
  Flag* listed;    // [num_nodes] the lists from this node are here
  Flag* staged;    // [num_nodes] the rows from this node are here
  Flag* pushed;    // [num_nodes] all partial sums of tokens of this node's ranks are in their slots
  Flag* consumed;  // this rank has read all that it reads in this epoch
  std::vector<Inbox> inbox;
};

inline Region carve_region(Cursor& c, const Config& config) {
  Region region;
  region.aborted = c.take<Flag>(1);
  region.called = c.take<Flag>(1);
  region.calls = c.take<Call>(2);
  region.counted = c.take<Flag>(config.num_nodes);
  region.listed = c.take<Flag>(config.num_nodes);
  region.staged = c.take<Flag>(config.num_nodes);
  region.pushed = c.take<Flag>(config.num_nodes);
  region.consumed = c.take<Flag>(1);
  const size_t slots = static_cast<size_t>(config.max_tokens) * config.max_partials();
  for (int node = 0; node < config.num_nodes; ++node) {
    Inbox inbox;
    inbox.counts = carve_counts(c, config);
    inbox.lists = c.take<char>(max_lists_bytes(config));
    inbox.payload = c.take<char>(max_payload_bytes(config));
    inbox.slots.rows = c.take<char>(slots * config.row_bytes());
    inbox.slots.weights = c.take<float>(slots * config.num_topk);
    region.inbox.push_back(inbox);
  }
  return region;
}

}  // namespace ep::cpu
