// From a routing to a plan: every rank counts, tells all ranks its counts, and lists who gets which row. All of it is
// done by one team of the first `plan_blocks` blocks.
#pragma once
#include <type_traits>

#include "cuda/agree.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/item.cuh"
#include "cuda/wait.cuh"

namespace ep::cuda {

// What the ranks tell each other of a dispatch: int32 [head_ints]. Of one with a new plan also the counts.
struct Head {
  int32_t* data;

  __device__ int32_t& given(int field) const { return data[field]; }
  __device__ int32_t& items(int rank) const { return data[8 + rank]; }
  __device__ int32_t& tokens(int expert) const { return data[kHeadFixedInts + expert]; }
};

// Shared memory of a block that plans.
struct Scratch {
  int* expert_place;      // [plan_warps, num_experts] tokens of the block before those of the warp; then rows
  uint32_t* marks;        // [plan_warps, num_experts] the lanes whose tokens go to the expert; 0 between batches
  int* rank_place;        // [plan_warps, kMaxRanks] items of the block before those of the warp; then of this rank
  int16_t* choices;       // [plan_warps, 32, choices_per_token] the batch's experts, or -1
  int* numbers;           // [plan_warps, kMaxRanks, 32] the batch's items
  int* expert_before;     // [num_experts] tokens of lower ranks, then the first row of this rank's
  int* expert_total;      // [num_experts] tokens of all ranks
  int64_t* needed;        // [kMaxRanks] rows of every rank
  int choices_per_token;  // num_topk rounded up to whole vectors
};

constexpr int kChoices = 8;  // experts of a token in a vector of 16 bytes

__host__ __device__ size_t carve_scratch(char* base, const Sizes& sizes, int plan_warps, Scratch* scratch) {
  size_t offset = 0;
  const auto take = [&](auto*& array, size_t count) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + offset);
    offset += (count * sizeof(*array) + 15) / 16 * 16;
  };
  Scratch s;
  const size_t warps = plan_warps, experts = sizes.num_experts;
  s.choices_per_token = (sizes.num_topk + kChoices - 1) / kChoices * kChoices;
  take(s.expert_place, warps * experts);
  take(s.marks, warps * experts);
  take(s.rank_place, warps * kMaxRanks);
  take(s.choices, warps * 32 * s.choices_per_token);
  take(s.numbers, warps * kMaxRanks * 32);
  take(s.expert_before, experts);
  take(s.expert_total, experts);
  take(s.needed, kMaxRanks);
  if (scratch) *scratch = s;
  return offset;
}

// A warp's part of the scratch, and of the tokens: a range in a range of the block, so that places follow the order of
// the tokens. The warp goes through it in batches with a token per lane.
struct Scan {
  const Context& context;
  const int64_t* topk_idx;
  int *expert_place, *rank_place, *numbers;
  uint32_t* marks;
  int16_t* choices;
  int choices_per_token, begin, end;
  uint32_t inverse;  // of the local experts, for a division by them

  __device__ Scan(const Context& context, const DispatchCall& args, const Scratch& scratch, int warp)
      : context(context), topk_idx(args.dispatch.topk_idx) {
    const int experts = context.sizes.num_experts, num_tokens = args.dispatch.num_tokens;
    expert_place = scratch.expert_place + warp * experts;
    marks = scratch.marks + warp * experts;
    rank_place = scratch.rank_place + warp * kMaxRanks;
    choices_per_token = scratch.choices_per_token;
    choices = scratch.choices + warp * 32 * choices_per_token;
    numbers = scratch.numbers + warp * kMaxRanks * 32;
    const int batches = (num_tokens + 31) / 32, per_block = (batches + args.plan_blocks - 1) / args.plan_blocks;
    const int first = blockIdx.x * per_block, last = first + per_block;
    const int per_warp = (per_block + args.plan_warps - 1) / args.plan_warps;
    begin = min(num_tokens, min(first + warp * per_warp, last) * 32);
    end = min(num_tokens, min(first + (warp + 1) * per_warp, last) * 32);
    inverse = 0xffffffffu / context.sizes.num_local_experts() + 1;
  }

  __device__ int rank_of(int expert) const {
    return context.sizes.num_local_experts() == 1 ? expert : __umulhi(expert, inverse);
  }

  __device__ int16_t* own() const { return choices + threadIdx.x % 32 * choices_per_token; }

  // Brings a batch to shared memory and marks its experts; returns how many of them this lane's token has on each rank,
  // a byte per rank. Entries that are no experts, or that the token has already, are reported and count as -1.
  __device__ uint64_t load(int first, bool report) const {
    const int lane = threadIdx.x % 32, num_topk = context.sizes.num_topk, num = min(32, end - first);
    const int64_t* from = topk_idx + static_cast<int64_t>(first) * num_topk;
    int token = lane / num_topk, k = lane % num_topk;
    const int step_tokens = 32 / num_topk, step_k = 32 % num_topk;
#pragma unroll 4
    for (int i = lane; i < num * num_topk; i += 32) {
      const int64_t given = __ldg(from + i);
      const bool bad = given < -1 || given >= context.sizes.num_experts;
      if (bad && report) report_mistake(context, Mistake::kBadEntry, first + token, k, false, given);
      choices[token * choices_per_token + k] = static_cast<int16_t>(bad ? -1 : given);
      token += step_tokens, k += step_k;
      if (k >= num_topk) k -= num_topk, ++token;
    }
    __syncwarp();
    uint64_t copies = 0;
    if (lane < num)
#pragma unroll 1
      for (k = 0; k < num_topk; ++k) {
        const int expert = own()[k];
        if (expert < 0) continue;
        if (atomicOr(marks + expert, 1u << lane) >> lane & 1) {
          if (report) report_mistake(context, Mistake::kBadEntry, first + lane, k, true, expert);
          own()[k] = -1;
        } else {
          copies += uint64_t{1} << 8 * rank_of(expert);
        }
      }
    __syncwarp();
    return copies;
  }

  static __device__ int copies_at(uint64_t copies, int rank) { return static_cast<int>(copies >> 8 * rank & 0xff); }

  // Moves the places of the batch's experts behind the batch, and takes the marks away.
  __device__ void finish(int first) const {
    const int lane = threadIdx.x % 32;
    const bool has_token = first + lane < end;
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < context.sizes.num_topk; ++k) {
      const int expert = has_token ? own()[k] : -1;
      const uint32_t lanes = expert < 0 ? 0 : marks[expert];  // none when another column had the expert before
      __syncwarp();
      if (lane == __ffs(lanes) - 1) {
        expert_place[expert] += __popc(lanes);
        marks[expert] = 0;
      }
      __syncwarp();
    }
  }
};

__device__ void count_tokens(const Context& context, const DispatchCall& args, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < args.plan_warps) {
    const Scan scan(context, args, scratch, warp);
    for (int e = lane; e < context.sizes.num_experts; e += 32) scan.expert_place[e] = 0, scan.marks[e] = 0;
    for (int i = lane; i < 32 * scan.choices_per_token; i += 32) scan.choices[i] = -1;
    __syncwarp();
    int items = 0;  // of the lane's rank
    for (int first = scan.begin; first < scan.end; first += 32) {
      const uint64_t copies = scan.load(first, true);
      scan.finish(first);
#pragma unroll 1
      for (int rank = 0; rank < context.sizes.num_ranks; ++rank) {
        const uint32_t lanes = __ballot_sync(~0u, Scan::copies_at(copies, rank) > 0);
        if (lane == rank) items += __popc(lanes);
      }
    }
    if (lane < kMaxRanks) scan.rank_place[lane] = items;
  }
  Movers::sync();
}

// Turns counts of several parts, [num_parts, stride], into sums of the parts before; total(i) is told the sum of all.
template <class Total>
__device__ void sum_before(int* counts, int stride, int num, int num_parts, const Total& total) {
#pragma unroll 1
  for (int i = threadIdx.x; i < num; i += Movers::kThreads) {
    int sum = 0;
#pragma unroll 8
    for (int p = 0; p < num_parts; ++p) {
      const int count = counts[p * stride + i];
      counts[p * stride + i] = sum;
      sum += count;
    }
    total(i, sum);
  }
}

// The block's counts, to all blocks.
__device__ void share_counts(const Context& context, const DispatchCall& args, const Scratch& scratch) {
  int32_t* tokens = context.arrays.block_tokens + static_cast<size_t>(blockIdx.x) * context.sizes.num_experts;
  int32_t* items = context.arrays.block_items + blockIdx.x * kMaxRanks;
  sum_before(scratch.expert_place, context.sizes.num_experts, context.sizes.num_experts, args.plan_warps,
             [&](int expert, int sum) { tokens[expert] = sum; });
  sum_before(scratch.rank_place, kMaxRanks, context.sizes.num_ranks, args.plan_warps,
             [&](int rank, int sum) { items[rank] = sum; });
}

// What `rank` has been told by `source`.
__device__ inline Head head_at(const Context& context, int rank, int source) {
  return {context.region[rank].heads + source * context.head_ints};
}

// Tells a rank what this rank was given; by one thread.
__device__ inline void tell_given(const Context& context, const DispatchCall& call, int peer) {
  const DispatchArgs& args = call.dispatch;
  const Head head = head_at(context, peer, context.sizes.rank);
  head.given(Given::kPlan) = call.new_plan ? 0 : call.plan.head->made;
  head.given(Given::kLayout) = static_cast<int32_t>(args.layout);
  head.given(Given::kAlignment) = args.expert_alignment;
  head.given(Given::kMaxRows) = args.num_rows;
  head.given(Given::kWeights) = args.topk_weights != nullptr;
  head.given(Given::kRowBytes) = static_cast<int32_t>(args.row_bytes);
  head.given(Given::kScaleBytes) = static_cast<int32_t>(args.scale_bytes);
}

// Called by a whole warp: whether ranks were not given the same where they must be.
__device__ inline Difference compare_calls(const Head& head_of_lane) {
  int given[Given::kNum];
#pragma unroll
  for (int i = 0; i < Given::kNum; ++i) given[i] = __ldcg(&head_of_lane.given(i));
#pragma unroll
  for (int i = 0; i < Given::kNum; ++i) {
    if (i == Given::kMaxRows) continue;
    const Difference found = compare(static_cast<Given::Field>(i), given[i]);
    if (found.found) return found;
  }
  return {};
}

// The head of the lane's rank, or of the last one.
__device__ inline Head head_of_lane(const Context& context) {
  const int rank = min(static_cast<int>(threadIdx.x) % 32, context.sizes.num_ranks - 1);
  return head_at(context, context.sizes.rank, rank);
}

// Tells all ranks what this rank sends to whom; by the last block that has counted.
__device__ void send_heads(const Context& context, const DispatchCall& args, uint64_t epoch) {
  const int num_ranks = context.sizes.num_ranks, experts = context.sizes.num_experts;
  const auto head_of = [&](int peer) { return head_at(context, peer, context.sizes.rank); };
  sum_before(context.arrays.block_tokens, experts, experts, args.plan_blocks, [&](int expert, int sum) {
    for (int peer = 0; peer < num_ranks; ++peer) head_of(peer).tokens(expert) = sum;
  });
  sum_before(context.arrays.block_items, kMaxRanks, num_ranks, args.plan_blocks, [&](int to, int sum) {
    for (int peer = 0; peer < num_ranks; ++peer) head_of(peer).items(to) = sum;
  });
  if (static_cast<int>(threadIdx.x) < num_ranks) tell_given(context, args, threadIdx.x);
  Movers::sync();
  raise_at_all<Movers>(context, &Region::headed, epoch);
}

// Of every expert: where its group begins on its rank, and the first row in it that is this rank's. Sums per rank.
__device__ void place_groups(const Context& context, const DispatchCall& args, const Scratch& scratch) {
  const int experts = context.sizes.num_experts, local = context.sizes.num_local_experts();
  const int num_ranks = context.sizes.num_ranks, rank = context.sizes.rank;
  const auto head_of = [&](int source) { return head_at(context, rank, source); };
#pragma unroll 1
  for (int e = threadIdx.x; e < experts; e += Movers::kThreads) {
    int total = 0, before = 0;
#pragma unroll 4
    for (int source = 0; source < num_ranks; ++source) {
      const int tokens = __ldcg(&head_of(source).tokens(e));
      total += tokens;
      before += source < rank ? tokens : 0;
    }
    scratch.expert_total[e] = total;
    scratch.expert_before[e] = before;
  }
  Movers::sync();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // warp r places the groups of rank r
  if (warp < num_ranks) {
    const bool own = warp == rank && blockIdx.x == 0, expert_layout = args.dispatch.layout == Layout::kExpert;
    const uint32_t alignment = args.dispatch.expert_alignment;
    int64_t begin = 0;
#pragma unroll 1
    for (int first = 0; first < local; first += 32) {
      const int e = first + lane, expert = warp * local + e;
      const uint32_t tokens = e < local ? scratch.expert_total[expert] : 0;
      const int64_t padded = int64_t{(tokens + alignment - 1) / alignment} * alignment;
      int64_t sum = padded;
      for (int offset = 1; offset < 32; offset *= 2) {
        const int64_t other = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += other;
      }
      if (e < local) {
        const int64_t group = begin + sum - padded;
        scratch.expert_before[expert] += static_cast<int>(group);
        if (own) {
          args.plan.expert_rows[e] = static_cast<int>(tokens);
          args.plan.expert_begin[e] = static_cast<int>(group);
          args.dispatch.out_tokens_per_expert[e] = tokens;
          args.dispatch.out_rows_per_expert[e] = padded;
        }
      }
      begin += __shfl_sync(~0u, sum, 31);
    }
    int64_t items = lane < num_ranks ? __ldcg(&head_of(lane).items(warp)) : 0;
    for (int offset = 16; offset > 0; offset /= 2) items += __shfl_xor_sync(~0u, items, offset);
    if (lane == 0) scratch.needed[warp] = expert_layout ? begin : items;
    if (own && lane == 0) args.plan.expert_begin[local] = static_cast<int>(begin);
  }
  Movers::sync();
}

// Called by a whole warp: whether the ranks agree and all rows fit; the same on every rank. If not, the host is told
// why.
__device__ bool check_heads(const Context& context, const DispatchCall& args, const Scratch& scratch) {
  const int num_ranks = context.sizes.num_ranks, rank = min(static_cast<int>(threadIdx.x), num_ranks - 1);
  const Head head = head_of_lane(context);
  const int given = __ldcg(&head.given(Given::kMaxRows));
  if (const Difference found = compare_calls(head); found.found) {
    if (blockIdx.x == 0 && threadIdx.x == 0) report_difference(context, found);
    return false;
  }
  const int64_t needed = scratch.needed[rank];
  const bool countable = __all_sync(~0u, needed <= INT32_MAX);
  if (countable && __all_sync(~0u, given < 0 || needed <= given)) return true;
  if (blockIdx.x != 0) return false;
  if (*static_cast<volatile int32_t*>(&context.report->mistake) == 0) {
    context.report->values[2 * rank] = needed;
    context.report->values[2 * rank + 1] = given;
  }
  __threadfence_system();
  __syncwarp();
  if (threadIdx.x == 0)
    report_mistake(context, countable ? Mistake::kTooFewRows : Mistake::kTooManyRows, args.dispatch.expert_alignment, 0,
                   0, needed);
  return false;
}

// The head of the plan.
__device__ void write_head(const Context& context, const DispatchCall& args, const Scratch& scratch, bool usable,
                           uint64_t epoch) {
  PlanHead& head = *args.plan.head;
  const int rank = context.sizes.rank;
  const Head own = head_at(context, rank, rank);
  int from[kMaxRanks], items = 0, sent = 0;
#pragma unroll
  for (int source = 0; source < kMaxRanks; ++source) {
    const Head theirs = head_at(context, rank, source);
    const bool counts = usable && source < context.sizes.num_ranks;
    from[source] = counts ? __ldcg(&theirs.items(rank)) : 0;
    sent += counts ? __ldcg(&own.items(source)) : 0;
  }
#pragma unroll
  for (int source = 0; source < kMaxRanks; ++source) {
    if (source < context.sizes.num_ranks) head.item_begin[source] = items;
    items += from[source];
  }
  head.item_begin[context.sizes.num_ranks] = items;
  head.made = static_cast<int32_t>(epoch);
  head.layout = static_cast<int32_t>(args.dispatch.layout);
  head.num_rows = usable ? static_cast<int32_t>(scratch.needed[context.sizes.rank]) : 0;
  head.usable = usable;
  head.num_items = items;
  head.num_sent = sent;
  if (args.dispatch.num_rows >= 0) return;  // nobody waits for the counts
  context.report->num_rows = head.num_rows;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&context.report->counted) = args.dispatch.ticket;
}

// How many of a token's experts lie in [first, expert).
__device__ int count_between(const int16_t* choices, int num_vectors, int first, int expert) {
  int count = 0;
  for (int v = 0; v < num_vectors; ++v) {
    const uint4 vector = reinterpret_cast<const uint4*>(choices)[v];
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = static_cast<int16_t>(words[i]), high = static_cast<int>(words[i]) >> 16;
      count += static_cast<uint32_t>(low - first) < static_cast<uint32_t>(expert - first);
      count += static_cast<uint32_t>(high - first) < static_cast<uint32_t>(expert - first);
    }
  }
  return count;
}

// Where every token of this rank goes.
__device__ void list_items(const Context& context, const DispatchCall& args, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= args.plan_warps) return;
  const Scan scan(context, args, scratch, warp);
  const int local = context.sizes.num_local_experts(), max_copies = context.sizes.max_copies();
  const int num_vectors = scan.choices_per_token / kChoices;
  const bool expert_layout = args.dispatch.layout == Layout::kExpert;
  const auto item_of = [&](int rank, int number) {
    return Item{item_at_source(context, context.sizes.rank, rank, number), max_copies};
  };
  const int32_t* block_tokens =
      context.arrays.block_tokens + static_cast<size_t>(blockIdx.x) * context.sizes.num_experts;
  for (int e = lane; e < context.sizes.num_experts; e += 32)
    scan.expert_place[e] += scratch.expert_before[e] + __ldcg(block_tokens + e);
  int items = 0;  // of the lane's rank
  if (lane < kMaxRanks)
    items = scan.rank_place[lane] + __ldcg(context.arrays.block_items + blockIdx.x * kMaxRanks + lane);
  __syncwarp();
  for (int first = scan.begin; first < scan.end; first += 32) {
    const int token = first + lane;
    const uint64_t copies = scan.load(first, false);
#pragma unroll 1
    for (int rank = 0; rank < context.sizes.num_ranks; ++rank) {
      const int num_copies = Scan::copies_at(copies, rank);
      const uint32_t lanes = __ballot_sync(~0u, num_copies > 0);
      const int number = __shfl_sync(~0u, items, rank) + __popc(lanes & ((1u << lane) - 1));
      if (lane == rank) items += __popc(lanes);
      if (token >= scan.end) continue;
      scan.numbers[rank * 32 + lane] = number;
      args.plan.sent_item[static_cast<size_t>(token) * context.sent_ints + rank] = num_copies > 0 ? number : -1;
      if (num_copies == 0) continue;
      const Item item = item_of(rank, number);
      item.token() = token;
      item.num_copies() = num_copies;
    }
    uint32_t used = 0;
    if (token < scan.end)
#pragma unroll 1
      for (int k = 0; k < context.sizes.num_topk; ++k) {
        const int expert = scan.own()[k];
        if (expert < 0) continue;
        used |= 1u << k;
        const int rank = scan.rank_of(expert), begin = rank * local;
        const int row = scan.expert_place[expert] + __popc(scan.marks[expert] & ((1u << lane) - 1));
        const int copy = count_between(scan.own(), num_vectors, begin, expert);
        const Item item = item_of(rank, scan.numbers[rank * 32 + lane]);
        item.value(copy) = expert_layout ? row : expert - begin;
        item.k(copy) = static_cast<uint8_t>(k);
      }
    if (token < scan.end) args.plan.sent_k[token] = used;
    scan.finish(first);
  }
}

__device__ void count(const Context& context, const DispatchCall& args, const Scratch& scratch, uint64_t epoch) {
  count_tokens(context, args, scratch);
  share_counts(context, args, scratch);
  if (last_block<Movers>(&context.state->count_done, args.plan_blocks)) send_heads(context, args, epoch);
}

// The whole of it, by the movers. False when this rank has given up.
__device__ bool make_plan(const Context& context, const DispatchCall& args, char* shared, uint64_t epoch) {
  __shared__ bool usable;
  Scratch scratch;
  carve_scratch(shared, context.sizes, args.plan_warps, &scratch);
  count(context, args, scratch, epoch);
  if (!team_waits<Movers>(context, kDispatch, Phase::kCounts, epoch, context.own().headed, epoch)) return false;
  place_groups(context, args, scratch);
  if (threadIdx.x < 32) {
    const bool ok = check_heads(context, args, scratch);
    if (threadIdx.x == 0) {
      usable = ok;
      if (blockIdx.x == 0) write_head(context, args, scratch, ok, epoch);
    }
  }
  Movers::sync();
  if (usable) {
    list_items(context, args, scratch);
  } else if (blockIdx.x == 0) {  // then no token has an item, and no row is counted
    const Plan& plan = args.plan;
    const int local = context.sizes.num_local_experts();
    for (int e = threadIdx.x; e <= local; e += Movers::kThreads) plan.expert_begin[e] = 0;
    for (int e = threadIdx.x; e < local; e += Movers::kThreads) {
      plan.expert_rows[e] = 0;
      args.dispatch.out_tokens_per_expert[e] = args.dispatch.out_rows_per_expert[e] = 0;
    }
    for (int i = threadIdx.x; i < args.dispatch.num_tokens * context.sent_ints; i += Movers::kThreads)
      plan.sent_item[i] = -1;
    for (int t = threadIdx.x; t < args.dispatch.num_tokens; t += Movers::kThreads) plan.sent_k[t] = 0;
  }
  if (last_block<Movers>(&context.state->list_done, args.plan_blocks))
    raise_at_all<Movers>(context, &Region::listed, epoch);
  return true;
}

}  // namespace ep::cuda
