// Items: the tokens of one rank that another rank receives, and the order in which a rank goes through them.
#pragma once
#include "cuda/context.h"
#include "cuda/ptx.cuh"

namespace ep::cuda {

// One item as it lies in memory: int32 [item_ints]. Made by the source of the token for the rank that receives it.
struct Item {
  int32_t* data;
  int max_copies;

  __device__ int32_t& token() const { return data[0]; }
  __device__ int32_t& num_copies() const { return data[1]; }  // local experts, in ascending order
  // Expert layout: the row of each copy. Rank layout: its local expert.
  __device__ int32_t& value(int copy) const { return data[2 + copy]; }
  // The column of topk_idx that each copy comes from.
  __device__ uint8_t& k(int copy) const { return reinterpret_cast<uint8_t*>(data + 2 + max_copies)[copy]; }
};

// Where `source` has the item of this number that `receiver` gets.
__device__ inline int32_t* item_at_source(const Context& context, int source, int receiver, int number) {
  return context.region[source].items +
         (static_cast<size_t>(receiver) * context.sizes.max_tokens + number) * context.item_ints;
}

// The items of several ranks in one order: the first of each rank, then the second of each, and so on, so that all
// links are busy; every rank starts at a different one.
struct Interleave {
  int num_ranks, first;
  int count[kMaxRanks];  // of rank (first + position) % num_ranks

  __device__ Interleave(int num_ranks, int first, const int32_t* item_begin) : num_ranks(num_ranks), first(first) {
#pragma unroll
    for (int p = 0; p < kMaxRanks; ++p) {
      const int rank = (first + p) % num_ranks;
      count[p] = p < num_ranks ? item_begin[rank + 1] - item_begin[rank] : 0;
    }
  }

  __device__ int most() const {
    int most = 0;
#pragma unroll
    for (int p = 0; p < kMaxRanks; ++p) most = max(most, count[p]);
    return most;
  }

  struct Place {
    int rank, number;  // the number-th item of the rank
  };

  // The item at `index` of the order. Whoever takes every `step`-th item gets them from all ranks in turn.
  __device__ Place at(int index, int step) const {
    int low = 0, before = 0;  // items with a number below `low`
    while (true) {
      int with_more = 0, high = INT32_MAX;  // ranks with more than `low` items, and the fewest that one of them has
#pragma unroll
      for (int p = 0; p < kMaxRanks; ++p) {
        with_more += count[p] > low;
        if (count[p] > low) high = min(high, count[p]);
      }
      const int inside = index - before, width = (high - low) * with_more;
      if (inside < width) {
        const int number = low + inside / with_more;
        // Shifted from time to time, the same for all items of a number, in case `step` is a multiple of with_more.
        int turn = (inside % with_more + (index - inside % with_more) / step) % with_more;
        int rank = 0;
#pragma unroll
        for (int p = 0; p < kMaxRanks; ++p)
          if (count[p] > low && turn-- == 0) rank = (first + p) % num_ranks;
        return {rank, number};
      }
      before += width;
      low = high;
    }
  }
};

// Records that a warp needs one after the other, brought to shared memory in batches while it works on earlier ones.
//   where(n) -> the address of the n-th record
struct Records {
  static constexpr int kBatch = 16;

  char* data;          // [2, kBatch, bytes]
  uint64_t* barriers;  // [2]
  int bytes;           // of a record, a multiple of 16
  int num;
  int fetched = 0, ready = 0;  // batches

  static constexpr size_t shared_bytes(int bytes) { return 2 * (kBatch * static_cast<size_t>(bytes) + 8); }

  __device__ Records(char* shared, int bytes, int num)
      : data(shared), barriers(reinterpret_cast<uint64_t*>(shared + 2 * kBatch * bytes)), bytes(bytes), num(num) {}

  __device__ char* at(int n) const { return data + (n % (2 * kBatch)) * bytes; }

  // Called by a whole warp once records before the batch `fetched - 1` are not needed any more.
  template <class Where>
  __device__ void fetch(const Where& where) {
    fetch(where, min(kBatch, num - fetched * kBatch));
  }

  // The same, of a batch that is perhaps not whole.
  template <class Where>
  __device__ void fetch(const Where& where, int here) {
    const int lane = threadIdx.x % 32, begin = fetched * kBatch;
    if (here <= 0) return;
    uint64_t* barrier = barriers + fetched % 2;
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive_expect(barrier, here * bytes);
    __syncwarp();
    ptx::fence_shared_before_bulk();
    if (lane < here) ptx::bulk_load(at(begin + lane), where(begin + lane), bytes, barrier);
    __syncwarp();
    ++fetched;
  }

  // Until nothing is on its way any more.
  __device__ void drain() {
    for (; ready < fetched; ++ready) ptx::barrier_wait(barriers + ready % 2, ready / 2 % 2);
  }

  // Whether record n is there or on its way; waits until it is there.
  __device__ bool wait(int n) {
    const int batch = n / kBatch;
    if (batch >= fetched) return false;
    for (; ready <= batch; ++ready) ptx::barrier_wait(barriers + ready % 2, ready / 2 % 2);
    return true;
  }
};

}  // namespace ep::cuda
