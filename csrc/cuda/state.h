// What the kernels of one rank remember between operations, and what they report to the host.
#pragma once
#include "cuda/config.h"

namespace ep::cuda {

enum class Phase : int32_t { kFreeStaging = 0, kCounts = 1, kLists = 2, kRows = 3, kFreeSlots = 4, kSums = 5 };
enum class Mistake : int32_t { kNone = 0, kBadEntry = 1, kTooFewRows = 2, kTooManyRows = 3, kDiffer = 4 };

// A caller's mistake that an operation has found.
//   kBadEntry     detail: token, k, 1 if the expert is repeated; value: the entry
//   kTooFewRows   rows[r]: needed and given on rank r
//   kTooManyRows  detail: expert_alignment; rows[r] as above
//   kDiffer       detail: field, rank, theirs, rank 0's (call.h)
struct MistakeFacts {
  int32_t detail[4];
  int64_t value;
  int64_t rows[kMaxRanks][2];
};

// In device memory, 0 at the start.
struct State {
  uint64_t epoch;                     // of the last complete operation
  uint64_t staged_epoch;              // of the last operation after which `consumed` was raised
  uint64_t pushed_epoch;              // of the last operation after which `slots_free` was raised
  uint64_t bytes_read[kMaxRanks];     // from the inboxes of every rank of the node
  uint64_t bytes_written[kMaxRanks];  // to the slots there
  uint64_t bytes_sent[kMaxNodes];     // to the rail peer on every node: rows, tails, sums, weights
  uint64_t lists_sent[kMaxNodes];     // [bytes] likewise: Calls, counts, items, tables
  uint64_t wire_free;                 // [ns] when a paced wire can take the next bytes
  uint32_t aborted;                   // 1: kernels end as soon as they can and do nothing any more
  uint32_t count_done, list_done, pull_done, combine_done;  // blocks that have arrived; 0 between operations
  uint32_t next_token;  // of combine's tokens, taken in batches by all blocks; 0 between operations
  uint32_t mistake;     // Mistake of the operation under way, claimed by the first to find one; 0 between operations
  MistakeFacts facts;   // of it
};

struct StateArrays {
  State* state;
  uint32_t* staged_done;  // [max_token_chunks] blocks that have staged their tokens of a chunk; 0 between operations
  uint32_t* pushed_done;  // [max_item_chunks] blocks that have stored their sums of a chunk; 0 between operations
  uint32_t* summed_done;  // [num_others, max_sum_chunks] blocks that have stored their sums of a chunk; likewise
  uint32_t* items_sent;   // [num_others] warps that have sent their share; likewise, as the next two
  uint32_t* rows_sent;    // [num_others, max_token_chunks]
  uint32_t* sums_sent;    // [num_others, max_sum_chunks]
  int32_t* block_num_tokens;  // [num_blocks, num_experts] tokens per expert counted by each block; then the sum over
                              // the blocks before it
  int32_t* block_num_items;   // [num_blocks, num_ranks] items per rank; likewise
};

inline StateArrays carve_state(Cursor& c, const Config& config, int num_blocks) {
  StateArrays arrays;
  arrays.state = c.take<State>(1);
  arrays.staged_done = c.take<uint32_t>(config.max_token_chunks());
  arrays.pushed_done = c.take<uint32_t>(config.max_item_chunks());
  const size_t others = config.num_others();
  arrays.summed_done = c.take<uint32_t>(others * config.max_sum_chunks());
  arrays.items_sent = c.take<uint32_t>(others);
  arrays.rows_sent = c.take<uint32_t>(others * config.max_token_chunks());
  arrays.sums_sent = c.take<uint32_t>(others * config.max_sum_chunks());
  arrays.block_num_tokens = c.take<int32_t>(static_cast<size_t>(num_blocks) * config.num_experts);
  arrays.block_num_items = c.take<int32_t>(static_cast<size_t>(num_blocks) * config.num_ranks());
  return arrays;
}

// In pinned host memory, written by kernels and read by the host. Each group is valid once its first field is set.
struct Report {
  uint64_t counted;  // ticket of the last dispatch whose rows were counted
  int64_t num_rows;  // ... and how many they are

  uint32_t aborted;           // 1: this rank has aborted
  uint32_t late[kRankWords];  // bit mask of the ranks that it waited for in vain
  int32_t operation, phase;
  uint32_t waited_ms;
  uint64_t epoch;

  int32_t mistake;  // Mistake; 0 again once the host has taken it
  MistakeFacts facts;
};

}  // namespace ep::cuda
