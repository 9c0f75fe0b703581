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
  report->mistake_epoch = context.state->epoch + 1;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&report->mistake) = static_cast<int32_t>(mistake);
}

// Called by a whole warp, in which lane r knows what rank r was given, and the lanes behind the last rank what that
// was: whether it was not the same for all.
__device__ inline Difference compare(Given::Field field, int32_t given) {
  const int first = __shfl_sync(~0u, given, 0);
  const uint32_t others = __ballot_sync(~0u, given != first);
  if (others == 0) return {};
  const int rank = __ffs(others) - 1;
  return {true, field, rank, __shfl_sync(~0u, given, rank), first};
}

__device__ inline void report_difference(const Context& context, const Difference& found) {
  report_mistake(context, Mistake::kDisagree, found.field, found.rank, found.theirs, found.first);
}

// Called by one thread of the last block of an operation, before that counts as complete. The report has to wait for
// this: the host tells the peers that this rank gives up, and then they wait for nothing that is still to come.
__device__ inline void report_kept_difference(const Context& context) {
  Difference* kept = &context.state->difference;
  if (!__ldcg(&kept->found)) return;
  report_difference(context,
                    {true, __ldcg(&kept->field), __ldcg(&kept->rank), __ldcg(&kept->theirs), __ldcg(&kept->first)});
  kept->found = 0;
}

}  // namespace ep::cuda
