// Items: tokens of a source for one receiver. Also the order of a receiver's items, for pull warps and pushing blocks.
#pragma once
#include "cuda/op.cuh"

namespace ep::cuda {

// One item in memory: int32 [item_ints]. Written by list_items of the source, or for direct plans by write_items of the
// receiver; read by the receiver.
struct Item {
  int32_t* data;
  int max_copies;

  __device__ int32_t token() const { return data[0]; }  // of the source; with packed rows its row (Plan::sent_rows)
  __device__ int32_t num_copies() const { return data[1]; }  // local experts of the token, in ascending order
  // Expert layout: the output row of each copy. Rank layout: the local expert of each copy.
  __device__ int32_t& value(int copy) const { return data[2 + copy]; }
  // The column of topk_idx of each copy.
  __device__ uint8_t& k(int copy) const { return reinterpret_cast<uint8_t*>(data + 2 + max_copies)[copy]; }
  // [thread] Return whether all indices stay in their arrays. A peer has written the item. `num_values`: values are
  // below it.
  __device__ bool is_in_range(const Config& config, int num_values) const {
    const auto is_below = [](int n, int end) { return static_cast<uint32_t>(n) < static_cast<uint32_t>(end); };
    bool right = is_below(token(), config.max_tokens) && is_below(num_copies() - 1, max_copies);
#pragma unroll 1
    for (int copy = 0; right && copy < num_copies(); ++copy)
      right = is_below(value(copy), num_values) && k(copy) < config.num_topk;
    return right;
  }
  // [thread] Write token and num_copies, in one store.
  __device__ void begin(int token, int num_copies) const { *reinterpret_cast<int2*>(data) = {token, num_copies}; }
};

// [thread] Return item `number` from `source` to `receiver`, a rank of this node. It lies in the source's inbox here.
template <Kernels K>
__device__ inline int32_t* item_at_source(const Op<K>& op, int source, int receiver, int number) {
  const Context& context = op.context;
  const size_t index = static_cast<size_t>(op.local_of(receiver)) * context.config.max_tokens + number;
  return op.inbox_holding(source, &Inbox::items) + index * context.item_ints;
}

// [thread] Return this rank's items for `receiver`: in its inbox, or for another node in items_out. Senders take them
// from there.
template <Kernels K>
__device__ inline int32_t* items_for(const Op<K>& op, int receiver) {
  const Context& context = op.context;
  const int node = op.node_of(receiver);
  int32_t* const items = node == context.node ? op.inbox_holding(context.config.rank, &Inbox::items)
                                              : context.local_rail_buffer(node, &RailArrays::items_out);
  return items + static_cast<size_t>(op.local_of(receiver)) * context.config.max_tokens * context.item_ints;
}

// Sources of a rank's items, in shared memory. Ranks of the own node come first, then those of other nodes. Each rank
// begins with itself, so different ranks read from different sources at a time: all links are busy.
struct SourceOrder {
  // An item: its source, and its number in the source's list.
  struct Position {
    int source, number;
  };

  int32_t *ranks, *num_items;  // [num_ranks] rank of each source, and its items for this rank

  // [host] [thread] Lay out the memory of several warps, or measure it. Return that of one warp.
  EP_HOST_DEVICE static SourceOrder carve(Cursor& c, int num_ranks, int num_warps = 1, int warp = 0) {
    int32_t* const ranks = c.take<int32_t>(2 * num_ranks * num_warps) + 2 * num_ranks * warp;
    return {ranks, ranks + num_ranks};
  }

  // [warp] Fill in the sources of this rank; `items_of(rank)` returns the items of a source. Ends with __syncwarp.
  template <Kernels K, class ItemsOf>
  __device__ void fill(const Op<K>& op, const ItemsOf& items_of) const {
    const Context& context = op.context;
    const int locals = context.config.ranks_per_node;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < context.num_ranks; i += 32) {
      const int nodes_on = i / locals;  // the one division: each takes some 30 instructions
      int node = context.node + nodes_on, local = context.local + i - nodes_on * locals;
      if (node >= op.num_nodes()) node -= op.num_nodes();
      if (local >= locals) local -= locals;
      const int rank = node * locals + local;
      ranks[i] = rank;
      num_items[i] = items_of(rank);
    }
    __syncwarp();
  }

  // [thread] Return the n-th item of the sources [begin, end); there are more than n. First come the first items of all
  // these sources, then the second ones, and so on. `step`: the same for all items of an order; where items are dealt
  // out, a warp gets every step-th.
  __device__ Position at(int n, int begin, int end, int step) const {
    // Find the item's range of numbers [low, high), then its number and source.
    int low = 0, before = 0;  // `before` items have a number below `low`
    while (true) {
      int with_more = 0, high = INT32_MAX;  // sources with more than `low` items, and the fewest items of such a source
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        const int count = num_items[i];
        with_more += count > low;
        if (count > low) high = min(high, count);
      }
      // Sources with more items have the numbers [low, high): `width` items.
      const int inside = n - before, width = (high - low) * with_more;
      if (inside < width) {
        const int number = low + inside / with_more;
        // Rotate the sources from time to time, in the same way for all items with this number. Otherwise a warp would
        // stay with one source if `step` is a multiple of with_more.
        int turn = (inside % with_more + (n - inside % with_more) / step) % with_more, i = begin;
        while (num_items[i] <= low || turn-- > 0) ++i;
        return {ranks[i], number};
      }
      before += width;
      low = high;
    }
  }
};

// Order of all items of a rank: first those from the own node, then those from other nodes. In each of the two,
// SourceOrder::at.
struct ItemOrder {
  using Position = SourceOrder::Position;

  const SourceOrder sources;
  const int num_own, num_ranks;  // sources on the own node, and in all
  int num_in_first;              // items from the own node

  // [thread] Count the items from the own node. SourceOrder::fill has been called.
  __device__ ItemOrder(const SourceOrder& sources, const Context& context)
      : sources(sources), num_own(context.config.ranks_per_node), num_ranks(context.num_ranks), num_in_first(0) {
#pragma unroll 1
    for (int i = 0; i < num_own; ++i) num_in_first += sources.num_items[i];
  }

  // [thread] Return the n-th item of the order; there are more than n. `step` as there.
  __device__ Position at(int n, int step) const {
    const bool is_own = n < num_in_first;
    return sources.at(is_own ? n : n - num_in_first, is_own ? 0 : num_own, is_own ? num_own : num_ranks, step);
  }
};

}  // namespace ep::cuda
