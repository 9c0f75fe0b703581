// Stores sums of tensor cores, 16 bytes at a time.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace ep::cuda {

// [warp] Transpose values between the four threads of each row: thread c of them gets the values [c] of all four, in
// the order of threads.
__device__ inline void transpose(uint32_t (&values)[4]) {
#pragma unroll
  for (int distance = 2; distance >= 1; distance /= 2) {
    const bool is_upper = threadIdx.x & distance;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t& lower = values[distance == 2 ? pair : 2 * pair];
      uint32_t& upper = values[distance == 2 ? pair + 2 : 2 * pair + 1];
      const uint32_t other = __shfl_xor_sync(~0u, is_upper ? lower : upper, distance);
      (is_upper ? lower : upper) = other;
    }
  }
}

// [warp group] Store sums in a matrix of bfloat16 whose rows are `columns` long. `row`: the first of the thread's two
// rows; `column`: the first of the sums. From end_row and `columns` on nothing is stored.
template <int kSums>
__device__ void store_rounded(__nv_bfloat16* out, int end_row, int columns, const float (&sums)[kSums], int row,
                              int column) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_inside = row + 8 * i < end_row;
    __nv_bfloat16* const to = out + static_cast<int64_t>(row + 8 * i) * columns;
#pragma unroll
    for (int j = 0; j < kSums / 4; j += 4) {
      uint32_t values[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* const sum = &sums[4 * (j + k) + 2 * i];
        const __nv_bfloat162 rounded = __floats2bfloat162_rn(sum[0], sum[1]);
        values[k] = reinterpret_cast<const uint32_t&>(rounded);
      }
      transpose(values);
      const int at = column + 8 * (j + static_cast<int>(threadIdx.x) % 4);
      if (is_inside && at < columns) *reinterpret_cast<uint4*>(to + at) = {values[0], values[1], values[2], values[3]};
    }
  }
}

// [warp group] Call put(address, four floats) for sums of a matrix of float32, likewise.
template <int kSums, class Put>
__device__ __forceinline__ void put_floats(float* out, int end_row, int columns, const float (&sums)[kSums], int row,
                                           int column, const Put& put) {
  const bool is_odd = threadIdx.x & 1;
  column += 8 * is_odd + threadIdx.x % 4 / 2 * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_inside = row + 8 * i < end_row;
    float* const to = out + static_cast<int64_t>(row + 8 * i) * columns;
#pragma unroll
    for (int j = 0; j < kSums / 4; j += 2) {
      // Of the columns 8 j to 8 j + 15 a thread has two pairs. The even one of two threads takes both first pairs.
      const float *const first = &sums[4 * j + 2 * i], *const second = &sums[4 * (j + 1) + 2 * i];
      const float x = __shfl_xor_sync(~0u, is_odd ? first[0] : second[0], 1);
      const float y = __shfl_xor_sync(~0u, is_odd ? first[1] : second[1], 1);
      const float4 four = is_odd ? float4{x, y, second[0], second[1]} : float4{first[0], first[1], x, y};
      if (is_inside && column + 8 * j < columns) put(to + column + 8 * j, four);
    }
  }
}

}  // namespace ep::cuda
