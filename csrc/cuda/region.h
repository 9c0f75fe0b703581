// The symmetric memory of one rank: what peers write into it and read from it. docs/protocol.md tells the story.
#pragma once
#include <tuple>
#include <utility>

#include "cuda/call.h"
#include "cuda/config.h"

namespace ep::cuda {

// The counts of one rank's new plan, as every rank gets them: int32 [counts_ints].
struct Counts {
  int32_t* data;

  static int ints(const Config& config) {
    return static_cast<int>(round_up(config.num_ranks() + static_cast<size_t>(config.num_experts), 4));
  }

#ifdef __CUDACC__
  __device__ int32_t& num_items(int rank) const { return data[rank]; }  // items that it sends to the rank
  __device__ int32_t& num_tokens(const Config& config, int expert) const { return data[config.num_ranks() + expert]; }
#endif
};

// What one rank keeps of one source, for the ranks of its own node: of itself, and of its rail peer on every other
// node. "Written by the source": for a rail peer, through the wire.
struct Inbox {
  int32_t* items;  // [ranks_per_node, max_tokens, item_ints] the source's items by receiver; written by the source
  char* staging;   // [max_tokens, row_stride of the operation] rows; written by the source, read by every receiver
  char* tails;     // [max_tokens, tail bytes of the operation] scales and weights; as staging
  char* slots;     // [ranks_per_node, max_tokens, slot_stride] partial sums by receiver and item; written by it
  float* weights;  // [max_tokens, num_topk] weights on their way back; written by the receivers
};

// What one rank keeps for its rail peer on one other node.
struct RailArrays {
  int32_t* items_out;  // [ranks_per_node, max_tokens, item_ints] this rank's items for that node, before they travel
  int32_t* table_out;  // [max_tokens, table_ints] numbers of those items by token and receiver, -1 for none; likewise
  int32_t* table_in;   // the same from the rail peer, for the ranks of the own node
  char* sums;          // [max_tokens, slot_stride] that node's sums of this rank's tokens; written by the rail peer
  float* weights;      // [max_tokens, num_topk] weights from that node; written by the rail peer
};

// Flags are raised in the memory of the rank that waits. A flag holds the epoch of the last operation for which it was
// raised; `aborted` is 0 or 1. "By the rank": of a rank on another node, its rail peer on the own node raises the flag
// here as soon as the wire has brought what it stands for (rail.cuh).
struct Region {
  uint64_t* aborted;   // [num_ranks] the rank has aborted: its other flags may never come
  uint64_t* called;    // [num_ranks] the rank's Call is in `calls`, and the counts of a new plan in `counts`
  uint64_t* listed;    // [num_ranks] the rank's items are in its inbox
  uint64_t* staged;    // [num_ranks, max_token_chunks] the rank's rows and tails of a chunk of tokens are in its inbox
  uint64_t* consumed;  // [ranks_per_node] the rank has read all items, rows and tails that it needed
  uint64_t* slots_free;  // [ranks_per_node] the rank has read all partial sums in its inboxes
  uint64_t* pushed;  // [ranks_per_node, max_item_chunks] the rank's partial sums of a chunk are in this rank's inboxes
  // Raised by this rank itself: its sums for another node are complete; that node's sums for it are here.
  uint64_t* summed;     // [num_others, max_sum_chunks]
  uint64_t* sums_here;  // likewise
  // Raised through the wire by the rail peer on another node, and seen by the relay alone: [num_others] and
  // [num_others, max chunks].
  uint64_t* call_arrived;
  uint64_t* items_arrived;
  uint64_t* rows_arrived;
  uint64_t* sums_arrived;
  Call* calls;      // [2, num_ranks] by the parity of the epoch: a peer can be one operation ahead
  int32_t* counts;  // [2, num_ranks, counts_ints] likewise
  Inbox inbox;      // of node 0 as source; that of node n begins n * inbox_bytes later
  size_t inbox_bytes;
  RailArrays rail;  // the first; rail_bytes to the next
  size_t rail_bytes;
};

inline Inbox carve_inbox(Cursor& c, const Config& config) {
  const size_t locals = config.ranks_per_node, tokens = config.max_tokens;
  Inbox inbox;
  inbox.staging = c.take<char>(tokens * row_stride(config.row_bytes()), kLine);
  inbox.slots = c.take<char>(locals * tokens * config.slot_stride(), kLine);
  inbox.items = c.take<int32_t>(locals * tokens * config.item_ints());
  inbox.tails = c.take<char>(tokens * config.max_tail_bytes());
  inbox.weights = c.take<float>(tokens * config.num_topk);
  return inbox;
}

inline RailArrays carve_rail(Cursor& c, const Config& config) {
  const size_t locals = config.ranks_per_node, tokens = config.max_tokens;
  RailArrays rail;
  rail.sums = c.take<char>(tokens * config.slot_stride(), kLine);
  rail.items_out = c.take<int32_t>(locals * tokens * config.item_ints());
  rail.table_out = c.take<int32_t>(tokens * config.table_ints());
  rail.table_in = c.take<int32_t>(tokens * config.table_ints());
  rail.weights = c.take<float>(tokens * config.num_topk);
  return rail;
}

inline Region carve_region(Cursor& c, const Config& config) {
  const size_t ranks = config.num_ranks(), locals = config.ranks_per_node, others = config.num_others();
  Region region{};
  region.aborted = c.take<uint64_t>(ranks);
  region.called = c.take<uint64_t>(ranks);
  region.listed = c.take<uint64_t>(ranks);
  region.staged = c.take<uint64_t>(ranks * config.max_token_chunks());
  region.consumed = c.take<uint64_t>(locals);
  region.slots_free = c.take<uint64_t>(locals);
  region.pushed = c.take<uint64_t>(locals * config.max_item_chunks());
  region.summed = c.take<uint64_t>(others * config.max_sum_chunks());
  region.sums_here = c.take<uint64_t>(others * config.max_sum_chunks());
  region.call_arrived = c.take<uint64_t>(others);
  region.items_arrived = c.take<uint64_t>(others);
  region.rows_arrived = c.take<uint64_t>(others * config.max_token_chunks());
  region.sums_arrived = c.take<uint64_t>(others * config.max_sum_chunks());
  region.calls = c.take<Call>(2 * ranks);
  region.counts = c.take<int32_t>(2 * ranks * Counts::ints(config));
  // Whatever repeats begins at a multiple of a line.
  const auto repeat = [&](size_t times, auto carve) {
    c.take<char>(0, kLine);
    const size_t begin = c.size();
    const auto first = carve(c, config);
    c.take<char>(0, kLine);
    const size_t bytes = times == 0 ? 0 : c.size() - begin;
    if (times > 1) c.take<char>((times - 1) * bytes);
    return std::pair(first, bytes);
  };
  std::tie(region.inbox, region.inbox_bytes) = repeat(config.num_nodes, carve_inbox);
  if (others > 0) std::tie(region.rail, region.rail_bytes) = repeat(others, carve_rail);
  return region;
}

// [bytes] at the start of a region that must be 0 before its first use: all flags.
inline size_t flag_bytes(const Config& config) {
  Cursor c;
  return reinterpret_cast<size_t>(carve_region(c, config).calls);
}

inline size_t region_bytes(const Config& config) {
  Cursor c;
  carve_region(c, config);
  return c.size();
}

// [bytes] from the start of a region to the flags `aborted`, for the host.
inline size_t aborted_offset(const Config& config) {
  Cursor c;
  return reinterpret_cast<size_t>(carve_region(c, config).aborted);
}

}  // namespace ep::cuda
