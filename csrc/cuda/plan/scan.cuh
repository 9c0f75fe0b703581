// Scans of a rank's own routing, by the pull warps of the planning blocks. There are two scans: count_tokens counts,
// then list_items writes the items.
//
//   tokens of the rank   | block 0                   | block 1                   | ...
//   tokens of a block    | warp 0 | warp 1 | ...     | in ascending order, so that prefix sums keep the order of tokens
//   tokens of a warp     | batch | batch | ...       | 32 tokens, one per lane
//
// A batch of topk_idx has these forms, in shared memory and in one register:
//
//   choices [lane][k]     topk_idx as int16: the expert of each column, -1 for none
//   marks [expert]        a bit per lane with this expert; the bits of lower lanes count its earlier tokens
//   rank_marks [rank]     the same by rank; the bits of lower lanes count its earlier items
#pragma once
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/plan/item.cuh"

namespace ep::cuda {

constexpr int kChoices = 8;  // int16 in a vector of 16 bytes

// Shared memory of a planning block. Written and read by its pull warps.
struct Scratch {
  int* expert_offset;    // [plan_warps, num_experts] in turn: tokens of each warp; tokens of the block before the warp;
                         // the row of the warp's next token
  uint32_t* marks;       // [plan_warps, num_experts] a bit per lane of the batch; 0 between batches
  int* rank_offset;      // [plan_warps, num_ranks] in turn: items of each warp; items of the block before the warp; the
                         // number of the warp's next item
  uint32_t* rank_marks;  // [plan_warps, num_ranks] a bit per lane of the batch; 0 between batches
  int16_t* choices;      // [plan_warps, 32, choices_per_token]
  int* expert_before;    // [num_experts] in turn: tokens of lower ranks; the first row of this rank's tokens
  int* expert_total;     // [num_experts] tokens of all ranks
  int64_t* needed;       // [num_ranks] output rows of each rank
  int* max_rows;         // [num_ranks] rows in the output of each rank, -1: the output is made later
  int32_t** items;       // [num_ranks] this rank's items for each rank: its inbox, or items_out for another node
  int choices_per_token;  // num_topk, rounded up to whole vectors

  // [host] [block] Lay out the scratch, or measure it.
  EP_HOST_DEVICE static Scratch carve(Cursor& c, const Config& config, int plan_warps) {
    const size_t warps = plan_warps, experts = config.num_experts, ranks = config.num_ranks();
    Scratch s;
    s.choices_per_token = config.choices_per_token();
    s.expert_offset = c.take<int>(warps * experts);
    s.marks = c.take<uint32_t>(warps * experts);
    s.rank_offset = c.take<int>(warps * ranks);
    s.rank_marks = c.take<uint32_t>(warps * ranks);
    s.choices = c.take<int16_t>(warps * 32 * s.choices_per_token);
    s.expert_before = c.take<int>(experts);
    s.expert_total = c.take<int>(experts);
    s.needed = c.take<int64_t>(ranks);
    s.max_rows = c.take<int>(ranks);
    s.items = c.take<int32_t*>(ranks);
    return s;
  }
};

// One warp's part of the scratch, and its tokens [begin, end).
template <Kernels K>
struct Scan {
  const Op<K> op;
  const Context& context;
  const int64_t* topk_idx;
  int *expert_offset, *rank_offset;
  uint32_t *marks, *rank_marks;
  int16_t* choices;
  int choices_per_token, begin, end;
  uint32_t inverse, inverse_topk;  // as in DispatchParams

  // [warp] Find the warp's tokens and its part of the scratch.
  template <class Params>
  __device__ Scan(const Op<K>& op, const Params& params, const Scratch& scratch, int warp)
      : op(op), context(op.context), topk_idx(params.args.topk_idx) {
    const int experts = context.config.num_experts;
    expert_offset = scratch.expert_offset + warp * experts;
    marks = scratch.marks + warp * experts;
    rank_offset = scratch.rank_offset + warp * context.num_ranks;
    rank_marks = scratch.rank_marks + warp * context.num_ranks;
    choices_per_token = scratch.choices_per_token;
    choices = scratch.choices + warp * 32 * choices_per_token;
    const int first = warp * params.batches_of_warp, of_block = params.batches_of_block;
    const auto token = [&](int batch) {
      return min(params.args.num_tokens, (op.block * of_block + min(batch, of_block)) * 32);
    };
    begin = token(first), end = token(first + params.batches_of_warp);
    inverse = params.inverse, inverse_topk = params.inverse_topk;
  }

  // [thread] Return the rank of an expert.
  __device__ int rank_of(int expert) const { return quotient(expert, inverse); }

  // [thread] Return the choices of the lane's token.
  __device__ int16_t* lane_choices() const { return choices + threadIdx.x % 32 * choices_per_token; }

  // [warp] Load a batch into shared memory, beginning with token `first`, and mark its experts and ranks. The marks are
  // 0 before. Return a bit for each node with an expert of the lane's token. An invalid or repeated entry counts as -1.
  // With `checks` it is kept as an error.
  // reports: kBadEntry
  __device__ uint32_t load(int first, bool checks) const {
    const int lane = threadIdx.x % 32, num_topk = context.config.num_topk, num = min(32, end - first);
    const int64_t* const from = topk_idx + static_cast<int64_t>(first) * num_topk;
    // The lane's first wrong entry: its place in the batch. All repeated ones come after the invalid ones.
    constexpr int kRepeated = 32 * kMaxTopk, kNone = 2 * kRepeated;
    int wrong = kNone;
    // Read the entries in the order of memory, so a lane has entries of several tokens. Several loads overlap: each
    // takes a microsecond and more while other warps stage rows.
    constexpr int kTogether = 8;
#pragma unroll 1
    for (int n = lane; n < num * num_topk; n += 32 * kTogether) {
      int64_t given[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) given[i] = n + 32 * i < num * num_topk ? __ldg(from + n + 32 * i) : -1;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = n + 32 * i, token = quotient(at, inverse_topk);
        if (at >= num * num_topk) break;
        const bool bad = given[i] < -1 || given[i] >= context.config.num_experts;
        if (bad) wrong = min(wrong, at);
        choices[at + token * (choices_per_token - num_topk)] = static_cast<int16_t>(bad ? -1 : given[i]);
      }
    }
    __syncwarp();
    // Mark the experts of the lane's own token.
    uint32_t nodes = 0;
    if (lane < num)
#pragma unroll 1
      for (int k = 0; k < num_topk; ++k) {
        const int expert = lane_choices()[k];
        if (expert < 0) continue;
        if (atomicOr(marks + expert, 1u << lane) >> lane & 1) {
          wrong = min(wrong, kRepeated + lane * num_topk + k);
          lane_choices()[k] = -1;
        } else {
          const int rank = rank_of(expert);
          atomicOr(rank_marks + rank, 1u << lane);
          nodes |= 1u << op.node_of(rank);
        }
      }
    if (checks) wrong = __reduce_min_sync(~0u, wrong);
    if (checks && wrong != kNone && lane == 0) {
      const int at = wrong % kRepeated, token = quotient(at, inverse_topk);
      record_bad_topk_idx(context, first + token, at - token * num_topk, wrong >= kRepeated, __ldg(from + at));
    }
    __syncwarp();
    return nodes;
  }

  // [warp] Advance expert_offset and rank_offset past the batch, and clear its marks. Called after the last use of the
  // marks. The lowest lane with an expert does it for this expert, at the expert's column.
  __device__ void finish(int first) const {
    const int lane = threadIdx.x % 32;
    const bool has_token = first + lane < end;
    __syncwarp();
#pragma unroll 1
    for (int rank = lane; rank < context.num_ranks; rank += 32) {
      rank_offset[rank] += __popc(rank_marks[rank]);
      rank_marks[rank] = 0;
    }
#pragma unroll 1
    for (int k = 0; k < context.config.num_topk; ++k) {
      const int expert = has_token ? lane_choices()[k] : -1;
      const uint32_t lanes = expert < 0 ? 0 : marks[expert];  // 0: cleared at an earlier column
      __syncwarp();
      if (lane == __ffs(lanes) - 1) {
        expert_offset[expert] += __popc(lanes);
        marks[expert] = 0;
      }
      __syncwarp();
    }
  }
};

// [team] Count the tokens of each expert and the items of each rank, by warp, into the scratch. Write sent_nodes to the
// plan. Called by the pull warps of a planning block. Ends with a barrier of the pull warps.
template <Kernels K, class Params>
__device__ void count_tokens(const Op<K>& op, const Params& params, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < params.plan_warps) {
    const Scan<K> scan(op, params, scratch, warp);
    // Clear this warp's scratch.
#pragma unroll 1
    for (int e = lane; e < op.context.config.num_experts; e += 32) scan.expert_offset[e] = 0, scan.marks[e] = 0;
#pragma unroll 1
    for (int rank = lane; rank < op.num_ranks(); rank += 32) scan.rank_offset[rank] = scan.rank_marks[rank] = 0;
#pragma unroll 1
    for (int i = 0; i < scan.choices_per_token; ++i) scan.choices[32 * i + lane] = -1;
    __syncwarp();
    // Count batch by batch: `finish` does.
    for (int first = scan.begin; first < scan.end; first += 32) {
      const uint32_t nodes = scan.load(first, true);
      if (op.num_nodes() > 1 && first + lane < scan.end)
        params.plan.sent_nodes[first + lane] = nodes & ~(1u << op.context.node);
      scan.finish(first);
    }
  }
  PullWarps::sync();
}

// [thread] Count a token's experts in [first, first + num), and those of them below `expert`. `choices`: of the token,
// in num_vectors vectors.
__device__ inline int2 count_local(const int16_t* choices, int num_vectors, int first, int num, int expert) {
  int count = 0, below = 0;
  const auto add = [&](int choice) {
    count += static_cast<uint32_t>(choice - first) < static_cast<uint32_t>(num);
    below += static_cast<uint32_t>(choice - first) < static_cast<uint32_t>(expert - first);
  };
#pragma unroll 1
  for (int v = 0; v < num_vectors; ++v) {
    const uint4 vector = reinterpret_cast<const uint4*>(choices)[v];
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      add(static_cast<int16_t>(words[i]));
      add(static_cast<int>(words[i]) >> 16);
    }
  }
  return {count, below};
}

// [thread] Write the node of each of a token's columns to the plan, for combines.
template <Kernels K>
__device__ inline void list_nodes(const Scan<K>& scan, const Plan& plan, int token) {
  const Context& context = scan.context;
  const int num_topk = context.config.num_topk;
#pragma unroll 1
  for (int k = 0; k < num_topk; ++k) {
    const int expert = scan.lane_choices()[k];
    const int node = expert < 0 ? context.node : scan.op.node_of(scan.rank_of(expert));
    plan.k_node[static_cast<size_t>(token) * num_topk + k] = static_cast<uint8_t>(node);
  }
}

// [thread] Return whether messages with `rows` of a rank's tokens are packed. Packing takes a copy, so it must leave
// out more than a sixteenth. Both ends find the same.
__device__ inline bool is_packed(int rows, int num_tokens) { return num_tokens - rows > num_tokens / 16; }

// [warp] Return in lane n the number of tokens before `end` with experts on node n, another one. Called in planning
// blocks, once all of them have counted. `sent_nodes`: of the plan. Not inlined: only the NCCL wire calls it.
__device__ __noinline__ inline int rows_before(const uint32_t* sent_nodes, int num_nodes, int end) {
  constexpr int kTogether = 8;  // loads under way
  const int lane = threadIdx.x % 32;
  int rows = 0;
#pragma unroll 1
  for (int first = lane; first - lane < end; first += 32 * kTogether) {
    uint32_t nodes[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) nodes[i] = first + 32 * i < end ? __ldcg(sent_nodes + first + 32 * i) : 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll 1
      for (int node = 0; node < num_nodes; ++node) {
        const int num = __popc(__ballot_sync(~0u, nodes[i] >> node & 1));
        rows += lane == node ? num : 0;
      }
  }
  return rows;
}

// [team] Write the items and tables of this rank's tokens. Called by the pull warps of a planning block, after
// find_first_rows and with a usable plan. Items go to the own inbox, and for other nodes to items_out. Tables go to the
// plan, and for other nodes to table_out. The plan also gets sent_k and k_node, and with rows `known` (MessageRows)
// sent_rows. `limited`: as in PlanFacts. `agree` has freed all this memory. No barrier at the end.
template <Kernels K, class Params>
__device__ void list_items(const Op<K>& op, const Params& params, const Scratch& scratch, bool known, bool limited) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= params.plan_warps) return;
  const Context& context = op.context;
  const Config& config = context.config;
  const Scan<K> scan(op, params, scratch, warp);
  const int num_local = context.num_local_experts, locals = config.ranks_per_node;
  const int num_vectors = scan.choices_per_token / kChoices;
  const bool expert_layout = params.args.layout != Layout::kRank;
  const auto item_of = [&](int rank, int number) {
    return Item{scratch.items[rank] + static_cast<size_t>(number) * context.item_ints, context.max_copies};
  };
  // Begin after the rows of lower ranks, and after the rows and items of earlier blocks and warps.
  const int32_t* const block_num_tokens =
      context.arrays.block_num_tokens + static_cast<size_t>(op.block) * config.num_experts;
  const int32_t* const block_num_items = context.arrays.block_num_items + op.block * op.num_ranks();
#pragma unroll 8
  for (int e = lane; e < config.num_experts; e += 32)
    scan.expert_offset[e] += scratch.expert_before[e] + (op.block > 0 ? __ldcg(block_num_tokens + e) : 0);
#pragma unroll 1
  for (int rank = lane; op.block > 0 && rank < op.num_ranks(); rank += 32)
    scan.rank_offset[rank] += __ldcg(block_num_items + rank);
  // Lane n has the next row for node n.
  uint32_t packed = 0;
  int next_row = 0;
  if (op.num_nodes() > 1 && known) {
    const bool is_other = lane < op.num_nodes() && lane != context.node;
    const auto rows = [&] { return __ldcg(&own_counts(op, op.rank()).num_rows(config, lane)); };
    packed = __ballot_sync(~0u, is_other && (limited || is_packed(rows(), params.args.num_tokens)));
    if (packed != 0) next_row = rows_before(params.plan.sent_nodes, op.num_nodes(), scan.begin);
  }
  __syncwarp();
  const uint32_t lower_lanes = (1u << lane) - 1;
  const auto number_at = [&](int rank) {  // of the lane's item
    return scan.rank_offset[rank] + __popc(scan.rank_marks[rank] & lower_lanes);
  };
  for (int first = scan.begin; first < scan.end; first += 32) {
    const int token = first + lane;
    const uint32_t nodes = scan.load(first, false);
    // Write the numbers of the token's items to the tables.
#pragma unroll 1
    for (int node = 0; node < op.num_nodes(); ++node) {
      int row = token;
      bool has_row = token < scan.end;
      if (packed >> node & 1) {
        const uint32_t lanes = __ballot_sync(~0u, nodes >> node & 1);
        const bool goes = lanes >> lane & 1;
        row = __shfl_sync(~0u, next_row, node) + __popc(lanes & lower_lanes);
        if (has_row) params.plan.sent_rows[static_cast<size_t>(node) * config.max_tokens + token] = row - !goes;
        has_row = goes;
        next_row += lane == node ? __popc(lanes) : 0;
      }
      if (!has_row) continue;
      int32_t* const table = (node == context.node ? params.plan.tables + static_cast<size_t>(node) *
                                                                              config.max_tokens * context.table_ints
                                                   : context.local_rail_buffer(node, &RailArrays::table_out)) +
                             static_cast<size_t>(row) * context.table_ints;
#pragma unroll 1
      for (int local = 0; local < locals; ++local) {
        const int rank = node * locals + local;
        table[local] = scan.rank_marks[rank] >> lane & 1 ? number_at(rank) : -1;
      }
    }
    // Write the items, copy by copy. The first copy begins the item. A copy's position in its item is the number of the
    // token's lower experts on the same rank.
    uint32_t used = 0, *sent_k = params.plan.sent_k + token;
    if (token < scan.end)
#pragma unroll 1
      for (int k = 0; k < config.num_topk; ++k) {
        if (k == 32) *sent_k = used, sent_k += config.max_tokens, used = 0;
        const int expert = scan.lane_choices()[k];
        if (expert < 0) continue;
        used |= 1u << k % 32;
        const int rank = scan.rank_of(expert), begin = rank * num_local;
        const int row = scan.expert_offset[expert] + __popc(scan.marks[expert] & lower_lanes);
        const auto [copies, copy] = count_local(scan.lane_choices(), num_vectors, begin, num_local, expert);
        const Item item = item_of(rank, number_at(rank));
        if (copy == 0) {
          const int node = op.node_of(rank);
          const bool packs = packed >> node & 1;
          item.begin(packs ? params.plan.sent_rows[static_cast<size_t>(node) * config.max_tokens + token] : token,
                     copies);
        }
        item.value(copy) = expert_layout ? row : expert - begin;
        item.k(copy) = static_cast<uint8_t>(k);
      }
    // Describe the token for senders and combine.
    if (token < scan.end) *sent_k = used;
    if (token < scan.end && op.num_nodes() > 1) list_nodes(scan, params.plan, token);
    scan.finish(first);
  }
}

}  // namespace ep::cuda
