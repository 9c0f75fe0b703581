// A block as a pipeline of sums. One warp prepares tasks, a batch at a time. Two warps issue the loads of their rows to
// shared memory. Teams of warps sum the rows and store the sums, also to the memory of other ranks.
//
//   prepare --prepared--> issue --full--> sum and store --empty--> issue
//           <--issued---
//
// Tasks are in a queue, a ring of kQueue places; team t sums the tasks t, t + num_teams, ... An smem stage is room in
// shared memory for one row of a task, or for one piece of a long row. The smem stages of a task are adjacent, in a
// ring of num_smem_stages.
#pragma once
#include "common/cursor.h"
#include "cuda/combine/sum_rows.cuh"
#include "cuda/config.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace ep::cuda {

// One sum of rows, or of a piece of each row.
struct alignas(16) Task {
  char* to;        // address of the sum; null: no sum
  uint32_t bytes;  // of the sum; 0: no sum
  int32_t
      progress_flag;  // of the sum; before summing, the team's warps count themselves in for all lower progress flags
  int16_t first_smem_stage;   // of its rows; the others follow
  int16_t weights_from = -1;  // decode layout: the rank whose combine weights the rows are multiplied by; -1: none
  int8_t num_rows;            // number of addends, at most kMaxTopk
  int8_t num_own;             // addends that are this rank's rows: if there are several, their sum is rounded first
  int8_t first_own;           // the first of these
  bool stops;                 // the last task of its team
};

struct Pipeline {
  static constexpr int kIssuingWarps = 2;  // issuing a row is slow: both warps share the rows of each task
  static constexpr int kFirstSummingThread = 32 * (kIssuingWarps + 1);  // after these and the preparing warp
  static constexpr int kSummingWarps = 12;
  static constexpr int kThreads = kFirstSummingThread + 32 * kSummingWarps;
  static constexpr int kBatch = 16;          // tasks prepared at once
  static constexpr int kBatches = 2;         // batches prepared and not yet issued
  static constexpr int kMaxSmemStages = 48;  // unless a task needs more. Also the limit of tasks issued and not done
  static constexpr int kQueue = 128;         // places for tasks
  static_assert(kMaxSmemStages + kBatches * kBatch <= kQueue && kQueue % kBatch == 0);

  enum class Role { kIssue, kPrepare, kSum };
  // [warp] Return the role of this warp.
  static __device__ Role role() {
    const int warp = threadIdx.x / 32;
    return warp < kIssuingWarps ? Role::kIssue : warp == kIssuingWarps ? Role::kPrepare : Role::kSum;
  }

  struct Batch {
    int num;          // tasks; 0: the end
    uint32_t offset;  // of the piece, added to all addends
  };

  char* smem_stages;  // [num_smem_stages, smem_stage_bytes]
  int num_smem_stages;
  uint32_t smem_stage_bytes;
  // Four kinds of mbarriers. A round of each ends when:
  uint64_t* full;        // [kQueue] the rows of the task have landed
  uint64_t* empty;       // [kQueue] its team has read them, so its smem stages are free
  uint64_t* prepared;    // [kBatches] the batch is in the queue
  uint64_t* issued;      // [kBatches] its loads are issued, so its place in `batches` and `addends` is free
  Batch* batches;        // [kBatches]
  Task* queue;           // [kQueue]
  const char** addends;  // [kBatches, kBatch, max_addends] rows to be summed
  int max_addends;
  int log_lanes;  // 2^log_lanes lanes of an issuing warp look after a task

  // [host] Lay the pipeline out, or measure it.
  static Pipeline carve(Cursor& c, int num_smem_stages, uint32_t smem_stage_bytes, int max_addends) {
    Pipeline p;
    p.num_smem_stages = num_smem_stages;
    p.smem_stage_bytes = smem_stage_bytes;
    p.max_addends = max_addends;
    static_assert(kMaxTopk <= 32 * kIssuingWarps, "a lane per addend");
    for (p.log_lanes = 0; kIssuingWarps << p.log_lanes < max_addends;) ++p.log_lanes;
    p.smem_stages = c.take<char>(static_cast<size_t>(num_smem_stages) * smem_stage_bytes, kLine);
    p.queue = c.take<Task>(kQueue);
    p.full = c.take<uint64_t>(2 * (kQueue + kBatches));
    p.empty = p.full + kQueue;
    p.prepared = p.empty + kQueue;
    p.issued = p.prepared + kBatches;
    p.batches = c.take<Batch>(kBatches);
    p.addends = c.take<const char*>(kBatches * kBatch * max_addends);
    return p;
  }

  // [thread] Return the pipeline in the shared memory of a block. The arrays of this one are offsets.
  __device__ Pipeline in(char* shared) const {
    Pipeline p = *this;
    set_base(shared, p.smem_stages, p.queue, p.full, p.empty, p.prepared, p.issued, p.batches, p.addends);
    return p;
  }

  // [block] Initialise the mbarriers, once per launch: called by all warps but the first one, which may wait for peers
  // meanwhile. A barrier of the block must follow. Lanes of one warp initialise mbarriers one after the other, 28 ns
  // each on H200: deal them out to the warps. An issuing warp arrives so many times for each task.
  __device__ void init(int num_teams, int arrivals_of_issuer = 1) const {
    constexpr int kWarps = kThreads / 32 - 1;
    for (int i = threadIdx.x % 32 * kWarps + threadIdx.x / 32 - 1; i < 2 * (kQueue + kBatches); i += 32 * kWarps) {
      uint64_t* const barrier = full + i;
      ptx::barrier_init(barrier, barrier < empty      ? kIssuingWarps * arrivals_of_issuer
                                 : barrier < prepared ? kSummingWarps / num_teams
                                 : barrier < issued   ? 1
                                                      : kIssuingWarps);
    }
    ptx::fence_barrier_init();
  }

  // [thread] Return smem stage i of the ring; i may be up to one turn ahead.
  __device__ char* smem_stage(int i) const {
    return smem_stages + static_cast<size_t>(i >= num_smem_stages ? i - num_smem_stages : i) * smem_stage_bytes;
  }
};
using QueueRing = Ring<Pipeline::kQueue>;
using BatchRing = Ring<Pipeline::kBatches>;

// The preparing warp: fills the queue.
struct Preparer {
  const Pipeline& pipeline;
  int num_teams;
  int num_tasks = 0, num_batches = 0;
  int next_smem_stage = 0;

  // [warp] Queue `num` tasks as one batch: lane i < num passes the i-th, and `fill(to, place)` writes its addends;
  // `place` is that of the task in the queue. Sum `bytes` of each addend, from `offset` on. Wait until the second last
  // batch is issued. Then its place is free, and so are the places of the tasks: by the limits above, tasks kQueue
  // before them are done. Call `ready()` when all is written: after true the rows are loaded. After false nothing is
  // queued; return false.
  template <class Fill, class Ready>
  __device__ bool prepare(const Task& given, int num, uint32_t offset, uint32_t bytes, const Fill& fill,
                          const Ready& ready) {
    const int lane = threadIdx.x % 32, place = BatchRing::place(num_batches);
    if (num_batches >= Pipeline::kBatches)
      ptx::barrier_wait(pipeline.issued + place, BatchRing::parity(num_batches - Pipeline::kBatches));
    // Find the smem stages of each task, and write the tasks.
    Task task = given;
    task.bytes = given.to ? bytes : 0;
    if (task.bytes > 0) task.to += offset;
    const int end =
        inclusive_sum(lane < num ? task.num_rows : 0, 1, Pipeline::kBatch);  // smem stages up to the end of this task
    if (lane < num) {
      task.first_smem_stage = static_cast<int16_t>((next_smem_stage + end - task.num_rows) % pipeline.num_smem_stages);
      const int in_queue = QueueRing::place(num_tasks + lane);
      pipeline.queue[in_queue] = task;
      fill(pipeline.addends + (place * Pipeline::kBatch + lane) * pipeline.max_addends, in_queue);
    }
    if (lane == 0) pipeline.batches[place] = {num, offset};
    if (!ready()) return false;
    // Hand the batch over.
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(pipeline.prepared + place);
    next_smem_stage = (next_smem_stage + __shfl_sync(~0u, end, Pipeline::kBatch - 1)) % pipeline.num_smem_stages;
    num_tasks += num;
    ++num_batches;
    return true;
  }

  // [warp] Queue one task of `row_bytes` per lane i < num, once per piece of its row; `ready` as in `prepare`. Only the
  // last piece has the task's own progress flag, earlier ones have that of the first lane: a progress flag is reached
  // after all pieces of the tasks before it. Return false once `ready` has: then no further piece is queued.
  template <class Fill, class Ready>
  __device__ bool prepare_rows(Task task, int num, uint32_t row_bytes, const Fill& fill, const Ready& ready) {
    const int progress_flag = task.progress_flag;
    task.progress_flag = __shfl_sync(~0u, progress_flag, 0);
    for (uint32_t offset = 0; offset < row_bytes; offset += pipeline.smem_stage_bytes) {
      const uint32_t rest = row_bytes - offset;
      if (rest <= pipeline.smem_stage_bytes) task.progress_flag = progress_flag;
      if (!prepare(task, num, offset, min(pipeline.smem_stage_bytes, rest), fill, ready)) return false;
    }
    return true;
  }

  // [warp] Queue a task without rows for every team: it reaches `progress_flag`, after all earlier tasks. With `stops`
  // the teams stop there.
  __device__ void reach(int progress_flag, bool stops) {
    Task task{};
    task.progress_flag = progress_flag;
    task.stops = stops;
    prepare(task, num_teams, 0, 0, [](const char**, int) {}, [] { return true; });
  }

  // [warp] Stop the teams and the issuing warps, after all queued tasks. Reach no further progress flag. As the other
  // functions here, wait only for places in the queue.
  __device__ void end() {
    reach(0, true);
    prepare(Task{}, 0, 0, 0, [](const char**, int) {}, [] { return true; });
  }
};

// One issuing warp. It takes the tasks in order, as smem stages become free, and loads its share of each task's rows.
// It prepares the loads of several tasks together, with a few lanes for each: then little is left to do once smem
// stages are free. Its loop has no division, because a combine of short rows waits for the issuing warps. Tuned with
// hidden 2048 (combine of 4096 tokens, top-8): several tasks together 382 -> 227 to 238 us on 4 H200, two warps 201 ->
// 166 us on 2 H200. To measure again, change kIssuingWarps and run `python -m ep_dispatcher.bench --engine cuda`.
struct Issuer {
  static constexpr int kWarps = Pipeline::kIssuingWarps;

  const Pipeline& pipeline;
  const int warp, lane;
  const int log_width, together;           // 2^log_width lanes per task; tasks looked at together
  const int nth, lane_of_task;             // number of the lane's task among those together; of the lane in its task
  int issued = 0, released = 0, used = 0;  // tasks issued, tasks released, smem stages in use

  // [warp] Prepare issuing warp number `warp`.
  __device__ Issuer(const Pipeline& pipeline, int warp)
      : pipeline(pipeline),
        warp(warp),
        lane(threadIdx.x % 32),
        log_width(pipeline.log_lanes),
        together(32 >> log_width),
        nth(lane >> log_width),
        lane_of_task(lane & ((1 << log_width) - 1)) {}

  // The row to be loaded by a lane.
  struct Load {
    int place = 0;       // of the task in the queue
    int num_rows = 0;    // of the task
    int first = 0;       // first row of this warp; then every kWarps-th
    uint32_t bytes = 0;  // of each row
    char* smem_stage = nullptr;
    const char* addend = nullptr;  // null: the lane has no row
  };

  // [warp] Wait until the oldest task is done. Release its smem stages, and those of the next tasks as far as these are
  // done. `num_issued` tasks have been issued so far, and not all of them are released.
  __device__ void release(int num_issued) {
    const int task = released + lane, place = QueueRing::place(task);
    const int num_rows = task < num_issued ? pipeline.queue[place].num_rows : 0;
    ptx::barrier_wait(pipeline.empty + QueueRing::place(released), QueueRing::parity(released));
    const bool done = task < num_issued && ptx::barrier_ended_now(pipeline.empty + place, QueueRing::parity(task));
    const int num = __clz(__brev(~__ballot_sync(~0u, done)));  // done without a gap
    used -= __reduce_add_sync(~0u, lane < num ? num_rows : 0);
    released += num;
  }

  // [thread] Find the lane's row of its task, number `begin + nth` of the batch; `num_left` tasks are left together.
  __device__ Load find(const Pipeline::Batch& batch, int batch_place, int begin, int num_left) const {
    Load load;
    load.place = QueueRing::place(issued + nth);
    load.first = (warp + issued + nth) % kWarps;
    if (nth >= num_left) return load;
    const Task& task = pipeline.queue[load.place];
    const int row = load.first + lane_of_task * kWarps;
    load.num_rows = task.num_rows;
    load.bytes = task.bytes;
    load.smem_stage = pipeline.smem_stage(task.first_smem_stage + row);
    const int entry = (batch_place * Pipeline::kBatch + begin + nth) * pipeline.max_addends;
    if (row < load.num_rows) load.addend = pipeline.addends[entry + row] + batch.offset;
    return load;
  }

  // [warp] Issue the loads of all tasks with `fits` in their lanes. Their smem stages are free.
  __device__ void load_rows(const Load& load, bool fits) const {
    uint64_t* full = pipeline.full + load.place;
    __syncwarp();
    if (fits && lane_of_task == 0) {
      if (load.num_rows > load.first)
        ptx::barrier_arrive_expect(full, (load.num_rows - load.first + kWarps - 1) / kWarps * load.bytes);
      else
        ptx::barrier_arrive(full);
    }
    if (fits && load.addend) {
      ptx::fence_shared_before_bulk();
      ptx::bulk_load(load.smem_stage, load.addend, load.bytes, full);
    }
  }

  // [warp] Issue all tasks, up to the empty batch at the end. Wait for batches and for free smem stages. Call
  // `before_rows(load, has_task)` in all lanes, before the rows of several tasks are loaded together.
  template <class BeforeRows>
  __device__ void run(const BeforeRows& before_rows) {
    for (int n = 0;; ++n) {
      const int place = BatchRing::place(n);
      ptx::barrier_wait(pipeline.prepared + place, BatchRing::parity(n));
      const Pipeline::Batch batch = pipeline.batches[place];
      if (batch.num == 0) return;
      // Take several tasks together; issue as many as fit, and release smem stages for the rest.
      for (int begin = 0; begin < batch.num; begin += together) {
        const int num_left = min(together, batch.num - begin);
        const Load load = find(batch, place, begin, num_left);
        before_rows(load, nth < num_left);
        const int end =
            inclusive_sum(load.num_rows, 1 << log_width);  // smem stages of these tasks, up to the lane's task
        for (int count = 0; count < num_left;) {           // of these tasks, issued
          const bool fits = nth >= count && nth < num_left && used + end <= pipeline.num_smem_stages &&
                            issued + nth - released < Pipeline::kMaxSmemStages;
          const uint32_t fitting = __ballot_sync(~0u, fits);
          if (fitting == 0) {
            release(issued + count);
            continue;
          }
          load_rows(load, fits);
          count = ((31 - __clz(fitting)) >> log_width) + 1;
        }
        issued += num_left;
        used += __shfl_sync(~0u, end, 31);
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(pipeline.issued + place);
    }
  }
};

// [team] Sum the team's tasks, until the one with `stops`. Wait for each task's rows. Called in summing warps.
//   sums(): whether to make sums and to reach progress flags, the same in all lanes; asked once for each task. Once
//     it is false it stays so
//   sum(task, place, row, thread, release): make one sum. `row(j)` is its j-th row in shared memory, `thread` the
//   number
//     of this thread in the team; `release` as in sum_rows
//   finish(flag): called by lane 0 of each warp for each progress flag in turn, after the warp's stores for it
template <class Summing, class Sums, class Sum, class Finish>
__device__ void consume(const Pipeline& pipeline, const Sums& sums, const Sum& sum, const Finish& finish) {
  const int team = (threadIdx.x - Pipeline::kFirstSummingThread) / Summing::kThreads;
  const int thread = threadIdx.x % Summing::kThreads;  // in the team, in some order
  int progress_flag = 0;                               // first one not yet finished
  for (int n = team;; n += Pipeline::kSummingWarps / Summing::kWarps) {
    const int place = QueueRing::place(n);
    ptx::barrier_wait(pipeline.full + place, QueueRing::parity(n));
    const Task task = pipeline.queue[place];
    const bool makes_sum = sums();
    // Finish the progress flags before this task.
    for (; makes_sum && progress_flag < task.progress_flag; ++progress_flag) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) finish(progress_flag);
    }
    const auto release = [&] {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive(pipeline.empty + place);
    };
    // Sum, and release the smem stages as soon as they are read.
    const auto row = [&](int j) { return reinterpret_cast<uint4*>(pipeline.smem_stage(task.first_smem_stage + j)); };
    if (makes_sum && task.to != nullptr)
      sum(task, place, row, thread, release);
    else
      release();
    if (task.stops) return;
  }
}

// [team] Sum the rows of a task as they are.
template <class Summing, class Row, class Release>
__device__ void sum_task(const Task& task, const Row& row, int thread, const Release& release) {
  auto* const to = reinterpret_cast<uint4*>(task.to);
  sum_rows<Summing>(row, NoCombineWeights{}, task.num_rows, static_cast<int>(task.bytes / 16), to, thread, release);
}

// [team] Sum the rows of a task. If several of them are this rank's own rows, sum these first, in place. Each thread
// then reads only what it has written itself.
template <class Summing, class Row, class Release>
__device__ void sum_own_rows_first(const Task& task, const Row& row, int thread, const Release& release) {
  const int num_vectors = task.bytes / 16, merged = max(task.num_own - 1, 0);  // rows that the sum in place leaves out
  auto* const to = reinterpret_cast<uint4*>(task.to);
#pragma unroll 1
  for (bool in_place = merged > 0;; in_place = false) {
    const int begin = in_place ? task.first_own : 0, gap = in_place ? 0 : merged;
    const auto row_of_sum = [&](int j) { return row(begin + (j > task.first_own ? j + gap : j)); };
    const int num_rows = in_place ? task.num_own : task.num_rows - merged;
    sum_rows<Summing>(row_of_sum, NoCombineWeights{}, num_rows, num_vectors, in_place ? row_of_sum(0) : to, thread,
                      [&] {
                        if (!in_place) release();
                      });
    if (!in_place) break;
  }
}

}  // namespace ep::cuda
