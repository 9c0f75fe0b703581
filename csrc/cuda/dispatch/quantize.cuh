// Quantize rows to float8, bitwise equal to ep_dispatcher/float8.py. Used by staging.
#pragma once
#include <cuda_fp8.h>

#include "cuda/combine/sum_rows.cuh"
#include "cuda/config.h"

namespace ep::cuda {

// [thread] Return a / b, rounded as in IEEE 754. `a` is a bfloat16 number, `reciprocal` is 1 / b rounded:
// tests/division.cpp tries all of them. Quotients below 2^-34 may differ: float8 rounds them to 0.
__device__ inline float divide(float a, float b, float reciprocal) {
  const float near = a * reciprocal;
  return copysignf(__fmaf_rn(__fmaf_rn(-near, b, a), reciprocal, near), a);  // restore the sign of -0
}

// [thread] Return 8 elements in float8.
__device__ inline uint2 to_float8(const float (&values)[BFloat16::kElements]) {
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const auto low = __nv_cvt_float2_to_fp8x2({values[4 * w], values[4 * w + 1]}, __NV_SATFINITE, __NV_E4M3);
    const auto high = __nv_cvt_float2_to_fp8x2({values[4 * w + 2], values[4 * w + 3]}, __NV_SATFINITE, __NV_E4M3);
    words[w] = low | static_cast<uint32_t>(high) << 16;
  }
  return {words[0], words[1]};
}

// [thread] Return 8 bfloat16 elements, of any magnitude, divided by `scale` and in float8.
__device__ __noinline__ inline uint2 divide_slowly(uint4 vector, float scale) {
  float values[BFloat16::kElements];
  BFloat16::load(vector, values);
  for (float& value : values) value = __fdiv_rn(value, scale);
  return to_float8(values);
}

// [warp] Return the bits of the largest magnitude among kLanes neighbouring lanes, with 8 bfloat16 each. Bits order
// magnitudes; NaN is the largest.
template <int kLanes>
__device__ inline uint32_t largest_magnitude(const uint4& vector) {
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  uint32_t most = __vmaxu2(__vmaxu2(vector.x & kMagnitudes, vector.y & kMagnitudes),
                           __vmaxu2(vector.z & kMagnitudes, vector.w & kMagnitudes));
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, offset));
  return max(most >> 16, most & 0xffff);
}

// [thread] Return the e8m0 scale of MXFP8: the exponent of the smallest power of two that is at least amax / 448, which
// is 1.75 * 2^8. 255 is NaN.
__device__ inline uint32_t e8m0_scale(float amax) {
  constexpr uint32_t kMantissa = 0x7fffff, kThreeQuarters = 0x600000;
  if (!(amax < INFINITY)) return amax == INFINITY ? 254 : 255;
  const uint32_t exponent = (__float_as_uint(amax) + kMantissa - kThreeQuarters) >> 23;  // carries above 1.75
  return exponent > 8 ? exponent - 8 : 0;
}

// [thread] Return 1 / scale of an e8m0 scale, which is exact.
__device__ inline float e8m0_reciprocal(uint32_t scale) {
  if (scale >= 254) return scale == 254 ? 0x1p-127f : NAN;
  return __uint_as_float((254 - scale) << 23);
}

// Part of a bfloat16 row, quantized by a warp at once. Each half of the warp takes every second scale block of 128
// elements. Both halves do the same, because shuffles need all lanes. Behind the end of the row lanes repeat vectors of
// its last scale block, which leaves that block's largest magnitude as it is, and store nothing.
struct RowPart {
  // Scale blocks of a half warp, and of the part. A part of 14 is 25 KB of code instead of 9: staging 128 rows of 7168
  // by 24 multiprocessors of an H200 then took 13.5 us instead of 8.5. To measure again: benchmarks/time_line.py.
  static constexpr int kTogether = 4, kScaleBlocks = 2 * kTogether;
  static constexpr int kBlockVectors = kScaleBlock / BFloat16::kElements;

  // A part in float8: vectors, and the scale kept by the lane: the bits of a float, or an e8m0 scale.
  struct Quantized {
    uint2 vectors[kTogether];
    uint32_t scale;
  };

  uint4 vectors[kTogether];

  // [host] [thread] Return the number of parts of a row.
  EP_HOST_DEVICE static int num_in_row(int num_vectors) {
    return (num_vectors + kScaleBlocks * kBlockVectors - 1) / (kScaleBlocks * kBlockVectors);
  }

  // [warp] Start to load part `number` of a row of `num_vectors`.
  __device__ void load(const uint4* row, int number, int num_vectors) {
    const int first = number * kScaleBlocks + threadIdx.x % 32 / 16, lane = threadIdx.x % 16;
    const int last = min((num_vectors - 1) / kBlockVectors * kBlockVectors + lane, num_vectors - 1);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) vectors[i] = __ldg(row + min((first + 2 * i) * kBlockVectors + lane, last));
  }

  // [warp] Quantize the loaded part. With kMx in blocks of 32 elements with an e8m0 scale. Otherwise in blocks of 128,
  // and with `powers_of_two` round each scale up to the next one.
  template <bool kMx>
  __device__ Quantized quantize(bool powers_of_two) const {
    constexpr float kLargest = 448, kSmallest = 0x1p-126f;
    constexpr int kLanes = kMx ? 4 : 16;  // with a common scale
    static_assert(kTogether <= kLanes, "a lane keeps one scale at most");
    Quantized part;
    // Find the largest magnitude of each scale block: the i-th lane of kLanes keeps that of their i-th vectors.
    const int kept = threadIdx.x % kLanes;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const uint32_t its_most = largest_magnitude<kLanes>(vectors[i]);
      if (kept == i) most = its_most;
    }
    // Compute the scales.
    const float amax = __uint_as_float(most << 16);
    float scale = 0, reciprocal;
    bool plain = true;
    if constexpr (kMx) {
      part.scale = e8m0_scale(amax);
      reciprocal = e8m0_reciprocal(part.scale);
    } else {
      scale = __fdiv_rn(amax, kLargest);
      if (scale < kSmallest) scale = kSmallest;  // false for NaN
      if (powers_of_two && scale < INFINITY) {   // the sum carries into the exponent unless the mantissa is 0
        constexpr uint32_t kMantissa = 0x7fffff;
        scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
      }
      reciprocal = __frcp_rn(scale);
      // Most rows lie in the range of `divide`.
      plain = __all_sync(~0u, kept >= kTogether || (amax > 0x1p-60f && amax < 0x1p120f));
      part.scale = __float_as_uint(scale);
    }
    // Divide and round.
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float its_reciprocal = __shfl_sync(~0u, reciprocal, i, kLanes);
      const float its_scale = kMx ? 0 : __shfl_sync(~0u, scale, i, kLanes);
      if (plain) {
        float values[BFloat16::kElements];
        BFloat16::load(vectors[i], values);
#pragma unroll
        for (float& value : values)  // the reciprocal of a power of two is exact
          value = kMx ? value * its_reciprocal : divide(value, its_scale, its_reciprocal);
        part.vectors[i] = to_float8(values);
      } else {
        part.vectors[i] = divide_slowly(vectors[i], its_scale);
      }
    }
    return part;
  }

  // [warp] Store a quantized part: its elements to `row`, and its scales to `scales`, both of the whole row. With kMx
  // scales of blocks behind the end are 0.
  template <bool kMx>
  static __device__ void store(const Quantized& part, char* row, float* scales, int number, int num_vectors) {
    constexpr int kLanes = kMx ? 4 : 16;
    const int first = number * kScaleBlocks + threadIdx.x % 32 / 16, lane = threadIdx.x % 16;
    const int word = first + 2 * (lane % kLanes);
    if (lane % kLanes < kTogether && word * kBlockVectors < num_vectors) {
      const int vector = word * kBlockVectors + lane / kLanes * kLanes;
      if (kMx)
        reinterpret_cast<uint8_t*>(scales + word)[lane / kLanes] = vector < num_vectors ? part.scale : 0;
      else
        scales[word] = __uint_as_float(part.scale);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int vector = (first + 2 * i) * kBlockVectors + lane;
      if (vector < num_vectors) reinterpret_cast<uint2*>(row)[vector] = part.vectors[i];
    }
  }
};

}  // namespace ep::cuda
