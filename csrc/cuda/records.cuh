// Small records that a warp reads one after the other, prefetched to shared memory.
#pragma once
#include "common/layout.h"
#include "cuda/ptx.cuh"
#include "cuda/warp.cuh"

namespace ep::cuda {

// Two batches in shared memory: one at work, the next on its way. A `where` maps n to the address of the n-th record.
struct Records {
  static constexpr int kBatch = 16;
  using Batches = Ring<2>;

  char* data;          // [2, kBatch, bytes]
  uint64_t* barriers;  // [2] complete when a batch has arrived
  int bytes;           // of a record, a multiple of 16
  int num = 0;
  int fetched = 0, ready = 0;  // batches

  // Lay out the records of several warps, and return those of one. Without a base the cursor measures.
  EP_HOST_DEVICE static Records carve(Cursor& c, int bytes, int num_warps = 1, int warp = 0) {
    const size_t stride = 2 * kBatch * static_cast<size_t>(bytes);
    Records records;
    records.bytes = bytes;
    records.data = c.take<char>(num_warps * stride) + warp * stride;
    records.barriers = c.take<uint64_t>(2 * num_warps) + 2 * warp;
    return records;
  }

  // [warp] Prepare for `num` records, before the first fetch.
  __device__ void begin(int num_records) {
    num = num_records;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_init(barriers, 1);
      ptx::barrier_init(barriers + 1, 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
  }

  __device__ char* at(int n) const { return data + (n % (2 * kBatch)) * bytes; }

  // [warp] Start to load the next batch. The batch before the last fetched one is overwritten.
  template <class Where>
  __device__ void fetch(const Where& where) {
    fetch(where, min(kBatch, num - fetched * kBatch));
  }

  // [warp] Start to load a batch of only `here` records.
  template <class Where>
  __device__ void fetch(const Where& where, int here) {
    const int lane = threadIdx.x % 32, begin = fetched * kBatch;
    if (here <= 0) return;
    uint64_t* barrier = barriers + Batches::place(fetched);
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive_expect(barrier, here * bytes);
    __syncwarp();
    ptx::fence_shared_before_bulk();
    if (lane < here) ptx::bulk_load(at(begin + lane), where(begin + lane), bytes, barrier);
    __syncwarp();
    ++fetched;
  }

  // [warp] Wait until record n is there. Return false if it was not fetched yet.
  __device__ bool wait(int n) {
    const int batch = n / kBatch;
    if (batch >= fetched) return false;
    wait_for_batches(batch + 1);
    return true;
  }

  // [warp] Wait until nothing is on its way any more.
  __device__ void drain() { wait_for_batches(fetched); }

 private:
  __device__ void wait_for_batches(int count) {
    for (; ready < count; ++ready) ptx::barrier_wait(barriers + Batches::place(ready), Batches::parity(ready));
  }
};

}  // namespace ep::cuda
