// Reducing: the partial sums in the inboxes of a rank are added. For a rail peer's token the result is this node's sum:
// rail blocks send it home. For an own token the sums of other nodes are added too, and the result is the output.
#pragma once
#include "cuda/combine.cuh"

namespace ep::cuda {

// [warp] Write the weights of own tokens to the output: 0 where a column has no expert. The tokens' partial sums have
// arrived, and the weights with them.
__device__ inline void take_weights(const Op& op, const CombineParams& params, int first_token, int num_tokens) {
  constexpr int kTogether = 4;  // loads of a lane under way
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
      const float* weights = node == context.node ? own_weights : context.rail_for(node, &RailArrays::weights);
      values[u] = chosen ? __ldcg(weights + first + i) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (begin + 32 * u < num) params.args.out_weights[first + begin + 32 * u] = values[u];
  }
}

// Tokens reduced together by a block: own tokens, or tokens of the rail peer on another node.
struct TokenBatch {
  int node;  // of the tokens' owner; -1: there are no tokens
  int begin, num;
  int milestone;  // of the sums of a rail peer's tokens; SumMilestones::end() for own tokens, or for none
};

// Milestones of the sums for other nodes. They follow those of pushes. They go chunk by chunk, and in a chunk node by
// node.
struct SumMilestones {
  const Context& context;

  // [thread] Return the first milestone; the end of the milestones; the i-th other node, in this rank's order.
  __device__ int first() const { return context.max_item_chunks; }
  __device__ int end() const { return first() + context.max_sum_chunks * context.config.num_others(); }
  __device__ int node(int i) const { return (context.node + 1 + i) % context.config.num_nodes; }
  // [thread] Return the index in Region::summed of a milestone's flag.
  __device__ int flag(int milestone) const {
    const int others = context.config.num_others(), n = milestone - first();
    return context.other(node(n % others)) * context.max_sum_chunks + n / others;
  }
};

// Reduces tokens, in the preparing warp. First come tokens of the rail peers: the blocks of `for_others` share them, in
// a fixed order. Then all blocks take batches of this rank's own tokens, each as soon as it is free.
struct Reducer {
  static constexpr int kBatch = Records::kBatch;

  const Op op;
  const Context& context;
  const CombineParams& params;
  Records& records;
  const Part for_others;
  const SumMilestones milestones;
  const int lane, num_tokens;
  const int own_batch;           // own tokens to take at once; fewer if there are few, so that all blocks get some
  ChunkFlags pushed, sums_here;  // lane by local rank; lane by other node
  int milestone, next_begin;     // of the next batch for others: its milestone, its first token counted in the chunk

  // [warp] Prepare to reduce, once all ranks agree. Without a usable plan there are no tokens for others.
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
    // These flags are about the rail peers, and the relay of this rank raises them.
    sums_here.rank = context.rail_peer(lane + (lane >= context.node));
    sums_here.raiser = op.rank();
    records.begin(INT32_MAX);
  }

  // [thread] Return true in a block of `for_others`.
  __device__ bool has_part() const { return for_others.block >= 0 && for_others.block < for_others.num_blocks; }

  // [warp] Take the next batch of tokens, those for other nodes first. Start to load their rows of the table.
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

  // [warp] Take this block's next batch of the rail peers' tokens, or none. Their number comes from the peer's Call.
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

  // [warp] Take the next batch of own tokens from the counter shared by all blocks, or none.
  __device__ TokenBatch take_own() {
    int begin = 0;
    if (lane == 0) begin = static_cast<int>(atomicAdd(&context.state->next_token, own_batch));
    begin = __shfl_sync(~0u, begin, 0);
    if (begin >= num_tokens) return {-1, 0, 0, milestones.end()};
    return {context.node, begin, min(own_batch, num_tokens - begin), milestones.end()};
  }

  // [warp] Wait until all addends of a batch have arrived. Lane i passes the i-th token: `item_numbers` by local rank,
  // or -1, and a bit in `nodes` for each other node with a sum of it. Return false after an abort of this rank. After
  // true, bulk loads may read the addends, also those of a warp that synchronizes with this one.
  __device__ bool wait_for_addends(const TokenBatch& tokens, const int32_t* item_numbers, bool has_token,
                                   uint32_t nodes) {
    const bool is_own = tokens.node == context.node;
    const int first_chunk = is_own ? context.config.first_own_chunk() : 0;
    // Lane l finds the last needed chunk of local rank l.
    int chunk_of_lane = -1;
    for (int local = 0; local < op.ranks_per_node(); ++local) {
      const int number = has_token ? item_numbers[local] : -1;
      const int needed = __reduce_max_sync(~0u, number < 0 ? -1 : first_chunk + number / kItemChunk);
      if (lane == local) chunk_of_lane = needed;
    }
    if (!pushed.wait(op, Phase::kSums, chunk_of_lane)) return false;
    if (context.config.num_nodes == 1) return true;
    // Lane i finds the needed chunk of the i-th other node.
    const uint32_t all = __reduce_or_sync(~0u, nodes);
    const bool awaited = lane < context.config.num_others() && (all >> (lane + (lane >= context.node)) & 1);
    return sums_here.wait(op, Phase::kSums, awaited ? (tokens.begin + tokens.num - 1) / kSumChunk : -1);
  }

  // [thread] Return the memory for sums of the tokens of the rail peer on `node`: the peer's own, or staging for
  // senders.
  __device__ char* sums_for(int node) const {
    if (!context.is_straight(node)) return context.inbox_for(node, &Inbox::staging);
    return Wire{context}.at(node, context.rail_at_peer(node, &RailArrays::sums));
  }

  // [warp] Queue the sums of a batch; its rows of the table begin at record n. Wait for the addends. Return false after
  // an abort of this rank: then nothing is queued. Without a usable plan the sums of own tokens have no addends: zeros.
  __device__ bool queue(Preparer& preparer, const TokenBatch& tokens, int n) {
    const bool is_own = tokens.node == context.node, usable = params.plan.head->usable;
    records.wait(n);
    // Lane i takes the i-th token of the batch. Wait for its addends.
    const bool has_token = usable && lane < tokens.num;
    const size_t token = tokens.begin + lane;
    const auto* item_numbers = reinterpret_cast<const int32_t*>(records.at(n + min(lane, tokens.num - 1)));
    const uint32_t nodes = is_own && has_token && context.config.num_nodes > 1 ? params.plan.sent_nodes[token] : 0;
    if (!wait_for_addends(tokens, item_numbers, has_token, nodes)) return false;
    // Fill the lane's work.
    Work work{};
    char* const to = is_own ? params.args.out : sums_for(tokens.node);
    work.to = to + token * (is_own ? context.row_bytes : context.slot_stride);
    work.milestone = is_own ? 0 : tokens.milestone;
    work.num_rows = static_cast<int8_t>(__popc(nodes));
    for (int local = 0; local < op.ranks_per_node(); ++local) work.num_rows += has_token && item_numbers[local] >= 0;
    if (!is_own && work.num_rows == 0) work.to = nullptr;  // no experts here, so no sum; the work only keeps the order
    const char* slots = context.inbox_for(tokens.node, &Inbox::slots);
    preparer.prepare_rows(work, tokens.num, context.row_bytes, [&](const char** addends, float*) {
      // List the addends in the order of nodes, on the own node of ranks: the order of the sum is defined.
      const auto add_nodes = [&](uint32_t some) {
        for (; some != 0; some &= some - 1)
          *addends++ = context.rail_for(__ffs(some) - 1, &RailArrays::sums) + token * context.slot_stride;
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

  // [warp] Queue the sums of all tokens of this block, batch by batch. Wait for free staging if any sum travels, and
  // for each batch's addends. Return false after an abort of this rank. In both cases no load of table rows is under
  // way.
  __device__ bool run(Preparer& preparer) {
    // Sums for a rail peer go to the staging of its inbox: wait until the node has read the rows there. `agree` implies
    // it, so this wait is over at once.
    const bool sends = milestone < milestones.end();
    if (sends && !wait_for_node(op, Phase::kFreeStaging, context.own.consumed, context.state->staged_epoch))
      return false;
    // Keep one batch ahead: its rows of the table load meanwhile.
    TokenBatch tokens = take_batch(), next = tokens.node < 0 ? tokens : take_batch();
    // Reach the milestones without tokens of this block, too: every block of `for_others` counts itself in for each.
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
