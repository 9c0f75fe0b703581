// What every kernel of one buffer is given: sizes, where all ranks' memory is, and how to report.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/args.h"
#include "common/layout.h"

namespace ep::cuda {

constexpr int kMaxRanks = 8;      // of one NVLink domain
constexpr int kChunk = 512;       // items whose partial sums are announced together
constexpr int kVector = 16;       // bytes; bulk copies and vector accesses need multiples
constexpr int kLine = 1024;       // bytes; where rows begin, in shared memory too, so that no request has to be split
constexpr int kScaleBlock = 128;  // elements of a float8 row that share a scale

inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// From one row to the next where rows travel from or to.
inline size_t row_stride(size_t row_bytes) { return round_up(row_bytes, row_bytes < 4 * kLine ? 128 : kLine); }

// One buffer, the same on every rank but for `rank`. Ranks are numbered by node: those of a node are neighbours.
struct Sizes {
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;  // decides the order of the sums alone: all ranks reach each other
  int num_experts = 1;
  int num_topk = 1;
  int max_tokens = 1;  // tokens a rank may bring to one dispatch
  int hidden = 1;
  DType dtype = DType::kBFloat16;

  constexpr int num_local_experts() const { return num_experts / num_ranks; }
  size_t row_bytes() const { return hidden * size_of(dtype); }
  size_t slot_stride() const { return row_stride(row_bytes()); }  // from one partial sum to the next
  size_t scale_bytes() const { return hidden / kScaleBlock * sizeof(float); }
  size_t weights_bytes() const { return num_topk * sizeof(float); }
  // Local experts that one token can have on one rank.
  constexpr int max_copies() const { return num_topk < num_local_experts() ? num_topk : num_local_experts(); }
  // int32 of an item (item.cuh): token, number of copies, a value per copy, a byte per copy.
  int item_ints() const { return static_cast<int>(round_up(2 + max_copies() + (max_copies() + 3) / 4, 4)); }
  // int32 per token of Plan::sent_item.
  int sent_ints() const { return static_cast<int>(round_up(num_ranks, 4)); }
  // Tokens from the first that are staged before rows are pulled; the others while they are.
  int early_tokens() const { return max_tokens <= 1024 ? max_tokens : max_tokens / 2; }
  int max_chunks() const { return (max_tokens + kChunk - 1) / kChunk; }
  // Scales and weights of a staged row; float8 rows are shorter than rows of the dtype, but have scales.
  size_t max_tail_bytes() const { return round_up(scale_bytes(), kVector) + round_up(weights_bytes(), kVector); }
};

// What a rank tells the others of a combine.
struct CombineCall {
  int32_t plan, has_weights;  // for which all must be given the same
  int32_t num_chunks;         // that it announces to all ranks
};

// The symmetric memory of one rank. A flag holds the epoch of the last operation for which it was raised; `staged`,
// which is raised twice in an operation, holds 2 * epoch - 1 and then 2 * epoch.
struct Region {
  uint64_t* gave_up;     // [num_ranks] not an epoch: the rank has given up, nobody need wait for it; at offset 0
  uint64_t* headed;      // [num_ranks] the rank's head is in `heads`
  uint64_t* listed;      // [num_ranks] the rank's items are in its own `items`
  uint64_t* staged;      // [num_ranks] the rank's rows are in its own `staging`, scales and weights in its `tails`: of
                         // its early tokens, and then of all
  uint64_t* consumed;    // [num_ranks] the rank has read all that it needs of `items`, `staging` and `tails`
  uint64_t* pushed;      // [num_ranks, max_chunks] the rank's partial sums of a chunk are in `slots`
  uint64_t* slots_free;  // [num_ranks] the rank has read its own `slots`
  uint64_t* called;      // [num_ranks] what the rank was given for a combine is in `calls`
  int32_t* heads;        // [num_ranks, head_ints] (plan.cuh)
  CombineCall* calls;    // [num_ranks]
  int32_t* items;        // [num_ranks, max_tokens, item_ints] by the rank that receives them
  char* staging;         // [max_tokens, row_stride of the operation]
  char* tails;           // [max_tokens, tail bytes of the operation] scales and weights
  char* slots;           // [num_ranks, max_tokens, slot_stride] partial sums: by rank, in the order of its items
  float* weights;        // [max_tokens, num_topk] on their way back
};

constexpr int kHeadFixedInts = 8 + kMaxRanks;

inline int head_ints(const Sizes& sizes) { return static_cast<int>(round_up(kHeadFixedInts + sizes.num_experts, 4)); }

inline Region carve_region(Cursor& c, const Sizes& sizes) {
  const size_t ranks = sizes.num_ranks, tokens = sizes.max_tokens;
  Region region;
  region.gave_up = c.take<uint64_t>(ranks);
  region.headed = c.take<uint64_t>(ranks);
  region.listed = c.take<uint64_t>(ranks);
  region.staged = c.take<uint64_t>(ranks);
  region.consumed = c.take<uint64_t>(ranks);
  region.slots_free = c.take<uint64_t>(ranks);
  region.called = c.take<uint64_t>(ranks);
  region.pushed = c.take<uint64_t>(ranks * sizes.max_chunks());
  region.heads = c.take<int32_t>(ranks * head_ints(sizes));
  region.calls = c.take<CombineCall>(ranks);
  region.items = c.take<int32_t>(ranks * tokens * sizes.item_ints());
  region.tails = c.take<char>(tokens * sizes.max_tail_bytes());
  region.staging = c.take<char>(tokens * row_stride(sizes.row_bytes()), kLine);
  region.slots = c.take<char>(ranks * tokens * sizes.slot_stride(), kLine);
  region.weights = c.take<float>(tokens * sizes.num_topk);
  return region;
}

// Bytes at the start of a region that must be 0 before its first use: all flags.
inline size_t flag_bytes(const Sizes& sizes) {
  Cursor c;
  return reinterpret_cast<size_t>(carve_region(c, sizes).heads);
}

inline size_t region_bytes(const Sizes& sizes) {
  Cursor c;
  carve_region(c, sizes);
  return c.size();
}

// What ranks were given differently (agree.cuh): `theirs` of `rank`, `first` of rank 0.
struct Difference {
  int32_t found, field, rank, theirs, first;
};

// What the kernels of one rank remember between operations; in the device's memory, 0 at the start.
struct State {
  uint64_t epoch;                     // of the last complete operation
  uint64_t staged_epoch;              // of the last complete dispatch
  uint64_t pushed_epoch;              // of the last complete combine
  uint64_t bytes_read[kMaxRanks];     // from every rank's staging
  uint64_t bytes_written[kMaxRanks];  // to every rank's slots
  uint32_t failed;                    // this rank has given up: kernels do nothing any more
  uint32_t count_done, list_done, stage_done, pull_done, combine_done;  // blocks that are through; 0 between operations
  uint32_t next_token;    // to be reduced by whoever comes first; 0 between operations
  Difference difference;  // to be reported at the end of the operation; `found` is 0 between operations
};

struct StateArrays {
  State* state;
  uint32_t* chunk_done;   // [max_chunks] warps that are through with a chunk; 0 between operations
  int32_t* block_tokens;  // [num_blocks, num_experts] of this rank's tokens: those that blocks counted, or before them
  int32_t* block_items;   // [num_blocks, kMaxRanks] the same of items
};

inline StateArrays carve_state(Cursor& c, const Sizes& sizes, int num_blocks) {
  StateArrays arrays;
  arrays.state = c.take<State>(1);
  arrays.chunk_done = c.take<uint32_t>(sizes.max_chunks());
  arrays.block_tokens = c.take<int32_t>(static_cast<size_t>(num_blocks) * sizes.num_experts);
  arrays.block_items = c.take<int32_t>(static_cast<size_t>(num_blocks) * kMaxRanks);
  return arrays;
}

enum class Operation : int32_t { kDispatch = 0, kCombine = 1 };
enum class Phase : int32_t { kFreeStaging = 0, kCounts = 1, kItems = 2, kRows = 3, kFreeSlots = 4, kSums = 5 };
enum class Mistake : int32_t { kNone = 0, kBadEntry = 1, kTooFewRows = 2, kTooManyRows = 3, kDisagree = 4 };

// What kernels tell the host, in pinned host memory. Each group is valid once its first field is set.
struct Report {
  uint64_t counted;  // ticket of the last dispatch whose rows were counted
  int64_t num_rows;  // ... and how many they are

  uint32_t late;  // bit mask of the ranks waited for in vain; the buffer is of no use any more
  int32_t operation, phase;
  uint32_t waited_ms;
  uint64_t epoch;

  int32_t mistake;  // the first one that was not yet taken
  int32_t detail[3];
  uint64_t mistake_epoch;
  int64_t values[2 * kMaxRanks];
};

struct Context {
  Sizes sizes;
  int item_ints, sent_ints, head_ints, max_chunks, early_tokens;
  uint32_t row_bytes, slot_stride;
  uint64_t timeout_ns;
  State* state;
  StateArrays arrays;
  Report* report;
  Region region[kMaxRanks];  // by rank

#ifdef __CUDACC__
  __device__ const Region& own() const { return region[sizes.rank]; }
#endif
};

}  // namespace ep::cuda
