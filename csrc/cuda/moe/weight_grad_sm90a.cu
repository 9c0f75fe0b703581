// A block has a warp that loads tiles of the operands, and two warp groups that multiply: each computes 64 of a tile's
// 128 rows, in 256 columns. The L2 cache adds the sums to memory, so nobody waits for what is there, and the products
// of the next tile begin under it.
#include "cuda/device/launch.h"
#include "cuda/device/tensor_core.cuh"
#include "cuda/moe/tiles.cuh"
#include "cuda/moe/weight_grad.h"

namespace ep::cuda {
namespace {

constexpr int kRows = 128, kColumns = 256;  // of a tile of `out`
constexpr int kStep = 64;                   // rows of the operands that a step sums
constexpr int kStages = 4;                  // steps whose operands are in shared memory
constexpr int kGroups = 2, kGroupRows = kRows / kGroups;
constexpr int kGroupThreads = 128, kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kMultiplyingWarps = kGroups * kGroupThreads / 32;
constexpr int kMultiplyRegisters = 232, kLoadRegisters = 40;
constexpr int kTileColumns = 64, kTileBytes = kStep * kTileColumns * 2;  // of a tile in shared memory

struct Stage {
  uint8_t grad[kRows / kTileColumns][kTileBytes];
  uint8_t rows[kColumns / kTileColumns][kTileBytes];
};

struct Tile {
  int expert;  // of out; -1: there are no more
  int row, column;
  int num_rows[2];  // of the operands, in each set
};

struct Shared {
  Stage stages[kStages];
  uint64_t loaded[kStages], free[kStages];
  Tile tiles[2];
  uint64_t tile_known[2], tile_free[2];
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Params {
  WeightGrad grad;
  int num_sms, num_rounds;
};

struct Maps {
  CUtensorMap grad[2], rows[2];
};

// [thread] Find the block's tiles, tell the other warps, and load their operands.
__device__ void load(Shared& shared, const Params& p, const Maps& maps) {
  const WeightGrad& grad = p.grad;
  const int m_tiles = div_up(grad.n, kRows), per_expert = m_tiles * div_up(grad.k, kColumns);
  const Numbers numbers = own_numbers(grad.experts * per_expert, p.num_sms, p.num_rounds);
  Ring<kStages> stage;
  Ring<2> known;
  const auto tell = [&](const Tile& tile) {
    ptx::barrier_wait(&shared.tile_free[known.place], known.parity ^ 1);
    shared.tiles[known.place] = tile;
    ptx::barrier_arrive(&shared.tile_known[known.place]);
    known.advance();
  };
  for (int number = numbers.first; number < numbers.end; number += p.num_sms) {
    const int expert = number / per_expert, place = number % per_expert;
    Tile tile{expert, place % m_tiles * kRows, place / m_tiles * kColumns, {0, 0}};
    int begin[2] = {0, 0};
    for (int set = 0; set < grad.num_sets; ++set) {
      const GradRows& of = grad.sets[set];
      const int source = grad.first_expert + expert;
      begin[set] = source ? min(of.ends[source - 1], of.num_rows) : 0;
      tile.num_rows[set] = min(of.ends[source], of.num_rows) - begin[set];
    }
    if (tile.num_rows[0] + tile.num_rows[1] == 0 || (grad.held && grad.held[3 * expert] < 0)) continue;
    tell(tile);
    for (int set = 0; set < grad.num_sets; ++set)
      for (int step = 0; step < div_up(tile.num_rows[set], kStep); ++step) {
        Stage& to = shared.stages[stage.place];
        uint64_t* const loaded = &shared.loaded[stage.place];
        ptx::barrier_wait(&shared.free[stage.place], stage.parity ^ 1);
        ptx::barrier_arrive_expect(loaded, sizeof(Stage));
        const int row = begin[set] + step * kStep;
        for (int i = 0; i < kRows / kTileColumns; ++i)
          ptx::tile_load(to.grad[i], &maps.grad[set], tile.row + i * kTileColumns, row, loaded);
        for (int i = 0; i < kColumns / kTileColumns; ++i)
          ptx::tile_load(to.rows[i], &maps.rows[set], tile.column + i * kTileColumns, row, loaded);
        stage.advance();
      }
  }
  tell({-1, 0, 0, {0, 0}});
}

// [warp group] Let rows of a stage from `num_rows` on be zeros, in the operands of this group: they belong to another
// expert, or nobody wrote them.
__device__ void clear_rows(Stage& stage, int group, int num_rows) {
  const int thread = threadIdx.x % kGroupThreads;
  constexpr int kRowBytes = kTileColumns * 2, kPieces = kRowBytes / 16;
  for (int row = num_rows + thread / kPieces; row < kStep; row += kGroupThreads / kPieces) {
    const int at = row * kRowBytes + thread % kPieces * 16;
    *reinterpret_cast<uint4*>(stage.grad[group] + at) = {};
    for (auto& tile : stage.rows) *reinterpret_cast<uint4*>(tile + at) = {};
  }
  ptx::fence_shared_before_bulk();
  ptx::named_barrier(1 + group, kGroupThreads);
}

// [warp group] Add the products of a stage to the sums, or let them be the sums.
__device__ __forceinline__ void add_products(float (&sums)[128], const Stage& stage, int group, bool add) {
  // The same in all threads of the group, which the compiler does not know.
  const uint32_t grad = __shfl_sync(~0u, ptx::operand_place(stage.grad[group]), 0);
  const uint32_t rows = __shfl_sync(~0u, ptx::operand_place(stage.rows[0]), 0);
  constexpr uint32_t kNextRows = 16 * kTileColumns * 2 / 16;  // 16 rows, in units of 16 bytes
  ptx::products_begin();
#pragma unroll
  for (int k = 0; k < kStep / 16; ++k)
    ptx::multiply_64x256(sums, ptx::transposed_operand<kTileBytes>(grad + k * kNextRows),
                         ptx::transposed_operand<kTileBytes>(rows + k * kNextRows), add || k > 0);
  ptx::products_end();
}

// [warp group] Add the sums of a tile to memory. `row`: the first of the thread's two rows.
__device__ void add_tile(const WeightGrad& grad, const Tile& tile, const float (&sums)[128], int row) {
  float* const out = reinterpret_cast<float*>(grad.out[tile.expert]);
  const bool is_odd = threadIdx.x & 1;
  const int column = tile.column + 8 * is_odd + threadIdx.x % 4 / 2 * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_inside = row + 8 * i < grad.n;
    float* const to = out + static_cast<int64_t>(row + 8 * i) * grad.k;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      // Of the columns 8 j to 8 j + 15 a thread has two pairs. The even one of two threads takes both first pairs.
      const float *const first = &sums[4 * j + 2 * i], *const second = &sums[4 * (j + 1) + 2 * i];
      const float x = __shfl_xor_sync(~0u, is_odd ? first[0] : second[0], 1);
      const float y = __shfl_xor_sync(~0u, is_odd ? first[1] : second[1], 1);
      const float4 four = is_odd ? float4{x, y, second[0], second[1]} : float4{first[0], first[1], x, y};
      if (is_inside && column + 8 * j < grad.k) ptx::add_to_memory(to + column + 8 * j, four);
    }
  }
}

// [warp] Return the tile that all threads have been given, in a way that lets the compiler know that they are the same:
// otherwise it lets each product wait for the one before.
__device__ Tile same_in_warp(const Tile& tile) {
  const auto same = [](int value) { return __shfl_sync(~0u, value, 0); };
  return {same(tile.expert), same(tile.row), same(tile.column), {same(tile.num_rows[0]), same(tile.num_rows[1])}};
}

// [warp group] Compute its rows of the block's tiles.
__device__ void multiply(Shared& shared, const WeightGrad& grad) {
  const int group = __shfl_sync(~0u, threadIdx.x / kGroupThreads - 1, 0);
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  Ring<kStages> stage;
  Ring<2> known;
  while (true) {
    ptx::barrier_wait(&shared.tile_known[known.place], known.parity);
    const Tile tile = same_in_warp(shared.tiles[known.place]);
    if (lane == 0) ptx::barrier_arrive(&shared.tile_free[known.place]);
    known.advance();
    if (tile.expert < 0) break;
    const int first_steps = div_up(tile.num_rows[0], kStep), steps = first_steps + div_up(tile.num_rows[1], kStep);
    float sums[128];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::barrier_wait(&shared.loaded[stage.place], stage.parity);
      const bool is_second = step >= first_steps;
      const int num_rows =
          is_second ? tile.num_rows[1] - (step - first_steps) * kStep : tile.num_rows[0] - step * kStep;
      if (num_rows < kStep) clear_rows(shared.stages[stage.place], group, num_rows);
      add_products(sums, shared.stages[stage.place], group, step > 0);
      if (lane == 0) ptx::barrier_arrive(&shared.free[stage.place]);
      stage.advance();
    }
    add_tile(grad, tile, sums, tile.row + group * kGroupRows + thread / 32 * 16 + lane / 4);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    weight_grad_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
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
    if (threadIdx.x == 0) load(shared, p, maps);
  } else {
    ptx::take_registers<kMultiplyRegisters>();
    multiply(shared, p.grad);
  }
}

// [host] Describe rows of bfloat16 for loads of tiles.
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
    const GradRows& of = grad.sets[set];
    maps.grad[set] = rows_map(of.grad, of.num_rows, grad.n, of.grad_stride);
    maps.rows[set] = rows_map(of.rows, of.num_rows, grad.k, of.rows_stride);
  }
  const int rounds = rounds_of(tiles, num_sms);
  launch(weight_grad_kernel, rounds == 1 ? tiles : rounds * num_sms, kThreads, sizeof(Shared), stream,
         Params{grad, num_sms, rounds}, maps);
}

}  // namespace ep::cuda
