// Stamps: the time at which each warp ends a step of an operation, for benchmarks/time_line.py. Only builds with
// EP_STAMPS have them (setup.py). In all others `stamp` is empty and costs nothing.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#include "cuda/device/ptx.cuh"
#endif

namespace ep::cuda {

#ifdef EP_STAMPS
constexpr bool kStamps = true;
#else
constexpr bool kStamps = false;
#endif

// The ends of steps. The first two begin an operation.
// clang-format off
enum class Step {
  kDispatch, kCombine, kFree, kSent, kChosen, kAgreed, kCounted, kPlanned, kListed, kFetched, kRows, kLanded, kPulled, kStored,
  kStaged, kKept, kDelivered, kCleared, kQueued, kIssued, kPushed, kRaised, kSums, kReduced, kSummed, kBegun,
  kFirstSent, kItemsSent, kAllSent, kRelayed, kArrived, kLast, kComplete
};
// Their names for Python, in the same order.
constexpr const char* kStepNames[] = {
    "dispatch", "combine", "memory free", "announced", "choices counted", "agreed", "rows counted", "planned", "items known",
    "items fetched", "rows staged by all", "first row landed", "rows landed", "rows stored", "staged", "table kept",
    "metadata delivered", "padding cleared", "pushes queued", "loads issued", "pushes stored", "pushes signalled",
    "partial sums here", "sums queued", "sums stored", "calls exchanged", "first chunk sent",
    "items sent", "all chunks sent", "all chunks relayed", "block ended", "last block", "complete"};
// clang-format on
constexpr int kNumSteps = static_cast<int>(Step::kComplete) + 1;
static_assert(sizeof(kStepNames) == kNumSteps * sizeof(kStepNames[0]));

constexpr int kStampedLaunches = 2;    // of an operation: stamps of the second one do not overwrite those of the first
constexpr int kStampedOperations = 8;  // the last ones; an older one is overwritten
constexpr int kStampedWarps = 20;      // of a block

#ifdef __CUDACC__
// [thread] Keep the time as the end of this warp's step, in lane 0. A later stamp of the same step overwrites it.
// Context::stamps has those of this launch: [kStampedOperations, blocks, kStampedWarps, kNumSteps] nanoseconds; null:
// keep none.
template <class Op>
__device__ __forceinline__ void stamp([[maybe_unused]] const Op& op, [[maybe_unused]] Step step) {
#ifdef EP_STAMPS
  if (threadIdx.x % 32 != 0 || op.context.stamps == nullptr) return;
  const uint32_t block = static_cast<uint32_t>(op.epoch % kStampedOperations) * op.context.stamped_blocks + blockIdx.x;
  const uint32_t warp = block * kStampedWarps + threadIdx.x / 32;
  op.context.stamps[warp * kNumSteps + static_cast<int>(step)] = ptx::nanoseconds();
  asm volatile("" ::: "memory");  // later accesses come after it
#endif
}
#endif

}  // namespace ep::cuda
