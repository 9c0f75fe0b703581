// How large one buffer is, and the limits that are compiled in.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/args.h"
#include "common/layout.h"

namespace ep::cuda {

constexpr int kMaxLocal = 8;  // ranks of one node; kernels give each a lane
constexpr int kMaxNodes = 8;  // nodes of one buffer; a rail block gives each a warp (rail.cuh)
constexpr int kMaxRanks = kMaxLocal * kMaxNodes;
constexpr int kRankWords = (kMaxRanks + 31) / 32;  // of masks, and lanes, with one for each rank
constexpr int kMaxTopk = 32;                       // a token's choices have a bit each (Plan::sent_k)
// Tokens that are staged, and items whose partial sums are pushed, per chunk flag. Measured on 2 H200: fewer tokens
// cost more flags than they save time; more items keep the owner waiting.
constexpr int kTokenChunk = 1024;
constexpr int kItemChunk = 512;
constexpr int kSumChunk = 512;    // tokens whose sums travel between nodes, per chunk flag
constexpr int kVector = 16;       // bytes; bulk copies and vector accesses need multiples
constexpr int kLine = 1024;       // bytes; rows begin at multiples, in shared memory too, so that no request is split
constexpr int kScaleBlock = 128;  // elements of a float8 row that share a scale

EP_HOST_DEVICE constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// [bytes] from one row to the next where rows are staged or pushed.
EP_HOST_DEVICE constexpr size_t row_stride(size_t row_bytes) {
  return round_up(row_bytes, row_bytes < 4 * kLine ? 128 : kLine);
}

// Chunks in which a rank's tokens are staged; the last one stands for all that are empty.
EP_HOST_DEVICE constexpr int num_token_chunks(int num_tokens) {
  return num_tokens == 0 ? 1 : (num_tokens + kTokenChunk - 1) / kTokenChunk;
}

// One buffer: the same on every rank but for `rank`. Ranks are numbered by node: those of a node are neighbours.
struct Config {
  int rank = 0;
  int num_nodes = 1;
  int ranks_per_node = 1;  // ranks that reach each other's memory
  int num_experts = 1;
  int num_topk = 1;
  int max_tokens = 1;  // tokens a rank may bring to one dispatch
  int hidden = 1;
  DType dtype = DType::kBFloat16;

  EP_HOST_DEVICE int num_ranks() const { return num_nodes * ranks_per_node; }
  EP_HOST_DEVICE int node_of(int r) const { return r / ranks_per_node; }
  EP_HOST_DEVICE int local_of(int r) const { return r % ranks_per_node; }
  EP_HOST_DEVICE int num_others() const { return num_nodes - 1; }  // nodes
  EP_HOST_DEVICE int num_local_experts() const { return num_experts / num_ranks(); }
  // Local experts that one token can have on one rank.
  EP_HOST_DEVICE int max_copies() const { return num_topk < num_local_experts() ? num_topk : num_local_experts(); }
  // Chunks of tokens of one rank, and of items that one rank sends to another: at most all its tokens.
  EP_HOST_DEVICE int max_token_chunks() const { return (max_tokens + kTokenChunk - 1) / kTokenChunk; }
  EP_HOST_DEVICE int max_sum_chunks() const { return (max_tokens + kSumChunk - 1) / kSumChunk; }
  // Chunks of items from other nodes are pushed first. Those from the own node begin at this number.
  EP_HOST_DEVICE int first_own_chunk() const { return num_nodes == 1 ? 0 : (max_tokens + kItemChunk - 1) / kItemChunk; }
  EP_HOST_DEVICE int max_item_chunks() const { return first_own_chunk() + (max_tokens + kItemChunk - 1) / kItemChunk; }

  size_t row_bytes() const { return hidden * size_of(dtype); }
  size_t slot_stride() const { return row_stride(row_bytes()); }  // from one partial sum to the next
  size_t scale_bytes() const { return hidden / kScaleBlock * sizeof(float); }
  size_t weights_bytes() const { return num_topk * sizeof(float); }
  // [int32] of an item (item.cuh): token, number of copies, a value per copy, a byte per copy.
  int item_ints() const { return static_cast<int>(round_up(2 + max_copies() + (max_copies() + 3) / 4, 4)); }
  // [int32] per token of a table (Plan::tables).
  int table_ints() const { return static_cast<int>(round_up(ranks_per_node, 4)); }
  // [bytes] of a token's tail: scales, then weights. Float8 rows are shorter than rows of the dtype, but have scales.
  size_t max_tail_bytes() const { return round_up(scale_bytes(), kVector) + round_up(weights_bytes(), kVector); }
};

}  // namespace ep::cuda
