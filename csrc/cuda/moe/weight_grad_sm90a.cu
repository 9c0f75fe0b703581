// Where sums are added to memory, the L2 cache does so: nobody waits for what is there, and the products of the next
// tile begin under it. It adds 280 billion floats a second on an H200, so with few rows, where a tile has few products,
// that takes longer.
#include "cuda/device/tensor_map.h"
#include "cuda/moe/tile_pipeline.cuh"
#include "cuda/moe/tile_store.cuh"
#include "cuda/moe/weight_grad.h"

namespace ep::cuda {
namespace {

constexpr int kStep = 64;                                             // rows of the operands that a step sums
constexpr int kBoxColumns = 64, kBoxBytes = kStep * kBoxColumns * 2;  // of a box in shared memory

struct Stage {
  uint8_t grad[kRows / kBoxColumns][kBoxBytes];
  uint8_t rows[kColumns / kBoxColumns][kBoxBytes];
};

struct Tile {
  int expert;
  int row, column;
  int num_rows[2];  // of the operands, in each set
};

enum class Result { kAdded, kFloat32, kBFloat16 };  // added to float32, or stored

using Params = InRounds<WeightGrad>;

struct Maps {
  CUtensorMap grad[2], rows[2];
};

// [thread] Find the block's tiles, and load their operands. Where nothing would be added there is no tile.
template <Result kResult>
__device__ void load(Pipeline<Stage, Tile>& pipeline, const Params& p, const Maps& maps) {
  const WeightGrad& grad = p.gemm;
  const int m_tiles = div_up(grad.n, kRows), per_expert = m_tiles * div_up(grad.k, kColumns);
  const TileNumbers numbers = own_tiles(grad.experts * per_expert, p.num_sms, p.num_rounds);
  Loading<Stage, Tile> loading(pipeline);
  for (int number = numbers.first; number < numbers.end; number += p.num_sms) {
    const int expert = number / per_expert, place = number % per_expert;
    Tile tile{expert, place % m_tiles * kRows, place / m_tiles * kColumns, {0, 0}};
    int begin[2] = {0, 0};
#pragma unroll
    for (int set = 0; set < 2; ++set)
      if (set < grad.num_sets) {
        const GradRows& given = grad.sets[set];
        begin[set] = expert ? min(given.ends[expert - 1], given.num_rows) : 0;
        tile.num_rows[set] = max(0, min(given.ends[expert], given.num_rows) - begin[set]);
      }
    if (kResult == Result::kAdded && tile.num_rows[0] + tile.num_rows[1] == 0) continue;
    loading.publish(tile);
#pragma unroll
    for (int set = 0; set < 2; ++set)
      for (int first = 0; first < tile.num_rows[set]; first += kStep)
        loading.load([&](Stage& to, uint64_t* loaded) {
          for (int i = 0; i < kRows / kBoxColumns; ++i)
            ptx::box_load(to.grad[i], &maps.grad[set], tile.row + i * kBoxColumns, begin[set] + first, loaded);
          for (int i = 0; i < kColumns / kBoxColumns; ++i)
            ptx::box_load(to.rows[i], &maps.rows[set], tile.column + i * kBoxColumns, begin[set] + first, loaded);
        });
  }
  loading.publish({-1, 0, 0, {0, 0}});
}

// [warp group] Let rows of a stage from `num_rows` on be zeros, in the operands of this group: they belong to another
// expert, or nobody wrote them. Both groups read stage.rows, and each writes these zeros there before its own products.
__device__ void clear_rows(Stage& stage, int group, int num_rows) {
  const int thread = threadIdx.x % kGroupThreads;
  constexpr int kRowBytes = kBoxColumns * 2, kPieces = kRowBytes / 16;
  for (int row = num_rows + thread / kPieces; row < kStep; row += kGroupThreads / kPieces) {
    const int at = row * kRowBytes + thread % kPieces * 16;
    *reinterpret_cast<uint4*>(stage.grad[group] + at) = {};
    for (auto& box : stage.rows) *reinterpret_cast<uint4*>(box + at) = {};
  }
  ptx::fence_shared_before_bulk();
  ptx::named_barrier(1 + group, kGroupThreads);
}

// [warp group] Add the products of a stage to the sums, or let them be the sums.
__device__ __forceinline__ void add_products(float (&sums)[128], const Stage& stage, int group, bool add) {
  const uint32_t grad = same_in_warp(ptx::operand_place(stage.grad[group]));
  const uint32_t rows = same_in_warp(ptx::operand_place(stage.rows[0]));
  constexpr uint32_t kNextRows = 16 * kBoxColumns * 2 / 16;  // 16 rows, in units of 16 bytes
  ptx::products_begin(sums);
#pragma unroll
  for (int k = 0; k < kStep / 16; ++k)
    ptx::multiply_64x256<1, 1>(sums, ptx::operand<kBoxBytes>(grad + k * kNextRows),
                               ptx::operand<kBoxBytes>(rows + k * kNextRows), add || k > 0);
  ptx::products_end(sums);
}

// [warp group] Add the sums of a tile to memory, or store them. `row`: the first of the thread's two rows.
template <Result kResult>
__device__ void put_tile(const WeightGrad& grad, const Tile& tile, const float (&sums)[128], int row) {
  void* const out = reinterpret_cast<void*>(grad.out[tile.expert]);
  const auto put = [](float* p, float4 four) {
    if (kResult == Result::kAdded)
      ptx::add_to_memory(p, four);
    else
      *reinterpret_cast<float4*>(p) = four;
  };
  if (kResult == Result::kBFloat16)
    store_rounded(static_cast<__nv_bfloat16*>(out), grad.n, grad.k, sums, row, tile.column);
  else
    put_floats(static_cast<float*>(out), grad.n, grad.k, sums, row, tile.column, put);
}

// [warp group] Compute its rows of the block's tiles.
template <Result kResult>
__device__ void multiply(Pipeline<Stage, Tile>& pipeline, const WeightGrad& grad) {
  const int group = own_group();
  Multiplying<Stage, Tile> multiplying(pipeline);
  while (true) {
    const Tile tile = multiplying.take_tile();
    // Where the compiler does not know that a loop is the same in all threads, each product waits for the one before.
    if (same_in_warp(tile.expert) < 0) break;
    const int first_rows = same_in_warp(tile.num_rows[0]), second_rows = same_in_warp(tile.num_rows[1]);
    const int first_steps = div_up(first_rows, kStep), steps = first_steps + div_up(second_rows, kStep);
    float sums[128];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      multiplying.wait();
      Stage& stage = multiplying.stage();
      const bool is_second = step >= first_steps;
      const int num_rows = is_second ? second_rows - (step - first_steps) * kStep : first_rows - step * kStep;
      if (num_rows < kStep) clear_rows(stage, group, num_rows);
      add_products(sums, stage, group, step > 0);
      multiplying.release();
      multiplying.advance();
    }
    if (kResult != Result::kAdded && steps == 0) {
#pragma unroll
      for (float& sum : sums) sum = 0;
    }
    put_tile<kResult>(grad, tile, sums, tile.row + group * kGroupRows + row_of_sums());
  }
}

template <Result kResult>
__global__ void __launch_bounds__(kThreads, 1)
    weight_grad_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& pipeline = *reinterpret_cast<Pipeline<Stage, Tile>*>(memory);
  const auto load_all = [&] {
    if (threadIdx.x == 0) load<kResult>(pipeline, p, maps);
  };
  run(pipeline, load_all, [&] { multiply<kResult>(pipeline, p.gemm); });
}

// [host] Describe rows of bfloat16 for loads of boxes.
CUtensorMap rows_map(const void* at, int num_rows, int columns, int64_t stride) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(num_rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride)};
  return tensor_map(at, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, sizes, strides, kStep);
}

}  // namespace

void weight_grad(const WeightGrad& grad, int num_sms, cudaStream_t stream) {
  const int tiles = grad.experts * div_up(grad.n, kRows) * div_up(grad.k, kColumns);
  if (tiles == 0) return;
  Maps maps{};
  for (int set = 0; set < grad.num_sets; ++set) {
    const GradRows& given = grad.sets[set];
    maps.grad[set] = rows_map(given.grad, given.num_rows, grad.n, given.grad_stride);
    maps.rows[set] = rows_map(given.rows, given.num_rows, grad.k, given.rows_stride);
  }
  const auto stores =
      grad.dtype == DType::kBFloat16 ? weight_grad_kernel<Result::kBFloat16> : weight_grad_kernel<Result::kFloat32>;
  launch_in_rounds<Pipeline<Stage, Tile>>(grad.accumulate ? weight_grad_kernel<Result::kAdded> : stores, grad, tiles,
                                          num_sms, stream, maps);
}

}  // namespace ep::cuda
