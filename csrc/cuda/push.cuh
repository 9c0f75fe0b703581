// Pushing: the partial sum of every received token goes to the inbox of its source.
#pragma once
#include "cuda/combine.cuh"

namespace ep::cuda {

// [warp] Queue the sums of this part's items, chunk by chunk. Items go in the order that keeps all links busy.
__device__ inline void push_items(const Op& op, const CombineParams& params, const Part& part, CombineMemory& memory,
                                  Preparer& preparer) {
  constexpr int kBatch = Records::kBatch;
  const Context& context = op.context;
  const Plan& plan = params.plan;
  const PlanHead& head = *plan.head;
  const int lane = threadIdx.x % 32, item_ints = context.item_ints, max_copies = context.config.max_copies();
  const bool expert_layout = head.has_expert_layout();
  const Interleave order{op.num_ranks(), op.rank(), head.item_begin};
  const int num = part.block < head.num_items ? (head.num_items - 1 - part.block) / part.num_blocks + 1 : 0;
  Records& items = memory.items;
  const auto row_of = [&](const Interleave::Position& position) {
    return static_cast<size_t>(head.item_begin[position.rank] + position.number);
  };
  const auto where = [&](int n) {
    const Interleave::Position position = order.at(part.block + n * part.num_blocks, part.num_blocks);
    memory.positions[n % (2 * kBatch)] = position;
    return plan.items + row_of(position) * item_ints;
  };
  items.begin(num);
  items.fetch(where);
  items.fetch(where);
  for (int first = 0; first < num; first += kBatch) {
    if (first > 0) items.fetch(where);
    items.wait(first);
    // Lane i takes the i-th item of the batch.
    Work work{};
    const Item item{reinterpret_cast<int32_t*>(items.at(first + lane % kBatch)), max_copies};
    const Interleave::Position position = memory.positions[(first + lane) % (2 * kBatch)];
    if (lane < kBatch && first + lane < num) {
      const size_t slot =
          static_cast<size_t>(context.config.local_of(op.rank())) * context.config.max_tokens + position.number;
      work.to = context.inbox_of(position.rank, &Inbox::slots) + slot * context.slot_stride;
      work.num_rows = static_cast<int8_t>(expert_layout ? item.num_copies() : 1);
      work.chunk = position.number / kItemChunk;
    }
    preparer.prepare_rows(work, min(kBatch, num - first), context.row_bytes, [&](const char** addends) {
      for (int j = 0; j < work.num_rows; ++j)
        addends[j] = params.args.y + (expert_layout ? item.value(j) : row_of(position)) * context.row_bytes;
    });
  }
  preparer.end_chunks(num_chunks(order.most()), false);
}

// [block] Write the weights of this part's items to the inboxes of their sources.
__device__ inline void push_weights(const Op& op, const CombineParams& params, const Part& part) {
  const Context& context = op.context;
  const PlanHead& head = *params.plan.head;
  const int max_copies = context.config.max_copies(), num_topk = context.config.num_topk;
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
