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

// [thread] Find the item of this number from `source` to `receiver`, a rank of this node, in the source's inbox.
__device__ inline int32_t* item_at_source(const Context& context, int source, int receiver, int number) {
  const size_t index = static_cast<size_t>(context.local_of(receiver)) * context.config.max_tokens + number;
  return context.inbox_of(source, &Inbox::items) + index * context.item_ints;
}

// [thread] Find the item of this number from this rank to `receiver` on another node, before it travels.
__device__ inline int32_t* item_to_send(const Context& context, int receiver, int number) {
  const size_t index = static_cast<size_t>(context.local_of(receiver)) * context.config.max_tokens + number;
  return context.rail_to(context.node_of(receiver), &RailArrays::items_out) + index * context.item_ints;
}

// The sources of a rank's items, in the order in which it goes through them: those of its own node, then all others.
// Each rank starts at a different one, so that all links are busy. In shared memory.
struct SourceOrder {
  int32_t *ranks, *num_items;  // [num_ranks] rank, and its items

  // Lay out the sources of several warps, and return those of one. Without a base the cursor measures.
  EP_HOST_DEVICE static SourceOrder carve(Cursor& c, int num_ranks, int num_warps = 1, int warp = 0) {
    int32_t* const ranks = c.take<int32_t>(2 * num_ranks * num_warps) + 2 * num_ranks * warp;
    return {ranks, ranks + num_ranks};
  }

  // [warp]
  __device__ void fill(const Context& context, const int32_t* item_begin) const {
    const int locals = context.config.ranks_per_node;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < context.num_ranks; i += 32) {
      const int node = (context.node + i / locals) % context.config.num_nodes;
      const int rank = node * locals + (context.local + i % locals) % locals;
      ranks[i] = rank;
      num_items[i] = item_begin[rank + 1] - item_begin[rank];
    }
    __syncwarp();
  }
};

// All items of a rank in one order: those from its own node and those from others, one after the other. Of either: the
// first of each source, then the second of each, and so on.
struct ItemOrder {
  const SourceOrder sources;
  const int num_own, num_ranks;  // sources
  const bool own_first;
  int num_in_first;  // items of the first section

  __device__ ItemOrder(const SourceOrder& sources, const Context& context, bool own_first)
      : sources(sources), num_own(context.config.ranks_per_node), num_ranks(context.num_ranks), own_first(own_first) {
    num_in_first = 0;
#pragma unroll 1
    for (int i = begin_of(0); i < end_of(0); ++i) num_in_first += sources.num_items[i];
  }

  struct Position {
    int source, number;
  };

  // Find the item n of the order. A warp that takes every `step`-th item gets items of all ranks in turn.
  __device__ Position at(int n, int step) const {
    const int section = n >= num_in_first, begin = begin_of(section), end = end_of(section);
    n -= section * num_in_first;
    int low = 0, before = 0;  // `before` items have a number below `low`
    while (true) {
      int with_more = 0, high = INT32_MAX;  // ranks with more than `low` items, and the fewest that one of them has
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        const int count = sources.num_items[i];
        with_more += count > low;
        if (count > low) high = min(high, count);
      }
      const int inside = n - before, width = (high - low) * with_more;
      if (inside < width) {
        const int number = low + inside / with_more;
        // Turn the ranks from time to time, alike for all items of a number, in case `step` is a multiple of with_more.
        int turn = (inside % with_more + (n - inside % with_more) / step) % with_more, i = begin;
        while (sources.num_items[i] <= low || turn-- > 0) ++i;
        return {sources.ranks[i], number};
      }
      before += width;
      low = high;
    }
  }

 private:
  // The sources of the first section and of the second.
  __device__ int begin_of(int section) const { return (section == 0) == own_first ? 0 : num_own; }
  __device__ int end_of(int section) const { return (section == 0) == own_first ? num_own : num_ranks; }
};

}  // namespace ep::cuda
