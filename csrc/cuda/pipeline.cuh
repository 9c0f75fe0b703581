// One block that sums rows. One warp prepares the work, a batch at a time; some bring the rows to shared memory; groups
// of warps sum them and store the sums where they belong, also in the memory of other ranks. Work stands in a queue;
// the n-th work is done by group n % num_groups.
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
  static constexpr int kIssuingWarps = 2;  // a row takes one of them long, so that they share the rows of each work
  static constexpr int kFirstSummingThread = 32 * (kIssuingWarps + 1);  // after these and the preparing warp
  static constexpr int kSummingWarps = 12;
  static constexpr int kThreads = kFirstSummingThread + 32 * kSummingWarps;
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
  int num_groups;
  int lanes_per_work;  // of a warp that issues: a power of two

  static constexpr size_t fixed_bytes(int max_addends) {
    return kQueue * (sizeof(Work) + 2 * sizeof(uint64_t)) + kBatches * (2 * sizeof(uint64_t) + sizeof(Batch)) +
           sizeof(const char*) * kBatches * kBatch * max_addends;
  }
  static_assert((2 * sizeof(uint64_t) + sizeof(Batch)) * kBatches % 16 == 0, "what comes behind is aligned");

  __device__ Pipeline(char* shared, int num_slots, uint32_t slot_bytes, int max_addends, int num_groups)
      : ring(shared), num_slots(num_slots), slot_bytes(slot_bytes), max_addends(max_addends), num_groups(num_groups) {
    for (lanes_per_work = 1; kIssuingWarps * lanes_per_work < max_addends;) lanes_per_work *= 2;
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
      ptx::barrier_init(full + i, kIssuingWarps);
      ptx::barrier_init(empty + i, kSummingWarps / num_groups);
    }
    for (int i = threadIdx.x % 32; i < kBatches; i += 32) {
      ptx::barrier_init(prepared + i, 1);
      ptx::barrier_init(issued + i, kIssuingWarps);
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
    prepare(work, pipeline.num_groups, 0, 0, [](const char**) {});
  }

  __device__ void end() {
    prepare(Work{}, 0, 0, 0, [](const char**) {});
  }
};

// The side of a warp that issues: all works, in their order, as slots become free; of each work the rows that are this
// warp's. As many works as there are lanes for are looked at together, so that little is left to do once there are
// slots.
__device__ inline void issue(const Pipeline& pipeline, int warp) {
  constexpr int kWarps = Pipeline::kIssuingWarps;
  const int lane = threadIdx.x % 32, width = pipeline.lanes_per_work;
  const int number = lane / width;            // of the lane's work among those together
  int issued = 0, released = 0, used = 0;     // works, works, slots
  const auto release = [&](int num_issued) {  // the oldest work, for which it waits, and those behind it that are done
    const int work = released + lane, place = work % Pipeline::kQueue;
    const int num_rows = work < num_issued ? pipeline.queue[place].num_rows : 0;
    ptx::barrier_wait(pipeline.empty + released % Pipeline::kQueue, released / Pipeline::kQueue % 2);
    const bool done = work < num_issued && ptx::barrier_ended_now(pipeline.empty + place, work / Pipeline::kQueue % 2);
    const int num = __clz(__brev(~__ballot_sync(~0u, done)));  // in a row
    used -= __reduce_add_sync(~0u, lane < num ? num_rows : 0);
    released += num;
  };
  for (int n = 0;; ++n) {
    const int in_ring = n % Pipeline::kBatches;
    ptx::barrier_wait(pipeline.prepared + in_ring, n / Pipeline::kBatches % 2);
    const Pipeline::Batch batch = pipeline.batches[in_ring];
    if (batch.num == 0) return;
    for (int begin = 0; begin < batch.num; begin += 32 / width) {
      const int here = min(32 / width, batch.num - begin), place = (issued + number) % Pipeline::kQueue;
      const int first = (warp + issued + number) % kWarps;  // row of this warp
      const int row = first + lane % width * kWarps;        // of the lane
      int num_rows = 0;
      uint32_t bytes = 0;
      char* slot = nullptr;
      const char* addend = nullptr;
      if (number < here) {
        const Work& work = pipeline.queue[place];
        num_rows = work.num_rows;
        bytes = work.bytes;
        slot = pipeline.slot(work.first_slot + row);
        if (row < num_rows)
          addend = batch.offset +
                   pipeline.addends[(in_ring * Pipeline::kBatch + begin + number) * pipeline.max_addends + row];
      }
      int end = num_rows;  // slots of the works together, up to the lane's
      for (int step = width; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += other;
      }
      for (int count = 0; count < here;) {
        const bool fits = number >= count && number < here && used + end <= pipeline.num_slots &&
                          issued + number - released < Pipeline::kMaxSlots;
        const uint32_t fitting = __ballot_sync(~0u, fits);
        if (fitting == 0) {
          release(issued + count);
          continue;
        }
        __syncwarp();
        if (fits && lane % width == 0) {
          if (num_rows > first)
            ptx::barrier_arrive_expect(pipeline.full + place, (num_rows - first + kWarps - 1) / kWarps * bytes);
          else
            ptx::barrier_arrive(pipeline.full + place);
        }
        if (fits && row < num_rows) {
          ptx::fence_shared_before_bulk();
          ptx::bulk_load(slot, addend, bytes, pipeline.full + place);
        }
        count = (31 - __clz(fitting)) / width + 1;
      }
      issued += here;
      used += __shfl_sync(~0u, end, 31);
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(pipeline.issued + in_ring);
  }
}

// A group's side: all its threads, until its last work.
//   finish(chunk): called by one thread of every warp, after all that the warp stored for the chunk and those before
template <class Summing, class Finish>
__device__ void consume(const Pipeline& pipeline, const Finish& finish) {
  const int group = (threadIdx.x - Pipeline::kFirstSummingThread) / Summing::kThreads;
  const int thread = threadIdx.x % Summing::kThreads;  // in the group, in some order
  int chunk = 0;
  for (int n = group;; n += Pipeline::kSummingWarps / Summing::kWarps) {
    const int place = n % Pipeline::kQueue;
    ptx::barrier_wait(pipeline.full + place, n / Pipeline::kQueue % 2);
    const Work work = pipeline.queue[place];
    for (; chunk < work.chunk; ++chunk) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) finish(chunk);
    }
    const auto release = [&] {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive(pipeline.empty + place);
    };
    if (work.bytes > 0) {
      const auto row = [&](int j) { return reinterpret_cast<const uint4*>(pipeline.slot(work.first_slot + j)); };
      auto* to = reinterpret_cast<uint4*>(work.to);
      sum_rows<Summing>(row, work.num_rows, work.bytes / 16, work.nodes, to, thread, release);
    } else {
      release();
    }
    if (work.stops) return;
  }
}

}  // namespace ep::cuda
