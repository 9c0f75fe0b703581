// A block of a GEMM on Hopper: one warp finds tiles of the result and loads their operands, step by step, and two warp
// groups multiply. Each of these computes half of a tile's rows, and while one of them does something else, the tensor
// cores compute products of the other. 128 x 256 entries need 1.5 times the operands of 128 x 128 for twice the
// products.
#pragma once
#include <cstdint>

#include "cuda/device/launch.h"
#include "cuda/device/tensor_core.cuh"
#include "cuda/moe/tile_order.cuh"

namespace ep::cuda {

constexpr int kRows = 128, kColumns = 256;  // of a tile
constexpr int kGroups = 2, kGroupRows = kRows / kGroups;
constexpr int kGroupThreads = 128, kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kMultiplyingWarps = kGroups * kGroupThreads / 32;
// [registers of a thread] 128 sums, in float8 64 products, and no spills; the rest is enough to load.
constexpr int kMultiplyRegisters = 232, kLoadRegisters = 40;
static_assert(kGroupThreads * (kGroups * kMultiplyRegisters + kLoadRegisters) <= 65536);
constexpr uint32_t kStages = 4;  // steps whose operands are in shared memory: as many as fit

// A place in a ring, and the parity of its current round.
template <uint32_t kPlaces>
class Ring {
 public:
  __device__ uint32_t place() const { return count_ % kPlaces; }
  __device__ uint32_t parity() const { return count_ / kPlaces % 2; }
  __device__ void advance() { ++count_; }

 private:
  static_assert((kPlaces & (kPlaces - 1)) == 0, "the count may overflow");
  uint32_t count_ = 0;  // in one register
};

// In shared memory. Tile: has `expert`, -1 behind the last one.
template <class Stage, class Tile>
struct Pipeline {
  Stage stages[kStages];
  uint64_t loaded[kStages], free[kStages];
  Tile tiles[2];
  uint64_t tile_known[2], tile_free[2];

  // [thread]
  __device__ void init() {
    for (uint32_t i = 0; i < kStages; ++i) {
      ptx::barrier_init(&loaded[i], 1);
      ptx::barrier_init(&free[i], kMultiplyingWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(&tile_known[i], 1);
      ptx::barrier_init(&tile_free[i], kMultiplyingWarps);
    }
    ptx::fence_barrier_init();
  }
};

// What the thread that loads does.
template <class Stage, class Tile>
class Loading {
 public:
  __device__ explicit Loading(Pipeline<Stage, Tile>& pipeline) : p_(pipeline) {}

  // [thread] Tell the other warps the next tile.
  __device__ void publish(const Tile& tile) {
    ptx::barrier_wait(&p_.tile_free[known_.place()], known_.parity() ^ 1);
    p_.tiles[known_.place()] = tile;
    ptx::barrier_arrive(&p_.tile_known[known_.place()]);
    known_.advance();
  }

  // [thread] Wait for a free stage, and call start(stage, barrier), which starts loads of all of its bytes.
  template <class Start>
  __device__ void load(const Start& start) {
    uint64_t* const loaded = &p_.loaded[stage_.place()];
    ptx::barrier_wait(&p_.free[stage_.place()], stage_.parity() ^ 1);
    ptx::barrier_arrive_expect(loaded, sizeof(Stage));
    start(p_.stages[stage_.place()], loaded);
    stage_.advance();
  }

 private:
  Pipeline<Stage, Tile>& p_;
  Ring<kStages> stage_;
  Ring<2> known_;
};

// What a warp that multiplies does.
template <class Stage, class Tile>
class Multiplying {
 public:
  __device__ explicit Multiplying(Pipeline<Stage, Tile>& pipeline) : p_(pipeline) {}

  // [warp] Return the next tile.
  __device__ Tile take_tile() {
    ptx::barrier_wait(&p_.tile_known[known_.place()], known_.parity());
    const Tile tile = p_.tiles[known_.place()];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&p_.tile_free[known_.place()]);
    known_.advance();
    return tile;
  }

  // [warp] Return the stage of the next step, with its operands once wait() has returned.
  __device__ Stage& stage() { return p_.stages[stage_.place()]; }
  __device__ void wait() { ptx::barrier_wait(&p_.loaded[stage_.place()], stage_.parity()); }

  // [warp] Let others load to that stage. Its products are computed. stage() stays the same until advance().
  __device__ void release() {
    __syncwarp();  // all threads have waited
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&p_.free[stage_.place()]);
  }
  __device__ void advance() { stage_.advance(); }

 private:
  Pipeline<Stage, Tile>& p_;
  Ring<kStages> stage_;
  Ring<2> known_;
};

// [block] Call load() in one warp, and multiply() in the two groups.
template <class Stage, class Tile, class Load, class Multiply>
__device__ __forceinline__ void run(Pipeline<Stage, Tile>& pipeline, const Load& load, const Multiply& multiply) {
  static_assert(sizeof(pipeline) <= kUsableShared);
  if (threadIdx.x == 0) pipeline.init();
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<kLoadRegisters>();
    if (threadIdx.x < 32) load();
  } else {
    ptx::take_registers<kMultiplyRegisters>();
    multiply();
  }
}

// What a kernel computes, and the rounds of its blocks.
template <class Gemm>
struct InRounds {
  Gemm gemm;
  int num_sms, num_rounds;
};

// [host] Launch a kernel for up to so many tiles. Shared: the pipeline of a block.
template <class Shared, class Gemm, class... Maps>
void launch_in_rounds(void (*kernel)(InRounds<Gemm>, Maps...), const Gemm& gemm, int tiles, int num_sms,
                      cudaStream_t stream, const Maps&... maps) {
  const int rounds = rounds_of(tiles, num_sms);
  launch(kernel, rounds == 1 ? tiles : rounds * num_sms, kThreads, sizeof(Shared), stream,
         InRounds<Gemm>{gemm, num_sms, rounds}, maps...);
}

// [warp] Return a value that all threads have, in a way that lets the compiler know that they are the same.
template <class Value>
__device__ __forceinline__ Value same_in_warp(Value value) {
  return __shfl_sync(~0u, value, 0);
}

// [thread] Return the number of this warp group among those that multiply.
__device__ __forceinline__ int own_group() { return same_in_warp(static_cast<int>(threadIdx.x) / kGroupThreads - 1); }

// [thread] Return the first of the two rows that a thread has of its group's sums; the other one is 8 further.
__device__ __forceinline__ int row_of_sums() { return threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4; }

}  // namespace ep::cuda
