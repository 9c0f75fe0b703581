// Delivery by the stage warps: weights, local experts, scales not copied with the rows, and zeros in rows without a
// token.
#pragma once
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/plan/item.cuh"

namespace ep::cuda {

// [thread] Write the weights of one item, and in rank layout its local experts. `index`: of the item in the plan.
// `metadata`: of its token. Weights are read only if the caller wants them; then they are staged.
template <Kernels K>
__device__ inline void deliver_weights(const Op<K>& op, const DispatchParams& params, const Item& item, int index,
                                       bool expert_layout, const float* metadata) {
  const DispatchArgs& args = params.args;
  const float* const weights = metadata + params.weights_at;
  const int num_copies = item.num_copies(), num_topk = op.context.config.num_topk;
  if (expert_layout) {
    constexpr int kTogether = 4;
    for (int begin = 0; args.out_weights && begin < num_copies; begin += kTogether) {
      float values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (begin + i < num_copies) values[i] = weights[item.k(begin + i)];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (begin + i < num_copies) args.out_weights[item.value(begin + i)] = values[i];
    }
    return;
  }
  // Rank layout: clear the columns first.
  const size_t begin = static_cast<size_t>(index) * num_topk;
#pragma unroll 1
  for (int k = 0; k < num_topk; ++k) {
    if (args.out_weights) args.out_weights[begin + k] = 0;
    args.out_topk_idx[begin + k] = -1;
  }
#pragma unroll 1
  for (int copy = 0; copy < num_copies; ++copy) {
    const int k = item.k(copy);
    if (args.out_weights) args.out_weights[begin + k] = weights[k];
    args.out_topk_idx[begin + k] = item.value(copy);
  }
}

// [warp] Wait until the metadata of up to 32 items are staged. Lane i has token and source of the i-th item, or token
// -1. Return false after an abort of this rank. After true, all lanes may read the metadata.
template <Kernels K>
__device__ inline bool wait_for_metadata(const Op<K>& op, StagedFlags& staged, int token, int source) {
  // Items are in the order of sources: only sources from `first` to `last` have items here.
  const int first = __reduce_min_sync(~0u, token >= 0 ? source : INT32_MAX);
  const int last = __reduce_max_sync(~0u, token >= 0 ? source : -1);
#pragma unroll 1
  for (int rank = first; rank <= last; ++rank) {
    const int of_lane = token >= 0 && source == rank ? token >> op.context.config.log_token_chunk : -1;
    const int chunk = __reduce_max_sync(~0u, of_lane);
    if (chunk <= staged.seen(rank)) continue;
    staged.look(op);
    if (!staged.wait(op, rank, chunk)) return false;
  }
  return true;
}

// [team] Copy the tables of the rail peers to a new plan, for later combines: the next dispatch overwrites table_in.
// Called by the stage warps of each block, after `listed` of all ranks.
template <Kernels K>
__device__ inline void keep_tables(const Op<K>& op, const RowParams& params) {
  const Context& context = op.context;
  const int step = op.num_blocks * StageWarps<K>::kThreads;
#pragma unroll 1
  for (int node = 0; node < op.num_nodes(); ++node) {
    if (node == context.node) continue;
    const int num = rows_from(op, params.plan, node) * context.table_ints;
    const int32_t* const from = context.local_rail_buffer(node, &RailArrays::table_in);
    int32_t* const to = params.plan.tables + static_cast<size_t>(node) * context.config.max_tokens * context.table_ints;
#pragma unroll 1
    for (int i = op.block * StageWarps<K>::kThreads + StageWarps<K>::thread(); i < num; i += step)
      to[i] = __ldcg(from + i);
  }
}

// [thread] Write to a new plan where the chunks of a source's tokens begin in its list (Plan::chunk_begin). Each item
// writes the chunks that begin with it. The last item also writes the chunks behind it. `token`: of item `number`;
// `token_before`: of the item before it, or -1.
template <Kernels K>
__device__ inline void keep_chunks(const Op<K>& op, const Plan& plan, int source, int number, bool is_last,
                                   int token_before, int token) {
  const Context& context = op.context;
  const int length = context.config.window_chunk, end = is_last ? op.num_far_chunks() : token / length + 1;
#pragma unroll 1
  for (int chunk = token_before < 0 ? 1 : token_before / length + 1; chunk < end; ++chunk)
    plan.chunk_begin[chunk * context.num_ranks + source] = chunk * length <= token ? number : number + 1;
}

// [team] Deliver the metadata of this block's share of the items, 32 items per warp at a time. Also write the items to
// a new plan. Called by the stage warps of each block, after `listed` of all ranks. Wait for staged metadata, if there
// are metadata. Return false after an abort of this rank: a warp may then leave alone, so no barrier of the team may
// follow. `shared`: of the block.
// reports: kWrongLists (the item becomes empty, its chunks are not written)
template <Kernels K, class Params>
__device__ bool deliver_metadata(const Op<K>& op, const Params& params, char* shared) {
  constexpr int kTogether = 32;  // items of a warp
  const Context& context = op.context;
  const RowArgs& args = params.args;
  const PlanHead& head = *params.plan.head;
  const int32_t* const item_begin = head.item_begin();
  const bool expert_layout = head.has_expert_layout();
  const int lane = threadIdx.x % 32, num_items = head.num_items, num_warps = op.num_blocks * StageWarps<K>::kWarps;
  const int num_scales = args.scale_bytes / 4;
  const auto item_at = [&](int index) {
    return Item{params.plan.items + static_cast<size_t>(index) * context.item_ints, context.max_copies};
  };
  StagedFlags staged = staged_flags(op, params, shared);
  if (params.metadata_bytes > 0) staged.look(op);
#pragma unroll 1
  for (int first = kTogether * (op.block + op.num_blocks * StageWarps<K>::warp()); first < num_items;
       first += kTogether * num_warps) {
    const int index = first + lane, num_together = min(kTogether, num_items - first);
    const float* token_metadata = nullptr;
    int source = 0, token = -1;
    // Find the item's source, and keep the item in a new plan.
    if (lane < num_together) {
      source = head.source_of(index, op.num_ranks());
      const Item item = item_at(index);
      if (params.new_plan()) {
        const auto* from =
            reinterpret_cast<const int4*>(item_at_source(op, source, op.rank(), index - item_begin[source]));
#pragma unroll 4
        for (int i = 0; i < context.item_ints / 4; ++i) reinterpret_cast<int4*>(item.data)[i] = from[i];
        // Check it here, once for all operations with the plan; pull warps keep to their arrays without an error.
        if (!item.is_in_range(context.config, expert_layout ? args.num_rows : context.num_local_experts)) {
          item.begin(0, 0);
          abort_because_of(op, Phase::kWrongLists, source, 0);
        }
      }
      token = item.token();
    }
    // Between nodes, keep where the chunks of pushes begin, if there are several.
    if (op.num_far_chunks() > 1 && params.new_plan()) {
      int before = __shfl_up_sync(~0u, token, 1);
      if (lane < num_together && op.node_of(source) != context.node) {
        const int number = index - item_begin[source];
        if (number == 0)
          before = -1;
        else if (lane == 0)
          before = *item_at_source(op, source, op.rank(), number - 1);
        if (before >= -1 && before < token)  // tokens ascend
          keep_chunks(op, params.plan, source, number, index + 1 == item_begin[source + 1], before, token);
        else
          abort_because_of(op, Phase::kWrongLists, source, 0);
      }
    }
    // Wait for the metadata, and deliver the weights.
    if (params.metadata_bytes > 0 && !wait_for_metadata(op, staged, token, source)) return false;
    if (lane < num_together) {
      token_metadata = reinterpret_cast<const float*>(metadata_of(op, params, source, token));
      deliver_weights(op, params, item_at(index), index, expert_layout, token_metadata);
    }
    // Deliver the scales, item by item.
    if (num_scales == 0 || params.bulk_scales) continue;
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < num_together; ++j) {
      const auto* scales =
          reinterpret_cast<const float*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(token_metadata), j));
      const Item item = item_at(first + j);
      const int num_rows = expert_layout ? item.num_copies() : 1;
#pragma unroll 1
      for (int word = lane; word < params.num_scale_words(); word += 32)
#pragma unroll 1
        for (int copy = 0; copy < num_rows; ++copy)
          params.write_scale(expert_layout ? item.value(copy) : first + j, word, scales);
    }
  }
  return true;
}

// [warp] Clear a row without a token: zeros, and -1 as its local experts.
template <Kernels K>
__device__ inline void clear_row(const Op<K>& op, const DispatchParams& params, int64_t row) {
  const DispatchArgs& args = params.args;
  const int lane = threadIdx.x % 32, num_topk = op.context.config.num_topk, num_scales = args.scale_bytes / 4;
  auto* vectors = reinterpret_cast<uint4*>(args.out_rows + row * args.row_bytes);
  for (int v = lane; v < static_cast<int>(args.row_bytes / kVector); v += 32) vectors[v] = uint4{};
  for (int i = lane; i < num_scales; i += 32) args.out_scales[row * num_scales + i] = 0;
  if (args.layout == Layout::kExpert) {
    if (args.out_weights && lane == 0) args.out_weights[row] = 0;
    return;
  }
  for (int k = lane; k < num_topk; k += 32) {
    if (args.out_weights) args.out_weights[row * num_topk + k] = 0;
    if (args.out_topk_idx) args.out_topk_idx[row * num_topk + k] = -1;
  }
}

// [team] Clear the output rows from `begin` to the end. Called by the same team in every block; the warps share the
// rows.
template <class Team, Kernels K>
__device__ void clear_from(const Op<K>& op, const DispatchParams& params, int64_t begin) {
  const int warp = op.block + op.num_blocks * Team::warp();
  for (int64_t row = begin + warp; row < params.args.num_rows; row += op.num_blocks * Team::kWarps)
    clear_row(op, params, row);
}

// [block] After an abort, clear this block's share of the output rows, and all indices: later readers of the output
// stay in bounds. Called in every block with an aborted warp. A block without one clears nothing, so rows in its share
// may stay unwritten. A rail block has no share: it clears rows of other blocks, also pulled ones. The output is void
// anyway.
template <Kernels K>
__device__ inline void clear_after_abort(const Op<K>& op, const DispatchParams& params) {
  clear_from<DispatchBlock<K>>(op, params, 0);
  if (!params.args.out_topk_idx) return;
  const int64_t num_indices = static_cast<int64_t>(params.args.num_rows) * op.context.config.num_topk;
  for (int64_t i = threadIdx.x; i < num_indices; i += DispatchBlock<K>::kThreads) params.args.out_topk_idx[i] = -1;
}

// [team] Clear the padding of the expert groups, and the rows after the last group. Called by the stage warps of each
// block, with the plan's head and expert groups as this block may read them.
template <Kernels K>
__device__ inline void clear_padding(const Op<K>& op, const DispatchParams& params, const PlanHead& head,
                                     const int32_t* expert_begin, const int32_t* expert_rows) {
  const int lane = threadIdx.x % 32, num_warps = op.num_blocks * StageWarps<K>::kWarps;
  const int num_local = op.context.num_local_experts, warp = op.block + op.num_blocks * StageWarps<K>::warp();
  if (head.has_expert_layout())
    // Each lane finds the padding of one expert group; then the warps of all blocks share its rows.
    for (int first = 0; first < num_local; first += 32) {
      const int e = min(first + lane, num_local - 1);
      const int begin = expert_begin[e] + expert_rows[e];
      const int num = first + lane < num_local ? expert_begin[e + 1] - begin : 0;
      for (uint32_t padded = __ballot_sync(~0u, num > 0); padded != 0; padded &= padded - 1) {
        const int from = __ffs(padded) - 1;
        const int its_begin = __shfl_sync(~0u, begin, from), its_num = __shfl_sync(~0u, num, from);
        for (int i = (warp + from * StageWarps<K>::kWarps) % num_warps; i < its_num; i += num_warps)
          clear_row(op, params, its_begin + i);
      }
    }
  clear_from<StageWarps<K>>(op, params, head.num_rows);
}

}  // namespace ep::cuda
