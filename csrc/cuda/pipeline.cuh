// One block that sums rows: its first warp brings the rows to shared memory, groups of warps sum them and store the
// sums where they belong, also in the memory of other ranks. Work items stand in a queue; item n is done by group n %
// kGroups.
#pragma once
#include "cuda/ptx.cuh"
#include "cuda/sum_rows.cuh"

namespace ep::cuda {

struct alignas(16) Work {
  enum Kind : int8_t { kSum, kSignal, kStop };

  char* to;            // kSum: where the sum goes ...
  uint32_t bytes;      // ... and its size
  int16_t first_slot;  // place of the addends in the ring, in consecutive slots
  int8_t num_rows;     // addends
  Kind kind;
  Nodes nodes;
  int32_t chunk;  // kSignal: all sums before it belong to this chunk or earlier ones
};

struct Pipeline {
  static constexpr int kGroups = 3;
  static constexpr int kGroupThreads = 128;
  static constexpr int kGroupWarps = kGroupThreads / 32;
  static constexpr int kThreads = 32 + kGroups * kGroupThreads;
  static constexpr int kQueue = 16;

  char* ring;  // [num_slots, slot_bytes]
  int num_slots;
  uint32_t slot_bytes;
  Work* queue;      // [kQueue]
  uint64_t* full;   // [kQueue] the rows of the item are there
  uint64_t* empty;  // [kQueue] its slots and its place in the queue can be used again

  static constexpr size_t fixed_bytes() { return kQueue * (sizeof(Work) + 2 * sizeof(uint64_t)); }

  __device__ Pipeline(char* shared, int num_slots, uint32_t slot_bytes)
      : ring(shared), num_slots(num_slots), slot_bytes(slot_bytes) {
    full = reinterpret_cast<uint64_t*>(shared + static_cast<size_t>(num_slots) * slot_bytes);
    empty = full + kQueue;
    queue = reinterpret_cast<Work*>(empty + kQueue);
  }

  // By one thread, before a barrier of the block.
  __device__ void init() const {
    for (int i = 0; i < kQueue; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kGroupWarps);
    }
    ptx::fence_barrier_init();
  }

  __device__ char* slot(int i) const {
    return ring + static_cast<size_t>(i >= num_slots ? i - num_slots : i) * slot_bytes;
  }
};

// The first warp's side.
struct Producer {
  const Pipeline& pipeline;
  int issued = 0, released = 0, head = 0, used = 0;
  int of_place = 0;  // slots of the item whose place in the queue is the number of this lane

  // Called by the whole warp. A lane with number >= 0 brings the addend of that number from `row`.
  __device__ void issue(Work work, int number, const char* row) {
    const int lane = threadIdx.x % 32, num_slots = work.kind == Work::kSum ? max(work.num_rows, 1) : 0;
    while (used + num_slots > pipeline.num_slots || issued - released == Pipeline::kQueue) {
      const int oldest = released % Pipeline::kQueue;
      ptx::barrier_wait(pipeline.empty + oldest, released / Pipeline::kQueue % 2);
      used -= __shfl_sync(~0u, of_place, oldest);
      ++released;
    }
    const int place = issued % Pipeline::kQueue;
    if (lane == place) of_place = num_slots;
    if (lane == 0) {
      work.first_slot = static_cast<int16_t>(head);
      pipeline.queue[place] = work;
      if (work.kind == Work::kSum && work.num_rows > 0)
        ptx::barrier_arrive_expect(pipeline.full + place, work.num_rows * work.bytes);
      else
        ptx::barrier_arrive(pipeline.full + place);
    }
    __syncwarp();
    if (number >= 0) ptx::bulk_load(pipeline.slot(head + number), row, work.bytes, pipeline.full + place);
    head += num_slots;
    if (head >= pipeline.num_slots) head -= pipeline.num_slots;
    used += num_slots;
    ++issued;
  }

  // A chunk is complete when every warp of every group has come to its signal.
  __device__ void signal(int chunk) {
    Work work{};
    work.kind = Work::kSignal;
    work.chunk = chunk;
    for (int g = 0; g < Pipeline::kGroups; ++g) issue(work, -1, nullptr);
  }

  __device__ void stop() {
    Work work{};
    work.kind = Work::kStop;
    for (int g = 0; g < Pipeline::kGroups; ++g) issue(work, -1, nullptr);
  }
};

// A group's side: all its threads, until the producer stops.
//   signal(chunk): called by one thread of every warp, after all that the warp stored before
template <class T, bool kNodes, class Signal>
__device__ void consume(const Pipeline& pipeline, const Signal& signal) {
  const int group = (threadIdx.x - 32) / Pipeline::kGroupThreads, thread = (threadIdx.x - 32) % Pipeline::kGroupThreads;
  for (int n = group;; n += Pipeline::kGroups) {
    const int place = n % Pipeline::kQueue;
    ptx::barrier_wait(pipeline.full + place, n / Pipeline::kQueue % 2);
    const Work work = pipeline.queue[place];
    if (work.kind == Work::kStop) return;
    if (work.kind == Work::kSum) {
      const auto row = [&](int j) { return reinterpret_cast<const uint4*>(pipeline.slot(work.first_slot + j)); };
      auto* to = reinterpret_cast<uint4*>(work.to);
      sum_rows<T, kNodes>(row, work.num_rows, work.bytes / 16, work.nodes, to, thread, Pipeline::kGroupThreads);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (work.kind == Work::kSignal) signal(work.chunk);
      ptx::barrier_arrive(pipeline.empty + place);
    }
  }
}

}  // namespace ep::cuda
