// The Call: arguments of one rank for one operation. All ranks compare all Calls, so all find the same error.
#pragma once
#include <cstdint>

#include "common/cursor.h"

namespace ep::cuda {

// The numbers are those of checks.AGREED. The CPU engine has one more: a combine of decode layout.
enum class Operation : int32_t { kDispatch = 0, kCombine = 1, kGather = 3 };
constexpr const char* kOperationNames[] = {"dispatch", "combine", "combine", "gather of counts"};

// Fields of a Call. The first kNumCompared must be equal on all ranks, compared in this order. kComparedNames has
// their names, as those of checks.AGREED.
enum class Field : int32_t {
  kOperation = 0,
  // Epoch of the plan's dispatch, as in PlanHead::made; 0: a new plan, or below 0: one with so many tokens for a node
  // (-RowArgs::max_tokens_to_node). Errors call it "handle".
  kPlan = 1,
  kLayout = 2,
  kAlignment = 3,
  kWeights = 4,  // 1: with topk_weights
  kRowBytes = 5,
  kScales = 6,
  kMaxRows = 7,    // rows of the caller's output; -1: to be counted. May differ between ranks
  kNumTokens = 8,  // tokens of the rank as a source
  kNumChunks = 9,  // combine: the rank raises `pushed` for this many chunks, at every rank of its node
};
constexpr const char* kComparedNames[] = {"operation",    "handle",           "layout",           "expert_alignment",
                                          "topk_weights", "x: bytes per row", "x: scales per row"};
constexpr int kNumCompared = sizeof(kComparedNames) / sizeof(kComparedNames[0]);

// A Call before it is written. It travels as kNumWords Tagged words of two fields each.
struct Call {
  static constexpr int kNumWords = 5;

  int32_t fields[2 * kNumWords];

  EP_HOST_DEVICE void set(Field field, int32_t value) { fields[static_cast<int>(field)] = value; }
  EP_HOST_DEVICE uint64_t word(int i) const {
    return static_cast<uint32_t>(fields[2 * i]) | static_cast<uint64_t>(static_cast<uint32_t>(fields[2 * i + 1])) << 32;
  }
};

// The first field in which some rank differs from the first rank that takes part, and the first rank that differs
// there. found: 0 if all agree.
struct Difference {
  int32_t found, field, rank, theirs, first_rank, first;
};

}  // namespace ep::cuda
