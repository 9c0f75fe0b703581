// The kernels of latency_floor.cu: each is one part of a latency, with the instructions of csrc/cuda/device/ptx.cuh.
#pragma once
#include "cuda/device/ptx.cuh"

using namespace ep;

namespace {

constexpr int kThreads = 512;                           // of a block of a dispatch
constexpr int kMovers = 256, kMoverWarps = 8;           // those that pull
constexpr size_t kShared = 226 * 1024 - 128;            // as kUsableShared
constexpr int kRow = 7168, kPieces = 2048;              // [bytes] of a float8 row; rows in a buffer
constexpr int kPlaces = 3;                              // rows of a warp under way
constexpr int kTimes = 64;                              // repetitions inside a kernel
constexpr size_t kFlagStride = 128 / sizeof(uint64_t);  // a line for each flag

// Limit of a wait, and what to do after it; in each kernel's parameters.
struct Guard {
  uint64_t limit_ns;
  uint32_t* failed;  // in pinned host memory: 1 after a wait over the limit

  // [thread] Wait until done() or the end. Return whether it is done.
  template <class Done>
  __device__ bool wait(const Done& done) const {
    uint64_t begin = 0;  // read late: a short wait reads no clock
    for (int turn = 1; !done(); ++turn) {
      if (turn % 1024 != 0) continue;
      if (begin == 0) begin = ptx::nanoseconds();
      if (ptx::nanoseconds() - begin > limit_ns) *static_cast<volatile uint32_t*>(failed) = 1;
      if (*static_cast<volatile uint32_t*>(failed) != 0) return false;
    }
    return true;
  }
};

// ---- launches -------------------------------------------------------------------------------------------------------

// As many bytes of parameters as a dispatch has.
struct Params {
  char bytes[1032];
};

__global__ void __launch_bounds__(kThreads, 1) empty_kernel(const __grid_constant__ Params) {}

// The last of all blocks to arrive stores a word, as at the end of every operation.
__global__ void __launch_bounds__(kThreads, 1) arrive_kernel(const __grid_constant__ Params, uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::fence_system();
  if (atomicAdd(counter, 1u) == gridDim.x - 1) *counter = 0;
  ptx::fence_system();
}

// ---- one thread's instructions --------------------------------------------------------------------------------------

enum class Single { kClock, kLoad, kAtomic, kFence, kFenceAfterStore, kFenceBeforeBulk, kBarrier };

// Repeat one instruction; each depends on the one before. `ring`: [kPieces] indices of a walk, in memory near or far.
template <Single kWhich>
__global__ void single_kernel(uint32_t* ring, uint32_t* scratch, float* ns) {
  uint32_t at = 0;
  __syncthreads();
  const uint64_t begin = ptx::nanoseconds();
  uint64_t end = begin;
  int steps = 0;
#pragma unroll 1
  for (int i = 0; i < (kWhich == Single::kClock ? 256 : 1) * kTimes; ++i) {
    if constexpr (kWhich == Single::kClock) {  // the steps of the clock
      const uint64_t now = ptx::nanoseconds();
      steps += now != end, end = now;
    } else if constexpr (kWhich == Single::kLoad) {
      at = __ldcg(ring + at * (kRow / sizeof(uint32_t)));
    } else if constexpr (kWhich == Single::kAtomic) {
      at += atomicAdd(scratch + (at & 1), 2u) & 1;
    } else if constexpr (kWhich == Single::kFence) {
      ptx::fence_system();
    } else if constexpr (kWhich == Single::kFenceAfterStore) {
      *static_cast<volatile uint32_t*>(ring + i * (kRow / sizeof(uint32_t)) + 1) = i;
      ptx::fence_system();
    } else if constexpr (kWhich == Single::kFenceBeforeBulk) {
      ptx::fence_before_bulk();
    } else {
      ptx::named_barrier(1, blockDim.x);
    }
  }
  if (kWhich != Single::kClock) end = ptx::nanoseconds(), steps = kTimes;
  if (threadIdx.x == 0) *ns = static_cast<float>(end - begin) / max(steps, 1) + (at == ~0u);
}

// ---- flags and pushed rows ------------------------------------------------------------------------------------------

enum class Ball { kFlag, kTeam, kStores, kBulk };

// One end of a game of catch.
struct Player {
  uint64_t *flag_here, *flag_there;  // lines of this end, and of the other one
  char *rows_here, *rows_there;      // [kTimes, 2 * kRow]
  uint64_t* thrown;                  // balls thrown in earlier launches
  float* ns;                         // of one way
  uint32_t* torn;                    // rows that were not complete when their flag was seen
};
struct Players {
  Player of[2];
};

// [thread] The wait for a flag; a warp waits together, as wait_until does.
__device__ bool caught(const Guard& guard, const uint64_t* flag, uint64_t expected) {
  const bool ok = guard.wait([&] { return !__any_sync(~0u, ptx::load_acquire(flag) < expected); });
  __syncwarp();
  return ok;
}

// Two blocks throw a ball: a flag, or a row and its flag. The time of one way is half of that of a round trip. `first`:
// the player of block 0.
template <Ball kBall>
__global__ void __launch_bounds__(kMovers)
    catch_kernel(const __grid_constant__ Players players, int first, int bytes, const Guard guard) {
  extern __shared__ __align__(1024) char row[];
  __shared__ bool ok;
  const int number = first + blockIdx.x, thread = threadIdx.x, vectors = bytes / 16;
  const Player& me = players.of[number];
  const uint64_t before = *me.thrown;
  const bool is_in = kBall == Ball::kTeam || thread < 32;
  if (!is_in) return;
  for (int v = thread; v < vectors; v += 32) reinterpret_cast<uint4*>(row)[v] = uint4{1, 2, 3, 4};
  __syncwarp();
  uint64_t begin = 0;
#pragma unroll 1
  for (int i = 0; i < 2 * kTimes; ++i) {
    const uint64_t ball = before + i + 1;
    char* const to = me.rows_there + static_cast<size_t>(i / 2) * 2 * kRow;
    if (i == 2) begin = ptx::nanoseconds();  // both have begun
    if (i % 2 == number) {
      if constexpr (kBall == Ball::kBulk) {
        if (thread == 0) {
          reinterpret_cast<volatile uint64_t*>(row)[vectors * 2 - 1] = ball;
          ptx::fence_shared_before_bulk();
          ptx::bulk_store(to, row, bytes);
          ptx::bulk_commit();
          ptx::bulk_wait<0>();
        }
      } else if constexpr (kBall == Ball::kStores) {
        const uint4 value{1, 2, static_cast<uint32_t>(ball), static_cast<uint32_t>(ball >> 32)};
#pragma unroll 14
        for (int v = thread; v < vectors; v += 32) reinterpret_cast<uint4*>(to)[v] = value;
        __syncwarp();
      }
      if (thread == 0) {
        ptx::fence_system();
        ptx::store_relaxed(me.flag_there, ball);
      }
    } else {
      bool seen = true;
      if (thread < 32) seen = caught(guard, me.flag_here, ball);
      if constexpr (kBall == Ball::kTeam) {  // as first_warp_waits
        if (thread == 0) ok = seen;
        ptx::named_barrier(1, kMovers);
        seen = ok;
        ptx::fence_before_bulk();
        ptx::named_barrier(1, kMovers);
      }
      if (!seen) return;
      if (thread == 0 && (kBall == Ball::kBulk || kBall == Ball::kStores)) {
        const char* from = me.rows_here + static_cast<size_t>(i / 2) * 2 * kRow + bytes - 8;
        if (*reinterpret_cast<const volatile uint64_t*>(from) != ball) atomicAdd(me.torn, 1u);
      }
    }
  }
  if (thread != 0) return;
  *me.ns = static_cast<float>(ptx::nanoseconds() - begin) / (2 * kTimes - 2);
  *me.thrown = before + 2 * kTimes;
}

// ---- one pulled row -------------------------------------------------------------------------------------------------

// Pull rows one after the other: by bulk loads of at most a piece each, or by vector loads of all threads.
template <bool kByBulk>
__global__ void row_kernel(const char* rows, int bytes, uint32_t* sink, float* ns, const Guard guard) {
  extern __shared__ __align__(1024) char row[];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&full, 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  uint32_t sum = 0;
  const uint64_t begin = ptx::nanoseconds();
#pragma unroll 1
  for (int i = 0; i < kTimes; ++i) {
    const char* from = rows + static_cast<size_t>(i) * 2 * kRow + (sum == ~0u);  // after the row before
    if constexpr (kByBulk) {
      if (threadIdx.x == 0) {
        ptx::barrier_arrive_expect(&full, bytes);
#pragma unroll 1
        for (int at = 0; at < bytes; at += kRow) ptx::bulk_load(row + at, from + at, kRow, &full);
        if (!guard.wait([&] { return ptx::barrier_ended(&full, i % 2); })) return;
      }
      __syncwarp();
    } else {
      constexpr int kTogether = 14;
      uint4 vectors[kTogether];
#pragma unroll 1
      for (int first = threadIdx.x; first < bytes / 16; first += kTogether * blockDim.x) {
#pragma unroll
        for (int v = 0; v < kTogether; ++v)
          if (first + v * blockDim.x < bytes / 16)
            vectors[v] = __ldcg(reinterpret_cast<const uint4*>(from) + first + v * blockDim.x);
#pragma unroll
        for (int v = 0; v < kTogether; ++v)
          if (first + v * blockDim.x < bytes / 16) sum += vectors[v].x ^ vectors[v].w;
      }
      sum = __reduce_add_sync(~0u, sum);
      if (blockDim.x > 32) __syncthreads();
    }
  }
  if (threadIdx.x == 0) *ns = static_cast<float>(ptx::nanoseconds() - begin) / kTimes;
  if (sum == ~0u) *sink = sum;
}

// ---- all rows -------------------------------------------------------------------------------------------------------

// Copy rows as movers do: each warp has a ring of places, loads by bulk copies and stores by bulk copies. Without `to`
// only load, without `from` only store.
__global__ void __launch_bounds__(kThreads, 1)
    rows_kernel(const char* from, char* to, int num_rows, const Guard guard) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kMoverWarps * kPlaces];
  if (threadIdx.x >= kMovers || threadIdx.x % 32 != 0) return;
  const int warp = threadIdx.x / 32, step = gridDim.x * kMoverWarps, first = blockIdx.x + gridDim.x * warp;
  const int num = first < num_rows ? (num_rows - 1 - first) / step + 1 : 0;
  char* const ring = shared + warp * kPlaces * kRow;
  uint64_t* const its_full = full + warp * kPlaces;
  for (int i = 0; i < kPlaces; ++i) ptx::barrier_init(its_full + i, 1);
  ptx::fence_barrier_init();
  const auto row = [&](int n) { return static_cast<size_t>((first + n * step) * 37 % kPieces) * kRow; };
  const auto load = [&](int n) {
    if (n >= num || from == nullptr) return;
    ptx::barrier_arrive_expect(its_full + n % kPlaces, kRow);
    ptx::bulk_load(ring + n % kPlaces * kRow, from + row(n), kRow, its_full + n % kPlaces);
  };
  for (int n = 0; n < kPlaces - 1; ++n) load(n);
#pragma unroll 1
  for (int n = 0; n < num; ++n) {
    if (from != nullptr && !guard.wait([&] { return ptx::barrier_ended(its_full + n % kPlaces, n / kPlaces % 2); }))
      return;
    if (to != nullptr) {
      ptx::bulk_store(to + row(n), ring + n % kPlaces * kRow, kRow);
      ptx::bulk_commit();
      ptx::bulk_wait_read<1>();  // the place before is free
    }
    load(n + kPlaces - 1);
  }
  ptx::bulk_wait<0>();
}

}  // namespace
