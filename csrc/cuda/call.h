// What a rank was given for one operation. All ranks compare, so that a mistake of one is found by all.
#pragma once
#include <cstdint>

namespace ep::cuda {

enum class Operation : int32_t { kDispatch = 0, kCombine = 1 };

// The fields that must be the same on all ranks, in the order in which they are compared.
enum class Field : int32_t {
  kOperation = 0,
  kPlan = 1,  // the epoch that made the plan of the handle; 0: a new plan
  kLayout = 2,
  kAlignment = 3,
  kWeights = 4,  // 1: topk_weights were given
  kRowBytes = 5,
  kScaleBytes = 6,
};
constexpr int kNumFields = 7;

struct alignas(16) Call {
  int32_t fields[kNumFields];
  int32_t max_rows;    // rows of the caller's output; -1: as many as are received. May differ between ranks.
  int32_t num_tokens;  // of the rank, as a source
  int32_t num_chunks;  // combine: chunks for which the rank raises `pushed` at every rank of its node
};

// The first field that differs from rank 0's.
struct Difference {
  int32_t found, field, rank, theirs, first;
};

}  // namespace ep::cuda
