// Tiles of a GEMM of rows and experts' weights: which there are, and how they are stored.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/device/tensor_map.h"
#include "cuda/moe/row_gemm.h"
#include "cuda/moe/tile_pipeline.cuh"
#include "cuda/moe/tile_store.cuh"

namespace ep::cuda {

// Tiles of one column of tiles that are computed in order, before as many of the next. 4 to 64 take as long on an H200.
constexpr int kDown = 16;

struct RowTile {
  int expert;
  int row, end, column;
};

// Finds tiles by their numbers, which ascend from call to call. [warp]: a lane knows one of 32 experts.
struct RowTiles {
  const RowGemm& gemm;
  const int lane = threadIdx.x % 32, n_tiles;
  int group = 0, before = 0;                   // experts / 32; tiles of the groups before
  int begin = 0, end = 0, tiles = 0, sum = 0;  // of the lane's expert; sum: of tiles up to this lane

  __device__ explicit RowTiles(const RowGemm& given) : gemm(given), n_tiles(div_up(given.columns, kColumns)) {}

  __device__ void load_group() {
    const int expert = 32 * group + lane;
    begin = end = 0;
    if (expert < gemm.experts) {
      begin = expert ? min(gemm.ends[expert - 1], gemm.num_rows) : 0;
      end = min(gemm.ends[expert], gemm.num_rows);
    }
    sum = tiles = div_up(end - begin, kRows) * n_tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
  }

  // Return the number of all tiles, and go to the first group.
  __device__ int count() {
    int total = 0;
    for (group = div_up(gemm.experts, 32); group-- > 0;) {
      load_group();
      total += __shfl_sync(~0u, sum, 31);
    }
    group = 0;
    return total;
  }

  __device__ RowTile find(int number) {
    int in_group;
    while (number >= before + (in_group = __shfl_sync(~0u, sum, 31))) {
      before += in_group;
      ++group;
      load_group();
    }
    number -= before;
    const int source = __ffs(__ballot_sync(~0u, sum > number)) - 1;
    const int first = __shfl_sync(~0u, begin, source), last = __shfl_sync(~0u, end, source);
    number -= __shfl_sync(~0u, sum - tiles, source);
    const int top = number / (kDown * n_tiles) * kDown;  // tiles above this column of tiles
    number -= top * n_tiles;
    const int height = min(div_up(last - first, kRows) - top, kDown);
    return {32 * group + source, first + (top + number % height) * kRows, last, number / height * kColumns};
  }
};

// [warp] Find the block's tiles, and call load_tile(tile, loading) for each in one lane.
template <class Stage, class Gemm, class LoadTile>
__device__ __forceinline__ void load_tiles(Pipeline<Stage, RowTile>& pipeline, const InRounds<Gemm>& p,
                                           const LoadTile& load_tile) {
  RowTiles finder(p.gemm);
  const TileNumbers numbers = own_tiles(finder.count(), p.num_sms, p.num_rounds);
  Loading<Stage, RowTile> loading(pipeline);
  for (int number = numbers.first; number < numbers.end; number += p.num_sms) {
    const RowTile tile = finder.find(number);
    if (finder.lane != 0) continue;
    loading.publish(tile);
    load_tile(tile, loading);
  }
  if (finder.lane == 0) loading.publish({-1, 0, 0, 0});
}

// [thread] Return the entries of a bias at a column and the next one.
__device__ inline float2 bias_at(const RowGemm& gemm, int expert, int column) {
  if (column >= gemm.columns) return {0, 0};
  const int64_t at = static_cast<int64_t>(expert) * gemm.columns + column;
  const auto pair = [at](const auto* bias) {  // they may begin at an odd entry
    return float2{static_cast<float>(bias[at]), static_cast<float>(bias[at + 1])};
  };
  switch (gemm.bias_dtype) {
    case DType::kFloat32:
      return pair(static_cast<const float*>(gemm.bias));
    case DType::kBFloat16:
      return pair(static_cast<const __nv_bfloat16*>(gemm.bias));
    default:
      return pair(static_cast<const __half*>(gemm.bias));
  }
}

// [warp group] Add the bias to sums of columns from `column` on. `row`: the first of the thread's two rows.
template <int kSums>
__device__ void add_bias(const RowGemm& gemm, const RowTile& tile, float (&sums)[kSums], int row, int column) {
  float weights[2];
  for (int i = 0; i < 2; ++i)
    weights[i] = gemm.row_weights && row + 8 * i < tile.end ? gemm.row_weights[row + 8 * i] : 1;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const float2 bias = bias_at(gemm, tile.expert, column + 8 * j + 2 * static_cast<int>(threadIdx.x % 4));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[4 * j + 2 * i] += weights[i] * bias.x;
      sums[4 * j + 2 * i + 1] += weights[i] * bias.y;
    }
  }
}

// [warp group] Add the bias to sums of columns from `column` on, and store them.
template <int kSums>
__device__ void store(const RowGemm& gemm, const RowTile& tile, float (&sums)[kSums], int row, int column) {
  if (gemm.bias) add_bias(gemm, tile, sums, row, column);
  store_rounded(static_cast<__nv_bfloat16*>(gemm.out), tile.end, gemm.columns, sums, row, column);
}

// [host] Describe the rows of a GEMM, or weights of experts: `rows` x `columns` each.
inline CUtensorMap rows_map(const RowGemm& gemm, CUtensorMapDataType type, int entry_bytes) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(gemm.length), static_cast<cuuint64_t>(gemm.num_rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(gemm.length) * entry_bytes};
  return tensor_map(gemm.rows, type, 2, sizes, strides, kRows);
}
inline CUtensorMap weights_map(const ExpertWeights& weights, CUtensorMapDataType type, int entry_bytes, int rows,
                               int columns, int box_rows) {
  if (weights.num_shifts > std::numeric_limits<int32_t>::max())
    throw std::runtime_error("the weights of experts lie " + std::to_string(weights.num_shifts) +
                             " times 16 bytes apart, but fewer than 2^31 times are allowed");
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(weights.num_shifts)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns) * entry_bytes, 16};
  return tensor_map(weights.at, type, 3, sizes, strides, box_rows);
}

// [thread] Return how many times 16 bytes the weights of an expert are behind the first ones.
__device__ __forceinline__ int shift_of(const ExpertWeights& weights, int expert) {
  return weights.shifts ? weights.shifts[expert] : static_cast<int>(weights.first + expert * weights.step);
}

// [host] Launch a kernel for all tiles of a GEMM.
template <class Stage, class Gemm, class... Maps>
void launch_tiles(void (*kernel)(InRounds<Gemm>, Maps...), const Gemm& gemm, int num_sms, cudaStream_t stream,
                  const Maps&... maps) {
  // The rows of each expert may end in a tile that is not full.
  const int row_tiles = gemm.num_rows / kRows + std::min(gemm.experts, gemm.num_rows);
  const int tiles = row_tiles * div_up(gemm.columns, kColumns);
  launch_in_rounds<Pipeline<Stage, RowTile>>(kernel, gemm, tiles, num_sms, stream, maps...);
}

}  // namespace ep::cuda
