// Copies by one warp, through registers.
#pragma once
#include <cstdint>

#include "cuda/config.h"

namespace ep::cuda {

// [warp] Copy `bytes`, a multiple of sizeof(T). Each thread has kTogether loads under way. With 14 loads of 16 bytes a
// row of 14336 bytes takes two turns. Loads bypass L1. No __syncwarp at the end.
template <class T, int kTogether>
__device__ inline void copy_words(T* to, const T* from, uint32_t bytes) {
  const int num = static_cast<int>(bytes / sizeof(T));
#pragma unroll 1
  for (int begin = threadIdx.x % 32; begin < num; begin += 32 * kTogether) {
    T words[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (begin + 32 * i < num) words[i] = __ldcg(from + begin + 32 * i);
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (begin + 32 * i < num) to[begin + 32 * i] = words[i];
  }
}

}  // namespace ep::cuda
