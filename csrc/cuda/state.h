// What the kernels of one rank remember between operations, and what they report to the host.
#pragma once
#include "cuda/config.h"

namespace ep::cuda {

enum class Phase : int32_t { kFreeStaging = 0, kCounts = 1, kItems = 2, kRows = 3, kFreeSlots = 4, kSums = 5 };
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
  uint64_t bytes_read[kMaxRanks];     // from every rank's staging
  uint64_t bytes_written[kMaxRanks];  // to every rank's slots
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
  int32_t* block_tokens;  // [num_blocks, num_experts] tokens per expert counted by each block; then the sum over the
                          // blocks before it
  int32_t* block_items;   // [num_blocks, kMaxRanks] items per rank; likewise
};

inline StateArrays carve_state(Cursor& c, const Config& config, int num_blocks) {
  StateArrays arrays;
  arrays.state = c.take<State>(1);
  arrays.staged_done = c.take<uint32_t>(config.max_token_chunks());
  arrays.pushed_done = c.take<uint32_t>(config.max_item_chunks());
  arrays.block_tokens = c.take<int32_t>(static_cast<size_t>(num_blocks) * config.num_experts);
  arrays.block_items = c.take<int32_t>(static_cast<size_t>(num_blocks) * kMaxRanks);
  return arrays;
}

// In pinned host memory, written by kernels and read by the host. Each group is valid once its first field is set.
struct Report {
  uint64_t counted;  // ticket of the last dispatch whose rows were counted
  int64_t num_rows;  // ... and how many they are

  uint32_t late;  // bit mask of the ranks waited for in vain; this rank has aborted
  int32_t operation, phase;
  uint32_t waited_ms;
  uint64_t epoch;

  int32_t mistake;  // Mistake; 0 again once the host has taken it
  MistakeFacts facts;
};
static_assert(kMaxRanks <= 32, "Report::late has a bit per rank");

}  // namespace ep::cuda
