// Each of the two warp groups has the sums of 64 rows and all columns of a tile in registers.
#include "cuda/moe/row_tiles.cuh"

namespace ep::cuda {
namespace {

constexpr int kStep = 64;             // entries of a row that a step multiplies
constexpr int kRowBytes = kStep * 2;  // of a box in shared memory
// Weights that are not transposed are in boxes side by side.
constexpr int kBoxColumns = kRowBytes / 2, kBoxBytes = kStep * kRowBytes, kBoxes = kColumns / kBoxColumns;

struct Stage {
  uint8_t rows[kRows * kRowBytes];
  uint8_t weights[kColumns * kRowBytes];
};
static_assert(kBoxes * kBoxBytes == sizeof(Stage::weights));

using Params = InRounds<BFloat16Gemm>;

struct Maps {
  CUtensorMap rows, weights, copies;
};

// [warp] Load the operands of the block's tiles.
template <bool kTransposed>
__device__ void load(Pipeline<Stage, RowTile>& pipeline, const Params& p, const Maps& maps) {
  const BFloat16Gemm& gemm = p.gemm;
  load_tiles(pipeline, p, [&](const RowTile& tile, Loading<Stage, RowTile>& loading) {
    const bool is_own = tile.expert < gemm.num_own;
    const CUtensorMap* const weights = is_own ? &maps.weights : &maps.copies;
    const int shift = is_own ? shift_of(gemm.weights, tile.expert) : shift_of(gemm.copies, tile.expert - gemm.num_own);
    for (int step = 0; step < gemm.length; step += kStep)
      loading.load([&](Stage& to, uint64_t* loaded) {
        ptx::box_load(to.rows, &maps.rows, step, tile.row, loaded);
        if (kTransposed)
          ptx::box_load(to.weights, weights, step, tile.column, shift, loaded);
        else
          for (int i = 0; i < kBoxes; ++i)
            ptx::box_load(to.weights + i * kBoxBytes, weights, tile.column + i * kBoxColumns, step, shift, loaded);
      });
  });
}

// [warp group] Add the products of its rows of a stage to the sums, or let them be the sums.
template <bool kTransposed>
__device__ __forceinline__ void add_products(float (&sums)[128], const Stage& stage, int group, bool add) {
  const uint32_t rows = same_in_warp(ptx::operand_place(stage.rows + group * kGroupRows * kRowBytes));
  const uint32_t weights = same_in_warp(ptx::operand_place(stage.weights));
  constexpr uint32_t kNextRows = 16 * kRowBytes / 16;  // 16 rows, in units of 16 bytes
  ptx::products_begin(sums);
#pragma unroll
  for (int k = 0; k < kStep / 16; ++k) {
    const uint64_t of_rows = ptx::operand(rows + k * ptx::kNext32Bytes);
    if (kTransposed)
      ptx::multiply_64x256<0, 0>(sums, of_rows, ptx::operand(weights + k * ptx::kNext32Bytes), add || k > 0);
    else
      ptx::multiply_64x256<0, 1>(sums, of_rows, ptx::operand<kBoxBytes>(weights + k * kNextRows), add || k > 0);
  }
  ptx::products_end(sums);
}

// [warp group] Compute its rows of the block's tiles.
template <bool kTransposed>
__device__ void multiply(Pipeline<Stage, RowTile>& pipeline, const BFloat16Gemm& gemm) {
  const int group = own_group(), steps = div_up(gemm.length, kStep);
  Multiplying<Stage, RowTile> multiplying(pipeline);
  while (true) {
    const RowTile tile = multiplying.take_tile();
    if (same_in_warp(tile.expert) < 0) break;
    const int first_row = tile.row + group * kGroupRows;
    const bool has_rows = same_in_warp(first_row < tile.end);
    float sums[128];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      multiplying.wait();
      if (has_rows) add_products<kTransposed>(sums, multiplying.stage(), group, step > 0);
      multiplying.release();
      multiplying.advance();
    }
    if (has_rows) store(gemm, tile, sums, first_row + row_of_sums(), tile.column);
  }
}

template <bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1)
    bfloat16_gemm_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& pipeline = *reinterpret_cast<Pipeline<Stage, RowTile>*>(memory);
  run(pipeline, [&] { load<kTransposed>(pipeline, p, maps); }, [&] { multiply<kTransposed>(pipeline, p.gemm); });
}

CUtensorMap map_of(const BFloat16Gemm& gemm, const ExpertWeights& weights) {
  const auto type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return gemm.transposed ? weights_map(weights, type, 2, gemm.columns, gemm.length, kColumns)
                         : weights_map(weights, type, 2, gemm.length, gemm.columns, kStep);
}

}  // namespace

void bfloat16_gemm(const BFloat16Gemm& gemm, int num_sms, cudaStream_t stream) {
  if (gemm.num_rows == 0 || gemm.columns == 0 || gemm.experts == 0) return;
  Maps maps{rows_map(gemm, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2), map_of(gemm, gemm.weights), {}};
  if (gemm.num_own < gemm.experts) maps.copies = map_of(gemm, gemm.copies);
  const auto kernel = gemm.transposed ? bfloat16_gemm_kernel<true> : bfloat16_gemm_kernel<false>;
  launch_tiles<Stage>(kernel, gemm, num_sms, stream, maps);
}

}  // namespace ep::cuda
