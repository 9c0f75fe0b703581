// One block that sums rows: its first warp brings the rows to shared memory, groups of warps sum them and store the
// sums where they belong, also in the memory of other ranks. Work stands in a queue; the n-th work is done by group n %
// kGroups.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/sum_rows.cuh"

namespace ep::cuda {

struct alignas(16) Work {
  char* to;            // where the sum goes ...
  uint32_t bytes;      // ... and its size; 0: no sum
  int16_t first_slot;  // place of the addends in the ring, in consecutive slots
  int8_t num_rows;     // addends
  bool stops;          // the last work of its group
  Nodes nodes;
  int32_t chunk;  // all work of earlier chunks comes before it
};

struct Pipeline {
  static constexpr int kGroups = 3;
  static constexpr int kGroupThreads = 128;
  static constexpr int kGroupWarps = kGroupThreads / 32;
  static constexpr int kThreads = 32 + kGroups * kGroupThreads;
  static constexpr int kBatch = 16;     // works that are prepared together
  static constexpr int kQueue = 64;     // places for work
  static constexpr int kMaxSlots = 48;  // so that places of a batch are free once the batch before it is on its way
  static_assert(kMaxSlots + kBatch <= kQueue && kQueue % kBatch == 0);

  char* ring;  // [num_slots, slot_bytes]
  int num_slots;
  uint32_t slot_bytes;
  uint64_t* full;        // [kQueue] the rows of the work are there
  uint64_t* empty;       // [kQueue] its slots can be used again
  Work* queue;           // [kQueue]
  const char** addends;  // [kBatch, max_addends] of the works that are prepared
  int max_addends;

  static constexpr size_t fixed_bytes(int max_addends) {
    return kQueue * (sizeof(Work) + 2 * sizeof(uint64_t)) + kBatch * max_addends * sizeof(char*);
  }

  __device__ Pipeline(char* shared, int num_slots, uint32_t slot_bytes, int max_addends)
      : ring(shared), num_slots(num_slots), slot_bytes(slot_bytes), max_addends(max_addends) {
    full = reinterpret_cast<uint64_t*>(shared + static_cast<size_t>(num_slots) * slot_bytes);
    empty = full + kQueue;
    queue = reinterpret_cast<Work*>(empty + kQueue);
    addends = reinterpret_cast<const char**>(queue + kQueue);
  }

  // By one warp, before a barrier of the block.
  __device__ void init() const {
    for (int i = threadIdx.x % 32; i < kQueue; i += 32) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kGroupWarps);
    }
    ptx::fence_barrier_init();
    __syncwarp();
  }

  __device__ char* slot(int i) const {
    return ring + static_cast<size_t>(i >= num_slots ? i - num_slots : i) * slot_bytes;
  }
};

// The first warp's side.
struct Producer {
  const Pipeline& pipeline;
  int issued = 0, released = 0;  // works
  int head = 0, used = 0;        // slots

  // Called by the whole warp: `num` works, the i-th given by lane i, whose addends are in its row of `addends`. Brings
  // `bytes` of each addend from `offset` on.
  __device__ void issue(const Work& given, int num, uint32_t offset, uint32_t bytes) {
    const int lane = threadIdx.x % 32;
    Work work = given;
    work.to += offset;
    work.bytes = bytes;
    int sum = lane < num ? work.num_rows : 0;  // slots up to this work's end
    for (int step = 1; step < Pipeline::kBatch; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    work.first_slot = static_cast<int16_t>((head + sum - work.num_rows) % pipeline.num_slots);
    if (lane < num) pipeline.queue[(issued + lane) % Pipeline::kQueue] = work;
    __syncwarp();
    for (int i = 0; i < num; ++i) {
      const int num_rows = __shfl_sync(~0u, work.num_rows, i), first_slot = __shfl_sync(~0u, work.first_slot, i);
      while (used + num_rows > pipeline.num_slots || issued - released >= Pipeline::kMaxSlots) release();
      uint64_t* full = pipeline.full + issued % Pipeline::kQueue;
      if (lane == 0) {
        if (num_rows > 0)
          ptx::barrier_arrive_expect(full, num_rows * bytes);
        else
          ptx::barrier_arrive(full);
      }
      __syncwarp();
      if (lane < num_rows)
        ptx::bulk_load(pipeline.slot(first_slot + lane), pipeline.addends[i * pipeline.max_addends + lane] + offset,
                       bytes, full);
      used += num_rows;
      ++issued;
    }
    head = (head + __shfl_sync(~0u, sum, Pipeline::kBatch - 1)) % pipeline.num_slots;
    __syncwarp();  // the addends may be written again
  }

  // A last work for every group, which says that all chunks before `chunk` are complete.
  __device__ void end_chunks(int chunk, bool stops) {
    const int lane = threadIdx.x % 32;
    while (issued - released > Pipeline::kMaxSlots - Pipeline::kGroups) release();
    if (lane < Pipeline::kGroups) {
      Work work{};
      work.chunk = chunk;
      work.stops = stops;
      pipeline.queue[(issued + lane) % Pipeline::kQueue] = work;
      ptx::barrier_arrive(pipeline.full + (issued + lane) % Pipeline::kQueue);
    }
    __syncwarp();
    issued += Pipeline::kGroups;
  }

 private:
  __device__ void release() {
    const int oldest = released % Pipeline::kQueue;
    ptx::barrier_wait(pipeline.empty + oldest, released / Pipeline::kQueue % 2);
    used -= pipeline.queue[oldest].num_rows;
    ++released;
  }
};

// A group's side: all its threads, until the producer stops.
//   finish(chunk): called by one thread of every warp, after all that the warp stored for the chunk and those before
template <class T, bool kNodes, class Finish>
__device__ void consume(const Pipeline& pipeline, const Finish& finish) {
  const int group = (threadIdx.x - 32) / Pipeline::kGroupThreads, thread = (threadIdx.x - 32) % Pipeline::kGroupThreads;
  int chunk = 0;
  for (int n = group;; n += Pipeline::kGroups) {
    const int place = n % Pipeline::kQueue;
    ptx::barrier_wait(pipeline.full + place, n / Pipeline::kQueue % 2);
    const Work work = pipeline.queue[place];
    for (; chunk < work.chunk; ++chunk) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) finish(chunk);
    }
    if (work.bytes > 0) {
      const auto row = [&](int j) { return reinterpret_cast<const uint4*>(pipeline.slot(work.first_slot + j)); };
      auto* to = reinterpret_cast<uint4*>(work.to);
      sum_rows<T, kNodes>(row, work.num_rows, work.bytes / 16, work.nodes, to, thread, Pipeline::kGroupThreads);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(pipeline.empty + place);
    if (work.stops) return;
  }
}

}  // namespace ep::cuda
