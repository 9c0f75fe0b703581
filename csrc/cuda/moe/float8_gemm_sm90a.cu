// The products of a step of 128 are multiplied by their scales and added to sums, half of a tile's columns after the
// other: so a group has 64 products and 128 sums in registers.
#include "cuda/moe/row_tiles.cuh"

namespace ep::cuda {
namespace {

constexpr int kStep = 128;  // entries that share a scale
constexpr int kHalf = kColumns / 2;

struct Stage {
  uint8_t rows[kRows * kStep];
  uint8_t weights[kColumns * kStep];
};

using Params = InRounds<Float8Gemm>;

// [warp] Load the operands of the block's tiles.
__device__ void load(Pipeline<Stage, RowTile>& pipeline, const Params& p, const CUtensorMap& rows,
                     const CUtensorMap& weights) {
  const Float8Gemm& gemm = p.gemm;
  load_tiles(pipeline, p, [&](const RowTile& tile, Loading<Stage, RowTile>& loading) {
    const int shift = shift_of(gemm.weights, tile.expert);
    for (int column = 0; column < gemm.length; column += kStep)
      loading.load([&](Stage& to, uint64_t* loaded) {
        ptx::box_load(to.rows, &rows, column, tile.row, loaded);
        ptx::box_load(to.weights, &weights, column, tile.column, shift, loaded);
      });
  });
}

// The scales of a step: of a thread's two rows, and of both halves of the columns.
struct Scales {
  float row[2], weight[2];
};

// Where a thread finds the scales of a tile. Rows and columns that do not exist have those of others.
struct ScalePlaces {
  const float *row, *weight;  // of the first row and the first half
  int next_row, next_weight;  // from these to the second ones

  __device__ ScalePlaces(const Float8Gemm& gemm, const RowTile& tile, int first_row) {
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
__device__ __forceinline__ void multiply_tile(Multiplying<Stage, RowTile>& multiplying, const Float8Gemm& gemm,
                                              const RowTile& tile, int group, int row, bool has_rows) {
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
    for (int half = 0; half < kHalves; ++half) store(gemm, tile, sums[half], row, tile.column + half * kHalf);
}

// [warp group] Compute its rows of the block's tiles.
__device__ void multiply(Pipeline<Stage, RowTile>& pipeline, const Float8Gemm& gemm) {
  const int group = own_group();
  Multiplying<Stage, RowTile> multiplying(pipeline);
  while (true) {
    const RowTile tile = multiplying.take_tile();
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
  auto& pipeline = *reinterpret_cast<Pipeline<Stage, RowTile>*>(memory);
  run(pipeline, [&] { load(pipeline, p, rows, weights); }, [&] { multiply(pipeline, p.gemm); });
}

}  // namespace

void float8_gemm(const Float8Gemm& gemm, int num_sms, cudaStream_t stream) {
  if (gemm.num_rows == 0 || gemm.columns == 0 || gemm.experts == 0) return;
  const CUtensorMapDataType bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  launch_tiles<Stage>(float8_gemm_kernel, gemm, num_sms, stream, rows_map(gemm, bytes, 1),
                      weights_map(gemm.weights, bytes, 1, gemm.columns, gemm.length, kColumns));
}

}  // namespace ep::cuda
