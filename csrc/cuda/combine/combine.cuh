// Parameters of one launch of the combine kernel, and the shared memory of a block.
#pragma once
#include "cuda/combine/pipeline.cuh"
#include "cuda/combine/progress_flags.h"
#include "cuda/device/records.cuh"
#include "cuda/engine.h"
#include "cuda/plan/item.cuh"
#include "cuda/sync/call.cuh"

namespace ep::cuda {

// [thread] Return the number of chunks of a list of items from the own node. The n-th chunks of all these lists share a
// flag.
constexpr int num_item_chunks(int num_items) { return (num_items + kItemChunk - 1) / kItemChunk; }

// [thread] Return the order of all progress flags.
template <Kernels K>
__device__ inline ProgressFlags progress_flags_of(const Op<K>& op) {
  const Context& context = op.context;
  const int far = op.num_far_chunks();
  const int window = is_for_one_node(K) ? 0 : min(far, context.config.window_chunks);
  return {far, context.max_pushed_chunks - far, window, op.num_others()};
}

// [thread] Return the index of a slot in RailArrays::slots: of a rail peer's token, pushed by local rank `local`.
__device__ inline size_t window_slot(const Context& context, int local, int token) {
  return static_cast<size_t>(local) * context.window_slots + token % context.window_slots;
}

// Shared memory of a block.
struct CombineMemory {
  static constexpr bool kHasWeights = false;  // whether there is memory for combine weights (decode/)

  Pipeline pipeline;
  ItemOrder::Position* positions;  // [2, Records::kBatch] of the items in `items`
  SourceOrder sources;             // order of pushes
  int *far_ends, *far_shifts;      // [num_ranks] of the far chunk being pushed: FarItems
  Records items;                   // items to push
  Records tokens;                  // rows of Plan::tables, of the tokens to reduce
  int16_t* seen;                   // [ranks_per_node] last chunk of `pushed` seen by the preparing warp
  uint32_t* pushed;                // [max_pushed_chunks] ChunkArrivals::in_block of `pushed` flags
  uint32_t* summed;                // [num_others * max_far_chunks] ChunkArrivals::in_block of `summed` flags

  // [host] Lay out the memory, or measure it. `num_smem_stages`, `smem_stage_bytes` and `max_addends` of the pipeline.
  static CombineMemory carve(Cursor& c, const Context& context, int num_smem_stages, uint32_t smem_stage_bytes,
                             int max_addends) {
    const int num_ranks = context.config.num_ranks();
    CombineMemory memory;
    memory.pipeline = Pipeline::carve(c, num_smem_stages, smem_stage_bytes, max_addends);
    memory.positions = c.take<ItemOrder::Position>(2 * Records::kBatch);
    memory.sources = SourceOrder::carve(c, num_ranks);
    memory.far_ends = c.take<int>(context.max_far_chunks > 0 ? 2 * num_ranks : 0);
    memory.far_shifts = memory.far_ends + num_ranks;
    memory.items = Records::carve(c, context.item_ints * 4);
    memory.tokens = Records::carve(c, context.table_ints * 4);
    memory.seen = c.take<int16_t>(context.config.ranks_per_node);
    memory.pushed = c.take<uint32_t>(context.max_pushed_chunks);
    memory.summed = c.take<uint32_t>(context.config.num_others() * context.max_far_chunks);
    return memory;
  }

  // [thread] Return the memory of a block. The arrays of this one are offsets.
  __device__ CombineMemory in(char* shared) const {
    CombineMemory memory = *this;
    memory.pipeline = pipeline.in(shared);
    set_base(shared, memory.positions, memory.sources.ranks, memory.sources.num_items, memory.far_ends,
             memory.far_shifts, memory.items.data, memory.items.barriers, memory.tokens.data, memory.tokens.barriers,
             memory.seen, memory.pushed, memory.summed);
    return memory;
  }
};

// What every combine kernel is told beside the arguments of the call. Written by the host, read by all threads.
struct SumParams {
  Plan plan;
  int own_batch;        // own tokens that a block takes at once to reduce them
  int rail_blocks;      // the last blocks of the launch; 0 with one node
  float reduce_weight;  // time to reduce a row; the time to push a row is 1
  float saturating;     // pushing blocks that saturate the links if they only store, all of it to other ranks
};

// A combine in expert or rank layout: one launch announces, pushes, compares the Calls, reduces, sends sums between
// nodes, and completes the operation.
struct CombineParams : SumParams {
  using Memory = CombineMemory;

  CombineArgs args;
  Memory memory;  // offsets in the shared memory of a block

  // [thread] Return whether this launch pushes, and whether it reduces.
  static constexpr bool pushes() { return true; }
  static constexpr bool reduces() { return true; }
  // [host] [thread] Return the weights that travel with the rows, and where they arrive; or null.
  EP_HOST_DEVICE const float* topk_weights() const { return args.topk_weights; }
  EP_HOST_DEVICE float* out_weights() const { return args.out_weights; }
};

// Whether kernels have code for adds_own_rows. Between nodes it made all combines slower.
template <Kernels K>
constexpr bool kAddsOwnRows = K == Kernels::kOneNode || K == Kernels::kTimed;

// [thread] Return whether own tokens' rows on this rank are summed where they are reduced, and have no slot.
template <Kernels K>
__device__ inline bool adds_own_rows(const Op<K>& op) {
  return kAddsOwnRows<K> && op.num_nodes() == 1;
}

// [warp] Compare the Calls of all ranks, before a push that waits for peers (Pusher::enter).
template <Kernels K>
__device__ inline Verdict agree_before_wait(const Op<K>& op, const CombineMemory&) {
  return agree(op, false, false);
}

// Some blocks of a launch, and this block's position among them. Below 0, or num_blocks and more: not among them.
struct Part {
  int block, num_blocks;

  __device__ bool has_block() const { return block >= 0 && block < num_blocks; }
};

}  // namespace ep::cuda
