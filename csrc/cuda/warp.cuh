// Sums across a warp, and positions in rings of shared memory.
#pragma once
#include <cstdint>

namespace ep::cuda {

// [warp] Return the sum of `value` over the lanes up to this one, in steps of `stride` lanes: lanes whose numbers agree
// modulo `stride` form a sum of their own. `stride` is a power of two.
template <class T>
__device__ __forceinline__ T inclusive_sum(T value, int stride = 1, int num_lanes = 32) {
  const int lane = threadIdx.x % 32;
  for (int step = stride; step < num_lanes; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// A place in a ring of `num` places, and the parity with which the place's barrier completes in this round.
struct RingPlace {
  uint32_t place, parity;

  __device__ __forceinline__ void advance(uint32_t num) {
    if (++place == num) place = 0, parity ^= 1;
  }
};

// The n-th use of a ring whose size is a constant.
template <int kPlaces>
struct Ring {
  static __device__ __forceinline__ int place(int n) { return n % kPlaces; }
  static __device__ __forceinline__ uint32_t parity(int n) { return n / kPlaces % 2; }
};

}  // namespace ep::cuda
