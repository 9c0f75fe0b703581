// The products of a step of 128 are multiplied by their scales and added to sums, half of a tile's columns after the
// other: so a group has 64 products and 128 sums in registers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "cuda/device/tensor_map.h"
#include "cuda/moe/float8_gemm.h"
#include "cuda/moe/tile_order.cuh"
#include "cuda/moe/tile_pipeline.cuh"

namespace ep::cuda {
namespace {

constexpr int kStep = 128;  // entries that share a scale
constexpr int kHalf = kColumns / 2;
// Tiles of one column of tiles that are computed in order, before as many of the next. 4 to 64 take as long on an H200.
constexpr int kDown = 16;

struct Stage {
  uint8_t rows[kRows * kStep];
  uint8_t weights[kColumns * kStep];
};

struct Tile {
  int expert;
  int row, end, column;
};

struct Params {
  Float8Gemm gemm;
  int num_sms, num_rounds;
};

// Finds tiles by their numbers, which ascend from call to call. [warp]: a lane knows one of 32 experts.
struct Finder {
  const Float8Gemm& gemm;
  const int lane = threadIdx.x % 32, n_tiles;
  int group = 0, before = 0;                   // experts / 32; tiles of the groups before
  int begin = 0, end = 0, tiles = 0, sum = 0;  // of the lane's expert; sum: of tiles up to this lane

  __device__ explicit Finder(const Float8Gemm& given) : gemm(given), n_tiles(div_up(given.columns, kColumns)) {}

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

  __device__ Tile find(int number) {
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

// [warp] Find the block's tiles, and load their operands.
__device__ void load(Pipeline<Stage, Tile>& pipeline, const Params& p, const CUtensorMap& rows,
                     const CUtensorMap& weights) {
  const Float8Gemm& gemm = p.gemm;
  Finder finder(gemm);
  const TileNumbers numbers = own_tiles(finder.count(), p.num_sms, p.num_rounds);
  Loading<Stage, Tile> loading(pipeline);
  for (int number = numbers.first; number < numbers.end; number += p.num_sms) {
    const Tile tile = finder.find(number);
    if (finder.lane != 0) continue;
    loading.publish(tile);
    const int shift = gemm.shifts ? gemm.shifts[tile.expert] : static_cast<int>(gemm.first + tile.expert * gemm.step);
    for (int column = 0; column < gemm.length; column += kStep)
      loading.load([&](Stage& to, uint64_t* loaded) {
        ptx::box_load(to.rows, &rows, column, tile.row, loaded);
        ptx::box_load(to.weights, &weights, column, tile.column, shift, loaded);
      });
  }
  if (finder.lane == 0) loading.publish({-1, 0, 0, 0});
}

// The scales of a step: of a thread's two rows, and of both halves of the columns.
struct Scales {
  float row[2], weight[2];
};

// Where a thread finds the scales of a tile. Rows and columns that do not exist have those of others.
struct ScalePlaces {
  const float *row, *weight;  // of the first row and the first half
  int next_row, next_weight;  // from these to the second ones

  __device__ ScalePlaces(const Float8Gemm& gemm, const Tile& tile, int first_row) {
    const int steps = div_up(gemm.length, kStep), last_row = gemm.num_rows - 1;
    const float* const of_expert = gemm.scale_addresses
                                       ? reinterpret_cast<const float*>(gemm.scale_addresses[tile.expert])
                                       : gemm.weight_scales + tile.expert * gemm.scale_step;
    row = gemm.scales + static_cast<int64_t>(min(first_row, last_row)) * steps;
    next_row = first_row + 8 <= last_row ? 8 * steps : 0;
    weight = of_expert + tile.column / kStep * gemm.scale_stride;
    next_weight = tile.column + kHalf < gemm.columns ? static_cast<int>(gemm.scale_stride) : 0;
  }

  __device__ Scales load(int step) const {
    return {{__ldg(row + step), __ldg(row + next_row + step)},
            {__ldg(weight + step), __ldg(weight + next_weight + step)}};
  }
};

// [thread] Return the entries of a bias at a column and the next one.
__device__ float2 bias_at(const Float8Gemm& gemm, int expert, int column) {
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

// [warp group] Add the bias to half of a tile.
__device__ void add_bias(const Float8Gemm& gemm, const Tile& tile, float (&sums)[64], int column, int row) {
  float weights[2];
  for (int i = 0; i < 2; ++i)
    weights[i] = gemm.row_weights && row + 8 * i < tile.end ? gemm.row_weights[row + 8 * i] : 1;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 bias = bias_at(gemm, tile.expert, column + 8 * j + 2 * static_cast<int>(threadIdx.x % 4));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[4 * j + 2 * i] += weights[i] * bias.x;
      sums[4 * j + 2 * i + 1] += weights[i] * bias.y;
    }
  }
}

// [warp] Transpose values between the four threads of each row: thread c of them gets the values [c] of all four, in
// the order of threads.
__device__ void transpose(uint32_t (&values)[4]) {
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

// [warp group] Add the bias to half of a tile, and store it. `row`: the first of the thread's two rows.
__device__ void store(const Float8Gemm& gemm, const Tile& tile, float (&sums)[64], int half, int row) {
  const int column = tile.column + half * kHalf, place = threadIdx.x % 4;
  if (gemm.bias) add_bias(gemm, tile, sums, column, row);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_own = row + 8 * i < tile.end;
    __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(gemm.out) + static_cast<int64_t>(row + 8 * i) * gemm.columns;
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      uint32_t values[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* const sum = &sums[4 * (j + k) + 2 * i];
        const __nv_bfloat162 rounded = __floats2bfloat162_rn(sum[0], sum[1]);
        values[k] = reinterpret_cast<const uint32_t&>(rounded);
      }
      transpose(values);
      const int at = column + 8 * (j + place);
      if (is_own && at < gemm.columns)
        *reinterpret_cast<uint4*>(to + at) = {values[0], values[1], values[2], values[3]};
    }
  }
}

// [warp group] Multiply 64 rows of a stage and half of its columns. `rows`, `columns`: places of the operands.
__device__ __forceinline__ void multiply_half(float (&products)[64], uint32_t rows, uint32_t columns) {
  ptx::products_begin();
#pragma unroll
  for (int k = 0; k < kStep / 32; ++k)
    ptx::multiply_64x128(products, ptx::operand(rows + k * ptx::kNext32Bytes),
                         ptx::operand(columns + k * ptx::kNext32Bytes), k > 0);
  ptx::products_end(products);
}

// [warp group] Compute its rows of a tile, or with has_rows = false only let the others go on. `row`: the first of the
// thread's two rows.
template <int kHalves>
__device__ __forceinline__ void multiply_tile(Multiplying<Stage, Tile>& multiplying, const Float8Gemm& gemm,
                                              const Tile& tile, int group, int row, bool has_rows) {
  const int steps = div_up(gemm.length, kStep);
  float sums[kHalves][64];
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[half][i] = 0;
  const ScalePlaces places(gemm, tile, row);
  for (int step = 0; step < steps; ++step) {
    const Scales scales = places.load(step);
    const Stage& from = multiplying.stage();
    const uint32_t rows = same_in_warp(ptx::operand_place(from.rows + group * kGroupRows * kStep));
    const uint32_t weights = same_in_warp(ptx::operand_place(from.weights));
    multiplying.wait();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float products[64];
      if (has_rows) multiply_half(products, rows, weights + half * (kHalf * kStep / 16));
      if (half == kHalves - 1) multiplying.release();
      if (has_rows) {
        const float first = scales.row[0] * scales.weight[half], second = scales.row[1] * scales.weight[half];
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[half][i] = fmaf(products[i], i % 4 < 2 ? first : second, sums[half][i]);
      }
    }
    multiplying.advance();
  }
  if (has_rows)
#pragma unroll
    for (int half = 0; half < kHalves; ++half) store(gemm, tile, sums[half], half, row);
}

// [warp group] Compute its rows of the block's tiles.
__device__ void multiply(Pipeline<Stage, Tile>& pipeline, const Float8Gemm& gemm) {
  const int group = own_group();
  Multiplying<Stage, Tile> multiplying(pipeline);
  while (true) {
    const Tile tile = multiplying.take_tile();
    if (tile.expert < 0) break;
    const int first_row = tile.row + group * kGroupRows, row = first_row + row_of_sums();
    const bool has_rows = same_in_warp(first_row < tile.end);
    if (tile.column + kHalf < gemm.columns)
      multiply_tile<2>(multiplying, gemm, tile, group, row, has_rows);
    else
      multiply_tile<1>(multiplying, gemm, tile, group, row, has_rows);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    float8_gemm_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap rows,
                       const __grid_constant__ CUtensorMap weights) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& pipeline = *reinterpret_cast<Pipeline<Stage, Tile>*>(memory);
  run(pipeline, [&] { load(pipeline, p, rows, weights); }, [&] { multiply(pipeline, p.gemm); });
}

}  // namespace

void float8_gemm(const Float8Gemm& gemm, int num_sms, cudaStream_t stream) {
  if (gemm.num_rows == 0 || gemm.columns == 0 || gemm.experts == 0) return;
  if (gemm.num_shifts > std::numeric_limits<int32_t>::max())
    throw std::runtime_error("the weights of experts lie " + std::to_string(gemm.num_shifts) +
                             " times 16 bytes apart, but fewer than 2^31 times are allowed");
  const cuuint64_t length = gemm.length;
  const cuuint64_t row_sizes[] = {length, static_cast<cuuint64_t>(gemm.num_rows)};
  const cuuint64_t sizes[] = {length, static_cast<cuuint64_t>(gemm.columns), static_cast<cuuint64_t>(gemm.num_shifts)};
  const cuuint64_t strides[] = {length, 16};
  const CUtensorMap rows = tensor_map(gemm.rows, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, row_sizes, strides, kRows);
  const CUtensorMap weights = tensor_map(gemm.weights, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, sizes, strides, kColumns);
  // The rows of each expert may end in a tile that is not full.
  const int row_tiles = gemm.num_rows / kRows + std::min(gemm.experts, gemm.num_rows);
  const int tiles = row_tiles * div_up(gemm.columns, kColumns);
  const int rounds = rounds_of(tiles, num_sms);
  launch(float8_gemm_kernel, rounds == 1 ? tiles : rounds * num_sms, kThreads, sizeof(Pipeline<Stage, Tile>), stream,
         Params{gemm, num_sms, rounds}, rows, weights);
}

}  // namespace ep::cuda
