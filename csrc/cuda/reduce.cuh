// Reducing: the owner of a token sums the partial sums in its inbox.
#pragma once
#include "cuda/combine.cuh"

namespace ep::cuda {

// [warp] Write the weights of some tokens whose partial sums have arrived: 0 where the token chose no expert.
__device__ inline void take_weights(const Op& op, const CombineParams& params, int first_token, int num_tokens) {
  constexpr int kTogether = 4;
  const float* weights = op.context.inbox_of(op.rank(), &Inbox::weights);
  const int num_topk = op.context.config.num_topk, num = num_tokens * num_topk;
  const int64_t first = static_cast<int64_t>(first_token) * num_topk;
  for (int begin = threadIdx.x % 32; begin < num; begin += 32 * kTogether) {
    float values[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = begin + 32 * u;
      if (i >= num) break;
      const bool chosen =
          params.plan.head->usable && params.plan.sent_k[first_token + i / num_topk] >> i % num_topk & 1;
      values[u] = chosen ? __ldcg(weights + first + i) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (begin + 32 * u < num) params.args.out_weights[first + begin + 32 * u] = values[u];
  }
}

// The preparing warp's work for the tokens of this rank. Blocks take batches of tokens as they come to them.
struct Reducer {
  static constexpr int kBatch = Records::kBatch;

  const Op op;
  const CombineParams& params;
  Records& records;
  const int lane, num_tokens;
  const int batch;  // tokens; few when there are few
  ChunkFlags pushed;

  __device__ Reducer(const Op& op, const CombineParams& params, Records& records)
      : op(op),
        params(params),
        records(records),
        lane(threadIdx.x % 32),
        num_tokens(params.args.num_tokens),
        batch(min(kBatch, num_tokens / (2 * op.num_blocks) + 1)),
        pushed(pushed_flags(op.context)) {
    records.begin(INT32_MAX);
  }

  // [warp] Take the next batch of tokens and start to load their items. Return its first token, or one past the last.
  __device__ int take_batch() {
    int begin = 0;
    if (lane == 0) begin = static_cast<int>(atomicAdd(&op.context.state->next_token, batch));
    begin = __shfl_sync(~0u, begin, 0);
    if (begin >= num_tokens) return begin;
    const int ints = op.context.sent_ints;
    records.fetch([&](int n) { return params.plan.sent_item + static_cast<size_t>(begin + n % kBatch) * ints; },
                  min(batch, num_tokens - begin));
    return begin;
  }

  // [warp] Count the addends of the lane's token and mark those of remote nodes. `items` are the token's, if the lane
  // `has_token`. Return the last chunk of the lane's rank that one of the tokens needs, or -1.
  __device__ int count_addends(Work& work, const int32_t* items, bool has_token) const {
    const Config& config = op.context.config;
    const auto node_of = [&](int rank) { return rank / config.ranks_per_sum; };
    int chunk = -1, last_node = -1;
    for (int rank = 0; rank < op.num_ranks(); ++rank) {
      const int item = has_token ? items[rank] : -1;
      const int needed = __reduce_max_sync(~0u, item < 0 ? -1 : item / kItemChunk);
      if (lane == rank) chunk = needed;
      if (item < 0) continue;
      if (node_of(rank) != node_of(op.rank())) {
        const uint32_t bit = 1u << work.num_rows;
        work.nodes.remote |= bit;
        if (node_of(rank) == last_node) work.nodes.last &= ~(bit >> 1);
        work.nodes.last |= bit;
      }
      last_node = node_of(rank);
      ++work.num_rows;
    }
    return chunk;
  }

  // [warp] Queue the sums of all batches that this block takes. Return false when this rank has aborted.
  __device__ bool run(Preparer& preparer) {
    const Context& context = op.context;
    const char* slots = context.inbox_of(op.rank(), &Inbox::slots);
    const bool usable = params.plan.head->usable;
    int begin = take_batch();
    int next = begin < num_tokens ? take_batch() : num_tokens;
    for (int n = 0; begin < num_tokens; n += kBatch) {
      const int num = min(batch, num_tokens - begin);
      records.wait(n);
      // Lane i takes the i-th token of the batch.
      const bool has_token = usable && lane < num;
      const auto* items = reinterpret_cast<const int32_t*>(records.at(n + min(lane, num - 1)));
      Work work{};
      work.to = params.args.out + static_cast<size_t>(begin + lane) * context.row_bytes;
      const int chunk = count_addends(work, items, has_token);
      if (!pushed.wait(op, Phase::kSums, chunk)) {
        records.drain();
        return false;
      }
      preparer.prepare_rows(work, num, context.row_bytes, [&](const char** addends) {
        for (int rank = 0; rank < op.num_ranks(); ++rank) {
          if (!has_token || items[rank] < 0) continue;
          const size_t slot = static_cast<size_t>(rank) * context.config.max_tokens + items[rank];
          *addends++ = slots + slot * context.slot_stride;
        }
      });
      if (params.args.out_weights) take_weights(op, params, begin, num);
      if (begin + num == num_tokens) break;
      begin = next;
      next = begin < num_tokens ? take_batch() : num_tokens;
    }
    return true;
  }
};

}  // namespace ep::cuda
