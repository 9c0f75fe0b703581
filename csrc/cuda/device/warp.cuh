// Prefix sums of a warp, and positions in rings in shared memory.
#pragma once
#include <cstdint>

#include "cuda/config.h"

namespace ep::cuda {

// [warp] Return the sum of `value` over the lanes up to this one, in steps of `stride` lanes. Only lanes with the same
// number modulo `stride` share a sum. `stride` and `num_lanes` are powers of two. All lanes take part; the result is
// right in the first num_lanes lanes.
template <class T>
__device__ __forceinline__ T inclusive_sum(T value, int stride = 1, int num_lanes = 32) {
  const int lane = threadIdx.x % 32;
  for (int step = stride; step < num_lanes; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// [thread] Return the number of lanes that share one token, or one item, with a column each: a power of two, up to 32.
__device__ inline int lanes_for(int num_columns) {
  int lanes = 32;
  while (lanes / 2 >= num_columns) lanes /= 2;
  return lanes;
}

// A position in a ring of `num` places, advanced one by one. `parity` is for the mbarrier of this place, in this round.
struct RingPlace {
  uint32_t place, parity;

  // [thread] Go to the next place; after the last one, to the first place of the next round.
  __device__ __forceinline__ void advance(uint32_t num) {
    if (++place == num) place = 0, parity ^= 1;
  }
};

// The n-th use of a ring with a constant number of places: its place, and the parity for the place's mbarrier.
template <int kPlaces>
struct Ring {
  static __device__ __forceinline__ int place(int n) { return n % kPlaces; }
  static __device__ __forceinline__ uint32_t parity(int n) { return n / kPlaces % 2; }
};

}  // namespace ep::cuda
