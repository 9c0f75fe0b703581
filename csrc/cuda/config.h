// Sizes of one buffer, and compile-time limits.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/sizes.h"

namespace ep::cuda {

// The builds of the kernels, as a template argument. Each is instantiated in files of its own (dispatch_one_node.cu,
// for example). Shorter code starts sooner, so there is a build for one node, and one for direct plans.
// Timing and masks cost registers, and few launches use them: they have builds that serve any number of nodes.
enum class Kernels {
  kOneNode,
  kSeveralNodes,
  kDirect,  // one node, makes a direct plan
  kTimed,   // adds up the time of waits
  // Decode layout (decode/):
  kDecode,        // one node, with an ordinary plan or that of a handle
  kDecodeDirect,  // one node, makes a direct plan
  kDecodeSeveralNodes,
  kDecodeExtras  // masks late ranks, and adds up the time of waits
};
constexpr bool is_for_one_node(Kernels kernels) {
  return kernels == Kernels::kOneNode || kernels == Kernels::kDirect || kernels == Kernels::kDecode ||
         kernels == Kernels::kDecodeDirect;
}
constexpr bool has_several_nodes(Kernels kernels) {
  return kernels == Kernels::kSeveralNodes || kernels == Kernels::kDecodeSeveralNodes;
}
constexpr bool measures_waits(Kernels kernels) {
  return kernels == Kernels::kTimed || kernels == Kernels::kDecodeExtras;
}

// Limits of a buffer. Only addresses of peers and sets of ranks in registers have room for so many.
constexpr int kMaxLocal = 72;   // ranks of one node
constexpr int kMaxNodes = 32;   // nodes; each has a lane in kernels, and a bit of a set of nodes
constexpr int kMaxRanks = 512;  // ranks in all
constexpr int kMaxTopk = 64;    // columns of topk_idx; each has a bit (Plan::sent_k)
constexpr int kRailWarps = 15;  // warps of a rail block, at least
// Items per chunk flag of `pushed`. Tuned on 2 H200: larger chunks keep the owner waiting. To measure again: python -m
// ep_dispatcher.tools.bench --engine cuda
constexpr int kItemChunk = 512;
constexpr int kVector = 16;  // [bytes] unit of bulk copies and vector accesses; sizes and addresses are multiples
constexpr int kLine = 1024;  // [bytes] long staged rows begin at multiples (row_stride): no request is split
constexpr int kTaggedSumBytes = 8;  // of a partial sum in a tagged word
constexpr int kScaleBlock = 128;  // elements of a float8 row whose scales are one word; the last block has what is left

// [host] [thread] Return `n`, rounded up to a multiple.
EP_HOST_DEVICE constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// [host] [thread] Return the bytes from one row to the next in staging, or from one slot to the next. Rows of 4 KiB and
// more begin at whole lines. Rows are cut into pieces for shared memory in the same way.
EP_HOST_DEVICE constexpr size_t row_stride(size_t row_bytes) {
  return round_up(row_bytes, row_bytes < 4 * kLine ? 128 : kLine);
}

// [host] [thread] Return the number of tagged words of a partial sum, with room for whole parts of kLine bytes.
EP_HOST_DEVICE constexpr size_t tagged_sum_words(size_t row_bytes) {
  return round_up(row_bytes, kLine) / kTaggedSumBytes;
}

// What the host says of one buffer, the same on all ranks, except `rank`. Ranks are numbered by node: those of a node
// are adjacent. Kernels read it in a Context, which also has the results of its functions.
struct Config : Sizes {
  int rank = 0;
  // Whether new plans are direct plans (decode/direct.cuh). Only with one node, few tokens and at most 32 columns.
  // Needed for masks.
  bool plans_directly = false;
  // Tokens per chunk flag, as powers of two (Shape of memory.py): for staged rows; for sums sent between nodes.
  int log_token_chunk = 10, log_sum_chunk = 9;
  // The window of a source on another node: the chunks of its tokens with slots here at a time (Shape of memory.py).
  int window_chunk = 1;   // [tokens] of a chunk
  int window_chunks = 1;  // chunks with slots

  EP_HOST_DEVICE int node_of(int r) const { return r / ranks_per_node; }
  EP_HOST_DEVICE int local_of(int r) const { return r % ranks_per_node; }
  EP_HOST_DEVICE int num_others() const { return num_nodes - 1; }  // other nodes
  // Return a number for node_of without a division: for ranks below kMaxRanks, rank * node_factor() >> kNodeShift.
  static constexpr int kNodeShift = 20;
  EP_HOST_DEVICE constexpr int node_factor() const { return (1 << kNodeShift) / ranks_per_node + 1; }
  // Return a bit for each node.
  EP_HOST_DEVICE uint32_t all_nodes() const { return ~0u >> (kMaxNodes - num_nodes); }
  // Return the number of words of a set of ranks (RankSet).
  EP_HOST_DEVICE int rank_words() const { return num_ranks() / 64 + 1; }
  // Return the minimum number of rail blocks: with a warp for each relay, and one for a sender.
  int least_rail_blocks() const { return num_nodes == 1 ? 0 : (num_nodes + kRailWarps - 1) / kRailWarps; }
  // Return the maximum number of local experts of one token.
  EP_HOST_DEVICE int max_copies() const { return num_topk < num_local_experts() ? num_topk : num_local_experts(); }
  // Return the number of int16 per token in Region::choices: num_topk, rounded up to whole vectors.
  EP_HOST_DEVICE int choices_per_token() const { return (num_topk + 7) / 8 * 8; }
  // Return the number of tagged words for the combine weights of a rank, two in each (Region::combine_weights).
  EP_HOST_DEVICE int combine_weight_words() const { return (max_tokens * num_topk + 1) / 2; }
  // Return whether partial sums in decode layout travel as tagged words (few.cuh): with very few tokens.
  bool tags_sums() const { return plans_directly && !masks && num_ranks() * max_tokens <= 64; }
  EP_HOST_DEVICE int token_chunk() const { return 1 << log_token_chunk; }
  EP_HOST_DEVICE int sum_chunk() const { return 1 << log_sum_chunk; }
  // Return the number of chunks of a rank's tokens; 1 without tokens. The last chunk also raises the flags of all empty
  // chunks.
  EP_HOST_DEVICE int num_token_chunks(int num_tokens) const {
    return num_tokens == 0 ? 1 : (num_tokens + token_chunk() - 1) >> log_token_chunk;
  }
  // Return the maximum number of chunks of a rank's tokens: in staging, or of sums between nodes.
  EP_HOST_DEVICE int max_token_chunks() const { return (max_tokens + token_chunk() - 1) >> log_token_chunk; }
  EP_HOST_DEVICE int max_sum_chunks() const { return (max_tokens + sum_chunk() - 1) >> log_sum_chunk; }
  // Return the maximum number of far chunks: of tokens of a source on another node, the same for all ranks that push.
  EP_HOST_DEVICE int max_far_chunks() const {
    return num_nodes == 1 ? 0 : (max_tokens + window_chunk - 1) / window_chunk;
  }
  // Return the number of slots of one rank for one source on another node.
  EP_HOST_DEVICE int window_slots() const {
    return max_tokens < window_chunk * window_chunks ? max_tokens : window_chunk * window_chunks;
  }
  // Return the maximum number of own chunks: of items from the own node. A list has at most max_tokens items.
  EP_HOST_DEVICE int max_own_chunks() const { return (max_tokens + kItemChunk - 1) / kItemChunk; }
  // Return the number of chunks of `pushed`. Far chunks come first: they are pushed first.
  EP_HOST_DEVICE int max_pushed_chunks() const { return max_far_chunks() + max_own_chunks(); }

  // Sizes for the host. Kernels find them in Context.
  size_t slot_stride() const { return row_stride(row_bytes()); }
  size_t scale_bytes() const { return (hidden + kScaleBlock - 1) / kScaleBlock * sizeof(float); }
  // Return the number of int32 per item (item.cuh): token, number of copies, a value per copy, a byte per copy.
  int item_ints() const { return static_cast<int>(round_up(2 + max_copies() + (max_copies() + 3) / 4, 4)); }
  // Return the number of int32 per token in a table (Plan::tables).
  int table_ints() const { return static_cast<int>(round_up(ranks_per_node, 4)); }
  // Return the maximum bytes of a token's metadata: scales, then weights. Float8 rows are shorter than rows of `dtype`,
  // but have scales.
  size_t max_metadata_bytes() const { return round_up(scale_bytes(), kVector) + round_up(weights_bytes(), kVector); }
};

// Rows in messages of the NCCL wire with one plan (messages.h). They are exact if all hosts have waited for the counts.
// Otherwise they are limited if max_tokens_to_node was given. Part of the plan's head, there always with the rows that
// cross; also reported to a host that waits for counts, with the rows of messages.
struct MessageRows {
  int32_t known;  // 0: nothing below is known, messages have rows for all tokens of the buffer, and nothing is packed
  int32_t limit;  // rows of each message, however many cross: max_tokens_to_node; 0: messages are exact
  // A bit per other node: messages to it have only tokens with experts there, and their rows are numbered without gaps
  // (Plan::sent_rows). In others the row is the token.
  uint32_t packed;
  int32_t to[kMaxNodes], from[kMaxNodes];  // rows of this rank's tokens for each node; of its rail peer's tokens there
};

}  // namespace ep::cuda
