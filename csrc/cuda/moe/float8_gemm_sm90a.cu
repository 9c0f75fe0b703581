// A block has a warp that loads tiles of the operands, and two warp groups that multiply: each computes 64 of the
// block's 128 rows, as two halves of 128 columns. While one of them scales and adds the products of a step, the tensor
// cores compute those of the other. 128 x 256 entries need 1.5 times the operands of 128 x 128 for twice the products.
//
// A block computes several tiles, so the loads of one go on under the end of another.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/launch.h"
#include "cuda/device/tensor_core.cuh"
#include "cuda/moe/float8_gemm.h"
#include "cuda/moe/tiles.cuh"

namespace ep::cuda {
namespace {

constexpr int kRows = 128, kColumns = 256, kStep = 128;  // of a tile; products that one step adds
constexpr int kHalf = kColumns / 2;
constexpr int kStages = 4;  // steps whose operands are in shared memory
constexpr int kGroups = 2, kGroupRows = kRows / kGroups;
constexpr int kGroupThreads = 128, kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kMultiplyingWarps = kGroups * kGroupThreads / 32;
constexpr int kMultiplyRegisters = 232, kLoadRegisters = 40;
static_assert(kGroupThreads * (kGroups * kMultiplyRegisters + kLoadRegisters) <= 65536);
constexpr int kDown = 16;  // tiles of one column of tiles that are computed in order, before as many of the next

struct Stage {
  uint8_t rows[kRows * kStep];
  uint8_t weights[kColumns * kStep];
};

struct Tile {
  int expert;  // -1: there are no more
  int row, end, column;
};

struct Shared {
  Stage stages[kStages];
  uint64_t loaded[kStages], free[kStages];
  Tile tiles[2];
  uint64_t tile_known[2], tile_free[2];
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Params {
  Float8Gemm gemm;
  int num_sms, num_rounds;
};

// Finds tiles by their numbers, which ascend from call to call. [warp]: a lane knows one of 32 experts.
struct Finder {
  const Float8Gemm& gemm;
  const int lane = threadIdx.x % 32, n_tiles;
  int group = 0, before = 0;                    // experts / 32; tiles of the groups before
  int begin = 0, end = 0, tiles = 0, upto = 0;  // of the lane's expert; upto: with those of lanes before

  __device__ explicit Finder(const Float8Gemm& given) : gemm(given), n_tiles(div_up(given.columns, kColumns)) {}

  __device__ void load_group() {
    const int expert = 32 * group + lane;
    begin = end = 0;
    if (expert < gemm.experts) {
      begin = expert ? min(gemm.ends[expert - 1], gemm.num_rows) : 0;
      end = min(gemm.ends[expert], gemm.num_rows);
    }
    upto = tiles = div_up(end - begin, kRows) * n_tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, upto, distance);
      if (lane >= distance) upto += other;
    }
  }

  // Return the number of all tiles, and go to the first group.
  __device__ int count() {
    int total = 0;
    for (group = div_up(gemm.experts, 32); group-- > 0;) {
      load_group();
      total += __shfl_sync(~0u, upto, 31);
    }
    group = 0;
    return total;
  }

  __device__ Tile find(int number) {
    int in_group;
    while (number >= before + (in_group = __shfl_sync(~0u, upto, 31))) {
      before += in_group;
      ++group;
      load_group();
    }
    number -= before;
    const int source = __ffs(__ballot_sync(~0u, upto > number)) - 1;
    const int first = __shfl_sync(~0u, begin, source), last = __shfl_sync(~0u, end, source);
    number -= __shfl_sync(~0u, upto - tiles, source);
    const int top = number / (kDown * n_tiles) * kDown;  // tiles above this column of tiles
    number -= top * n_tiles;
    const int height = min(div_up(last - first, kRows) - top, kDown);
    return {32 * group + source, first + (top + number % height) * kRows, last, number / height * kColumns};
  }
};

// [warp] Find the block's tiles, tell the other warps, and load their operands.
__device__ void load(Shared& shared, const Params& p, const CUtensorMap& rows, const CUtensorMap& weights) {
  const Float8Gemm& gemm = p.gemm;
  Finder finder(gemm);
  const Numbers numbers = own_numbers(finder.count(), p.num_sms, p.num_rounds);
  const int steps = div_up(gemm.length, kStep);
  Ring<kStages> stage;
  Ring<2> known;
  for (int number = numbers.first; number < numbers.end; number += p.num_sms) {
    const Tile tile = finder.find(number);
    if (finder.lane == 0) {
      ptx::barrier_wait(&shared.tile_free[known.place], known.parity ^ 1);
      shared.tiles[known.place] = tile;
      ptx::barrier_arrive(&shared.tile_known[known.place]);
      const int shift = gemm.shifts ? gemm.shifts[tile.expert] : static_cast<int>(gemm.first + tile.expert * gemm.step);
      for (int step = 0; step < steps; ++step) {
        Stage& to = shared.stages[stage.place];
        uint64_t* const loaded = &shared.loaded[stage.place];
        ptx::barrier_wait(&shared.free[stage.place], stage.parity ^ 1);
        ptx::barrier_arrive_expect(loaded, sizeof(Stage));
        ptx::tile_load(to.rows, &rows, step * kStep, tile.row, loaded);
        ptx::tile_load(to.weights, &weights, step * kStep, tile.column, shift, loaded);
        stage.advance();
      }
    }
    known.advance();
  }
  if (finder.lane == 0) {
    ptx::barrier_wait(&shared.tile_free[known.place], known.parity ^ 1);
    shared.tiles[known.place].expert = -1;
    ptx::barrier_arrive(&shared.tile_known[known.place]);
  }
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
  switch (gemm.bias_dtype) {
    case DType::kFloat32:
      return *reinterpret_cast<const float2*>(static_cast<const float*>(gemm.bias) + at);
    case DType::kBFloat16:
      return __bfloat1622float2(
          *reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(gemm.bias) + at));
    default:
      return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(gemm.bias) + at));
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
  ptx::products_end();
}

// [warp group] Compute its rows of a tile, or with has_rows = false only let the others go on.
template <int kHalves>
__device__ __forceinline__ void multiply_tile(Shared& shared, const Float8Gemm& gemm, const Tile& tile,
                                              Ring<kStages>& stage, int group, int row, bool has_rows) {
  const int steps = div_up(gemm.length, kStep);
  float sums[kHalves][64];
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[half][i] = 0;
  const ScalePlaces places(gemm, tile, row);
  for (int step = 0; step < steps; ++step) {
    const Scales scales = places.load(step);
    const Stage& from = shared.stages[stage.place];
    // The same in all threads of the group, which the compiler does not know.
    const uint32_t rows = __shfl_sync(~0u, ptx::operand_place(from.rows + group * kGroupRows * kStep), 0);
    const uint32_t weights = __shfl_sync(~0u, ptx::operand_place(from.weights), 0);
    ptx::barrier_wait(&shared.loaded[stage.place], stage.parity);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float products[64];
      if (has_rows) multiply_half(products, rows, weights + half * (kHalf * kStep / 16));
      if (half == kHalves - 1 && threadIdx.x % 32 == 0) ptx::barrier_arrive(&shared.free[stage.place]);
      if (has_rows) {
        const float first = scales.row[0] * scales.weight[half], second = scales.row[1] * scales.weight[half];
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[half][i] = fmaf(products[i], i % 4 < 2 ? first : second, sums[half][i]);
      }
    }
    stage.advance();
  }
  if (has_rows)
#pragma unroll
    for (int half = 0; half < kHalves; ++half) store(gemm, tile, sums[half], half, row);
}

// [warp group] Compute its rows of the block's tiles.
__device__ void multiply(Shared& shared, const Float8Gemm& gemm) {
  const int group = __shfl_sync(~0u, threadIdx.x / kGroupThreads - 1, 0);
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  Ring<kStages> stage;
  Ring<2> known;
  while (true) {
    ptx::barrier_wait(&shared.tile_known[known.place], known.parity);
    const Tile tile = shared.tiles[known.place];
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&shared.tile_free[known.place]);
    known.advance();
    if (tile.expert < 0) break;
    const int first_row = tile.row + group * kGroupRows, row = first_row + thread / 32 * 16 + lane / 4;
    const bool has_rows = __shfl_sync(~0u, first_row < tile.end, 0);
    if (tile.column + kHalf < gemm.columns)
      multiply_tile<2>(shared, gemm, tile, stage, group, row, has_rows);
    else
      multiply_tile<1>(shared, gemm, tile, stage, group, row, has_rows);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    float8_gemm_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap rows,
                       const __grid_constant__ CUtensorMap weights) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch(&rows);
    ptx::prefetch(&weights);
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&shared.loaded[i], 1);
      ptx::barrier_init(&shared.free[i], kMultiplyingWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(&shared.tile_known[i], 1);
      ptx::barrier_init(&shared.tile_free[i], kMultiplyingWarps);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<kLoadRegisters>();
    if (threadIdx.x < 32) load(shared, p, rows, weights);
  } else {
    ptx::take_registers<kMultiplyRegisters>();
    multiply(shared, p.gemm);
  }
}

}  // namespace

void float8_gemm(const Float8Gemm& gemm, int num_sms, cudaStream_t stream) {
  if (gemm.num_rows == 0 || gemm.columns == 0 || gemm.experts == 0) return;
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
  launch(float8_gemm_kernel, rounds == 1 ? tiles : rounds * num_sms, kThreads, sizeof(Shared), stream,
         Params{gemm, num_sms, rounds}, rows, weights);
}

}  // namespace ep::cuda
