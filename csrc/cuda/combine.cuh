// Parameters of one launch of the combine kernel, and the shared memory of a block.
#pragma once
#include "cuda/call.cuh"
#include "cuda/engine.h"
#include "cuda/item.cuh"
#include "cuda/milestones.h"
#include "cuda/pipeline.cuh"
#include "cuda/records.cuh"

namespace ep::cuda::EP_KERNELS {

struct CombineParams {
  CombineArgs args;
  Plan plan;
  uint32_t bay_bytes;         // of a Pipeline
  int num_bays, max_addends;  // of a Pipeline
  int rail_blocks;            // the last blocks of the launch; 0 with one node
  // Tasks of this launch. With `pushes`: announce, and push partial sums. With `reduces`: compare the Calls, reduce,
  // send sums between nodes, complete the operation. With a hook there are two launches for one epoch.
  bool pushes, reduces;

  // [thread] Return whether kernels of experts run beside this launch, and write the rows of y meanwhile.
  __device__ bool has_waves() const { return kExtras && args.waves.done; }
  // [thread] Return whether this launch sends factors to the ranks with the experts, before it pushes.
  __device__ bool shares_factors() const { return pushes && args.factors; }
  float reduce_weight;  // time to reduce a row; the time to push a row is 1
  float saturating;     // pushing blocks that saturate the links if they only store
};

// [thread] Return the number of chunks of a list of items from the own node. The n-th chunks of all these lists share a
// flag.
constexpr int num_item_chunks(int num_items) { return (num_items + kItemChunk - 1) / kItemChunk; }

// [thread] Return the order of all milestones.
__device__ inline Milestones milestones_of(const Context& context) {
  const int far = context.max_far_chunks;
  return {far, context.max_pushed_chunks - far, min(far, context.config.window_chunks), context.config.num_others()};
}

// [thread] Return the index of a slot in RailArrays::slots: of a rail peer's token, pushed by local rank `local`.
__device__ inline size_t window_slot(const Context& context, int local, int token) {
  return static_cast<size_t>(local) * context.window_slots + token % context.window_slots;
}

struct CombineMemory {
  Pipeline pipeline;
  ItemOrder::Position* positions;  // [2, Records::kBatch] of the items in `items`
  SourceOrder sources;             // order of pushes
  int *far_ends, *far_shifts;      // [num_ranks] of the far chunk being pushed: FarItems
  Records items;                   // items to push
  Records tokens;                  // rows of Plan::tables, of the tokens to reduce
  uint32_t* pushed;                // [max_pushed_chunks] ChunkArrivals::in_block of `pushed` flags
  uint32_t* summed;                // [num_others * max_far_chunks] ChunkArrivals::in_block of `summed` flags

  // [host] [thread] Lay the memory out. Without a base the cursor measures.
  EP_HOST_DEVICE static CombineMemory carve(Cursor& c, const CombineParams& params, const Context& context) {
    CombineMemory memory;
    memory.pipeline = Pipeline::carve(c, params.num_bays, params.bay_bytes, params.max_addends, params.args.factors);
    memory.positions = c.take<ItemOrder::Position>(2 * Records::kBatch);
    memory.sources = SourceOrder::carve(c, context.config.num_ranks());
    memory.far_ends = c.take<int>(context.max_far_chunks > 0 ? 2 * context.config.num_ranks() : 0);
    memory.far_shifts = memory.far_ends + context.config.num_ranks();
    memory.items = Records::carve(c, context.item_ints * 4);
    memory.tokens = Records::carve(c, context.table_ints * 4);
    memory.pushed = c.take<uint32_t>(context.max_pushed_chunks);
    memory.summed = c.take<uint32_t>(context.config.num_others() * context.max_far_chunks);
    return memory;
  }
};

// Some blocks of a launch, and this block's position among them. Below 0, or num_blocks and more: not among them.
struct Part {
  int block, num_blocks;

  __device__ bool has_block() const { return block >= 0 && block < num_blocks; }
};

}  // namespace ep::cuda::EP_KERNELS
