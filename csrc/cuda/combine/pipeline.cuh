// A block as a pipeline of sums. One warp prepares works, a batch at a time. Two warps issue the loads of their rows to
// shared memory. Teams of warps sum the rows and store the sums, also to the memory of other ranks.
//
//   prepare --prepared--> issue --full--> sum and store --empty--> issue
//           <--issued---
//
// Works are in a queue, a ring of kQueue places; team t sums the works t, t + num_teams, ... A bay is room in
// shared memory for one row of a work, or for one piece of a long row. The bays of a work are adjacent, in a ring of
// num_bays.
#pragma once
#include "common/cursor.h"
#include "cuda/combine/sum_rows.cuh"
#include "cuda/config.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace ep::cuda::EP_KERNELS {

// One sum of rows, or of a piece of each row.
struct alignas(16) Work {
  char* to;             // address of the sum; null: no sum
  const void* factors;  // memory with the factors of its addends (Pipeline::factors); null: it has none
  uint32_t bytes;       // of the sum; 0: no sum
  int32_t milestone;    // of the sum; before summing, the team's warps count themselves in for all lower milestones
  int16_t first_bay;    // of its rows; the others follow
  int8_t num_rows;      // number of addends
  int8_t source;        // the rank that has written the factors
  bool stops;           // the last work of its team
};

struct Pipeline {
  static constexpr int kIssuingWarps = 2;  // issuing a row is slow: both warps share the rows of each work
  static constexpr int kFirstSummingThread = 32 * (kIssuingWarps + 1);  // after these and the preparing warp
  static constexpr int kSummingWarps = 12;
  static constexpr int kThreads = kFirstSummingThread + 32 * kSummingWarps;
  static constexpr int kBatch = 16;    // works prepared at once
  static constexpr int kBatches = 2;   // batches prepared and not yet issued
  static constexpr int kMaxBays = 48;  // also the limit of works issued and not yet done
  static constexpr int kQueue = 128;   // places for works
  static_assert(kMaxBays + kBatches * kBatch <= kQueue && kQueue % kBatch == 0);

  enum class Role { kIssue, kPrepare, kSum };
  // [warp] Return the role of this warp.
  static __device__ Role role() {
    const int warp = threadIdx.x / 32;
    return warp < kIssuingWarps ? Role::kIssue : warp == kIssuingWarps ? Role::kPrepare : Role::kSum;
  }

  struct Batch {
    int num;          // works; 0: the end
    uint32_t offset;  // of the piece, added to all addends
  };

  char* bays;  // [num_bays, bay_bytes]
  int num_bays;
  uint32_t bay_bytes;
  // Four kinds of mbarriers. A round of each ends when:
  uint64_t* full;        // [kQueue] the rows of the work have landed, and the work has its factors, if any
  uint64_t* empty;       // [kQueue] its team has read them, so its bays are free
  uint64_t* prepared;    // [kBatches] the batch is in the queue
  uint64_t* issued;      // [kBatches] its loads are issued, so its place in `batches` and `addends` is free
  Batch* batches;        // [kBatches]
  Work* queue;           // [kQueue]
  const char** addends;  // [kBatches, kBatch, max_addends] rows to be summed
  // [kQueue, max_addends] of the rows of each work: first the index of the row's factor in Work::factors, then the
  // factor, float.
  int32_t* factors;
  bool has_factors;  // whether this launch has any; else `factors` has no room
  int max_addends;
  int log_lanes;  // 2^log_lanes lanes of an issuing warp look after a work

  // [host] Lay the pipeline out, or measure it.
  static Pipeline carve(Cursor& c, int num_bays, uint32_t bay_bytes, int max_addends, bool has_factors) {
    Pipeline p;
    p.num_bays = num_bays;
    p.bay_bytes = bay_bytes;
    p.max_addends = max_addends;
    p.has_factors = has_factors;
    for (p.log_lanes = 0; kIssuingWarps << p.log_lanes < max_addends;) ++p.log_lanes;
    p.bays = c.take<char>(static_cast<size_t>(num_bays) * bay_bytes, kLine);
    p.queue = c.take<Work>(kQueue);
    p.full = c.take<uint64_t>(2 * (kQueue + kBatches));
    p.empty = p.full + kQueue;
    p.prepared = p.empty + kQueue;
    p.issued = p.prepared + kBatches;
    p.batches = c.take<Batch>(kBatches);
    p.addends = c.take<const char*>(kBatches * kBatch * max_addends);
    p.factors = c.take<int32_t>(has_factors ? kQueue * max_addends : 0);
    return p;
  }

  // [thread] Return the pipeline in the shared memory of a block. The arrays of this one are offsets.
  __device__ Pipeline in(char* shared) const {
    Pipeline p = *this;
    set_base(shared, p.bays, p.queue, p.full, p.empty, p.prepared, p.issued, p.batches, p.addends, p.factors);
    return p;
  }

  // [block] Initialise the mbarriers, once per launch: called by all warps but the first one, which may wait for peers
  // meanwhile. A barrier of the block must follow. Lanes of one warp initialise mbarriers one after the other, 28 ns
  // each on H200: deal them out to the warps.
  __device__ void init(int num_teams) const {
    constexpr int kWarps = kThreads / 32 - 1;
    for (int i = threadIdx.x % 32 * kWarps + threadIdx.x / 32 - 1; i < 2 * (kQueue + kBatches); i += 32 * kWarps) {
      uint64_t* const barrier = full + i;
      ptx::barrier_init(barrier, barrier < empty      ? kIssuingWarps * (has_factors ? 2 : 1)
                                 : barrier < prepared ? kSummingWarps / num_teams
                                 : barrier < issued   ? 1
                                                      : kIssuingWarps);
    }
    ptx::fence_barrier_init();
  }

  // [thread] Return the factors of the work at a place of the queue.
  __device__ const float* factors_of(int place) const {
    return reinterpret_cast<const float*>(factors + place * max_addends);
  }
  // [thread] Return bay i of the ring; i may be up to one turn ahead.
  __device__ char* bay(int i) const { return bays + static_cast<size_t>(i >= num_bays ? i - num_bays : i) * bay_bytes; }
};
using QueueRing = Ring<Pipeline::kQueue>;
using BatchRing = Ring<Pipeline::kBatches>;

// The preparing warp: fills the queue.
struct Preparer {
  const Pipeline& pipeline;
  int num_teams;
  int num_works = 0, num_batches = 0;
  int next_bay = 0;

  // [warp] Queue `num` works as one batch: lane i < num passes the i-th, and `fill(to, factors)` writes its addends,
  // and with factors their indices. Sum `bytes` of each addend, from `offset` on. Wait until the second last batch is
  // issued. Then its place is free, and so are the places of the works: by the limits above, works kQueue before them
  // are done. Call `ready()` when all is written: after true the rows are loaded. After false nothing is queued; return
  // false.
  template <class Fill, class Ready>
  __device__ bool prepare(const Work& given, int num, uint32_t offset, uint32_t bytes, const Fill& fill,
                          const Ready& ready) {
    const int lane = threadIdx.x % 32, place = BatchRing::place(num_batches);
    if (num_batches >= Pipeline::kBatches)
      ptx::barrier_wait(pipeline.issued + place, BatchRing::parity(num_batches - Pipeline::kBatches));
    // Find the bays of each work, and write the works.
    Work work = given;
    work.bytes = given.to ? bytes : 0;
    if (work.bytes > 0) work.to += offset;
    const int end =
        inclusive_sum(lane < num ? work.num_rows : 0, 1, Pipeline::kBatch);  // bays up to the end of this work
    if (lane < num) {
      work.first_bay = static_cast<int16_t>((next_bay + end - work.num_rows) % pipeline.num_bays);
      const int in_queue = QueueRing::place(num_works + lane);
      pipeline.queue[in_queue] = work;
      fill(pipeline.addends + (place * Pipeline::kBatch + lane) * pipeline.max_addends,
           pipeline.factors + in_queue * pipeline.max_addends);
    }
    if (lane == 0) pipeline.batches[place] = {num, offset};
    if (!ready()) return false;
    // Hand the batch over.
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(pipeline.prepared + place);
    next_bay = (next_bay + __shfl_sync(~0u, end, Pipeline::kBatch - 1)) % pipeline.num_bays;
    num_works += num;
    ++num_batches;
    return true;
  }

  // [warp] Queue one work of `row_bytes` per lane i < num, once per piece of its row; `ready` as in `prepare`. Only the
  // last piece has the work's own milestone, earlier ones have that of the first lane: a milestone is reached after all
  // pieces of the works before it. Return false once `ready` has: then no further piece is queued.
  template <class Fill, class Ready>
  __device__ bool prepare_rows(Work work, int num, uint32_t row_bytes, const Fill& fill, const Ready& ready) {
    const int milestone = work.milestone;
    work.milestone = __shfl_sync(~0u, milestone, 0);
    for (uint32_t offset = 0; offset < row_bytes; offset += pipeline.bay_bytes) {
      const uint32_t rest = row_bytes - offset;
      if (rest <= pipeline.bay_bytes) work.milestone = milestone;
      if (!prepare(work, num, offset, min(pipeline.bay_bytes, rest), fill, ready)) return false;
    }
    return true;
  }

  // [warp] Queue a work without rows for every team: it reaches `milestone`, after all earlier works. With `stops` the
  // teams stop there.
  __device__ void reach(int milestone, bool stops) {
    Work work{};
    work.milestone = milestone;
    work.stops = stops;
    prepare(work, num_teams, 0, 0, [](const char**, int32_t*) {}, [] { return true; });
  }

  // [warp] Stop the teams and the issuing warps, after all queued works. Reach no further milestone. As the other
  // functions here, wait only for places in the queue.
  __device__ void end() {
    reach(0, true);
    prepare(Work{}, 0, 0, 0, [](const char**, int32_t*) {}, [] { return true; });
  }
};

// One issuing warp. It takes the works in order, as bays become free, and loads its share of each work's rows. It
// prepares the loads of several works together, with a few lanes for each: then little is left to do once bays are
// free. Its loop has no division, because a combine of short rows waits for the issuing warps. Tuned with hidden 2048
// (combine of 4096 tokens, top-8): several works together 382 -> 227 to 238 us on 4 H200, two warps 201 -> 166 us on 2
// H200. To measure again, change kIssuingWarps and run `python -m ep_dispatcher.bench --engine cuda`.
struct Issuer {
  static constexpr int kWarps = Pipeline::kIssuingWarps;

  const Pipeline& pipeline;
  const int warp, lane;
  const int log_width, together;           // 2^log_width lanes per work; works looked at together
  const int nth, lane_of_work;             // number of the lane's work among those together; of the lane in its work
  int issued = 0, released = 0, used = 0;  // works issued, works released, bays in use

  // [warp] Prepare issuing warp number `warp`.
  __device__ Issuer(const Pipeline& pipeline, int warp)
      : pipeline(pipeline),
        warp(warp),
        lane(threadIdx.x % 32),
        log_width(pipeline.log_lanes),
        together(32 >> log_width),
        nth(lane >> log_width),
        lane_of_work(lane & ((1 << log_width) - 1)) {}

  // The row to be loaded by a lane.
  struct Load {
    int place = 0;       // of the work in the queue
    int num_rows = 0;    // of the work
    int first = 0;       // first row of this warp; then every kWarps-th
    uint32_t bytes = 0;  // of each row
    char* bay = nullptr;
    const char* addend = nullptr;  // null: the lane has no row
  };

  // [warp] Wait until the oldest work is done. Release its bays, and those of the next works as far as these are done.
  // `num_issued` works have been issued so far, and not all of them are released.
  __device__ void release(int num_issued) {
    const int work = released + lane, place = QueueRing::place(work);
    const int num_rows = work < num_issued ? pipeline.queue[place].num_rows : 0;
    ptx::barrier_wait(pipeline.empty + QueueRing::place(released), QueueRing::parity(released));
    const bool done = work < num_issued && ptx::barrier_ended_now(pipeline.empty + place, QueueRing::parity(work));
    const int num = __clz(__brev(~__ballot_sync(~0u, done)));  // done without a gap
    used -= __reduce_add_sync(~0u, lane < num ? num_rows : 0);
    released += num;
  }

  // [thread] Find the lane's row of its work, number `begin + nth` of the batch; `here` works are left together.
  __device__ Load find(const Pipeline::Batch& batch, int batch_place, int begin, int here) const {
    Load load;
    load.place = QueueRing::place(issued + nth);
    load.first = (warp + issued + nth) % kWarps;
    if (nth >= here) return load;
    const Work& work = pipeline.queue[load.place];
    const int row = load.first + lane_of_work * kWarps;
    load.num_rows = work.num_rows;
    load.bytes = work.bytes;
    load.bay = pipeline.bay(work.first_bay + row);
    const int entry = (batch_place * Pipeline::kBatch + begin + nth) * pipeline.max_addends;
    if (row < load.num_rows) load.addend = pipeline.addends[entry + row] + batch.offset;
    return load;
  }

  // [warp] Issue the loads of all works with `fits` in their lanes. Their bays are free.
  __device__ void load_rows(const Load& load, bool fits) const {
    uint64_t* full = pipeline.full + load.place;
    __syncwarp();
    if (fits && lane_of_work == 0) {
      if (load.num_rows > load.first)
        ptx::barrier_arrive_expect(full, (load.num_rows - load.first + kWarps - 1) / kWarps * load.bytes);
      else
        ptx::barrier_arrive(full);
    }
    if (fits && load.addend) {
      ptx::fence_shared_before_bulk();
      ptx::bulk_load(load.bay, load.addend, load.bytes, full);
    }
  }

  // [warp] Load the factors of all works with `here` in their lanes. This comes before their rows: later, loads would
  // wait behind the stores of sums to other ranks.
  template <class LoadFactor>
  __device__ void load_factors(const Load& load, bool here, const LoadFactor& load_factor) const {
    if (!pipeline.has_factors) return;
    const Work& work = pipeline.queue[load.place];
    int32_t* const factor = pipeline.factors + load.place * pipeline.max_addends + load.first + lane_of_work * kWarps;
    if (here && load.addend && work.factors != nullptr) *factor = __float_as_int(load_factor(work, *factor));
    __syncwarp();
    if (here && lane_of_work == 0) ptx::barrier_arrive(pipeline.full + load.place);
  }

  // [warp] Issue all works, up to the empty batch at the end. Wait for batches, for free bays, and for what
  // `load_factor(work, at)` waits for: called by some lanes at once, it returns a factor of a work.
  template <class LoadFactor>
  __device__ void run(const LoadFactor& load_factor) {
    for (int n = 0;; ++n) {
      const int place = BatchRing::place(n);
      ptx::barrier_wait(pipeline.prepared + place, BatchRing::parity(n));
      const Pipeline::Batch batch = pipeline.batches[place];
      if (batch.num == 0) return;
      // Take several works together; issue as many as fit, and release bays for the rest.
      for (int begin = 0; begin < batch.num; begin += together) {
        const int here = min(together, batch.num - begin);
        const Load load = find(batch, place, begin, here);
        load_factors(load, nth < here, load_factor);
        const int end = inclusive_sum(load.num_rows, 1 << log_width);  // bays of these works, up to the lane's work
        for (int count = 0; count < here;) {                           // of these works, issued
          const bool fits = nth >= count && nth < here && used + end <= pipeline.num_bays &&
                            issued + nth - released < Pipeline::kMaxBays;
          const uint32_t fitting = __ballot_sync(~0u, fits);
          if (fitting == 0) {
            release(issued + count);
            continue;
          }
          load_rows(load, fits);
          count = ((31 - __clz(fitting)) >> log_width) + 1;
        }
        issued += here;
        used += __shfl_sync(~0u, end, 31);
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(pipeline.issued + place);
    }
  }
};

// [team] Sum the team's works, until the one with `stops`. Wait for each work's rows. Called in summing warps.
//   sums(): whether to make sums and to reach milestones, the same in all lanes; asked once for each work. Once it is
//     false it stays so
//   finish(milestone): called by lane 0 of each warp for each milestone in turn, after the warp's stores for it
template <class Summing, class Sums, class Finish>
__device__ void consume(const Pipeline& pipeline, const Sums& sums, const Finish& finish) {
  const int team = (threadIdx.x - Pipeline::kFirstSummingThread) / Summing::kThreads;
  const int thread = threadIdx.x % Summing::kThreads;  // in the team, in some order
  int milestone = 0;                                   // first one not yet finished
  for (int n = team;; n += Pipeline::kSummingWarps / Summing::kWarps) {
    const int place = QueueRing::place(n);
    ptx::barrier_wait(pipeline.full + place, QueueRing::parity(n));
    const Work work = pipeline.queue[place];
    const bool makes_sum = sums();
    // Finish the milestones before this work.
    for (; makes_sum && milestone < work.milestone; ++milestone) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) finish(milestone);
    }
    const auto release = [&] {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::barrier_arrive(pipeline.empty + place);
    };
    // Sum, and release the bays as soon as they are read.
    if (makes_sum && work.to != nullptr) {
      const auto row = [&](int j) { return reinterpret_cast<const uint4*>(pipeline.bay(work.first_bay + j)); };
      auto* to = reinterpret_cast<uint4*>(work.to);
      if (work.factors != nullptr)
        sum_rows<Summing>(row, pipeline.factors_of(place), work.num_rows, work.bytes / 16, to, thread, release);
      else
        sum_rows<Summing>(row, NoFactors{}, work.num_rows, work.bytes / 16, to, thread, release);
    } else {
      release();
    }
    if (work.stops) return;
  }
}

}  // namespace ep::cuda::EP_KERNELS
