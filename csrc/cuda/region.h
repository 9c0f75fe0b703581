// The symmetric memory of one rank: what peers write into it and read from it. docs/protocol.md tells the story.
#pragma once
#include "cuda/call.h"
#include "cuda/config.h"

namespace ep::cuda {

// The counts of one rank's new plan, as every rank gets them: int32 [head_ints].
struct Head {
  int32_t* data;

  static int ints(const Config& config) {
    return static_cast<int>(round_up(config.num_ranks() + static_cast<size_t>(config.num_experts), 4));
  }

#ifdef __CUDACC__
  __device__ int32_t& items(int rank) const { return data[rank]; }  // items that it sends to the rank
  __device__ int32_t& tokens(const Config& config, int expert) const { return data[config.num_ranks() + expert]; }
#endif
};

// What one rank keeps of one source: its own, as long as source and readers share a node.
struct Inbox {
  int32_t* items;  // [ranks_per_node, max_tokens, item_ints] the source's items by receiver; written by the source
  char* staging;   // [max_tokens, row_stride of the operation] rows; written by the source, read by every receiver
  char* tails;     // [max_tokens, tail bytes of the operation] scales and weights; as staging
  char* slots;     // [ranks_per_node, max_tokens, slot_stride] partial sums by receiver and item; written by it
  float* weights;  // [max_tokens, num_topk] weights on their way back; written by the receivers
};

// Flags are raised in the memory of the rank that waits, by the rank that their index names. A flag holds the epoch of
// the last operation for which it was raised; `aborted` is 0 or 1.
struct Region {
  uint64_t* aborted;     // [num_ranks] the rank has aborted: its other flags may never come
  uint64_t* called;      // [num_ranks] the rank's Call is in `calls`, and the counts of a new plan in `heads`
  uint64_t* listed;      // [num_ranks] the rank's items are in its inbox
  uint64_t* consumed;    // [num_ranks] the rank has read all items, rows and tails that it needed
  uint64_t* slots_free;  // [num_ranks] the rank has read all partial sums in its inbox
  uint64_t* staged;  // [num_ranks, max_token_chunks] the rank's rows and tails of a chunk of tokens are in its inbox
  uint64_t*
      pushed;      // [num_ranks, max_item_chunks] the rank's partial sums of a chunk of items are in this rank's inbox
  Call* calls;     // [2, num_ranks] by the parity of the epoch: a peer can be one operation ahead
  int32_t* heads;  // [num_ranks, head_ints]
  Inbox inbox[kMaxNodes];
};

inline Region carve_region(Cursor& c, const Config& config) {
  const size_t ranks = config.num_ranks(), locals = config.ranks_per_node, tokens = config.max_tokens;
  Region region;
  region.aborted = c.take<uint64_t>(ranks);
  region.called = c.take<uint64_t>(ranks);
  region.listed = c.take<uint64_t>(ranks);
  region.consumed = c.take<uint64_t>(ranks);
  region.slots_free = c.take<uint64_t>(ranks);
  region.staged = c.take<uint64_t>(ranks * config.max_token_chunks());
  region.pushed = c.take<uint64_t>(ranks * config.max_item_chunks());
  region.calls = c.take<Call>(2 * ranks);
  region.heads = c.take<int32_t>(ranks * Head::ints(config));
  for (int node = 0; node < config.num_nodes; ++node) {
    Inbox& inbox = region.inbox[node];
    inbox.items = c.take<int32_t>(locals * tokens * config.item_ints());
    inbox.tails = c.take<char>(tokens * config.max_tail_bytes());
    inbox.staging = c.take<char>(tokens * row_stride(config.row_bytes()), kLine);
    inbox.slots = c.take<char>(locals * tokens * config.slot_stride(), kLine);
    inbox.weights = c.take<float>(tokens * config.num_topk);
  }
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
