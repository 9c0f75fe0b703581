// Direct plans, for few tokens. Every rank sends its choices of experts to all ranks of the node. From them each block
// makes the whole plan of its rank, in shared memory. Choices are tagged words, so no flag has to follow them: the
// planners (all pull warps but the first warp) take them as they arrive, while the first warp waits for the Calls and
// compares them. No list travels, and no block waits for another one: this takes about half the time of make_plan.
//
// All code here runs once per operation, and somebody waits for it: each instruction of a thread takes some 3 ns. So
// the lanes of a warp share the work even where it is little, and most loops are not unrolled.
#pragma once
#include "cuda/decode/direct_plan.cuh"
#include "cuda/decode/row_slots.cuh"
#include "cuda/plan/item.cuh"
#include "cuda/plan/plan.cuh"

namespace ep::cuda {

// A launch that makes a direct plan. Written by the host, read by all threads. With one node no row goes to an inbox,
// and there is room for a bit of each rank, so all rows are pushed. `Base`: DecodeDispatchParams, or with few tokens in
// expert or rank layout PushedDispatchParams.
template <class Base>
struct DirectParams : Base {
  static constexpr bool pushes = true;
  EP_HOST_DEVICE static constexpr bool new_plan() { return true; }

  DirectPlan direct_plan;  // laid out without a base: `in` gives that of a block
  uint32_t rings_at;       // [bytes] from the start of shared memory to the pull warps' rings
};

// A barrier between the pull warps, who arrive with a direct plan, and the stage warps, who wait for it.
constexpr int kDirectPlanBarrier = 3;

// All pull warps but the first warp.
using Planners = Team<4, 32, PullWarps::kThreads - 32>;

// [thread] Return the choices of `source` in the memory of local rank `local`, for this operation.
template <Kernels K>
__device__ inline Tagged* choices_at(const Op<K>& op, int local, int source) {
  const Config& config = op.context.config;
  const size_t index = (op.epoch % 2 * op.num_ranks() + source) * config.max_tokens * config.choices_per_token();
  return op.context.peers.at(op.context.own.choices, local) + index / kTaggedChoices;
}

// [block] Write this rank's choices to every rank of the node. Tokens behind its last one have no experts: the readers
// do not know their number yet. An invalid or repeated entry is kept as an error, and counts as none. Wait for
// nothing: `announce` says why. Called in block 0. `aborted`: this rank has aborted. Then send nothing: its epoch has
// not advanced, and a slow peer may still read choices of the same epoch.
//
// A lane takes one entry of topk_idx. Every fourth lane stores the epoch and the choices of four lanes.
// raises: choices
// reports: kBadEntry
template <Kernels K, class Params>
__device__ inline void send_choices(const Op<K>& op, const Params& params, bool aborted) {
  static_assert(kTaggedChoices == 4);
  const Config& config = op.context.config;
  const int num_topk = config.num_topk, per_token = config.choices_per_token(), width = lanes_for(per_token);
  const int lane = threadIdx.x % 32, k = lane & (width - 1), together = 32 / width;
  const auto load = [&](int token) {
    const bool exists = token < params.args.num_tokens && k < num_topk;
    return exists ? __ldg(params.args.topk_idx + static_cast<int64_t>(token) * num_topk + k) : -1;
  };
  const int warp = threadIdx.x / 32, step = DispatchBlock<K>::kWarps * together;
  int token = warp * together + lane / width;
  int64_t next = load(token);
#pragma unroll 1
  for (int first = warp * together; first < config.max_tokens; first += step, token += step) {
    // Check the entry; the next one is on its way meanwhile.
    const int64_t given = next;
    next = load(token + step);
    const bool valid = given >= 0 && given < config.num_experts;
    const uint32_t same = __match_any_sync(~0u, valid ? lane / width << 16 | static_cast<int>(given) : ~lane);
    const bool repeated = (same & ((1u << lane) - 1)) != 0;
    // Keep an error; invalid entries go before repeated ones.
    const uint32_t invalid = __ballot_sync(~0u, !valid && given != -1), wrong = invalid | __ballot_sync(~0u, repeated);
    if (wrong != 0 && !aborted && lane == __ffs(invalid != 0 ? invalid : wrong) - 1)
      record_bad_topk_idx(op.context, token, k, repeated, given);
    // Collect the choices in every fourth lane, and send them.
    const uint32_t one = valid && !repeated ? static_cast<uint32_t>(given) : 0xffff;
    const uint32_t two = one | __shfl_down_sync(~0u, one, 1) << 16;
    const uint64_t four = two | static_cast<uint64_t>(__shfl_down_sync(~0u, two, 2)) << 32;
    if (aborted || k % 4 != 0 || k >= per_token || token >= config.max_tokens) continue;
    const int at = (token * per_token + k) / kTaggedChoices;
#pragma unroll 1
    for (int local = 0; local < op.ranks_per_node(); ++local)
      ptx::store_pair(choices_at(op, local, op.rank()) + at, op.epoch, four);
  }
}

// [team] Take the choices of all ranks as they arrive. Copy them to shared memory, and count them: for this rank's
// experts, for this rank's tokens, and (where not all rows fit) for all experts and ranks. A choice that is no expert
// aborts this rank, and counts as none. After an abort, or if the ranks differ, missing ones count as none: then nobody
// uses the plan. Called by the planners of a block, while the first warp waits for the Calls; the counters are 0. After
// kAgree missing choices are on their way, and the wait for them has a limit: it then aborts this rank, and the verdict
// becomes kAborted, also for the other planners. Ends with a barrier of the planners.
//
// A warp takes a word of tokens at a time, a token per lane; a rank has a bit, and then a lane. Own tokens come first:
// their choices are here early, and while those of other ranks travel, this code gets into the instruction cache.
// waits: choices (counts)
// reports: kWrongChoices (it counts as none)
template <Kernels K, class Params>
__device__ inline void count_choices(const Op<K>& op, const Params& params, char* shared) {
  constexpr int kAgreed = 1 + static_cast<int>(Verdict::kAgree);
  const DirectPlan plan = params.direct_plan.in(shared);
  const auto decided = [&] { return *static_cast<volatile int*>(plan.decided); };
  // Choices of absent ranks may never arrive. The absent ranks are known once there is a verdict.
  uint32_t absent = 0;
  if (has_masks(op)) {
    while (decided() == 0) {
    }
    ptx::fence_block();
    absent = absent_ranks(op);
  }
  const Config& config = op.context.config;
  const int lane = threadIdx.x % 32, num_local = op.context.num_local_experts, first_expert = op.rank() * num_local;
  const int words_of_token = plan.choices_per_token / kTaggedChoices;  // an even number
#pragma unroll 1
  for (int i = Planners::warp(); i < plan.words; i += Planners::kWarps) {
    int word = i + op.rank() * plan.source_words;
    if (word >= plan.words) word -= plan.words;
    int source = 0, word_of_source = word;
#pragma unroll 1
    for (; word_of_source >= plan.source_words; ++source) word_of_source -= plan.source_words;
    const int token = 32 * word_of_source + lane;
    const Tagged* const from = choices_at(op, op.context.local, source) + token * words_of_token;
    uint32_t ranks = 0;  // a bit per rank with an expert of the token
    bool wrong = false;
#pragma unroll 1
    for (int at = 0; token < config.max_tokens && at < words_of_token; at += 2) {
      // Take two words.
      uint64_t low, high, epoch_of_low, epoch_of_high, since = 0;
      for (uint32_t turn = 1;; ++turn) {
        const int verdict = decided();
        ptx::load_pair(from + at, epoch_of_low, low);
        ptx::load_pair(from + at + 1, epoch_of_high, high);
        // A later epoch means that a peer has masked this rank. Take none: both words must be of one operation.
        bool none = verdict > kAgreed || (absent >> source & 1) || max(epoch_of_low, epoch_of_high) > op.epoch;
        if (turn % kPollsBetweenChecks == 0 && verdict == kAgreed) {
          if (since == 0) since = ptx::nanoseconds();
          if (is_too_late(op, Phase::kCounts, source, from + at, 2, since)) {
            plan.post(Verdict::kAborted);
            none = true;
          }
        }
        if (none) low = high = ~uint64_t{0};
        if (none || min(epoch_of_low, epoch_of_high) == op.epoch) break;
      }
      reinterpret_cast<ulonglong2*>(plan.choices_of(op, source, token))[at / 2] = {low, high};
      // Count them.
#pragma unroll 1
      for (int k = 0; k < 2 * kTaggedChoices; ++k, low = low >> 16 | high << 48, high >>= 16) {
        const int expert = static_cast<int16_t>(low);
        if (static_cast<unsigned>(expert) >= static_cast<unsigned>(config.num_experts)) {
          wrong |= expert != -1;
          continue;
        }
        ranks |= 1u << quotient(expert, params.inverse);
        if constexpr (!Params::kAllFit) atomicAdd(plan.expert_tokens + expert, 1);
        if (static_cast<unsigned>(expert - first_expert) < static_cast<unsigned>(num_local))
          atomicOr(plan.chosen + word * num_local + (expert - first_expert), 1u << lane);
      }
    }
    if (wrong) abort_because_of(op, Phase::kWrongChoices, source, 0);
    __syncwarp();
    uint32_t tokens = 0;  // a bit per token with an expert at rank `lane`
#pragma unroll 1
    for (int rank = 0; rank < op.num_ranks(); ++rank) {
      const uint32_t tokens_of_rank = __ballot_sync(~0u, ranks >> rank & 1);
      if (lane == rank) tokens = tokens_of_rank;
    }
    if (lane == op.rank()) plan.received[word] = tokens;
    if (lane >= op.num_ranks()) continue;
    if (source == op.rank()) plan.sent[lane * plan.source_words + word_of_source] = tokens;
    if constexpr (!Params::kAllFit) atomicAdd(plan.rank_items + lane, __popc(tokens));
  }
  stamp(op, Step::kChosen);
  Planners::sync();
}

// [team] Sum the counts: tokens of this rank's experts, and where not all rows fit the output rows that each rank
// needs. Called by the planners of a block. Ends with a barrier of the planners.
template <Kernels K, class Params>
__device__ inline void sum_choices(const Op<K>& op, const Params& params, const DirectPlan& plan) {
  const int num_local = op.context.num_local_experts;
  [[maybe_unused]] const uint32_t alignment = params.args.expert_alignment;
#pragma unroll 1
  for (int e = Planners::thread(); e < num_local; e += Planners::kThreads) {
    int sum = 0;
    uint32_t next = plan.chosen[e];
#pragma unroll 1
    for (int at = e; at < plan.words * num_local; at += num_local) {
      const uint32_t tokens = next;
      if (at + num_local < plan.words * num_local) next = plan.chosen[at + num_local];  // on its way meanwhile
      plan.before[at] = static_cast<uint16_t>(sum);
      sum += __popc(tokens);
    }
    plan.expert_rows[e] = sum;
    plan.expert_begin[e] = Params::kAllFit ? sum : static_cast<int>(padded_rows(sum, alignment));
  }
  if constexpr (!Params::kAllFit) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int rank = Planners::warp(); rank < op.num_ranks(); rank += Planners::kWarps) {
      int64_t rows = 0;
#pragma unroll 1
      for (int e = lane; e < num_local; e += 32)
        rows += padded_rows(plan.expert_tokens[rank * num_local + e], alignment);
      rows = __shfl_sync(~0u, inclusive_sum(rows), 31);
      if (lane == 0) plan.needed[rank] = params.has_rank_layout() ? plan.rank_items[rank] : rows;
    }
  }
  Planners::sync();
}

// [warp] Lay out the expert groups as if they were adjacent, each lane some of them. Called in one warp of a block,
// after sum_choices.
template <Kernels K, class Params>
__device__ inline void lay_out(const Op<K>& op, const Params& params, const DirectPlan& plan) {
  const int lane = threadIdx.x % 32, num_local = op.context.num_local_experts, per_lane = (num_local + 31) / 32;
  const int first = lane * per_lane, end = min(first + per_lane, num_local);
  int rows = 0;
#pragma unroll 1
  for (int e = first; e < end; ++e) rows += plan.expert_begin[e];
  const int up_to = inclusive_sum(rows);
  int begin = up_to - rows;
#pragma unroll 1
  for (int e = first; e < end; ++e) {
    const int rows_of_group = plan.expert_begin[e];
    plan.expert_begin[e] = begin;
    begin += rows_of_group;
  }
  if (lane != 31) return;
  plan.expert_begin[num_local] = up_to;
  if (!params.has_rank_layout()) plan.head->num_rows = up_to;
}

// [warp] Write the head of a usable plan, except num_rows, which rank layout alone has here. Called in one warp of a
// block, while another one writes it in lay_out.
template <Kernels K, class Params>
__device__ inline void write_direct_head(const Op<K>& op, const Params& params, const DirectPlan& plan) {
  const int lane = threadIdx.x % 32;
  int addends = 0;
#pragma unroll 1
  for (int i = lane; i < op.num_ranks() * plan.source_words; i += 32) addends += __popc(plan.sent[i]);
  addends = __reduce_add_sync(~0u, addends);
  PlanHead& head = *plan.head;
  const int items = lane < op.num_ranks() ? plan.items_of(lane) : 0, up_to = inclusive_sum(items);
  const int most_items = __reduce_max_sync(~0u, items);
  if (lane < op.num_ranks()) head.item_begin()[lane] = up_to - items;
  const int num_items = __shfl_sync(~0u, up_to, 31);
  if (lane == 0) {
    head.num_items = num_items;
    head.item_begin()[op.num_ranks()] = num_items;
    if (params.has_rank_layout()) head.num_rows = num_items;
    head.num_addends = addends;
    head.most_items = most_items;
    head.made = static_cast<int32_t>(op.epoch);
    head.layout = static_cast<int32_t>(params.args.layout);
    head.usable = true;
  }
}

// [warp] Make the plan unusable: without items and rows. Called in the first warp, once the head is written.
__device__ __noinline__ inline void clear_head(PlanHead& head, int num_ranks) {
  for (int source = threadIdx.x; source <= num_ranks; source += 32) head.item_begin()[source] = 0;
  if (threadIdx.x == 0) head.num_items = head.most_items = head.num_rows = head.num_addends = head.usable = 0;
}

// [warp] Wait for the Calls of all ranks and compare them. Write the verdict, for the planners and for all pull warps
// and stage warps. Called in the first warp of a block. The second of two launches keeps no difference: the first one
// has kept it.
template <Kernels K, class Params>
__device__ inline void decide_on_calls(const Op<K>& op, const Params& params, const DirectPlan& plan) {
  const Verdict verdict = agree(op, params.stages());
  stamp(op, Step::kAgreed);
  const int lane = threadIdx.x % 32;
  if constexpr (!Params::kAllFit)
    if (verdict == Verdict::kAgree && lane < op.num_ranks()) plan.max_rows[lane] = field_of(op, lane, Field::kMaxRows);
  if (lane == 0) plan.post(verdict);
}

// [warp] Return whether the rows of all ranks fit into their outputs, as rows_fit. Called in the first warp of a block,
// after kAgree and sum_choices.
template <Kernels K, class Params>
__device__ inline bool direct_rows_fit(const Op<K>& op, const Params& params, const DirectPlan& plan) {
  if constexpr (Params::kAllFit) {
    return true;
  } else {
    Scratch scratch{};
    scratch.needed = plan.needed;
    scratch.max_rows = plan.max_rows;
    return rows_fit(op, params, scratch, params.stages());
  }
}

// [warp] Copy a finished plan to device memory for later operations, and its counts to the caller. Report the rows to a
// waiting host. Called in one warp of block 0: a stage warp if the launch pulls, because pull warps are busy then.
template <Kernels K, class Params>
__device__ inline void publish_plan(const Op<K>& op, const Params& params, const DirectPlan& plan) {
  const int lane = threadIdx.x % 32, num_local = op.context.num_local_experts;
  const bool usable = plan.head->usable;
  const auto* from = reinterpret_cast<const int32_t*>(plan.head);
#pragma unroll 1
  for (int i = lane; i < PlanHead::num_ints(op.num_ranks()); i += 32)
    reinterpret_cast<int32_t*>(params.plan.head)[i] = from[i];
#pragma unroll 1
  for (int e = lane; e < num_local; e += 32) {
    const int tokens = usable ? plan.expert_rows[e] : 0;
    const int rows = usable ? plan.expert_begin[e + 1] - plan.expert_begin[e] : 0;
    params.plan.expert_rows[e] = tokens;
    params.plan.expert_begin[e] = plan.expert_begin[e];
    params.write_counts(e, tokens, rows);
    if (params.reports_counts()) op.context.reports.counted_rows[e] = rows;
  }
  if (lane == 0) params.plan.expert_begin[num_local] = plan.expert_begin[num_local];
  if (!params.reports_counts()) return;
  __syncwarp();
  report_rows(op, params, plan.head->num_rows);
}

// [team] Announce a dispatch with a direct plan, as the first thing: all ranks wait for the Call. Called by the pull
// warps of each block; one of them announces, once staging is free. `is_free` as in wait_for_free_slots. Return false
// after an abort of this rank.
template <Kernels K, class Params>
__device__ inline bool announce_direct(const Op<K>& op, const Params& params, bool is_free) {
  // Block 1 publishes the Call, because block 0 is sending topk_idx. With masks a rank whose Call has arrived is
  // treated as alive, so its topk_idx must have been sent first: block 0 publishes then, after a fence.
  const bool covers = has_masks(op);
  if (!params.stages() || op.block != (covers ? 0 : min(1, op.num_blocks - 1))) return true;
  if (!wait_for_free_slots<PullWarps>(op, params, is_free)) return false;
  stamp(op, Step::kFree);
  if (PullWarps::warp() == 0) announce(op, call_of(params), covers);
  stamp(op, Step::kSent);
  return true;
}

// [team] Make a direct plan, and hand it to the stage warps of this block if the launch pulls. Called by the pull warps
// of each block; block 0 has sent the choices of this rank, and if the launch does not stage an earlier one has. `ok`:
// of announce_direct. If all rows fit, a launch that pulls may place rows before head and layout are written: its pull
// warps need neither. Return kAborted after an abort of this rank, kDiffer for differing Calls: the plan is then
// unusable. It is unusable, too, if the rows do not fit; the verdict is still kAgree.
template <Kernels K, class Params>
__device__ inline Verdict make_direct_plan(const Op<K>& op, const Params& params, char* shared, bool ok) {
  const DirectPlan plan = params.direct_plan.in(shared);
  // Clear the counters: all of `chosen`.
  for (uint32_t* word = plan.chosen + threadIdx.x; word < reinterpret_cast<uint32_t*>(plan.end);
       word += PullWarps::kThreads)
    *word = 0;
  if (threadIdx.x == 0) *plan.decided = 0;
  PullWarps::sync();  // the counters are clear
  // After an abort go on to the barrier below: the stage warps wait for the pull warps there.
  Verdict verdict = ok ? Verdict::kAgree : Verdict::kAborted;
  if (verdict == Verdict::kAgree) {
    // Plan, before it is known whether the ranks agree. Meanwhile compare the Calls.
    if (Planners::has_thread()) {
      count_choices(op, params, shared);
      sum_choices(op, params, plan);
      stamp(op, Step::kCounted);
    } else {
      decide_on_calls(op, params, plan);
    }
    PullWarps::sync();
    verdict = *plan.verdict;
    // Two of the planners finish the plan. The others place rows meanwhile, where all rows fit.
    if (PullWarps::warp() == 1) lay_out(op, params, plan);
    if (PullWarps::warp() == 2) write_direct_head(op, params, plan);
    if (verdict != Verdict::kAgree || !params.pulls() || !Params::kAllFit) {
      const bool fits = PullWarps::warp() == 0 && verdict == Verdict::kAgree && direct_rows_fit(op, params, plan);
      PullWarps::sync();
      if (PullWarps::warp() == 0) {
        if (!fits) clear_head(*plan.head, op.num_ranks());
        __syncwarp();
        if (!params.pulls() && op.block == 0 && verdict != Verdict::kAborted) publish_plan(op, params, plan);
      }
      PullWarps::sync();
    }
  } else {
    if (threadIdx.x == 0) *plan.verdict = verdict;
    PullWarps::sync();
  }
  // Hand the plan over.
  if (params.pulls()) ptx::named_barrier_arrive(kDirectPlanBarrier, DispatchBlock<K>::kThreads);
  return verdict;
}

// [thread] Return the output row of local expert `e` for a received token that has chosen it, in expert and decode
// layout. The choices are summed, and where not all rows fit the groups are laid out.
template <Kernels K, class Params>
__device__ inline int row_of_choice(const Op<K>& op, const Params& params, const DirectPlan& plan, int source,
                                    int token, int e) {
  const int index = (source * plan.source_words + token / 32) * op.context.num_local_experts + e;
  const int begin = static_cast<int>(params.group_begin(e, plan.expert_begin[e]));
  return begin + plan.before[index] + __popc(plan.chosen[index] & ((1u << token % 32) - 1));
}

// [team] Wait for the direct plan of this block. Return its verdict. Called by the stage warps of a block that pulls.
template <Kernels K, class Params>
__device__ inline Verdict wait_for_direct_plan(const Params& params, char* shared) {
  ptx::named_barrier(kDirectPlanBarrier, DispatchBlock<K>::kThreads);
  return *params.direct_plan.in(shared).verdict;
}

// [warp] Write up to 32 items to `data`: each lane passes one, for `token` of `source`. Lanes without an item come
// last; they pass token -1. The plan is usable. All lanes share the work: a lane takes one column of topk_idx, and as
// many items are written together as there are lanes for. Ends with __syncwarp.
template <Kernels K, class Params>
__device__ inline void write_items(const Op<K>& op, const Params& params, char* shared, int source, int token,
                                   int32_t* data) {
  const DirectPlan plan = params.direct_plan.in(shared);
  const int num_topk = op.context.config.num_topk, num_local = op.context.num_local_experts;
  const int width = lanes_for(num_topk);
  const int lane = threadIdx.x % 32, k = lane & (width - 1), together = 32 / width;
  const int num = __popc(__ballot_sync(~0u, token >= 0));
#pragma unroll 1
  for (int first = 0; first < num; first += together) {
    const int n = first + lane / width, its_source = __shfl_sync(~0u, source, n),
              its_token = __shfl_sync(~0u, token, n);
    const Item item{reinterpret_cast<int32_t*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(data), n)),
                    op.context.max_copies};
    // Find the local experts, and put them into ascending order.
    const bool chooses = n < num && k < num_topk;
    const int e = chooses ? plan.choices_of(op, its_source, its_token)[k] - op.rank() * num_local : -1;
    const bool is_local = static_cast<unsigned>(e) < static_cast<unsigned>(num_local);
    int copy = 0, num_copies = 0;
#pragma unroll 1
    for (int other = 0; other < num_topk; ++other) {
      const int its_e = __shfl_sync(~0u, is_local ? e : num_local, other, width);
      copy += its_e < e, num_copies += its_e < num_local;
    }
    if (k == 0 && n < num) item.begin(its_token, num_copies);
    if (!is_local) continue;
    item.value(copy) = params.has_rank_layout() ? e : row_of_choice(op, params, plan, its_source, its_token, e);
    item.k(copy) = static_cast<uint8_t>(k);
  }
  __syncwarp();
}

// [team] Write the table of this rank's tokens, and their columns with an expert, for later combines. Called by the
// same team in each block, with a usable plan.
template <class Team, Kernels K, class Params>
__device__ void keep_direct_table(const Op<K>& op, const Params& params, const DirectPlan& plan) {
  const Context& context = op.context;
#pragma unroll 1
  for (int token = op.block + op.num_blocks * Team::thread(); token < params.args.num_tokens;
       token += op.num_blocks * Team::kThreads) {
    int32_t* const table = params.plan.tables + static_cast<size_t>(token) * context.table_ints;
#pragma unroll 1
    for (int rank = 0; rank < op.num_ranks(); ++rank) {
      const uint32_t* const sent = plan.sent + rank * plan.source_words;
      int number = __popc(sent[token / 32] & ((1u << token % 32) - 1));
#pragma unroll 1
      for (int word = 0; word < token / 32; ++word) number += __popc(sent[word]);
      table[rank] = sent[token / 32] >> token % 32 & 1 ? number : -1;
    }
    uint32_t used = 0;
    const int16_t* const choices = plan.choices_of(op, op.rank(), token);
#pragma unroll 1
    for (int k = 0; k < context.config.num_topk; ++k) used |= static_cast<uint32_t>(choices[k] >= 0) << k;
    params.plan.sent_k[token] = used;
  }
}

}  // namespace ep::cuda
