// Small records, prefetched to shared memory by the warp reading them in order.
#pragma once
#include "common/cursor.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace ep::cuda {

// Room for two batches: one in use, the next on its way. `where(n)` returns the address of the n-th record. It is
// called in the lane of the record.
template <int kRecords>
struct RecordsOf {
  static constexpr int kBatch = kRecords;
  using Batches = Ring<2>;

  char* data;                  // [2, kBatch, bytes]
  uint64_t* barriers;          // [2] a round ends when its batch has landed
  int bytes;                   // [bytes] of one record, a multiple of 16
  int fetched = 0, ready = 0;  // batches with loads started, and batches known to have landed

  // [host] [thread] Lay out the memory of several warps, or measure it. Return that of one warp.
  EP_HOST_DEVICE static RecordsOf carve(Cursor& c, int bytes, int num_warps = 1, int warp = 0) {
    const size_t stride = 2 * kBatch * static_cast<size_t>(bytes);
    RecordsOf records;
    records.bytes = bytes;
    records.data = c.take<char>(num_warps * stride) + warp * stride;
    records.barriers = c.take<uint64_t>(2 * num_warps) + 2 * warp;
    return records;
  }

  // [warp] Create the mbarriers. Called before the first fetch.
  __device__ void begin() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_init(barriers, 1);
      ptx::barrier_init(barriers + 1, 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
  }

  // [thread] Return the memory of record n. Valid after wait(n), until the second fetch after that of its batch.
  __device__ char* at(int n) const { return data + (n % (2 * kBatch)) * bytes; }

  // [warp] Start to load the next batch: of num_together records, if there are any. The batch after it begins kBatch
  // numbers later all the same. It overwrites the second last batch fetched: the warp must not need that one any more.
  template <class Where>
  __device__ void fetch(const Where& where, int num_together) {
    const int lane = threadIdx.x % 32, begin = fetched * kBatch;
    if (num_together <= 0) return;
    uint64_t* barrier = barriers + Batches::place(fetched);
    // Announce the bytes before any load can land, and order the warp's reads of the old batch before the loads.
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive_expect(barrier, num_together * bytes);
    __syncwarp();
    ptx::fence_shared_before_bulk();
    if (lane < num_together) ptx::bulk_load(at(begin + lane), where(begin + lane), bytes, barrier);
    __syncwarp();
    ++fetched;
  }

  // [warp] Wait until record n has landed. Return false without waiting if its batch is not fetched yet.
  __device__ bool wait(int n) {
    const int batch = n / kBatch;
    if (batch >= fetched) return false;
    wait_for_batches(batch + 1);
    return true;
  }

  // [warp] Wait until all started loads have landed.
  __device__ void drain() { wait_for_batches(fetched); }

 private:
  // [warp] Wait for the first `count` batches.
  __device__ void wait_for_batches(int count) {
    for (; ready < count; ++ready) ptx::barrier_wait(barriers + Batches::place(ready), Batches::parity(ready));
  }
};
using Records = RecordsOf<16>;

}  // namespace ep::cuda
