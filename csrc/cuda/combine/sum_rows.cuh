// Sums of rows in float32, rounded once, in the order and with the roundings of ep_dispatcher/reference.py.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/config.h"

namespace ep::cuda {

// [thread] Convert a dtype: elements of a 16-byte vector to float32 and back, rounding to nearest. plus_zero adds +0 to
// each element of a word: it turns -0 into +0, as a sum from +0 does.
struct Float32 {
  static constexpr int kElements = 4;
  static __device__ void load(const uint4& v, float* to) {
    to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y);
    to[2] = __uint_as_float(v.z), to[3] = __uint_as_float(v.w);
  }
  static __device__ uint4 round(const float* from) {
    return {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3])};
  }
  static __device__ uint32_t plus_zero(uint32_t word) {
    return __float_as_uint(__fadd_rn(__uint_as_float(word), 0.0f));
  }
};

struct BFloat16 {
  static constexpr int kElements = 8;
  static __device__ void load(const uint4& v, float* to) {
    const uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  static __device__ uint4 round(const float* from) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  static __device__ uint32_t plus_zero(uint32_t word) {
    const __nv_bfloat162 sum = __hadd2_rn(reinterpret_cast<const __nv_bfloat162&>(word), __nv_bfloat162{});
    return reinterpret_cast<const uint32_t&>(sum);
  }
};

struct Float16 {
  static constexpr int kElements = 8;
  static __device__ void load(const uint4& v, float* to) {
    const uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
  static __device__ uint4 round(const float* from) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  static __device__ uint32_t plus_zero(uint32_t word) {
    const __half2 sum = __hadd2_rn(reinterpret_cast<const __half2&>(word), __half2{});
    return reinterpret_cast<const uint32_t&>(sum);
  }
};

// A way to sum rows: teams of kWarps warps, and kVectors vectors at a time in each thread's registers.
template <class Element, int kNumWarps, int kNumVectors>
struct Summing {
  using T = Element;
  static constexpr int kWarps = kNumWarps, kThreads = 32 * kWarps, kVectors = kNumVectors;
};

// [thread] Add +0 to each element of a vector.
template <class T>
__device__ __forceinline__ uint4 plus_zero(const uint4& v) {
  return {T::plus_zero(v.x), T::plus_zero(v.y), T::plus_zero(v.z), T::plus_zero(v.w)};
}

// Stands for the combine weights of a sum without any.
struct NoCombineWeights {};

// [team] Sum rows of num_vectors vectors from shared memory to global memory, in the order of rows. Without rows store
// zeros. No barrier.
//   thread: number of this thread in its team
//   row(j): address of row j
//   combine_weights: `const float*` in shared memory, one for each row; products are rounded to float32. Or none
//   release(): called once by every thread, after its last read of the rows and before its last stores
template <class Summing, class Row, class CombineWeights, class Release>
__device__ __forceinline__ void sum_rows(const Row& row, const CombineWeights& combine_weights, int num_rows,
                                         int num_vectors, uint4* to, int thread, const Release& release) {
  using T = typename Summing::T;
  constexpr bool kHasCombineWeights = !std::is_same_v<CombineWeights, NoCombineWeights>;
  constexpr int kVectors = Summing::kVectors, kStep = kVectors * Summing::kThreads;
  for (int begin = 0; begin < num_vectors; begin += kStep) {
    const int first = begin + thread, left = num_vectors - first;  // first vector of this thread; those from it on
    const auto has = [&](int i) { return i * Summing::kThreads < left; };
    float total[kVectors][T::kElements] = {};
    uint4 vectors[kVectors];
    for (int j = 0; j < num_rows; ++j) {
      const uint4* from = row(j) + first;
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        if (has(i)) vectors[i] = from[i * Summing::kThreads];
      if (num_rows == 1 && !kHasCombineWeights) break;  // one row needs no float32
      float combine_weight = 1;
      if constexpr (kHasCombineWeights) combine_weight = combine_weights[j];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float values[T::kElements];
        T::load(vectors[i], values);
#pragma unroll
        for (int e = 0; e < T::kElements; ++e)
          total[i][e] +=
              kHasCombineWeights ? __fmul_rn(combine_weight, values[e]) : values[e];  // not one fused operation
      }
    }
    if (begin + kStep >= num_vectors) release();
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (has(i))
        to[first + i * Summing::kThreads] =
            num_rows == 1 && !kHasCombineWeights ? plus_zero<T>(vectors[i]) : T::round(total[i]);
  }
}

}  // namespace ep::cuda
