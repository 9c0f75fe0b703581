// From a routing to a plan. Every rank counts, sends its counts to all ranks, finds the rows of its tokens, and lists
// its items. The pull warps of the first `plan_blocks` blocks do all of it.
#pragma once
#include "cuda/plan/scan.cuh"

namespace ep::cuda {

// [team] Replace counts of several parts by their exclusive prefix sums over the parts, in place: num_tokens
// [num_parts, num_experts], num_items [num_parts, num_ranks]. Write the sums over all parts to every rank of the node
// if this block `sends`, else to block_num_tokens and block_num_items, for send_counts. Called by the pull warps of one
// block. No barrier at the end. Loads go to an array first: the compiler cannot rule out that a store changes the next
// part's count, so without the array each load would wait for the store before it.
template <Kernels K>
__device__ inline void sum_parts(const Op<K>& op, int* num_tokens, int* num_items, int num_parts, bool sends) {
  const StateArrays& arrays = op.context.arrays;
  const int experts = op.context.config.num_experts;
#pragma unroll 1
  for (int n = threadIdx.x; n < experts + op.num_ranks(); n += PullWarps::kThreads) {
    constexpr int kTogether = 8;  // loads under way
    const bool is_rank = n >= experts;
    const int i = is_rank ? n - experts : n, stride = is_rank ? op.num_ranks() : experts;
    int sum = 0;
#pragma unroll 1
    for (int first = 0; first < num_parts; first += kTogether) {
      int* const from = (is_rank ? num_items : num_tokens) + first * stride + i;
      const int num_together = num_parts - first;
      int count[kTogether];
#pragma unroll
      for (int p = 0; p < kTogether; ++p) count[p] = p < num_together ? from[p * stride] : 0;
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        if (p < num_together) from[p * stride] = sum;
        sum += count[p];
      }
    }
    if (!sends) (is_rank ? arrays.block_num_items : arrays.block_num_tokens)[op.block * stride + i] = sum;
#pragma unroll 1
    for (int local = 0; sends && local < op.ranks_per_node(); ++local) {
      const Counts counts = counts_at(op, local, op.rank());
      (is_rank ? counts.num_items(i) : counts.num_tokens(op.context.config, i)) = sum;
    }
  }
}

// [thread] Return the Call of this dispatch.
template <class Params>
__device__ inline Call call_of(const Params& params) {
  const RowArgs& args = params.args;
  Call call{};
  const auto set = [&](Field field, int32_t value) { call.set(field, value); };
  set(Field::kOperation, static_cast<int32_t>(Operation::kDispatch));
  set(Field::kPlan, params.new_plan() ? -args.max_tokens_to_node : params.plan.head->made);
  set(Field::kLayout, static_cast<int32_t>(args.layout));
  set(Field::kAlignment, args.expert_alignment);
  set(Field::kWeights, params.has_weights());
  set(Field::kRowBytes, static_cast<int32_t>(args.row_bytes));
  set(Field::kScales, static_cast<int32_t>(args.scale_bytes / args.scale_size));
  set(Field::kMaxRows, args.num_rows);
  set(Field::kNumTokens, args.num_tokens);
  return call;
}

// [team] Write this rank's counts to every rank of the node, and announce the dispatch. A single planning block has
// written them. Called by the pull warps of the planning block that counts last. Afterwards block_num_tokens and
// block_num_items hold the sums over earlier blocks. The other planning blocks read them after `called` of this rank.
template <Kernels K, class Params>
__device__ void send_counts(const Op<K>& op, const Params& params) {
  const Context& context = op.context;
  const StateArrays& arrays = context.arrays;
  if (params.plan_blocks > 1) sum_parts(op, arrays.block_num_tokens, arrays.block_num_items, params.plan_blocks, true);
  const bool counts_rows =
      op.num_nodes() > 1 && (params.args.max_tokens_to_node > 0 || (has_messages(op) && params.reports_counts()));
  if (counts_rows && PullWarps::warp() == PullWarps::kWarps - 1) {
    const int node = threadIdx.x % 32;
    const int rows = rows_before(params.plan.sent_nodes, op.num_nodes(), params.args.num_tokens);
#pragma unroll 1
    for (int local = 0; node < op.num_nodes() && local < op.ranks_per_node(); ++local)
      counts_at(op, local, op.rank()).num_rows(context.config, node) = rows;
  }
  PullWarps::sync();
  if (PullWarps::warp() == 0) announce(op, call_of(params), true);
}

// [thread] Abort this rank: a source has counted more tokens or items than a rank may bring, or less than none. Rows
// and items found from such counts would lie anywhere. `of_first`: the count in question of source 0.
template <Kernels K>
__device__ __noinline__ inline void abort_for_counts(Op<K> op, const int32_t* of_first) {
  int source = 0;
  while (source < op.num_ranks() - 1 && static_cast<uint32_t>(__ldcg(of_first + source * op.context.counts_ints)) <=
                                            static_cast<uint32_t>(op.context.config.max_tokens))
    ++source;
  abort_because_of(op, Phase::kWrongCounts, source, 0);
}

// [team] Sum each expert's tokens over all ranks and over lower ranks. Called by the pull warps of a planning block,
// after `called` of all ranks. Set `broken` after a count out of range. Ends with a barrier of the pull warps.
// reports: kWrongCounts (tokens of an expert; no plan is made)
template <Kernels K>
__device__ void sum_sources(const Op<K>& op, const Scratch& scratch, bool& broken) {
  const Context& context = op.context;
  const int32_t* const num_tokens = &own_counts(op, 0).num_tokens(context.config, 0);
#pragma unroll 1
  for (int e = threadIdx.x; e < context.config.num_experts; e += PullWarps::kThreads) {
    int total = 0, before = 0;
    uint32_t most = 0;
#pragma unroll 4
    for (int source = 0; source < op.num_ranks(); ++source) {
      const int tokens = __ldcg(num_tokens + source * context.counts_ints + e);
      most = max(most, static_cast<uint32_t>(tokens));
      total += tokens;
      before += source < op.rank() ? tokens : 0;
    }
    scratch.expert_total[e] = total;
    scratch.expert_before[e] = before;
    if (most > static_cast<uint32_t>(context.config.max_tokens)) {
      broken = true;
      abort_for_counts(op, num_tokens + e);
    }
  }
  PullWarps::sync();
}

// [thread] Return the rows of an expert group with its padding. With a large alignment they need more than 32 bits.
__device__ inline int64_t padded_rows(uint32_t tokens, uint32_t alignment) {
  return int64_t{(tokens + alignment - 1) / alignment} * alignment;
}

// [warp] Lay out the expert groups of one rank: add the first row of each group to expert_before. Return the number of
// rows of all groups. With `writes`, also write the groups to the plan, and the counts to the caller's outputs and to a
// waiting host. Called once for each rank in a planning block.
template <Kernels K, class Params>
__device__ int64_t lay_out_experts(const Op<K>& op, const Params& params, const Scratch& scratch, int rank,
                                   bool writes) {
  const int lane = threadIdx.x % 32, num_local = op.context.num_local_experts;
  const uint32_t alignment = params.args.expert_alignment;
  int64_t begin = 0;
#pragma unroll 1
  for (int first = 0; first < num_local; first += 32) {
    const int e = first + lane, expert = rank * num_local + e;
    const uint32_t tokens = e < num_local ? scratch.expert_total[expert] : 0;
    const int64_t padded = padded_rows(tokens, alignment);
    const int64_t sum = inclusive_sum(padded);
    if (e < num_local) {
      const int64_t group = begin + sum - padded;
      scratch.expert_before[expert] += static_cast<int>(params.group_begin(e, group));
      if (writes) {
        params.plan.expert_rows[e] = static_cast<int>(tokens);
        params.plan.expert_begin[e] = static_cast<int>(group);
        params.write_counts(e, static_cast<int>(tokens), static_cast<int>(padded));
        if (params.reports_counts()) op.context.reports.counted_rows[e] = padded;
      }
    }
    begin += __shfl_sync(~0u, sum, 31);
  }
  if (writes && lane == 0) params.plan.expert_begin[num_local] = static_cast<int>(begin);
  return begin;
}

// [team] Find the first row of this rank's tokens at each expert, and for each rank its output rows and this rank's
// items for it. Called by the pull warps of a planning block, after `called` of all ranks. Set `broken` after a count
// out of range. Ends with a barrier of the pull warps.
// reports: kWrongCounts (items for a rank; no plan is made)
template <Kernels K, class Params>
__device__ void find_first_rows(const Op<K>& op, const Params& params, const Scratch& scratch, bool& broken) {
  sum_sources(op, scratch, broken);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int rank = warp; rank < op.num_ranks(); rank += PullWarps::kWarps) {
    // Start the first loads before the layout; their values are used after it.
    const auto items_of = [&](int source) {
      return source < op.num_ranks() ? __ldcg(&own_counts(op, source).num_items(rank)) : 0;
    };
    const int max_rows = field_of(op, rank, Field::kMaxRows);
    int num_items = items_of(lane);
    auto most = static_cast<uint32_t>(num_items);  // of a source
    const int64_t rows = lay_out_experts(op, params, scratch, rank, rank == op.rank() && op.block == 0);
#pragma unroll 4
    for (int source = lane + 32; source < op.num_ranks(); source += 32) {
      const int more = items_of(source);
      most = max(most, static_cast<uint32_t>(more));
      num_items += more;
    }
    num_items = __reduce_add_sync(~0u, num_items);
    // An item has at least one row, and the plan has room for as many items. If there are more, nobody knows which
    // source is wrong, so this rank names itself.
    const bool too_many = most > static_cast<uint32_t>(op.context.config.max_tokens);
    if (too_many || num_items > rows) {
      broken = true;
      if (too_many)
        abort_for_counts(op, &own_counts(op, 0).num_items(rank));
      else
        abort_because_of(op, Phase::kWrongCounts, op.rank(), 0);
    }
    if (lane == 0) {
      scratch.needed[rank] = params.args.layout == Layout::kRank ? num_items : rows;
      scratch.max_rows[rank] = max_rows;
      scratch.items[rank] = items_for(op, rank);
    }
  }
  PullWarps::sync();
}

// [warp] Write the facts of an error with two numbers of each rank, numbers_of(rank, which), if lane 0 has `claimed`
// it. Called in warp 0 of block 0.
template <Kernels K, class Params, class NumbersOf>
__device__ inline void keep_numbers(const Op<K>& op, const Params& params, bool claimed, const NumbersOf& numbers_of) {
  const Context& context = op.context;
  claimed = __shfl_sync(~0u, claimed, 0);
  if (claimed) {
    ErrorFacts& facts = context.state->facts;
    facts.detail[0] = params.args.expert_alignment;
    facts.value = params.args.label;
#pragma unroll 1
    for (int rank = threadIdx.x; rank < op.num_ranks(); rank += 32)
      for (int which = 0; which < 2; ++which) context.arrays.error_rows[rank][which] = numbers_of(rank, which);
    __threadfence();
  }
  __syncwarp();
}

// [warp] Return whether the rows of all ranks fit into their outputs; all ranks get the same result. If not, block 0
// keeps the error, with `keeps`. Called by warp 0 of a planning block, after find_first_rows. Read only
// scratch.needed and scratch.max_rows.
// reports: kTooFewRows, kTooManyRows
template <Kernels K, class Params>
__device__ bool rows_fit(const Op<K>& op, const Params& params, const Scratch& scratch, bool keeps = true) {
  const int lane = threadIdx.x % 32;
  bool countable = true, fit = true;
#pragma unroll 1
  for (int first = 0; first < op.num_ranks(); first += 32) {
    const int rank = min(first + lane, op.num_ranks() - 1);
    const int64_t needed = scratch.needed[rank];
    const int max_rows = scratch.max_rows[rank];
    countable &= __all_sync(~0u, needed <= INT32_MAX);
    fit &= __all_sync(~0u, max_rows < 0 || needed <= max_rows);
  }
  if (countable && fit) return true;
  if (op.block != 0 || !keeps) return false;
  const bool claimed =
      threadIdx.x == 0 && try_record_error(op.context, countable ? Error::kTooFewRows : Error::kTooManyRows);
  keep_numbers(op, params, claimed,
               [&](int rank, int which) { return which == 0 ? scratch.needed[rank] : scratch.max_rows[rank]; });
  return false;
}

// [warp] Return whether no rank has more tokens for another node than max_tokens_to_node; all ranks get the same
// result. If one has, block 0 keeps the error. Called by warp 0 of a planning block, after `called` of all ranks.
// reports: kTooManyToNode
template <Kernels K, class Params>
__device__ __noinline__ bool tokens_to_nodes_fit(Op<K> op, const Params& params) {
  const int limit = params.args.max_tokens_to_node;
  const auto most_of = [&](int source) {
    const Counts counts = own_counts(op, source);
    int most = 0;
#pragma unroll 1
    for (int node = 0; node < op.num_nodes(); ++node)
      if (node != op.node_of(source)) most = max(most, __ldcg(&counts.num_rows(op.context.config, node)));
    return most;
  };
  bool fit = true;
#pragma unroll 1
  for (int source = threadIdx.x; source < op.num_ranks(); source += 32) fit &= most_of(source) <= limit;
  if (__all_sync(~0u, fit)) return true;
  if (op.block != 0) return false;
  const bool claimed = threadIdx.x == 0 && try_record_error(op.context, Error::kTooManyToNode);
  keep_numbers(op, params, claimed, [&](int rank, int which) -> int64_t { return which == 0 ? most_of(rank) : limit; });
  return false;
}

// [warp] If the host waits for the counts, publish an error, then the number of rows, and then the ticket, which
// covers counted_rows too. Called in one warp of block 0; the warp has seen the counted rows.
template <Kernels K, class Params>
__device__ inline void report_rows(const Op<K>& op, const Params& params, int num_rows) {
  if (threadIdx.x % 32 != 0 || !params.reports_counts()) return;
  // The error first, because the host raises it with the counts.
  Report* report = op.context.report;
  publish_error(op.context, recorded_error(op.context));
  report->num_rows = num_rows;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&report->counted) = params.ticket();
}

// [warp] Return whether every host waits for the counts, and so knows the sizes of exact messages. Called in planning
// blocks, after find_first_rows.
template <Kernels K>
__device__ inline bool all_hosts_wait(const Op<K>& op, const Scratch& scratch) {
  bool all = true;
#pragma unroll 1
  for (int rank = threadIdx.x % 32; rank < op.num_ranks(); rank += 32) all &= scratch.max_rows[rank] < 0;
  return __all_sync(~0u, all);
}

// What a planning block finds out about a new plan.
struct PlanFacts {
  bool usable;   // it will have items
  bool known;    // as in MessageRows
  bool limited;  // some host does not wait for the counts, and max_tokens_to_node was given
};

// [warp] Write the rows of messages to the head of the plan, and report them to a waiting host. Without a usable plan
// exact messages have none. Called in write_head.
// reports: kWrongCounts (rows of a message; they count as 0)
template <Kernels K, class Params>
__device__ inline void write_message_rows(const Op<K>& op, const Params& params, const PlanFacts& facts) {
  const Context& context = op.context;
  const int node = threadIdx.x % 32;
  const bool is_other = node < op.num_nodes() && node != context.node;
  int to = 0, from = 0;
  bool packs = false;
  if (facts.usable && facts.known && is_other) {
    const auto rows_of = [&](int source, int of) {
      return __ldcg(&own_counts(op, source).num_rows(context.config, of));
    };
    const int source = context.rail_peer(node), sent_tokens = field_of(op, source, Field::kNumTokens);
    to = rows_of(op.rank(), node), from = rows_of(source, context.node);
    if (static_cast<uint32_t>(from) > static_cast<uint32_t>(sent_tokens)) {
      from = 0;
      abort_because_of(op, Phase::kWrongCounts, source, 0);
    }
    packs = facts.limited || is_packed(to, params.args.num_tokens);
    if (!packs) to = params.args.num_tokens;
    if (!facts.limited && !is_packed(from, sent_tokens)) from = sent_tokens;
  }
  const int limit = facts.known && facts.limited ? params.args.max_tokens_to_node : 0;
  const auto write = [&](MessageRows& rows) {
    const uint32_t packed = __ballot_sync(~0u, packs);
    if (node == 0) rows.known = facts.known, rows.limit = limit, rows.packed = packed;
    if (node < kMaxNodes) rows.to[node] = to, rows.from[node] = from;
  };
  write(params.plan.head->message_rows);
  if (has_messages(op) && params.reports_counts()) {
    // Messages of limited size cross even without a usable plan: some hosts do not know better.
    if (limit > 0) packs = is_other, to = from = is_other ? limit : 0;
    write(*context.reports.message_rows);
  }
  __syncwarp();
}

// [warp] Write the head of the plan, and report the rows. Called in one warp of block 0. Without a usable plan the
// counts are not read: after a difference they may be stale.
template <Kernels K, class Params>
__device__ void write_head(const Op<K>& op, const Params& params, const Scratch& scratch, const PlanFacts& facts) {
  const bool usable = facts.usable;
  const int lane = threadIdx.x % 32, locals = op.ranks_per_node();
  PlanHead& head = *params.plan.head;
  // Find the first item of each source. Count the partial sums of a combine: from ranks of this node, for tokens of
  // this rank and of its rail peers.
  int end = 0, addends = 0, most_items = 0;  // of the sources so far; of the lane
#pragma unroll 1
  for (int first = 0; first < op.num_ranks(); first += 32) {
    const int source = first + lane, rail_peer = source / locals * locals + op.context.local;
    const bool has_counts = usable && source < op.num_ranks();
    const int received = has_counts ? __ldcg(&own_counts(op, source).num_items(op.rank())) : 0;
    addends += has_counts ? __ldcg(&own_counts(op, rail_peer).num_items(op.first_local_rank() + source % locals)) : 0;
    if (op.node_of(min(source, op.num_ranks() - 1)) == op.context.node) most_items = max(most_items, received);
    const int up_to = end + inclusive_sum(received);
    if (source < op.num_ranks()) head.item_begin()[source] = up_to - received;
    end = __shfl_sync(~0u, up_to, 31);
  }
  addends = __reduce_add_sync(~0u, addends);
  most_items = __reduce_max_sync(~0u, most_items);
  // Write the head.
  if (lane == 0) {
    head.item_begin()[op.num_ranks()] = end;
    head.num_items = end;
    head.num_addends = addends;
    head.most_items = most_items;
    head.made = static_cast<int32_t>(op.epoch);
    head.layout = static_cast<int32_t>(params.args.layout);
    head.num_rows = usable ? static_cast<int32_t>(scratch.needed[op.rank()]) : 0;
    head.usable = usable;
  }
  if (op.num_nodes() > 1) write_message_rows(op, params, facts);
  __syncwarp();
  report_rows(op, params, head.num_rows);
}

// [team] Wait until all ranks of the node have read this rank's staging and metadata of earlier operations. `is_free`:
// they had done so when this block began (poll_once). Then there is no wait, and no barrier. Return false after an
// abort of this rank. Called by the stage warps of each block, and by the pull warps about to announce.
// waits: consumed (free staging)
template <class Team, Kernels K>
__device__ bool wait_for_free_staging(const Op<K>& op, bool is_free) {
  return is_free || team_waits<Team>(op, Phase::kFreeStaging, op.context.own.consumed, op.context.state->staged_epoch);
}

// [team] Make the plan. Called by the pull warps of the planning blocks, once staging is free. Return kAborted after an
// abort of this rank. Return kDiffer for differing Calls: the plan is then unusable. It is unusable, too, if the rows
// do not fit; the verdict is still kAgree. After counts out of range this rank aborts. An unusable plan has no items,
// and the caller's counts are 0. After kAgree and kDiffer the last planning block raises `listed`: by then all lists,
// tables and the plan's head are written.
// raises: listed
template <Kernels K, class Params>
__device__ Verdict make_plan(const Op<K>& op, const Params& params, char* shared) {
  __shared__ PlanFacts facts;
  __shared__ bool broken;
  const Context& context = op.context;
  Cursor c(shared);
  const Scratch scratch = Scratch::carve(c, context.config, params.plan_warps);
  const auto is_last = [&](uint32_t* counter) {  // a planning block alone is the last one
    if (params.plan_blocks != 1) return last_block<PullWarps>(counter, params.plan_blocks);
    PullWarps::sync();
    return true;
  };
  if (threadIdx.x == 0) broken = false;
  // Count. The last block to count sends the counts.
  count_tokens(op, params, scratch);
  sum_parts(op, scratch.expert_offset, scratch.rank_offset, params.plan_warps, params.plan_blocks == 1);
  if (is_last(&context.state->count_done)) send_counts(op, params);
  stamp(op, Step::kSent);
  // Wait for all counts, and lay out the rows.
  const Verdict verdict = first_warp_waits<PullWarps>([&] { return agree(op); });
  stamp(op, Step::kAgreed);
  if (verdict == Verdict::kAborted) return verdict;
  if (verdict == Verdict::kAgree) find_first_rows(op, params, scratch, broken);
  if (threadIdx.x < 32) {
    const bool agrees = verdict == Verdict::kAgree;
    const bool all_wait = op.num_nodes() > 1 && agrees && all_hosts_wait(op, scratch);
    const bool limited = op.num_nodes() > 1 && agrees && !all_wait && params.args.max_tokens_to_node > 0;
    const bool fits =
        agrees && !broken && rows_fit(op, params, scratch) && (!limited || tokens_to_nodes_fit(op, params));
    // After a difference nothing more is sent for this plan.
    const bool known = has_messages(op) && (!agrees || all_wait || limited);
    if (threadIdx.x == 0) facts = {fits, known, limited};
  }
  PullWarps::sync();
  if (broken) return Verdict::kAborted;
  // Write the head in the last warp: with few tokens it has none to list.
  if (op.block == 0 && PullWarps::warp() == PullWarps::kWarps - 1) write_head(op, params, scratch, facts);
  // List the items, or clear the caller's counts.
  if (facts.usable) {
    list_items(op, params, scratch, facts.known, facts.limited);
  } else if (op.block == 0) {
    for (int e = threadIdx.x; e < context.num_local_experts; e += PullWarps::kThreads) params.write_counts(e, 0, 0);
  }
  // Raise `listed` in the last block to list.
  if (is_last(&context.state->list_done)) team_raises<PullWarps>(op, context.own.listed + op.rank());
  return verdict;
}

}  // namespace ep::cuda
