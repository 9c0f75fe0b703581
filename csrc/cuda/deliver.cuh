// What a dispatch brings beside the rows, by the helpers: weights, indices and the scales that do not travel with the
// rows, of every item; and the rows that have no token.
#pragma once
#include "cuda/dispatch.cuh"
#include "cuda/item.cuh"

namespace ep::cuda {

// Weights of one item, and its experts, by one thread. `weights`: of its token.
__device__ inline void deliver_weights(const Context& context, const DispatchCall& call, const Item& item, int number,
                                       bool expert_layout, const float* weights) {
  const DispatchArgs& out = call.dispatch;
  const int num_copies = item.num_copies(), num_topk = context.sizes.num_topk;
  if (expert_layout) {
    constexpr int kTogether = 4;
    for (int begin = 0; out.out_weights && begin < num_copies; begin += kTogether) {
      float values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (begin + i < num_copies) values[i] = weights[item.k(begin + i)];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (begin + i < num_copies) out.out_weights[item.value(begin + i)] = values[i];
    }
    return;
  }
  const size_t begin = static_cast<size_t>(number) * num_topk;
#pragma unroll 1
  for (int k = 0; k < num_topk; ++k) {
    if (out.out_weights) out.out_weights[begin + k] = 0;
    out.out_topk_idx[begin + k] = -1;
  }
#pragma unroll 1
  for (int copy = 0; copy < num_copies; ++copy) {
    const int k = item.k(copy);
    if (out.out_weights) out.out_weights[begin + k] = weights[k];
    out.out_topk_idx[begin + k] = item.value(copy);
  }
}

// Every warp takes 32 items at a time. Those of a new plan are copied to it from the ranks that made them.
__device__ inline void deliver_tails(const Context& context, const DispatchCall& call) {
  const DispatchArgs& out = call.dispatch;
  const PlanHead& head = *call.plan.head;
  const bool expert_layout = head.has_expert_layout();
  const int lane = threadIdx.x % 32, warp = Helpers::thread() / 32, num_items = head.num_items;
  const int num_scales = out.scale_bytes / 4, weights_at = (num_scales + 3) / 4 * 4;
  const auto item_at = [&](int number) {
    return Item{call.plan.items + static_cast<size_t>(number) * context.item_ints, context.sizes.max_copies()};
  };
#pragma unroll 1
  for (int first = 32 * (blockIdx.x + gridDim.x * warp); first < num_items; first += 32 * gridDim.x * Helpers::kWarps) {
    const int number = first + lane, here = min(32, num_items - first);
    const float* tail = nullptr;
    if (lane < here) {
      int source = 0;
#pragma unroll 1
      while (number >= head.item_begin[source + 1]) ++source;
      const Item item = item_at(number);
      if (call.new_plan) {
        const auto* from = reinterpret_cast<const int4*>(
            item_at_source(context, source, context.sizes.rank, number - head.item_begin[source]));
#pragma unroll 4
        for (int i = 0; i < context.item_ints / 4; ++i) reinterpret_cast<int4*>(item.data)[i] = from[i];
      }
      tail = reinterpret_cast<const float*>(context.region[source].tails +
                                            static_cast<size_t>(item.token()) * call.tail_bytes);
      deliver_weights(context, call, item, number, expert_layout, tail + weights_at);
    }
    if (num_scales == 0 || call.bulk_scales) continue;
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < here; ++j) {
      const auto* scales = reinterpret_cast<const float*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(tail), j));
      const Item item = item_at(first + j);
      const int num_rows = expert_layout ? item.num_copies() : 1;
#pragma unroll 1
      for (int s = lane; s < num_scales; s += 32)
#pragma unroll 1
        for (int copy = 0; copy < num_rows; ++copy)
          out.out_scales[static_cast<size_t>(expert_layout ? item.value(copy) : first + j) * num_scales + s] =
              scales[s];
    }
  }
}

// A row without a token, by a warp.
__device__ inline void clear_row(const Context& context, const DispatchCall& call, int64_t row) {
  const DispatchArgs& out = call.dispatch;
  const int lane = threadIdx.x % 32, num_topk = context.sizes.num_topk, num_scales = out.scale_bytes / 4;
  auto* vectors = reinterpret_cast<uint4*>(out.out_rows + row * out.row_bytes);
  for (int v = lane; v < static_cast<int>(out.row_bytes / kVector); v += 32) vectors[v] = uint4{};
  for (int i = lane; i < num_scales; i += 32) out.out_scales[row * num_scales + i] = 0;
  if (out.layout == Layout::kExpert) {
    if (out.out_weights && lane == 0) out.out_weights[row] = 0;
  } else if (lane < num_topk) {
    if (out.out_weights) out.out_weights[row * num_topk + lane] = 0;
    if (out.out_topk_idx) out.out_topk_idx[row * num_topk + lane] = -1;
  }
}

// Padding of the groups, and the rows behind the last.
__device__ inline void clear_rows(const Context& context, const DispatchCall& call) {
  const Plan& plan = call.plan;
  const int lane = threadIdx.x % 32, num_warps = gridDim.x * Helpers::kWarps, local = context.sizes.num_local_experts();
  const int warp = blockIdx.x + gridDim.x * (Helpers::thread() / 32);
  if (plan.head->usable && plan.head->has_expert_layout())
    for (int first = 0; first < local; first += 32) {
      const int e = min(first + lane, local - 1);
      const int begin = plan.expert_begin[e] + plan.expert_rows[e];
      const int num = first + lane < local ? plan.expert_begin[e + 1] - begin : 0;
      for (uint32_t padded = __ballot_sync(~0u, num > 0); padded != 0; padded &= padded - 1) {
        const int from = __ffs(padded) - 1;
        const int its_begin = __shfl_sync(~0u, begin, from), its_num = __shfl_sync(~0u, num, from);
        for (int i = (warp + from * Helpers::kWarps) % num_warps; i < its_num; i += num_warps)
          clear_row(context, call, its_begin + i);
      }
    }
  for (int row = plan.head->num_rows + warp; row < call.dispatch.num_rows; row += num_warps)
    clear_row(context, call, row);
}

// What a rank that has given up leaves, by the whole block: nothing that leads whoever reads it out of bounds.
__device__ inline void clear_all(const Context& context, const DispatchCall& call) {
  for (int64_t row = threadIdx.x / 32 + kBlockWarps * blockIdx.x; row < call.dispatch.num_rows;
       row += kBlockWarps * gridDim.x)
    clear_row(context, call, row);
}

}  // namespace ep::cuda
