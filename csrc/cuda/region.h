// The region: memory of one rank that peers write and read. docs/protocol.md explains in which order.
#pragma once
#include <tuple>
#include <utility>

#include "cuda/config.h"
#include "cuda/sync/call.h"

namespace ep::cuda {

// Counts of one rank's new plan: int32 [counts_ints]. Written by the source or its relay, read by every rank.
struct Counts {
  int32_t* data;

  // [host] Return the number of int32 of one rank's counts.
  static int ints(const Config& config) {
    const size_t nodes = config.num_nodes > 1 ? config.num_nodes : 0;
    return static_cast<int>(round_up(config.num_ranks() + config.num_experts + nodes, 4));
  }

#ifdef __CUDACC__
  __device__ int32_t& num_items(int rank) const { return data[rank]; }  // items from the source to `rank`
  // Tokens of the source for `expert`.
  __device__ int32_t& num_tokens(const Config& config, int expert) const { return data[config.num_ranks() + expert]; }
  // Tokens of the source with experts on `node`. Written with max_tokens_to_node; otherwise on the NCCL wire, by a rank
  // whose host waits for counts.
  __device__ int32_t& num_rows(const Config& config, int node) const {
    return data[config.num_ranks() + config.num_experts + node];
  }
#endif
};

// Eight bytes of data, and the epoch of their operation. Stored and loaded as one: a thread that sees the epoch has the
// data. So a tagged word is its own flag.
struct alignas(16) Tagged {
  uint64_t epoch, data;
};
constexpr int kTaggedChoices = 4;  // choices in a tagged word: int16, -1 for none

// Memory of one rank for one source, and for all ranks of its node. The source is the rank itself, or its rail peer on
// another node. A rail peer writes through the wire. For receivers on its own node a rank writes items, staging and
// metadata to its own inbox, for those on another node to its rail peer's inbox there. Slots belong to an inbox too,
// but lie elsewhere: a rail peer has fewer (Region::slots, RailArrays::slots).
struct Inbox {
  // Written by the source, read by the receivers.
  int32_t* items;  // [ranks_per_node, max_tokens, item_ints] by receiver and number
  char* staging;   // [max_tokens, row_stride] rows by token. In a combine, sums for the rail peer, unless they go
                   // directly there
  char* metadata;  // [max_tokens, metadata_bytes] scales and weights by token
  // Written by the receivers, read by this rank.
  float* weights;  // [max_tokens, num_topk] weights of a combine, by token
};

// Memory of one rank for its rail peer on one other node.
struct RailArrays {
  // Written by this rank, sent by its senders.
  int32_t* items_out;  // [ranks_per_node, max_tokens, item_ints] items for that node, by receiver and number
  int32_t* table_out;  // [max_tokens, table_ints] their numbers by token and receiver, -1 for none
  // Written by the rail peer, read by this rank.
  Tagged* call;       // [2, Call::kNumWords] by parity of the epoch: its Call, for this rank's relay
  int32_t* table_in;  // [max_tokens, table_ints] numbers of the rail peer's items on this node
  char*
      sums;  // [max_tokens, slot_stride] that node's sums of this rank's tokens; direct ones come from all its blocks.
             // In a dispatch with packed rows, written by this rank's senders: [max_tokens, row_stride] these rows
  char* packed_metadata;  // [max_tokens, metadata_bytes] their metadata
  float* weights;         // [max_tokens, num_topk] that node's weights of this rank's tokens
  // Written by the ranks of this node, read by this rank.
  char* slots;  // [ranks_per_node, window_slots, slot_stride] partial sums of the rail peer's tokens, by receiver and
                // token: token t has the slot t % window_slots
};

// All memory of one rank for peers. A flag is a uint64 in the region of the rank waiting for it. It holds the epoch of
// the last operation with this flag raised; only `aborted` and `excluded` hold none. A tagged word is its own flag. A
// flag about a rank of this node is raised by the rank itself. A flag about a rank of another node is raised by the
// rank's relay here, after the wire has delivered the data (rail.cuh). Only `aborted` of a rail peer needs no relay:
// the rail peer raises it through the wire.
struct Region {
  // About a rank. Raised by the rank or by its relay (`aborted`: by the rank or its host), read by this rank.
  // [num_ranks, rank_words] first word not 0: the rank or its host has aborted, and its missing flags may never rise.
  // The RankSet of those that it has waited for in vain, or of itself if it has left
  uint64_t* aborted;
  // [num_ranks] not 0: the rank, or its host, has masked this one. Only with Config::masks
  uint64_t* excluded;
  uint64_t* listed;  // [num_ranks] the rank's items are in its inbox on this node
  uint64_t*
      staged;  // [num_ranks, max_token_chunks] the rank's rows and metadata of a chunk are in its inbox on this node
  uint64_t* consumed;    // [ranks_per_node] the rank has read all items, rows and metadata it needs
  uint64_t* slots_free;  // [ranks_per_node] the rank has read all slots and weights of its inboxes
  uint64_t* pushed;  // [ranks_per_node, max_pushed_chunks] the rank's partial sums of a chunk are in this rank's slots
  uint64_t* freed;   // [ranks_per_node, max_far_chunks] the rank has read its slots of a chunk of other nodes' tokens
  // Tagged words about a rank. [2] by parity of the epoch: a peer can be one operation ahead.
  Tagged* called;  // [2, num_ranks, Call::kNumWords] the rank's Call; its counts of a new plan are in `counts`. Relayed
  Tagged* choices;  // [2, num_ranks, max_tokens, choices_per_token / kTaggedChoices] experts of the rank's tokens. Only
                    // with Config::plans_directly, as the next
  Tagged* combine_weights;  // [2, num_ranks, combine_weight_words] combine weights of the rank's tokens: two float
  // [num_ranks, max_tokens, tagged_sum_words] partial sums of this rank's tokens, by receiver and number: 8 bytes in
  // each word. Only with Config::tags_sums, in one copy (few.cuh)
  Tagged* tagged_sums;
  // About another node. Raised by this rank, read by this rank.
  uint64_t* summed;  // [num_others, max_far_chunks] sums of a chunk for that node are where Reducer::sums_for says
  uint64_t* sums_relayed;  // [num_others, max_sum_chunks] that node's sums and weights of a chunk are in RailArrays
  // Wire flags, about another node. Raised by the rail peer through the wire, read by this rank's relay for that node;
  // `inbox_free` by the senders.
  uint64_t* inbox_free;     // [num_others] its node has read all rows and metadata in its inbox for this rank's node
  uint64_t* call_arrived;   // [num_others] the rail peer's Call and counts are here
  uint64_t* items_arrived;  // [num_others] its items and table are here
  uint64_t* rows_arrived;   // [num_others, max_token_chunks] its rows and metadata of a chunk are here
  uint64_t* sums_arrived;   // [num_others, max_sum_chunks] its sums and weights of a chunk are here
  // NCCL wire: [num_others] copies of all wire flags, one for each other node. Raised by this rank: what the rail
  // peer's flag will cover is ready to be sent. Read by the kernels between messages (messages.cu).
  uint64_t* ready;
  size_t wire_flags;  // uint64 in one copy
  // NCCL wire: [num_nodes] the epoch of a message, sent behind its arrays; 0 from a rank that has aborted before they
  // were ready. That of the own node is written by the kernels between messages, and those of others are received.
  uint64_t* message_epochs;
  // About a rank: written by the rank or by its relay, read by this rank.
  int32_t* counts;  // [2, num_ranks, counts_ints] by parity of the epoch
  char* slots;  // [ranks_per_node, max_tokens, slot_stride] partial sums of this rank's tokens, by receiver and number.
                // Written by the receivers, read by this rank. In a dispatch with pushed rows: rows for this rank, by
                // source and token (row_slot)
  Inbox inbox;  // for node 0; the inbox for node n begins n * inbox_bytes later
  size_t inbox_bytes;
  RailArrays rail;  // for the first other node; the next one begins rail_bytes later
  size_t rail_bytes;
};

// [host] Lay out one inbox, or measure it.
template <class C>
Inbox carve_inbox(C& c, const Config& config) {
  const size_t locals = config.ranks_per_node, tokens = config.max_tokens;
  Inbox inbox;
  c.take(inbox.staging, "staging", tokens * row_stride(config.row_bytes()), kLine);
  c.take(inbox.items, "items", locals * tokens * config.item_ints());
  c.take(inbox.metadata, "tails", tokens * config.max_metadata_bytes());
  c.take(inbox.weights, "weights", tokens * config.num_topk);
  return inbox;
}

// [host] Lay out the arrays for one rail peer, or measure them.
template <class C>
RailArrays carve_rail(C& c, const Config& config) {
  const size_t locals = config.ranks_per_node, tokens = config.max_tokens;
  RailArrays rail;
  c.take(rail.sums, "sums", tokens * config.slot_stride(), kLine);
  c.take(rail.packed_metadata, "tails", tokens * config.max_metadata_bytes());
  c.take(rail.items_out, "items", locals * tokens * config.item_ints());
  c.take(rail.table_out, "tables", tokens * config.table_ints());
  c.take(rail.call, kFlags, 2 * Call::kNumWords);
  c.take(rail.table_in, "tables", tokens * config.table_ints());
  c.take(rail.weights, "weights", tokens * config.num_topk);
  c.take(rail.slots, "slots", locals * config.window_slots() * config.slot_stride(), kLine);
  return rail;
}

// [host] Lay out a region, or measure it. All flags and tagged words lie before `counts`: flag_bytes
// relies on this.
template <class C>
Region carve_region(C& c, const Config& config) {
  const size_t ranks = config.num_ranks(), locals = config.ranks_per_node, others = config.num_others();
  Region region{};
  c.take(region.aborted, kFlags, ranks * config.rank_words());
  c.take(region.excluded, kFlags, config.masks ? ranks : 0);
  c.take(region.listed, kFlags, ranks);
  c.take(region.staged, kFlags, ranks * config.max_token_chunks());
  c.take(region.consumed, kFlags, locals);
  c.take(region.slots_free, kFlags, locals);
  c.take(region.pushed, kFlags, locals * config.max_pushed_chunks());
  c.take(region.freed, kFlags, locals * config.max_far_chunks());
  c.take(region.summed, kFlags, others * config.max_far_chunks());
  c.take(region.sums_relayed, kFlags, others * config.max_sum_chunks());
  c.take(region.inbox_free, kFlags, others);
  c.take(region.call_arrived, kFlags, others);
  c.take(region.items_arrived, kFlags, others);
  c.take(region.rows_arrived, kFlags, others * config.max_token_chunks());
  c.take(region.sums_arrived, kFlags, others * config.max_sum_chunks());
  c.take(region.ready, kFlags, 0);  // its address
  region.wire_flags = region.ready - region.inbox_free;
  c.take(region.ready, kFlags, others * region.wire_flags);
  c.take(region.message_epochs, kFlags, others > 0 ? config.num_nodes : 0);
  const size_t few_tokens = config.plans_directly ? config.max_tokens : 0;
  c.take(region.called, kFlags, 2 * ranks * Call::kNumWords);
  c.take(region.choices, "choices", 2 * ranks * few_tokens * config.choices_per_token() / kTaggedChoices);
  c.take(region.combine_weights, "factors", config.plans_directly ? 2 * ranks * config.combine_weight_words() : 0);
  c.take(region.tagged_sums, "slots",
         config.tags_sums() ? ranks * few_tokens * tagged_sum_words(config.row_bytes()) : 0, kLine);
  c.take(region.counts, kFlags, 2 * ranks * Counts::ints(config));
  c.take(region.slots, "slots", locals * config.max_tokens * config.slot_stride(), kLine);
  // Inboxes and rail arrays, of which there are several, begin and end at a line.
  const auto repeat = [&](size_t times, auto carve) {
    c.align(kLine);
    const size_t begin = c.size();
    const auto first = carve();
    c.align(kLine);
    const size_t bytes = c.size() - begin;
    for (size_t i = 1; i < times; ++i) {
      carve();
      c.align(kLine);
    }
    return std::pair(first, bytes);
  };
  std::tie(region.inbox, region.inbox_bytes) = repeat(config.num_nodes, [&] { return carve_inbox(c, config); });
  if (others > 0) std::tie(region.rail, region.rail_bytes) = repeat(others, [&] { return carve_rail(c, config); });
  return region;
}

// [host] Return the number of bytes of all flags and tagged words, at the start of a region. They must be 0 before its
// first use.
inline size_t flag_bytes(const Config& config) {
  Cursor c;
  return reinterpret_cast<size_t>(carve_region(c, config).counts);
}

// [host] Return the number of bytes of a region.
inline size_t region_bytes(const Config& config) {
  Cursor c;
  carve_region(c, config);
  return c.size();
}

// [host] Return the bytes from the start of a region to `excluded`.
inline size_t excluded_offset(const Config& config) {
  Cursor c;
  return reinterpret_cast<size_t>(carve_region(c, config).excluded);
}

// [host] Return the bytes from the start of a region to `aborted`.
inline size_t aborted_offset(const Config& config) {
  Cursor c;
  return reinterpret_cast<size_t>(carve_region(c, config).aborted);
}

}  // namespace ep::cuda
