// One block that sums rows. One warp prepares the work, a batch at a time; one brings the rows to shared memory; groups
// of warps sum them and store the sums where they belong, also in the memory of other ranks. Work stands in a queue;
// the n-th work is done by group n % kGroups.
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
  static constexpr int kFirstGroupThread = 64;  // after the issuing and the preparing warp
  static constexpr int kThreads = kFirstGroupThread + kGroups * kGroupThreads;
  static constexpr int kBatch = 16;     // works that are prepared together
  static constexpr int kBatches = 2;    // prepared, and not yet issued
  static constexpr int kMaxSlots = 48;  // also of works that are issued and not yet done
  static constexpr int kQueue = 128;    // places for work
  static_assert(kMaxSlots + kBatches * kBatch <= kQueue && kQueue % kBatch == 0);

  struct Batch {
    int num;          // works; 0: the end
    uint32_t offset;  // of all addends
  };

  char* ring;  // [num_slots, slot_bytes]
  int num_slots;
  uint32_t slot_bytes;
  uint64_t* full;        // [kQueue] the rows of the work are there
  uint64_t* empty;       // [kQueue] its slots can be used again
  uint64_t* prepared;    // [kBatches] the batch is there
  uint64_t* issued;      // [kBatches] it is issued
  Batch* batches;        // [kBatches]
  Work* queue;           // [kQueue]
  const char** addends;  // [kBatches, kBatch, max_addends]
  int max_addends;

  static constexpr size_t fixed_bytes(int max_addends) {
    return kQueue * (sizeof(Work) + 2 * sizeof(uint64_t)) + kBatches * (2 * sizeof(uint64_t) + sizeof(Batch)) +
           sizeof(const char*) * kBatches * kBatch * max_addends;
  }
  static_assert((2 * sizeof(uint64_t) + sizeof(Batch)) * kBatches % 16 == 0, "what comes behind is aligned");

  __device__ Pipeline(char* shared, int num_slots, uint32_t slot_bytes, int max_addends)
      : ring(shared), num_slots(num_slots), slot_bytes(slot_bytes), max_addends(max_addends) {
    queue = reinterpret_cast<Work*>(shared + static_cast<size_t>(num_slots) * slot_bytes);
    full = reinterpret_cast<uint64_t*>(queue + kQueue);
    empty = full + kQueue;
    prepared = empty + kQueue;
    issued = prepared + kBatches;
    batches = reinterpret_cast<Batch*>(issued + kBatches);
    addends = reinterpret_cast<const char**>(batches + kBatches);
  }

  // By one warp, before a barrier of the block.
  __device__ void init() const {
    for (int i = threadIdx.x % 32; i < kQueue; i += 32) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kGroupWarps);
    }
    for (int i = threadIdx.x % 32; i < kBatches; i += 32) {
      ptx::barrier_init(prepared + i, 1);
      ptx::barrier_init(issued + i, 1);
    }
    ptx::fence_barrier_init();
    __syncwarp();
  }

  __device__ char* slot(int i) const {
    return ring + static_cast<size_t>(i >= num_slots ? i - num_slots : i) * slot_bytes;
  }
};

// The side of the warp that prepares.
struct Preparer {
  const Pipeline& pipeline;
  int num_works = 0, num_batches = 0;
  int head = 0;  // slot

  // Called by the whole warp: `num` works, the i-th given by lane i. `fill(to)` writes its addends, of which `bytes`
  // from `offset` on are summed.
  template <class Fill>
  __device__ void prepare(const Work& given, int num, uint32_t offset, uint32_t bytes, const Fill& fill) {
    const int lane = threadIdx.x % 32, place = num_batches % Pipeline::kBatches, use = num_batches / Pipeline::kBatches;
    if (use > 0) ptx::barrier_wait(pipeline.issued + place, (use - 1) % 2);
    Work work = given;
    work.bytes = bytes;
    if (bytes > 0) work.to += offset;
    int sum = lane < num ? work.num_rows : 0;  // slots up to this work's end
    for (int step = 1; step < Pipeline::kBatch; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane < num) {
      work.first_slot = static_cast<int16_t>((head + sum - work.num_rows) % pipeline.num_slots);
      pipeline.queue[(num_works + lane) % Pipeline::kQueue] = work;
      fill(pipeline.addends + (place * Pipeline::kBatch + lane) * pipeline.max_addends);
    }
    if (lane == 0) pipeline.batches[place] = {num, offset};
    head = (head + __shfl_sync(~0u, sum, Pipeline::kBatch - 1)) % pipeline.num_slots;
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(pipeline.prepared + place);
    num_works += num;
    ++num_batches;
  }

  // A last work for every group, which says that all chunks before `chunk` are complete.
  __device__ void end_chunks(int chunk, bool stops) {
    Work work{};
    work.chunk = chunk;
    work.stops = stops;
    prepare(work, Pipeline::kGroups, 0, 0, [](const char**) {});
  }

  __device__ void end() {
    prepare(Work{}, 0, 0, 0, [](const char**) {});
  }
};

// The side of the warp that issues: all works, in their order, as slots become free.
__device__ inline void issue(const Pipeline& pipeline) {
  const int lane = threadIdx.x % 32;
  int issued = 0, released = 0, used = 0;  // works, works, slots
  for (int n = 0;; ++n) {
    const int in_ring = n % Pipeline::kBatches;
    ptx::barrier_wait(pipeline.prepared + in_ring, n / Pipeline::kBatches % 2);
    const Pipeline::Batch batch = pipeline.batches[in_ring];
    if (batch.num == 0) return;
    for (int i = 0; i < batch.num; ++i, ++issued) {
      const int place = issued % Pipeline::kQueue;
      const Work& work = pipeline.queue[place];
      const int num_rows = work.num_rows;
      while (used + num_rows > pipeline.num_slots || issued - released == Pipeline::kMaxSlots) {
        const int oldest = released % Pipeline::kQueue;
        ptx::barrier_wait(pipeline.empty + oldest, released / Pipeline::kQueue % 2);
        used -= pipeline.queue[oldest].num_rows;
        ++released;
      }
      used += num_rows;
      if (lane == 0) {
        if (num_rows > 0)
          ptx::barrier_arrive_expect(pipeline.full + place, num_rows * work.bytes);
        else
          ptx::barrier_arrive(pipeline.full + place);
      }
      __syncwarp();
      if (lane < num_rows) {
        const char* addend = pipeline.addends[(in_ring * Pipeline::kBatch + i) * pipeline.max_addends + lane];
        ptx::bulk_load(pipeline.slot(work.first_slot + lane), addend + batch.offset, work.bytes, pipeline.full + place);
      }
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(pipeline.issued + in_ring);
  }
}

// A group's side: all its threads, until its last work.
//   finish(chunk): called by one thread of every warp, after all that the warp stored for the chunk and those before
template <class T, bool kNodes, class Finish>
__device__ void consume(const Pipeline& pipeline, const Finish& finish) {
  const int group = (threadIdx.x - Pipeline::kFirstGroupThread) / Pipeline::kGroupThreads;
  const int thread = threadIdx.x % Pipeline::kGroupThreads;  // in the group, in some order
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
