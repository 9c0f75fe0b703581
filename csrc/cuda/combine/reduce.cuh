// Reducing: the partial sums in a rank's slots are added. For a rail peer's token the result is this node's sum: rail
// blocks send it to the rail peer. For an own token the sums of other nodes are added too, and the result is the
// output.
#pragma once
#include "cuda/combine/combine.cuh"

namespace ep::cuda {

// [thread] Return where a sum or weights of an own token come from another node: the token, or as Plan::sent_rows.
template <Kernels K>
__device__ inline int row_at(const Op<K>& op, const Plan& plan, int node, int token) {
  if (!has_messages(op) || (plan.head->message_rows.packed >> node & 1) == 0) return token;
  return __ldg(plan.sent_rows + static_cast<size_t>(node) * op.context.config.max_tokens + token);
}

// [warp] Write the weights of own tokens to the output: 0 where a column has no expert. The tokens' partial sums have
// arrived, and the weights with them.
template <Kernels K, class Params>
__device__ inline void take_weights(const Op<K>& op, const Params& params, int first_token, int num_tokens) {
  constexpr int kTogether = 4;  // loads of a lane under way
  const Context& context = op.context;
  const Plan& plan = params.plan;
  const float* own_weights = op.my_inbox(context.node, &Inbox::weights);
  const int num_topk = context.config.num_topk, num = num_tokens * num_topk;
  const int64_t first = static_cast<int64_t>(first_token) * num_topk;
  for (int begin = threadIdx.x % 32; begin < num; begin += 32 * kTogether) {
    float values[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = begin + 32 * u;
      if (i >= num) break;
      const int token = first_token + i / num_topk, k = i % num_topk;
      const uint32_t* const sent_k = plan.sent_k + (k < 32 ? 0 : context.config.max_tokens);
      const bool chosen = plan.head->usable && sent_k[token] >> k % 32 & 1;
      const int node = chosen && op.num_nodes() > 1 ? plan.k_node[first + i] : context.node;
      const float* weights = node == context.node ? own_weights : context.local_rail_buffer(node, &RailArrays::weights);
      const int row = node == context.node ? token : row_at(op, plan, node, token);
      values[u] = chosen ? __ldcg(weights + row * num_topk + k) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (begin + 32 * u < num) params.out_weights()[first + begin + 32 * u] = values[u];
  }
}

// Tokens reduced together by a block: own tokens, or tokens of the rail peer on another node.
struct TokenBatch {
  int node;  // of the tokens' owner; -1: there are no tokens
  int begin, num;
  int order;  // sum progress flag of a rail peer's tokens; ProgressFlags::num_sums() for own tokens, or for none
};

// [thread] Return the node of the n-th sum progress flag. Each node begins with the next one.
template <Kernels K>
__device__ inline int node_of_sum(const Op<K>& op, int n) {
  return (op.context.node + 1 + n % op.num_others()) % op.num_nodes();
}

// Reduces tokens, in the preparing warp. First come tokens of the rail peers: the blocks of `for_others` share them, in
// the order of ProgressFlags. Then come this rank's own tokens.
template <Kernels K, class Params>
struct Reducer {
  static constexpr int kBatch = Records::kBatch;

  const Op<K> op;
  const Context& context;
  const Params& params;
  typename Params::Memory& memory;
  const Part for_others;
  const int lane, num_tokens;
  int last_relayed = -1;        // last chunk of `sums_relayed` seen, of the other node `lane`
  int order, next_begin;        // of the next batch for others: its progress flag, its first token counted in the chunk
  int reached;                  // sum progress flags before which this block has no tokens left
  TokenBatch tokens{}, next{};  // to be queued, and behind it; from the first run() on
  int num_queued = -kBatch;     // records before those of `tokens`; below 0 before the first run()
  bool has_taken = false;       // whether this block has taken its only batch of own tokens

  // [warp] Prepare to reduce. Read nothing written by peers. Without a usable plan there are no tokens for others.
  __device__ Reducer(const Op<K>& op, const Params& params, typename Params::Memory& memory, const Part& for_others)
      : op(op),
        context(op.context),
        params(params),
        memory(memory),
        for_others(for_others),
        lane(threadIdx.x % 32),
        num_tokens(params.args.num_tokens),
        order(for_others.has_block() && params.plan.head->usable ? first_sum() : progress_flags().num_sums()),
        next_begin(op.num_nodes() > 1 ? begin_of(order) : 0),
        reached(order) {
#pragma unroll 1
    for (int local = lane; local < op.ranks_per_node(); local += 32) memory.seen[local] = -1;
    memory.tokens.begin();
  }

  __device__ ProgressFlags progress_flags() const { return progress_flags_of(op); }

  // [thread] Return the first sum progress flag left for this launch: the first of two launches makes all these sums.
  __device__ int first_sum() const { return params.pushes() ? 0 : progress_flags().num_sums(); }

  // [thread] Return the offset of this block's first token in the chunk of sum progress flag `n`. The blocks take turns
  // to begin: a chunk may have fewer batches than there are blocks.
  __device__ int begin_of(int n) const { return (for_others.block + n) % for_others.num_blocks * kBatch; }

  // [warp] Take the next batch of tokens, those for other nodes first. Start to load their rows of the table.
  __device__ TokenBatch take_batch() {
    TokenBatch taken = take_for_others();
    if (taken.node < 0) taken = take_own();
    if (taken.node < 0) return taken;
    const int ints = context.table_ints;
    const size_t first = static_cast<size_t>(taken.node) * context.config.max_tokens + taken.begin;
    const int32_t* table = params.plan.tables + first * ints;
    memory.tokens.fetch([&](int n) { return table + n % kBatch * ints; }, taken.num);
    return taken;
  }

  // [warp] Take this block's next batch of the rail peers' tokens, or none.
  __device__ TokenBatch take_for_others() {
    for (; order < progress_flags().num_sums(); ++order, next_begin = begin_of(order)) {
      const int node = node_of_sum(op, order), length = context.config.window_chunk;
      const int first = order / progress_flags().others * length;
      const int end = min(rows_from(op, params.plan, node), first + length);
      const int begin = first + next_begin;
      if (begin >= end) continue;
      next_begin += for_others.num_blocks * kBatch;
      return {node, begin, min(kBatch, end - begin), order};
    }
    return {-1, 0, 0, progress_flags().num_sums()};
  }

  // [warp] Take this block's next batch of own tokens, or none. With few tokens each block has one batch; else all
  // blocks take theirs from a shared counter. The first of two launches leaves the tokens to the second one.
  __device__ TokenBatch take_own() {
    int begin = params.reduces() ? 0 : num_tokens;
    if (params.reduces() && num_tokens <= params.own_batch * op.num_blocks) {
      begin = has_taken ? num_tokens : op.block * params.own_batch;
      has_taken = true;
    } else if (params.reduces()) {
      if (lane == 0) begin = static_cast<int>(atomicAdd(&context.state->next_index, params.own_batch));
      begin = __shfl_sync(~0u, begin, 0);
    }
    if (begin >= num_tokens) return {-1, 0, 0, progress_flags().num_sums()};
    return {context.node, begin, min(params.own_batch, num_tokens - begin), progress_flags().num_sums()};
  }

  // [warp] Wait until all addends of a batch have arrived. Lane i passes the i-th token: `item_numbers` by local rank,
  // or -1, and a bit in `nodes` for each other node with a sum of it. Return false after an abort of this rank. After
  // true, bulk loads may read the addends, also in a warp that synchronizes with this one afterwards.
  // waits: pushed (partial sums), sums_relayed (sums between nodes)
  __device__ bool wait_for_addends(const TokenBatch& tokens, const int32_t* item_numbers, bool has_token,
                                   uint32_t nodes) {
    const bool is_own = tokens.node == context.node;
    // A lane finds the last needed chunk of its local rank. All tokens of a batch for others are in one chunk.
    const int far_chunk = is_own ? 0 : tokens.order / progress_flags().others;
#pragma unroll 1
    for (int first = 0; first < op.ranks_per_node(); first += 32) {
      int chunk_of_lane = -1;
#pragma unroll 1
      for (int local = first; local < min(first + 32, op.ranks_per_node()); ++local) {
        // Own rows are read in place. Weights are not, and the flags cover them.
        const bool is_here = is_own && adds_own_rows(op) && local == context.local && !params.out_weights();
        const int number = has_token && !is_here ? item_numbers[local] : -1;
        const int chunk = is_own ? op.num_far_chunks() + number / kItemChunk : far_chunk;
        const int needed = __reduce_max_sync(~0u, number < 0 ? -1 : chunk);
        if (lane == local - first) chunk_of_lane = needed;
      }
      const int local = first + lane, rank = op.first_local_rank() + local;
      const uint64_t* const pushed = context.own.pushed + local * context.max_pushed_chunks;
      if (!wait_for_chunks(op, Phase::kSums, pushed, chunk_of_lane, rank, rank, memory.seen[local])) return false;
    }
    stamp(op, Step::kSums);
    if (op.num_nodes() == 1) return true;
    // Lane i finds the needed chunk of the i-th other node.
    const uint32_t all = __reduce_or_sync(~0u, nodes);
    const bool awaited = lane < op.num_others() && (all >> (lane + (lane >= context.node)) & 1);
    const int last = tokens.begin + tokens.num - 1, node = lane + (lane >= context.node);
    const int row = awaited ? row_at(op, params.plan, node, last) : -1;
    // These flags are about the rail peers, and the relay of this rank raises them.
    return wait_for_chunks(op, Phase::kNodeSums, context.own.sums_relayed + lane * context.max_sum_chunks,
                           row >> context.config.log_sum_chunk, context.rail_peer(node), op.rank(), last_relayed);
  }

  // [thread] Return a loaded item of this rank.
  __device__ Item own_item(int n) const { return {reinterpret_cast<int32_t*>(memory.items.at(n)), context.max_copies}; }

  // [thread] Return the memory for sums of tokens of the rail peer on `node`: at the peer if direct, else staging for
  // the senders.
  __device__ char* sums_for(int node) const {
    if (!context.maps(node)) return op.my_inbox(node, &Inbox::staging);
    return Wire{context}.at(node, context.remote_rail_buffer(node, &RailArrays::sums));
  }

  // [warp] Queue the sums of a batch; its rows of the table begin at record n. Once all is written, wait for the
  // addends. Return false after an abort of this rank: then nothing is queued. Without a usable plan the sums of own
  // tokens have no addends: zeros.
  __device__ bool queue(Preparer& preparer, const TokenBatch& tokens, int n) {
    const bool is_own = tokens.node == context.node, usable = params.plan.head->usable;
    memory.tokens.wait(n);
    // Lane i takes the i-th token of the batch.
    const bool has_token = usable && lane < tokens.num;
    const size_t token = tokens.begin + lane;
    const auto* item_numbers = reinterpret_cast<const int32_t*>(memory.tokens.at(n + min(lane, tokens.num - 1)));
    const uint32_t nodes = is_own && has_token && op.num_nodes() > 1 ? params.plan.sent_nodes[token] : 0;
    bool ready = false;  // all addends
    const auto wait = [&] { return ready || (ready = wait_for_addends(tokens, item_numbers, has_token, nodes)); };
    // Leave out masked ranks. Wait first: the wait may mask more. Then read the mask once for the batch.
    if (has_masks(op) && !wait()) return false;
    const uint32_t masked = has_masks(op) ? masked_ranks(op) : 0;
    const auto has_addend = [&](int local) {
      return has_token && item_numbers[local] >= 0 && (!has_masks(op) || (masked >> local & 1) == 0);
    };
    // Find the own rows of the lane's token, if they are added here: values of its item. In rank layout that is a row.
    const PlanHead& head = *params.plan.head;
    const bool has_own_rows = is_own && adds_own_rows(op) && has_addend(context.local);
    const int own = memory.items.fetched * kBatch + lane % kBatch;  // record of the item
    int num_own = has_own_rows;
    if (kAddsOwnRows<K> && __any_sync(~0u, has_own_rows)) {
      const int index = head.item_begin()[op.rank()] + (has_own_rows ? item_numbers[context.local] : 0);
      if (head.has_expert_layout()) {
        memory.items.fetch([&](int) { return params.plan.items + static_cast<size_t>(index) * context.item_ints; },
                           tokens.num);
        memory.items.wait(own);
        if (has_own_rows) num_own = own_item(own).num_copies();
      } else if (has_own_rows) {
        own_item(own).value(0) = index;
      }
    }
    // Fill the lane's task.
    Task task{};
    char* const to = is_own ? params.args.out : sums_for(tokens.node);
    task.to = to + token * (is_own ? context.row_bytes : context.slot_stride);
    task.progress_flag = is_own ? 0 : progress_flags().summed(tokens.order);
    task.num_rows = static_cast<int8_t>(__popc(nodes));
    task.first_own = static_cast<int8_t>(__popc(nodes & ((1u << context.node) - 1)));
    task.num_own = static_cast<int8_t>(num_own);
#pragma unroll 1
    for (int local = 0; local < op.ranks_per_node(); ++local) {
      task.num_rows += has_own_rows && local == context.local ? num_own : has_addend(local);
      task.first_own += local < context.local && has_addend(local);
    }
    if (!is_own && task.num_rows == 0) task.to = nullptr;  // no experts here, so no sum; the task only keeps the order
    const char* slots = is_own ? context.own.slots : context.local_rail_buffer(tokens.node, &RailArrays::slots);
    const auto fill = [&](const char** addends, int) {
      // List the addends in the order of nodes, on the own node of ranks: the order of the sum is defined.
      const auto add_nodes = [&](uint32_t some) {
        for (; some != 0; some &= some - 1) {
          const int node = __ffs(some) - 1;
          const size_t row = row_at(op, params.plan, node, static_cast<int>(token));
          *addends++ = context.local_rail_buffer(node, &RailArrays::sums) + row * context.slot_stride;
        }
      };
      add_nodes(nodes & ((1u << context.node) - 1));
#pragma unroll 1
      for (int local = 0; local < op.ranks_per_node(); ++local) {
        if (!has_addend(local)) continue;
        if (has_own_rows && local == context.local) {
#pragma unroll 1
          for (int j = 0; j < num_own; ++j)
            *addends++ = params.args.y + static_cast<size_t>(own_item(own).value(j)) * context.row_bytes;
          continue;
        }
        const size_t slot = is_own ? static_cast<size_t>(local) * context.config.max_tokens + item_numbers[local]
                                   : window_slot(context, local, static_cast<int>(token));
        *addends++ = slots + slot * context.slot_stride;
      }
      add_nodes(nodes & ~((1u << context.node) - 1));
    };
    if (!preparer.prepare_rows(task, tokens.num, context.row_bytes, fill, wait)) return false;
    if (is_own && params.out_weights()) take_weights(op, params, tokens.begin, tokens.num);
    return true;
  }

  // [warp] Take the first tokens, once all ranks agree. Wait for free staging if any sum travels. Return false after an
  // abort of this rank.
  // waits: consumed (free staging)
  __device__ bool begin() {
    // Sums for a rail peer go to the staging of its inbox, if not direct: wait until the node has read the rows
    // there. `agree` implies it, so this wait is over at once.
    const bool sends = order < progress_flags().num_sums();
    if (sends && !wait_for_node(op, Phase::kFreeStaging, context.own.consumed, context.state->staged_epoch))
      return false;
    // Keep one batch ahead: its rows of the table load meanwhile.
    tokens = take_batch();
    next = tokens.node < 0 ? tokens : take_batch();
    num_queued = 0;
    return true;
  }

  // [warp] Reach all sum progress flags before the n-th: this block has no tokens left there. Every block of
  // `for_others` counts itself in for each, also without tokens.
  __device__ void reach(Preparer& preparer, int n) {
    if (n <= reached) return;
    reached = n;
    preparer.reach(progress_flags().summed(n - 1) + 1, false);
  }

  // [thread] Return the far chunk of the next sums for others, after run(); ProgressFlags::far if none are left.
  __device__ int next_chunk() const { return progress_flags().others > 0 ? tokens.order / progress_flags().others : 0; }

  // [warp] Queue the sums of this block, batch by batch, once all ranks agree: those for others before the sum
  // progress flag `until`, or with kAllSums all that are left. Wait for each batch's addends. Return false
  // after an abort of this rank. Loads of table rows may be under way: at the end, call records.drain().
  __device__ bool run(Preparer& preparer, int until) {
    if (num_queued < 0 && !begin()) return false;
    reach(preparer, min(tokens.order, until));
    while (tokens.node >= 0 && tokens.order < until) {
      if (!queue(preparer, tokens, num_queued)) return false;
      // Free the slots of a chunk before the next wait.
      reach(preparer, min(next.order, until));
      num_queued += kBatch;
      tokens = next;
      if (tokens.node >= 0) next = take_batch();
    }
    return true;
  }
};

}  // namespace ep::cuda
