// Reducing: the partial sums in the inboxes of a rank are added. Those of its own tokens become the result, together
// with one sum from every other node; those of its rail peers' tokens become such sums, which the rail sends home.
#pragma once
#include "cuda/combine.cuh"

namespace ep::cuda {

// [warp] Write the weights of some tokens whose partial sums have arrived: 0 where the token chose no expert.
__device__ inline void take_weights(const Op& op, const CombineParams& params, int first_token, int num_tokens) {
  constexpr int kTogether = 4;
  const Context& context = op.context;
  const Plan& plan = params.plan;
  const float* own_weights = context.inbox_for(context.node, &Inbox::weights);
  const int num_topk = context.config.num_topk, num = num_tokens * num_topk;
  const int64_t first = static_cast<int64_t>(first_token) * num_topk;
  for (int begin = threadIdx.x % 32; begin < num; begin += 32 * kTogether) {
    float values[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = begin + 32 * u;
      if (i >= num) break;
      const bool chosen = plan.head->usable && plan.sent_k[first_token + i / num_topk] >> i % num_topk & 1;
      const int node = chosen && context.config.num_nodes > 1 ? plan.k_node[first + i] : context.node;
      const float* weights = node == context.node ? own_weights : context.rail_to(node, &RailArrays::weights);
      values[u] = chosen ? __ldcg(weights + first + i) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (begin + 32 * u < num) params.args.out_weights[first + begin + 32 * u] = values[u];
  }
}

// Some tokens of this rank, or of its rail peer on another node, that a block reduces together.
struct TokenBatch {
  int node;  // whose tokens; of no tokens: -1
  int begin, num;
  int milestone;  // of the pipeline, for sums that travel
};

// Numbers of the sums that travel, among the pipeline's chunks: behind those that are pushed, chunk by chunk, and in
// each chunk node by node.
struct SumMilestones {
  const Context& context;

  __device__ int first() const { return context.max_item_chunks; }
  __device__ int end() const { return first() + context.max_sum_chunks * context.config.num_others(); }
  __device__ int node(int i) const { return (context.node + 1 + i) % context.config.num_nodes; }
  // The flag of a chunk, among Region::summed.
  __device__ int flag(int milestone) const {
    const int others = context.config.num_others(), n = milestone - first();
    return context.other(node(n % others)) * context.max_sum_chunks + n / others;
  }
};

// The preparing warp's work for tokens. Sums that travel come first: the blocks of `for_others` share their tokens.
// Then all blocks take batches of this rank's own tokens as they come to them.
struct Reducer {
  static constexpr int kBatch = Records::kBatch;

  const Op op;
  const Context& context;
  const CombineParams& params;
  Records& records;
  const Part for_others;
  const SumMilestones milestones;
  const int lane, num_tokens;
  const int own_batch;           // own tokens; few when there are few
  ChunkFlags pushed, sums_here;  // by local rank; by other node
  int milestone, next_begin;     // of the next batch for others

  __device__ Reducer(const Op& op, const CombineParams& params, Records& records, const Part& for_others)
      : op(op),
        context(op.context),
        params(params),
        records(records),
        for_others(for_others),
        milestones{op.context},
        lane(threadIdx.x % 32),
        num_tokens(params.args.num_tokens),
        own_batch(min(kBatch, num_tokens / (2 * op.num_blocks) + 1)),
        pushed(chunk_flags(context.own.pushed, context.max_item_chunks, op.ranks_per_node(), op.first_local_rank())),
        sums_here(chunk_flags(context.own.sums_here, context.max_sum_chunks, context.config.num_others(), 0)),
        milestone(has_part() && params.plan.head->usable ? milestones.first() : milestones.end()),
        next_begin(for_others.block * kBatch) {
    sums_here.rank = context.rail_peer(lane + (lane >= context.node));
    sums_here.raiser = op.rank();
    records.begin(INT32_MAX);
  }

  __device__ bool has_part() const { return for_others.block >= 0 && for_others.block < for_others.num_blocks; }

  // [warp] Find the next batch of tokens, of other nodes first, and start to load their rows of the table.
  __device__ TokenBatch take_batch() {
    TokenBatch taken = take_for_others();
    if (taken.node < 0) taken = take_own();
    if (taken.node < 0) return taken;
    const int ints = context.table_ints;
    const size_t first = static_cast<size_t>(taken.node) * context.config.max_tokens + taken.begin;
    const int32_t* table = params.plan.tables + first * ints;
    records.fetch([&](int n) { return table + n % kBatch * ints; }, taken.num);
    return taken;
  }

  __device__ TokenBatch take_for_others() {
    for (; milestone < milestones.end(); ++milestone, next_begin = for_others.block * kBatch) {
      const int n = milestone - milestones.first(), others = context.config.num_others();
      const int node = milestones.node(n % others), first = n / others * kSumChunk;
      const int end = min(__ldcg(&call_at(op, context.rail_peer(node))->num_tokens), first + kSumChunk);
      const int begin = first + next_begin;
      if (begin >= end) continue;
      next_begin += for_others.num_blocks * kBatch;
      return {node, begin, min(kBatch, end - begin), milestone};
    }
    return {-1, 0, 0, milestones.end()};
  }

  __device__ TokenBatch take_own() {
    int begin = 0;
    if (lane == 0) begin = static_cast<int>(atomicAdd(&context.state->next_token, own_batch));
    begin = __shfl_sync(~0u, begin, 0);
    if (begin >= num_tokens) return {-1, 0, 0, milestones.end()};
    return {context.node, begin, min(own_batch, num_tokens - begin), milestones.end()};
  }

  // [warp] Wait until the partial sums of some tokens are here. `item_numbers` are those of the lane's token; the lane
  // `has_token`; `nodes` send sums of it. Return false when this rank has aborted.
  __device__ bool wait_for_addends(const TokenBatch& tokens, const int32_t* item_numbers, bool has_token,
                                   uint32_t nodes) {
    const bool is_own = tokens.node == context.node;
    const int first_chunk = is_own ? context.config.first_own_chunk() : 0;
    int chunk_of_lane = -1;
    for (int local = 0; local < op.ranks_per_node(); ++local) {
      const int number = has_token ? item_numbers[local] : -1;
      const int needed = __reduce_max_sync(~0u, number < 0 ? -1 : first_chunk + number / kItemChunk);
      if (lane == local) chunk_of_lane = needed;
    }
    if (!pushed.wait(op, Phase::kSums, chunk_of_lane)) return false;
    if (context.config.num_nodes == 1) return true;
    const uint32_t all = __reduce_or_sync(~0u, nodes);
    const bool awaited = lane < context.config.num_others() && (all >> (lane + (lane >= context.node)) & 1);
    return sums_here.wait(op, Phase::kSums, awaited ? (tokens.begin + tokens.num - 1) / kSumChunk : -1);
  }

  // [warp] Queue the sums of a batch, the n-th of the records. Return false when this rank has aborted.
  __device__ bool queue(Preparer& preparer, const TokenBatch& tokens, int n) {
    const bool is_own = tokens.node == context.node, usable = params.plan.head->usable;
    records.wait(n);
    // Lane i takes the i-th token of the batch.
    const bool has_token = usable && lane < tokens.num;
    const size_t token = tokens.begin + lane;
    const auto* item_numbers = reinterpret_cast<const int32_t*>(records.at(n + min(lane, tokens.num - 1)));
    const uint32_t nodes = is_own && has_token && context.config.num_nodes > 1 ? params.plan.sent_nodes[token] : 0;
    if (!wait_for_addends(tokens, item_numbers, has_token, nodes)) return false;
    Work work{};
    char* const to = is_own ? params.args.out : context.inbox_for(tokens.node, &Inbox::staging);
    work.to = to + token * (is_own ? context.row_bytes : context.slot_stride);
    work.milestone = is_own ? 0 : tokens.milestone;
    work.num_rows = static_cast<int8_t>(__popc(nodes));
    for (int local = 0; local < op.ranks_per_node(); ++local) work.num_rows += has_token && item_numbers[local] >= 0;
    if (!is_own && work.num_rows == 0) work.to = nullptr;  // nothing travels
    const char* slots = context.inbox_for(tokens.node, &Inbox::slots);
    preparer.prepare_rows(work, tokens.num, context.row_bytes, [&](const char** addends) {
      // In ascending order of ranks and nodes.
      const auto add_nodes = [&](uint32_t some) {
        for (; some != 0; some &= some - 1)
          *addends++ = context.rail_to(__ffs(some) - 1, &RailArrays::sums) + token * context.slot_stride;
      };
      add_nodes(nodes & ((1u << context.node) - 1));
      for (int local = 0; local < op.ranks_per_node(); ++local) {
        if (!has_token || item_numbers[local] < 0) continue;
        const size_t slot = static_cast<size_t>(local) * context.config.max_tokens + item_numbers[local];
        *addends++ = slots + slot * context.slot_stride;
      }
      add_nodes(nodes & ~((1u << context.node) - 1));
    });
    if (is_own && params.args.out_weights) take_weights(op, params, tokens.begin, tokens.num);
    return true;
  }

  // [warp] Queue the sums of all batches that this block takes. Return false when this rank has aborted.
  __device__ bool run(Preparer& preparer) {
    // Sums that travel lie where the rows of other nodes lay.
    const bool sends = milestone < milestones.end();
    if (sends && !wait_for_node(op, Phase::kFreeStaging, context.own.consumed, context.state->staged_epoch))
      return false;
    TokenBatch tokens = take_batch(), next = tokens.node < 0 ? tokens : take_batch();
    if (sends && tokens.milestone > milestones.first()) preparer.reach(tokens.milestone, false);
    for (int n = 0; tokens.node >= 0; n += kBatch) {
      if (!queue(preparer, tokens, n)) {
        records.drain();
        return false;
      }
      if (next.milestone > tokens.milestone) preparer.reach(next.milestone, false);
      tokens = next;
      if (tokens.node >= 0) next = take_batch();
    }
    return true;
  }
};

}  // namespace ep::cuda
