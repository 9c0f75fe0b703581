// What ranks must give alike: each tells the others what it was given, and all find the same difference.
#pragma once
#include "cuda/context.h"

namespace ep::cuda {

struct Given {
  enum Field { kPlan, kLayout, kAlignment, kMaxRows, kWeights, kRowBytes, kScaleBytes, kNum };
};

__device__ __noinline__ inline void report_mistake(const Context& context, Mistake mistake, int a, int b, int c,
                                                   int64_t value) {
  Report* report = context.report;
  if (*static_cast<volatile int32_t*>(&report->mistake) != 0) return;
  report->detail[0] = a;
  report->detail[1] = b;
  report->detail[2] = c;
  report->values[0] = value;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&report->mistake) = static_cast<int32_t>(mistake);
}

// Called by a whole warp, in which lane r knows what rank r was given, and the lanes behind the last rank what that
// was: whether it was the same for all. If not, the host is told, by one of the blocks that ask.
__device__ inline bool agree(const Context& context, Given::Field field, int32_t given) {
  const int first = __shfl_sync(~0u, given, 0);
  const uint32_t others = __ballot_sync(~0u, given != first);
  if (others == 0) return true;
  const int rank = __ffs(others) - 1, theirs = __shfl_sync(~0u, given, rank);
  if (blockIdx.x == 0 && threadIdx.x % 32 == 0) report_mistake(context, Mistake::kDisagree, field, rank, theirs, first);
  return false;
}

}  // namespace ep::cuda
