// Sums of rows in float32, rounded once, in the order and with the roundings of ep_dispatcher/reference.py.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ep::cuda {

// Elements of a 16-byte vector to float32 and back, rounding to nearest.
struct Float32 {
  static constexpr int kElements = 4;
  static __device__ void load(const uint4& v, float* to) {
    to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y);
    to[2] = __uint_as_float(v.z), to[3] = __uint_as_float(v.w);
  }
  static __device__ uint4 round(const float* from) {
    return {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3])};
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
};

// Rows that are summed first and rounded before they count: those of one remote node. Bit j stands for row j.
struct Nodes {
  uint32_t remote;  // the row is of a remote node ...
  uint32_t last;    // ... and the last of that node
};

// Called by `num_threads` threads: the sum of rows of num_vectors vectors in shared memory, to global memory.
//   row(j) -> the j-th row
template <class T, bool kNodes, class Row>
__device__ __forceinline__ void sum_rows(const Row& row, int num_rows, int num_vectors, Nodes nodes, uint4* to,
                                         int thread, int num_threads) {
  constexpr int kUnroll = kNodes ? 2 : 7;
  if (num_rows == 1) {
    const uint4* from = row(0);
    for (int v = thread; v < num_vectors; v += num_threads) to[v] = from[v];
    return;
  }
  for (int first = thread; first < num_vectors; first += kUnroll * num_threads) {
    float total[kUnroll][T::kElements] = {};
    float of_node[kNodes ? kUnroll : 1][T::kElements] = {};
    for (int j = 0; j < num_rows; ++j) {
      const uint4* from = row(j);
      uint4 vectors[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        if (first + i * num_threads < num_vectors) vectors[i] = from[first + i * num_threads];
      const bool remote = kNodes && (nodes.remote >> j & 1), last = kNodes && (nodes.last >> j & 1);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        float values[T::kElements];
        T::load(vectors[i], values);
#pragma unroll
        for (int e = 0; e < T::kElements; ++e) {
          if (remote)
            of_node[kNodes ? i : 0][e] += values[e];
          else
            total[i][e] += values[e];
        }
        if (last) {
          T::load(T::round(of_node[kNodes ? i : 0]), values);
#pragma unroll
          for (int e = 0; e < T::kElements; ++e) total[i][e] += values[e], of_node[kNodes ? i : 0][e] = 0;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (first + i * num_threads < num_vectors) to[first + i * num_threads] = T::round(total[i]);
  }
}

}  // namespace ep::cuda
