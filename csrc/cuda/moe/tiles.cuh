// What kernels share whose blocks compute several tiles each, with operands that one warp loads for the others.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ep::cuda {

__host__ __device__ constexpr int div_up(int a, int b) { return (a + b - 1) / b; }

// A place in a ring, and the parity of its current round.
template <int kPlaces>
struct Ring {
  int place = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++place == kPlaces) place = 0, parity ^= 1;
  }
};

// Rounds of blocks, as many as multiprocessors each: the first round computes 3/5 of all tiles, the second one 3/5 of
// the rest, and the last ones a tile a block. So blocks that start late, because another kernel holds their
// multiprocessor, delay nobody, and few blocks have to begin anew.
__host__ __device__ inline int tiles_each(int rest, int num_sms) {
  const int each = static_cast<int>(3 * static_cast<int64_t>(rest) / (5 * num_sms));
  return each > 0 ? each : 1;
}

// The numbers of a block's tiles: first, first + num_sms, ... below end. Blocks that run at the same time have tiles
// beside one another.
struct Numbers {
  int first, end;
};

__device__ inline Numbers own_numbers(int total, int num_sms, int num_rounds) {
  const int round = blockIdx.x / num_sms;
  int begin = 0, each = 0;
  for (int r = 0; r <= round; ++r) {
    begin += each * num_sms;
    each = tiles_each(total - begin, num_sms);
  }
  const int end = round == num_rounds - 1 ? total : min(total, begin + each * num_sms);
  return {begin + static_cast<int>(blockIdx.x) % num_sms, end};
}

// [host] Return how many rounds compute up to so many tiles.
inline int rounds_of(int tiles, int num_sms) {
  int rounds = 1;
  for (; tiles > num_sms; ++rounds) tiles -= tiles_each(tiles, num_sms) * num_sms;
  return rounds;
}

// [host] Describe a matrix, or several, for loads of tiles with rows of 128 bytes (tensor_core.cuh). sizes[0] are the
// columns; strides in bytes, from row to row first.
inline CUtensorMap tensor_map(const void* at, CUtensorMapDataType type, int rank, const cuuint64_t* sizes,
                              const cuuint64_t* strides, int tile_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);  // CUDA's runtime has loaded it
    void* const found = driver ? dlsym(driver, "cuTensorMapEncodeTiled") : nullptr;
    if (!found) throw std::runtime_error("the GPU driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
    return reinterpret_cast<Encode>(found);
  }();
  const cuuint32_t columns = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 128 : 64;
  const cuuint32_t tile[3] = {columns, static_cast<cuuint32_t>(tile_rows), 1}, ones[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, rank, const_cast<void*>(at), sizes, strides, tile, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("tensor map: CUDA error " + std::to_string(result));
  return map;
}

}  // namespace ep::cuda
