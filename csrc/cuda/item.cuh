// Items: the tokens of one rank that another rank receives, and the order in which a rank goes through them.
#pragma once
#include "cuda/context.h"

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

// [thread] Find the item of this number from `source` to `receiver`, in the source's inbox.
__device__ inline int32_t* item_at_source(const Context& context, int source, int receiver, int number) {
  const size_t index = static_cast<size_t>(context.config.local_of(receiver)) * context.config.max_tokens + number;
  return context.inbox_of(source, &Inbox::items) + index * context.item_ints;
}

// The items of several ranks in one order: the first of each rank, then the second of each, and so on, so that all
// links are busy. Every rank starts at a different one.
struct Interleave {
  int num_ranks, first;
  int count[kMaxRanks];  // items of rank (first + position) % num_ranks

  __device__ Interleave(int num_ranks, int first, const int32_t* item_begin) : num_ranks(num_ranks), first(first) {
#pragma unroll
    for (int p = 0; p < kMaxRanks; ++p) {
      const int rank = (first + p) % num_ranks;
      count[p] = p < num_ranks ? item_begin[rank + 1] - item_begin[rank] : 0;
    }
  }

  // The largest number of items of a rank.
  __device__ int most() const {
    int most = 0;
#pragma unroll
    for (int p = 0; p < kMaxRanks; ++p) most = max(most, count[p]);
    return most;
  }

  struct Position {
    int rank, number;  // the number-th item of the rank
  };

  // Find the item at `index` of the order. A warp that takes every `step`-th item gets items of all ranks in turn.
  __device__ Position at(int index, int step) const {
    int low = 0, before = 0;  // `before` items have a number below `low`
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
        // Turn the ranks from time to time, alike for all items of a number, in case `step` is a multiple of with_more.
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

}  // namespace ep::cuda
