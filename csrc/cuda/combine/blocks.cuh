// How the blocks of a combine share it: who pushes, what a block queues, and when a chunk is complete.
#pragma once
#include "cuda/combine/combine.cuh"
#include "cuda/combine/push.cuh"
#include "cuda/combine/reduce.cuh"

namespace ep::cuda {

using CombineBlock = Team<0, 0, Pipeline::kThreads>;

// [thread] Return the number of pushing blocks, from block 0 on: at least 1, if this launch pushes. Blocks are divided
// by the rows that pushing and reducing read and write: a rank with many received items pushes with nearly all blocks.
// Never use more blocks than saturate the links. All threads of a launch compute the same number.
template <Kernels K, class Params>
__device__ inline int num_push_blocks(const Op<K>& op, const Params& params, const PlanSizes& sizes, int num_own) {
  if (!params.pushes()) return 0;
  if (!params.reduces()) return op.num_blocks;
  // Few blocks do both. With windows of slots 7 are few: doing both, a combine in expert layout took 1708 us instead of
  // 1850 (4096 tokens, hidden 7168, at 50 GB/s, one H200). 10 are not: doing both took 1366 us instead of 1273.
  const ProgressFlags progress_flags = progress_flags_of(op);
  if (op.num_blocks < (progress_flags.far == progress_flags.window ? 4 : 8)) return op.num_blocks;
  if (sizes.num_items == 0) return 1;  // it raises the flags promised by Field::kNumChunks, also without items
  // Few items: no block can reduce before the last push, so all blocks push first.
  if (op.num_nodes() == 1 && end_of_pushed(op, sizes) == 1) return op.num_blocks;
  // Rows of own items are read to push, or to reduce.
  const float rows_of_item = static_cast<float>(sizes.num_rows) / sizes.num_items;
  const float push = (sizes.num_items - num_own) * (rows_of_item + 1);
  // A sum from another node is written and read once more than one of the own node.
  const float tokens = static_cast<float>(params.args.num_tokens) * (1 + 2 * op.num_others());
  const float reduce = params.reduce_weight * (sizes.num_addends + num_own * (rows_of_item - 1) + tokens);
  const float most = params.saturating * (rows_of_item + 1);
  const int share = static_cast<int>(min(op.num_blocks * push / (push + reduce) + 0.5f, most));
  return min(max(share, 1), op.num_blocks - 1);
}

// [warp] Queue all sums of this block: its pushes, then the sums of its tokens. In between call `agree_last()`, which
// waits until all ranks agree. If the block makes sums for other nodes too, it makes the early ones between its pushes.
// Called in the preparing warp. `agree_first()` returns a verdict once this warp is prepared; other than kAgree,
// nothing is queued. Whatever the verdict, stop the other warps of the pipeline at the end. Return kAborted after an
// abort of this rank, else the verdict.
template <Kernels K, class Params, class AgreeFirst, class AgreeLast>
__device__ Verdict queue_sums(const Op<K>& op, const Params& params, const Part& pushers, const Part& for_others,
                              typename Params::Memory& memory, int num_teams, const AgreeFirst& agree_first,
                              const AgreeLast& agree_last) {
  Preparer preparer{memory.pipeline, num_teams};
  Pusher pusher(op, params, memory, pushers, for_others.has_block());
  // Take the first items. This reads nothing of peers.
  if (pushers.has_block()) pusher.begin();
  Reducer reducer(op, params, memory, for_others);
  Verdict verdict = agree_first();
  for (int until = 0; verdict == Verdict::kAgree && until != kAllSums;) {
    // Push, all or until sums have to come before.
    until = kAllSums;
    if (pushers.has_block()) verdict = pusher.run(preparer, until);
    stamp(op, Step::kQueued);
    if (verdict == Verdict::kAborted) break;
    // Agree, after the last push.
    if (until == kAllSums) verdict = agree_last();
    stamp(op, Step::kAgreed);
    // Reduce.
    if (verdict == Verdict::kAgree && !reducer.run(preparer, until)) verdict = Verdict::kAborted;
    stamp(op, Step::kReduced);
    pusher.skip_sums(reducer.next_chunk());
  }
  memory.items.drain();
  memory.tokens.drain();
  preparer.end();
  return verdict;
}

// [block] Initialise the memory of this block, in all warps but the first one. A barrier of the block must follow. An
// issuing warp arrives so many times for each task.
template <Kernels K, class Params>
__device__ inline void init_memory(const Op<K>& op, const Params& params, typename Params::Memory& memory,
                                   int num_teams, int arrivals_of_issuer = 1) {
  const Context& context = op.context;
  if (Pipeline::role() == Pipeline::Role::kPrepare)
    memory.sources.fill(op, [&](int source) { return params.plan.head->items_of(source); });
  constexpr int kStep = Pipeline::kThreads - 32;
  memory.pipeline.init(num_teams, arrivals_of_issuer);
  for (int i = threadIdx.x - 32; i < context.max_pushed_chunks; i += kStep) memory.pushed[i] = 0;
  for (int i = threadIdx.x - 32; i < op.num_others() * op.num_far_chunks(); i += kStep) memory.summed[i] = 0;
}

// [thread] Count this warp in for a progress flag, after its last store for this chunk and __syncwarp. The last warp of
// all blocks raises the chunk's flag: `pushed` on the node, or `summed` for this rank's senders. After the last node's
// sums of a chunk its slots are free: raise `freed` on the node. Called in summing warps. Skip progress flags counted
// by other blocks or by the first launch. `pushed` covers the weights of the block too: a barrier of the block has
// followed push_weights.
// raises: pushed, summed, freed
template <Kernels K, class Params>
__device__ inline void finish_progress_flag(const Op<K>& op, const Params& params, const CombineMemory& memory,
                                            const Part& pushers, const Part& for_others, int progress_flag) {
  const Context& context = op.context;
  const ProgressFlags progress_flags = progress_flags_of(op);
  const auto arrivals = [](uint32_t* in_block, uint32_t* in_grid, const Part& part) {
    return ChunkArrivals{in_block, Pipeline::kSummingWarps, in_grid, static_cast<uint32_t>(part.num_blocks)};
  };
  const int chunk = progress_flags.at(progress_flag);
  if (chunk >= 0) {
    if (!pushers.has_block()) return;
    stamp(op, Step::kPushed);
    if (!arrivals(memory.pushed, context.arrays.pushed_done, pushers).arrive(chunk)) return;
    raise_on_node(context, context.own.pushed + context.local * context.max_pushed_chunks + chunk, op.epoch);
    stamp(op, Step::kRaised);
  } else if (params.pushes() && for_others.has_block()) {
    const int n = ~chunk, far = n / progress_flags.others;
    const int flag = context.other_node_idx(node_of_sum(op, n)) * progress_flags.far + far;
    if (!arrivals(memory.summed, context.arrays.summed_done, for_others).arrive(flag)) return;
    ptx::store_relaxed(context.own.summed + flag, op.epoch);
    if ((n + 1) % progress_flags.others == 0)
      raise_on_node(context, context.own.freed + context.local * progress_flags.far + far, op.epoch);
  }
}

// [block] Count the bytes pushed by this rank, by rank of the inbox. The second warp does this, because the first one
// raises flags next. Called in the last block, once all ranks agree.
template <Kernels K, class Params>
__device__ inline void count_bytes_pushed(const Op<K>& op, const Params& params) {
  const int local = static_cast<int>(threadIdx.x) - 32;
  if (local < 0 || local >= op.ranks_per_node()) return;
  const PlanHead& head = *params.plan.head;
  const uint32_t weights = params.topk_weights() ? op.context.config.num_topk * sizeof(float) : 0;
  uint64_t num_items = 0;
#pragma unroll 1
  for (int source = local; source < op.num_ranks(); source += op.ranks_per_node()) num_items += head.items_of(source);
  op.context.arrays.bytes_written[op.first_local_rank() + local] += num_items * (op.context.row_bytes + weights);
}

}  // namespace ep::cuda
