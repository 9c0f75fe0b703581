// The Call: arguments of one rank for one operation. All ranks compare all Calls, so all find the same mistake.
#pragma once
#include <cstdint>

namespace ep::cuda {

enum class Operation : int32_t { kDispatch = 0, kCombine = 1 };

// Fields that must be equal on all ranks, compared in this order. bindings_cuda.cpp names them for error messages.
enum class Field : int32_t {
  kOperation = 0,
  kPlan = 1,  // epoch of the plan's dispatch, as in PlanHead::made; 0: a new plan. Errors call it "handle"
  kLayout = 2,
  kAlignment = 3,
  kWeights = 4,  // 1: with topk_weights
  kRowBytes = 5,
  kScaleBytes = 6,
};
constexpr int kNumFields = 7;

// Written by `announce` (call.cuh) to every rank of the node; relayed to other nodes. Read by all ranks after `called`.
struct alignas(16) Call {
  int32_t fields[kNumFields];
  int32_t max_rows;    // rows of the caller's output; -1: to be counted. May differ between ranks
  int32_t num_tokens;  // tokens of the rank as a source
  int32_t num_chunks;  // combine: the rank raises `pushed` for this many chunks, at every rank of its node
};

// The first field in which some rank differs from the first rank that takes part, and the first rank that differs
// there. found: 0 if all agree.
struct Difference {
  int32_t found, field, rank, theirs, first_rank, first;
};

}  // namespace ep::cuda
