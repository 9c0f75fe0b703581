// Parameters of one launch of the combine kernel, and the shared memory of a block.
#pragma once
#include "cuda/combine/pipeline.cuh"
#include "cuda/combine/progress_flags.h"
#include "cuda/device/records.cuh"
#include "cuda/engine.h"
#include "cuda/plan/item.cuh"
#include "cuda/sync/call.cuh"

namespace ep::cuda::EP_KERNELS {

// [thread] Return the number of chunks of a list of items from the own node. The n-th chunks of all these lists share a
// flag.
constexpr int num_item_chunks(int num_items) { return (num_items + kItemChunk - 1) / kItemChunk; }

// [thread] Return the order of all progress flags.
__device__ inline ProgressFlags progress_flags_of(const Context& context) {
  const int far = context.num_far_chunks();
  const int window = kOneNode ? 0 : min(far, context.config.window_chunks);
  return {far, context.max_pushed_chunks - far, window, context.num_others()};
}

// [thread] Return the index of a slot in RailArrays::slots: of a rail peer's token, pushed by local rank `local`.
__device__ inline size_t window_slot(const Context& context, int local, int token) {
  return static_cast<size_t>(local) * context.window_slots + token % context.window_slots;
}

// The verdict of `agree`, with CombineParams::agrees_first: one summing warp of each block compares the Calls, and all
// other warps wait for it before their first sum. Meanwhile the preparing warp queues tasks.
struct PostedVerdict {
  Verdict* posted;
  uint64_t* barrier;  // an mbarrier with one arrival

  // [warp] Post the verdict. Called once. Wait for nothing.
  __device__ void post(Verdict verdict) const {
    if (threadIdx.x % 32 != 0) return;
    *posted = verdict;
    ptx::barrier_arrive(barrier);
  }
  // [thread] Wait for the verdict. After kAgree this thread may read all that the Calls cover. It may turn into
  // kAborted later.
  __device__ Verdict wait() const {
    ptx::barrier_wait(barrier, 0);
    return *static_cast<volatile Verdict*>(posted);
  }
  // [warp] Wait for the verdict. Return the same in all lanes.
  __device__ Verdict wait_in_warp() const {
    return static_cast<Verdict>(__shfl_sync(~0u, static_cast<int>(wait()), 0));
  }
  // [thread] Return whether there is a verdict.
  __device__ bool is_posted() const { return ptx::barrier_ended_now(barrier, 0); }
};

struct CombineMemory {
  Pipeline pipeline;
  ItemOrder::Position* positions;  // [2, Records::kBatch] of the items in `items`
  SourceOrder sources;             // order of pushes
  int *far_ends, *far_shifts;      // [num_ranks] of the far chunk being pushed: FarItems
  Records items;                   // items to push
  Records tokens;                  // rows of Plan::tables, of the tokens to reduce
  PostedVerdict verdict;
  int16_t* seen;     // [ranks_per_node] last chunk of `pushed` seen by the preparing warp
  uint32_t* pushed;  // [max_pushed_chunks] ChunkArrivals::in_block of `pushed` flags
  uint32_t* summed;  // [num_others * max_far_chunks] ChunkArrivals::in_block of `summed` flags

  // [host] Lay out the memory, or measure it. `num_smem_stages`, `smem_stage_bytes` and `max_addends` of the pipeline.
  static CombineMemory carve(Cursor& c, const BufferContext& context, int num_smem_stages, uint32_t smem_stage_bytes,
                             int max_addends, bool has_combine_weights) {
    const int num_ranks = context.config.num_ranks();
    CombineMemory memory;
    memory.pipeline = Pipeline::carve(c, num_smem_stages, smem_stage_bytes, max_addends, has_combine_weights);
    memory.positions = c.take<ItemOrder::Position>(2 * Records::kBatch);
    memory.sources = SourceOrder::carve(c, num_ranks);
    memory.far_ends = c.take<int>(context.max_far_chunks > 0 ? 2 * num_ranks : 0);
    memory.far_shifts = memory.far_ends + num_ranks;
    memory.items = Records::carve(c, context.item_ints * 4);
    memory.tokens = Records::carve(c, context.table_ints * 4);
    memory.verdict.posted = c.take<Verdict>(1);
    memory.verdict.barrier = c.take<uint64_t>(1);
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
             memory.verdict.posted, memory.verdict.barrier, memory.seen, memory.pushed, memory.summed);
    return memory;
  }
};

struct CombineParams {
  CombineArgs args;
  Plan plan;
  CombineMemory memory;       // offsets in the shared memory of a block
  int own_batch;              // own tokens that a block takes at once to reduce them
  int rail_blocks;            // the last blocks of the launch; 0 with one node
  uint32_t prefetched_bytes;  // of the plan, with few tokens
  // Tasks of this launch. With `pushes`: announce, and push partial sums. With `reduces`: compare the Calls, reduce,
  // send sums between nodes, complete the operation. With a hook there are two launches for one epoch.
  bool pushes, reduces;
  bool own_in_place;    // read by adds_own_rows(), except in kernels for several nodes
  float reduce_weight;  // time to reduce a row; the time to push a row is 1
  float saturating;     // pushing blocks that saturate the links if they only store, all of it to other ranks

  // [host] [thread] Return whether own tokens' rows on this rank are summed where they are reduced, and have no slot.
  __host__ __device__ bool adds_own_rows() const { return kAddsOwnRows ? own_in_place : false; }
  // [thread] Return whether this launch gives combine weights to the ranks with the experts, before it pushes.
  __device__ bool shares_combine_weights() const { return pushes && args.combine_weights; }
  // [thread] Return whether the blocks need the verdict of `agree` before their first sum.
  __device__ bool agrees_first() const { return shares_combine_weights() || !pushes; }
};

// Some blocks of a launch, and this block's position among them. Below 0, or num_blocks and more: not among them.
struct Part {
  int block, num_blocks;

  __device__ bool has_block() const { return block >= 0 && block < num_blocks; }
};

}  // namespace ep::cuda::EP_KERNELS
