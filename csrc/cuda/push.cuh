// Pushing: the partial sum of every item is stored in the inbox of its source on this node. The inbox of a source on
// another node is kept here by the source's rail peer.
#pragma once
#include "cuda/combine.cuh"

namespace ep::cuda {

// [thread] Return the end of this rank's chunks of a combine: first those of items from other nodes, then, from
// Config::first_own_chunk on, those of items from this node. This rank raises the flags of all chunks before the end,
// also of empty ones: Call::num_chunks promises it.
__device__ inline int end_of_pushed(const Op& op, const PlanHead& head) {
  int most = 0;
  for (int rank = op.first_local_rank(), end = rank + op.ranks_per_node(); rank < end; ++rank)
    most = max(most, head.item_begin[rank + 1] - head.item_begin[rank]);
  return op.context.config.first_own_chunk() + num_item_chunks(most);
}

// [block] Write the factors of own tokens to this rank's inbox, where the ranks of the node and the senders read them.
// Called in block 0, once slots are free: then nobody reads factors of an earlier combine. `called` covers them.
__device__ inline void share_factors(const Op& op, const CombineParams& params) {
  const Context& context = op.context;
  float* const to = context.inbox_for(context.node, &Inbox::weights);
  const int num = params.args.num_tokens * context.config.num_topk;
#pragma unroll 4
  for (int i = threadIdx.x; i < num; i += blockDim.x) to[i] = __ldg(params.args.factors + i);
}

// [warp] Wait until the factors of ranks on other nodes are in their inboxes here. Those of this node came with the
// Calls. Return false after an abort of this rank.
__device__ inline bool wait_for_factors(const Op& op) {
  const Context& context = op.context;
#pragma unroll 1
  for (int first = 0; context.config.num_nodes > 1 && first < op.num_ranks(); first += 32) {
    const int rank = min(first + static_cast<int>(threadIdx.x) % 32, op.num_ranks() - 1);
    const uint64_t* flag = context.own.staged + static_cast<size_t>(rank) * context.max_token_chunks;
    if (context.node_of(rank) == context.node) flag = nullptr;
    if (!wait_until(op, Phase::kWeights, flag, op.epoch, rank, context.raiser_of(rank))) return false;
  }
  return true;
}

// [warp] Wait until the experts have written all rows of an item: lane i of the first num_here has one. Return false
// after an abort of this rank. After true, bulk loads may read the rows.
__device__ inline bool wait_for_experts(const Op& op, const CombineParams& params, const Item& item, bool has_item) {
  const Waves& waves = params.args.waves;
  const int num_rows = params.plan.head->num_rows;
  const auto is_written = [&](int row) {
    const int group = row / kWaveRows, rows = min(kWaveRows, num_rows - group * kWaveRows);
    return ptx::load_acquire_on_gpu(waves.done + group) >= rows * waves.pieces_of_row;
  };
  const uint64_t begin = ptx::nanoseconds();
  int copy = 0;
  for (int turn = 1;; ++turn) {
    while (has_item && copy < item.num_copies() && is_written(item.value(copy))) ++copy;
    if (__all_sync(~0u, !has_item || copy == item.num_copies())) break;
    if (turn % 32 != 0) continue;
    // The experts of this rank are late: nobody else is to blame.
    const uint64_t waited = ptx::nanoseconds() - begin;
    if (__any_sync(~0u, waited > op.context.timeout_ns) && threadIdx.x % 32 == 0) {
      RankMask late{};
      late.words[op.rank() / 32] = 1u << op.rank() % 32;
      abort_rank(op, Phase::kExperts, late, waited);
    }
    if (__any_sync(~0u, has_aborted(op.context))) return false;
  }
  __syncwarp();
  ptx::fence_before_bulk();
  return true;
}

// [warp] Queue the sums of this part's items, chunk by chunk; ItemOrder keeps all links busy. Called in the preparing
// warp, once slots are free, and with factors once these are here. Wait only for own loads, for room in the queue, and
// with waves for the experts. Return false after an abort of this rank. Afterwards no load of items is under way; sums
// may be.
__device__ inline bool push_items(const Op& op, const CombineParams& params, const Part& part, CombineMemory& memory,
                                  Preparer& preparer) {
  constexpr int kBatch = Records::kBatch;
  const Context& context = op.context;
  const Plan& plan = params.plan;
  const PlanHead& head = *plan.head;
  const int lane = threadIdx.x % 32, item_ints = context.item_ints, max_copies = context.max_copies;
  const bool expert_layout = head.has_expert_layout();
  memory.sources.fill(context, head.item_begin);
  const ItemOrder order(memory.sources, context, false);  // items from other nodes first: their sums travel on
  const int num = part.block < head.num_items ? (head.num_items - 1 - part.block) / part.num_blocks + 1 : 0;
  Records& items = memory.items;
  const auto index_of = [&](const ItemOrder::Position& position) {
    return static_cast<size_t>(head.item_begin[position.source] + position.number);
  };
  const auto where = [&](int n) {
    const ItemOrder::Position position = order.at(part.block + n * part.num_blocks, part.num_blocks);
    memory.positions[n % (2 * kBatch)] = position;
    return plan.items + index_of(position) * item_ints;
  };

  // Load the items, one batch ahead of the works.
  items.begin(num);
  items.fetch(where);
  items.fetch(where);
  for (int first = 0; first < num; first += kBatch) {
    if (first > 0) items.fetch(where);
    items.wait(first);
    // Lane i fills a work with the i-th item of the batch.
    Work work{};
    const float* weights = nullptr;  // of the item's token
    const Item item{reinterpret_cast<int32_t*>(items.at(first + lane % kBatch)), max_copies};
    const ItemOrder::Position position = memory.positions[(first + lane) % (2 * kBatch)];
    if (lane < kBatch && first + lane < num) {
      const size_t slot = static_cast<size_t>(context.local) * context.config.max_tokens + position.number;
      work.to = context.inbox_of(position.source, &Inbox::slots) + slot * context.slot_stride;
      work.num_rows = static_cast<int8_t>(expert_layout ? item.num_copies() : 1);
      const int local = position.source - op.first_local_rank();
      const bool is_own = local >= 0 && local < op.ranks_per_node();
      work.milestone = position.number / kItemChunk + (is_own ? context.config.first_own_chunk() : 0);
      work.has_factors = params.args.factors != nullptr;
      weights = context.inbox_of(position.source, &Inbox::weights) +
                static_cast<size_t>(item.token()) * context.config.num_topk;
    }
    if (params.args.waves.done && !wait_for_experts(op, params, item, lane < kBatch && first + lane < num)) {
      items.drain();
      return false;
    }
    // Queue the works with their addends: the rows of y.
    preparer.prepare_rows(work, min(kBatch, num - first), context.row_bytes, [&](const char** addends, float* factors) {
      for (int j = 0; j < work.num_rows; ++j) {
        addends[j] = params.args.y + (expert_layout ? item.value(j) : index_of(position)) * context.row_bytes;
        if (work.has_factors) factors[j] = __ldcg(weights + item.k(j));
      }
    });
  }
  // Reach all chunks, also those without items of this block: every pushing block counts itself in for each.
  preparer.reach(end_of_pushed(op, head), false);
  return true;
}

// [block] Write the weights of this part's items to the inboxes of their sources, once slots are free. Wait for
// nothing. A barrier of the block must follow: the flags of chunks cover weights too.
__device__ inline void push_weights(const Op& op, const CombineParams& params, const Part& part) {
  const Context& context = op.context;
  const PlanHead& head = *params.plan.head;
  const int max_copies = context.max_copies, num_topk = context.config.num_topk;
  const bool expert_layout = head.has_expert_layout();
  int source = 0;
  for (int i = part.block * blockDim.x + threadIdx.x; i < head.num_items; i += part.num_blocks * blockDim.x) {
    while (i >= head.item_begin[source + 1]) ++source;
    const Item item{params.plan.items + static_cast<size_t>(i) * context.item_ints, max_copies};
    float* to = context.inbox_of(source, &Inbox::weights) + static_cast<size_t>(item.token()) * num_topk;
    for (int copy = 0; copy < item.num_copies(); ++copy) {
      const int k = item.k(copy);
      const size_t from = expert_layout ? item.value(copy) : static_cast<size_t>(i) * num_topk + k;
      to[k] = params.args.topk_weights[from];
    }
  }
}

}  // namespace ep::cuda
