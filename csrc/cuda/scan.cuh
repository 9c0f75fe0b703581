// How a rank goes through its own routing. It does so twice: count_tokens counts, list_items writes the items.
//
//   tokens of the rank   | block 0                   | block 1                   | ...
//   tokens of a block    | warp 0 | warp 1 | ...     | in ascending order, so that prefix sums keep the tokens' order
//   tokens of a warp     | batch | batch | ...       | 32 tokens, one per lane
//
// Of a batch, shared memory holds
//   choices [lane][k]    the expert of each choice, -1 for none: topk_idx as int16
//   marks   [expert]     a bit per lane whose token goes to the expert: popc of the lower lanes is the token's rank
//                        among the batch's tokens of that expert
// and a register of each lane
//   copies               a byte per rank: how many experts its token has there
#pragma once
#include "cuda/dispatch.cuh"
#include "cuda/item.cuh"

namespace ep::cuda {

constexpr int kChoices = 8;  // experts of a token in a vector of 16 bytes

// Shared memory of a block that plans.
struct Scratch {
  int* expert_place;      // [plan_warps, num_experts] tokens of the block before those of the warp; then rows
  uint32_t* marks;        // [plan_warps, num_experts] lanes of the batch by expert; 0 between batches
  int* rank_place;        // [plan_warps, kMaxRanks] items of the block before those of the warp
  int16_t* choices;       // [plan_warps, 32, choices_per_token]
  int* numbers;           // [plan_warps, kMaxRanks, 32] the batch's items by rank and lane
  int* expert_before;     // [num_experts] tokens of lower ranks, then the first row of this rank's tokens
  int* expert_total;      // [num_experts] tokens of all ranks
  int64_t* needed;        // [kMaxRanks] rows of every rank
  int choices_per_token;  // num_topk rounded up to whole vectors

  // Lay the scratch out. Without a base the cursor measures.
  EP_HOST_DEVICE static Scratch carve(Cursor& c, const Config& config, int plan_warps) {
    const size_t warps = plan_warps, experts = config.num_experts;
    Scratch s;
    s.choices_per_token = (config.num_topk + kChoices - 1) / kChoices * kChoices;
    s.expert_place = c.take<int>(warps * experts);
    s.marks = c.take<uint32_t>(warps * experts);
    s.rank_place = c.take<int>(warps * kMaxRanks);
    s.choices = c.take<int16_t>(warps * 32 * s.choices_per_token);
    s.numbers = c.take<int>(warps * kMaxRanks * 32);
    s.expert_before = c.take<int>(experts);
    s.expert_total = c.take<int>(experts);
    s.needed = c.take<int64_t>(kMaxRanks);
    return s;
  }
};

// How many experts one token has on each rank.
struct Copies {
  static constexpr int kBits = 8;
  uint64_t bytes = 0;
  static_assert(kMaxRanks * kBits <= 64, "a byte per rank: more ranks need more words, or the ranks of one node only");
  static_assert(kMaxTopk < 1 << kBits, "a byte holds the experts of one token");

  __device__ void add(int rank) { bytes += uint64_t{1} << kBits * rank; }
  __device__ int at(int rank) const { return static_cast<int>(bytes >> kBits * rank & ((1 << kBits) - 1)); }
};

// A warp's part of the scratch and of the tokens.
struct Scan {
  const Context& context;
  const int64_t* topk_idx;
  int *expert_place, *rank_place, *numbers;
  uint32_t* marks;
  int16_t* choices;
  int choices_per_token, begin, end;
  uint32_t inverse;  // 2^32 / num_local_experts, rounded up: rank_of

  __device__ Scan(const Op& op, const DispatchParams& params, const Scratch& scratch, int warp)
      : context(op.context), topk_idx(params.args.topk_idx) {
    const int experts = context.config.num_experts, num_tokens = params.args.num_tokens;
    expert_place = scratch.expert_place + warp * experts;
    marks = scratch.marks + warp * experts;
    rank_place = scratch.rank_place + warp * kMaxRanks;
    choices_per_token = scratch.choices_per_token;
    choices = scratch.choices + warp * 32 * choices_per_token;
    numbers = scratch.numbers + warp * kMaxRanks * 32;
    const int batches = (num_tokens + 31) / 32, per_block = (batches + params.plan_blocks - 1) / params.plan_blocks;
    const int first = op.block * per_block, last = first + per_block;
    const int per_warp = (per_block + params.plan_warps - 1) / params.plan_warps;
    begin = min(num_tokens, min(first + warp * per_warp, last) * 32);
    end = min(num_tokens, min(first + (warp + 1) * per_warp, last) * 32);
    inverse = 0xffffffffu / context.config.num_local_experts() + 1;
  }

  // expert / num_local_experts; exact while their product is below 2^32.
  __device__ int rank_of(int expert) const {
    return context.config.num_local_experts() == 1 ? expert : __umulhi(expert, inverse);
  }

  __device__ int16_t* own() const { return choices + threadIdx.x % 32 * choices_per_token; }

  // [warp] Load a batch to shared memory and mark its experts. Return the copies of the lane's token. An entry that is
  // no expert, or repeats one, counts as -1; it is kept as a mistake if `checks`.
  __device__ Copies load(int first, bool checks) const {
    const int lane = threadIdx.x % 32, num_topk = context.config.num_topk, num = min(32, end - first);
    const int64_t* from = topk_idx + static_cast<int64_t>(first) * num_topk;
    // Read the entries in the order of memory, whoever's they are.
    int token = lane / num_topk, k = lane % num_topk;
    const int step_tokens = 32 / num_topk, step_k = 32 % num_topk;
#pragma unroll 4
    for (int i = lane; i < num * num_topk; i += 32) {
      const int64_t given = __ldg(from + i);
      const bool bad = given < -1 || given >= context.config.num_experts;
      if (bad && checks) keep_bad_entry(context, first + token, k, false, given);
      choices[token * choices_per_token + k] = static_cast<int16_t>(bad ? -1 : given);
      token += step_tokens, k += step_k;
      if (k >= num_topk) k -= num_topk, ++token;
    }
    __syncwarp();
    // Mark the experts of the lane's own token.
    Copies copies;
    if (lane < num)
#pragma unroll 1
      for (k = 0; k < num_topk; ++k) {
        const int expert = own()[k];
        if (expert < 0) continue;
        if (atomicOr(marks + expert, 1u << lane) >> lane & 1) {
          if (checks) keep_bad_entry(context, first + lane, k, true, expert);
          own()[k] = -1;
        } else {
          copies.add(rank_of(expert));
        }
      }
    __syncwarp();
    return copies;
  }

  // [warp] Advance expert_place past the batch and clear its marks.
  __device__ void finish(int first) const {
    const int lane = threadIdx.x % 32;
    const bool has_token = first + lane < end;
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < context.config.num_topk; ++k) {
      const int expert = has_token ? own()[k] : -1;
      const uint32_t lanes = expert < 0 ? 0 : marks[expert];  // 0 when another column has cleared them
      __syncwarp();
      if (lane == __ffs(lanes) - 1) {
        expert_place[expert] += __popc(lanes);
        marks[expert] = 0;
      }
      __syncwarp();
    }
  }
};

// [movers] Count the tokens of every expert and the items of every rank, warp by warp, into the scratch.
__device__ void count_tokens(const Op& op, const DispatchParams& params, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < params.plan_warps) {
    const Scan scan(op, params, scratch, warp);
    for (int e = lane; e < op.context.config.num_experts; e += 32) scan.expert_place[e] = 0, scan.marks[e] = 0;
    for (int i = lane; i < 32 * scan.choices_per_token; i += 32) scan.choices[i] = -1;
    __syncwarp();
    int items = 0;  // of the lane's rank
    for (int first = scan.begin; first < scan.end; first += 32) {
      const Copies copies = scan.load(first, true);
      scan.finish(first);
#pragma unroll 1
      for (int rank = 0; rank < op.num_ranks(); ++rank) {
        const uint32_t lanes = __ballot_sync(~0u, copies.at(rank) > 0);
        if (lane == rank) items += __popc(lanes);
      }
    }
    if (lane < kMaxRanks) scan.rank_place[lane] = items;
  }
  Movers::sync();
}

// [thread] Count a token's experts in [first, expert).
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

// [movers] Write the items of this rank's tokens to its inbox, and what combine needs of them to the plan.
__device__ void list_items(const Op& op, const DispatchParams& params, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= params.plan_warps) return;
  const Context& context = op.context;
  const Config& config = context.config;
  const Scan scan(op, params, scratch, warp);
  const int local = config.num_local_experts(), max_copies = config.max_copies();
  const int num_vectors = scan.choices_per_token / kChoices;
  const bool expert_layout = params.args.layout == Layout::kExpert;
  const auto item_of = [&](int rank, int number) {
    return Item{item_at_source(context, config.rank, rank, number), max_copies};
  };
  // Begin behind the rows and items of lower ranks, blocks and warps.
  const int32_t* block_tokens = context.arrays.block_tokens + static_cast<size_t>(op.block) * config.num_experts;
  for (int e = lane; e < config.num_experts; e += 32)
    scan.expert_place[e] += scratch.expert_before[e] + __ldcg(block_tokens + e);
  int items = 0;  // of the lane's rank
  if (lane < kMaxRanks)
    items = scan.rank_place[lane] + __ldcg(context.arrays.block_items + op.block * kMaxRanks + lane);
  __syncwarp();
  for (int first = scan.begin; first < scan.end; first += 32) {
    const int token = first + lane;
    const Copies copies = scan.load(first, false);
    // Number the items, rank by rank.
#pragma unroll 1
    for (int rank = 0; rank < config.num_ranks(); ++rank) {
      const int num_copies = copies.at(rank);
      const uint32_t lanes = __ballot_sync(~0u, num_copies > 0);
      const int number = __shfl_sync(~0u, items, rank) + __popc(lanes & ((1u << lane) - 1));
      if (lane == rank) items += __popc(lanes);
      if (token >= scan.end) continue;
      scan.numbers[rank * 32 + lane] = number;
      params.plan.sent_item[static_cast<size_t>(token) * context.sent_ints + rank] = num_copies > 0 ? number : -1;
      if (num_copies == 0) continue;
      const Item item = item_of(rank, number);
      item.token() = token;
      item.num_copies() = num_copies;
    }
    // Write the copies: each choice finds its place among the token's experts of that rank.
    uint32_t used = 0;
    if (token < scan.end)
#pragma unroll 1
      for (int k = 0; k < config.num_topk; ++k) {
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
    if (token < scan.end) params.plan.sent_k[token] = used;
    scan.finish(first);
  }
}

}  // namespace ep::cuda
