// The first half of a dispatch: block 0 makes the plan while the others stage the rows where peers can read them.
#include "cuda/engine.h"
#include "cuda/item.cuh"
#include "cuda/launch.h"
#include "cuda/wait.cuh"

namespace ep::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr Operation kDispatch = Operation::kDispatch;

struct PrepareArgs {
  DispatchArgs dispatch;
  Plan plan;
  uint32_t record_bytes;
  int plan_warps;  // that scan tokens
};

// What the ranks tell each other of a routing: int32 [head_ints].
struct Head {
  int32_t* data;
  enum Field { kLayout, kAlignment, kMaxRows, kWeights, kRowBytes, kScaleBytes, kNumChecked = 6 };

  __device__ int32_t& field(int i) const { return data[i]; }
  __device__ int32_t& items(int rank) const { return data[8 + rank]; }
  __device__ int32_t& tokens(int expert) const { return data[kHeadFixedInts + expert]; }
};

__device__ void report_mistake(const Context& context, Mistake mistake, int a, int b, int c, int64_t value) {
  Report* report = context.report;
  if (*static_cast<volatile int32_t*>(&report->mistake) != 0) return;
  report->detail[0] = a;
  report->detail[1] = b;
  report->detail[2] = c;
  report->values[0] = value;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&report->mistake) = static_cast<int32_t>(mistake);
}

// One entry of topk_idx, with what it has to do with the other entries of its token.
struct Choice {
  int token, k, expert, rank;  // expert -1: none
  int leader;                  // lane of the lowest expert of the token on the same rank
  int before, num;             // experts of the token on the same rank: lower ones, all
};

// Called by a whole warp, a lane per entry.
__device__ Choice load_choice(const Context& context, const int64_t* topk_idx, int first_token, int end_token,
                              bool report) {
  const int lane = threadIdx.x % 32, num_topk = context.sizes.num_topk, tokens = 32 / num_topk;
  const int local = lane / num_topk, begin = local * num_topk;
  Choice choice{first_token + local, lane - begin, -1, -1, lane, 0, 0};
  const bool inside = local < tokens && choice.token < end_token;
  int64_t given = -1;
  if (inside) given = topk_idx[static_cast<int64_t>(choice.token) * num_topk + choice.k];
  bool bad = given < -1 || given >= context.sizes.num_experts, repeated = false;
  choice.expert = bad ? -1 : static_cast<int>(given);
  for (int k = 0; k < num_topk; ++k) {
    const int other = __shfl_sync(~0u, choice.expert, (begin + k) % 32);
    repeated |= k < choice.k && other == choice.expert && other >= 0;
  }
  if ((bad || repeated) && inside) {
    if (report) report_mistake(context, Mistake::kBadEntry, choice.token, choice.k, repeated, given);
    choice.expert = -1;
  }
  choice.rank = choice.expert < 0 ? -1 : choice.expert / context.sizes.num_local_experts();
  int lowest = choice.expert;
  for (int k = 0; k < num_topk; ++k) {
    const int from = (begin + k) % 32;
    const int expert = __shfl_sync(~0u, choice.expert, from), rank = __shfl_sync(~0u, choice.rank, from);
    if (rank != choice.rank || expert < 0) continue;
    ++choice.num;
    choice.before += expert < choice.expert;
    if (expert < lowest) {
      lowest = expert;
      choice.leader = from;
    }
  }
  return choice;
}

// A lane's place among the lanes of a warp with the same key, behind `counters[key]`, which then counts them too.
__device__ int take_place(int* counters, int key, bool valid) {
  const int lane = threadIdx.x % 32;
  const uint32_t same = __match_any_sync(~0u, valid ? key : -1);
  int place = 0;
  if (valid) place = counters[key] + __popc(same & ((1u << lane) - 1));
  __syncwarp();
  if (valid && lane == __ffs(same) - 1) counters[key] += __popc(same);
  __syncwarp();
  return place;
}

// Shared memory of the planning block.
struct Scratch {
  int* expert_place;    // [plan_warps, num_experts]
  int* rank_place;      // [plan_warps, kMaxRanks]
  int* expert_before;   // [num_experts] tokens of lower ranks
  int* expert_total;    // [num_experts] tokens of all ranks
  int64_t* needed;      // [kMaxRanks] rows of every rank
};

__host__ __device__ size_t carve_scratch(char* base, const Sizes& sizes, int plan_warps, Scratch* scratch) {
  size_t offset = 0;
  const auto take = [&](size_t bytes) {
    char* array = base + offset;
    offset += (bytes + 15) / 16 * 16;
    return array;
  };
  Scratch s;
  s.expert_place = reinterpret_cast<int*>(take(sizeof(int) * plan_warps * sizes.num_experts));
  s.rank_place = reinterpret_cast<int*>(take(sizeof(int) * plan_warps * kMaxRanks));
  s.expert_before = reinterpret_cast<int*>(take(sizeof(int) * sizes.num_experts));
  s.expert_total = reinterpret_cast<int*>(take(sizeof(int) * sizes.num_experts));
  s.needed = reinterpret_cast<int64_t*>(take(sizeof(int64_t) * kMaxRanks));
  if (scratch) *scratch = s;
  return offset;
}

// Tokens of one warp: a range, so that places follow the order of the tokens.
struct Range {
  int begin, end, step;
};

__device__ Range range_of(const Context& context, int num_tokens, int plan_warps, int warp) {
  const int group = 32 / context.sizes.num_topk;  // tokens that a warp takes at once
  const int groups = (num_tokens + group - 1) / group, per_warp = (groups + plan_warps - 1) / plan_warps * group;
  return {min(num_tokens, warp * per_warp), min(num_tokens, (warp + 1) * per_warp), group};
}

__device__ void count_tokens(const Context& context, const PrepareArgs& args, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = context.sizes.num_experts;
  if (warp < args.plan_warps) {
    int* by_expert = scratch.expert_place + warp * experts;
    int* by_rank = scratch.rank_place + warp * kMaxRanks;
    for (int e = lane; e < experts; e += 32) by_expert[e] = 0;
    if (lane < kMaxRanks) by_rank[lane] = 0;
    __syncwarp();
    const Range range = range_of(context, args.dispatch.num_tokens, args.plan_warps, warp);
    for (int token = range.begin; token < range.end; token += range.step) {
      const Choice choice = load_choice(context, args.dispatch.topk_idx, token, range.end, true);
      take_place(by_expert, choice.expert, choice.expert >= 0);
      take_place(by_rank, choice.rank, choice.expert >= 0 && choice.before == 0);
    }
  }
  __syncthreads();
}

// Turns the counts of each warp into the sums of the warps before it; total(i) is told the sum of all.
template <class Total>
__device__ void sum_before(int* counts, int stride, int num, int num_warps, const Total& total) {
  for (int i = threadIdx.x; i < num; i += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < num_warps; ++w) {
      const int count = counts[w * stride + i];
      counts[w * stride + i] = sum;
      sum += count;
    }
    total(i, sum);
  }
}

// Tells all ranks what this rank sends to whom.
__device__ void send_heads(const Context& context, const PrepareArgs& args, const Scratch& scratch, uint64_t epoch) {
  const int rank = context.sizes.rank, num_ranks = context.sizes.num_ranks;
  const auto head_at = [&](int peer) { return Head{context.region[peer].heads + rank * context.head_ints}; };
  sum_before(scratch.expert_place, context.sizes.num_experts, context.sizes.num_experts, args.plan_warps,
             [&](int expert, int sum) {
               for (int peer = 0; peer < num_ranks; ++peer) head_at(peer).tokens(expert) = sum;
             });
  sum_before(scratch.rank_place, kMaxRanks, num_ranks, args.plan_warps, [&](int to, int sum) {
    for (int peer = 0; peer < num_ranks; ++peer) head_at(peer).items(to) = sum;
  });
  if (static_cast<int>(threadIdx.x) < num_ranks) {
    const Head head = head_at(threadIdx.x);
    head.field(Head::kLayout) = static_cast<int32_t>(args.dispatch.layout);
    head.field(Head::kAlignment) = args.dispatch.expert_alignment;
    head.field(Head::kMaxRows) = args.dispatch.num_rows;
    head.field(Head::kWeights) = args.dispatch.topk_weights != nullptr;
    head.field(Head::kRowBytes) = static_cast<int32_t>(args.dispatch.row_bytes);
    head.field(Head::kScaleBytes) = static_cast<int32_t>(args.dispatch.scale_bytes);
  }
  __syncthreads();
  raise_at_all(context, &Region::headed, epoch);
}

// Of every expert: where its group begins on its rank, and the first row in it that is this rank's. Sums per rank.
__device__ void place_groups(const Context& context, const PrepareArgs& args, const Scratch& scratch) {
  const int experts = context.sizes.num_experts, local = context.sizes.num_local_experts();
  const int num_ranks = context.sizes.num_ranks, rank = context.sizes.rank;
  const auto head_of = [&](int source) { return Head{context.own().heads + source * context.head_ints}; };
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int total = 0, before = 0;
    for (int source = 0; source < num_ranks; ++source) {
      const int tokens = __ldcg(&head_of(source).tokens(e));
      total += tokens;
      before += source < rank ? tokens : 0;
    }
    scratch.expert_total[e] = total;
    scratch.expert_before[e] = before;
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // warp r places the groups of rank r
  if (warp < num_ranks) {
    const bool own = warp == rank, expert_layout = args.dispatch.layout == Layout::kExpert;
    const int64_t alignment = args.dispatch.expert_alignment;
    int64_t begin = 0;
    for (int first = 0; first < local; first += 32) {
      const int e = first + lane, expert = warp * local + e;
      const int64_t tokens = e < local ? scratch.expert_total[expert] : 0;
      const int64_t padded = (tokens + alignment - 1) / alignment * alignment;
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
  __syncthreads();
}

// Whether the ranks agree and all rows fit; the same on every rank. If not, the host is told why.
__device__ bool check_heads(const Context& context, const PrepareArgs& args, const Scratch& scratch) {
  const int num_ranks = context.sizes.num_ranks;
  const auto head_of = [&](int source) { return Head{context.own().heads + source * context.head_ints}; };
  for (int source = 0; source < num_ranks; ++source)
    for (int i = 0; i < Head::kNumChecked; ++i) {
      const int theirs = __ldcg(&head_of(source).field(i)), ours = __ldcg(&head_of(0).field(i));
      if (i == Head::kMaxRows || theirs == ours) continue;
      report_mistake(context, Mistake::kDisagree, i, source, theirs, ours);
      return false;
    }
  bool fits = true, countable = true;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int given = __ldcg(&head_of(rank).field(Head::kMaxRows));
    countable &= scratch.needed[rank] <= INT32_MAX;
    fits &= given < 0 || scratch.needed[rank] <= given;
  }
  if (countable && fits) return true;
  if (*static_cast<volatile int32_t*>(&context.report->mistake) == 0)
    for (int rank = 0; rank < num_ranks; ++rank) {
      context.report->values[2 * rank] = scratch.needed[rank];
      context.report->values[2 * rank + 1] = __ldcg(&head_of(rank).field(Head::kMaxRows));
    }
  __threadfence_system();
  report_mistake(context, countable ? Mistake::kTooFewRows : Mistake::kTooManyRows, args.dispatch.expert_alignment, 0, 0,
                 scratch.needed[0]);
  return false;
}

// The head of the plan; true when the plan is of use.
__device__ bool start_plan(const Context& context, const PrepareArgs& args, const Scratch& scratch) {
  __shared__ bool usable;
  const Plan& plan = args.plan;
  if (threadIdx.x == 0) {
    usable = check_heads(context, args, scratch);
    PlanHead& head = *plan.head;
    int items = 0;
    for (int source = 0; source < context.sizes.num_ranks; ++source) {
      head.item_begin[source] = items;
      const Head theirs{context.own().heads + source * context.head_ints};
      if (usable) items += __ldcg(&theirs.items(context.sizes.rank));
    }
    head.item_begin[context.sizes.num_ranks] = items;
    head.layout = static_cast<int32_t>(args.dispatch.layout);
    head.num_rows = usable ? static_cast<int32_t>(scratch.needed[context.sizes.rank]) : 0;
    head.usable = usable;
    head.num_items = items;
    Report* report = context.report;
    report->num_rows = head.num_rows;
    __threadfence_system();
    *static_cast<volatile uint64_t*>(&report->counted) = args.dispatch.ticket;
  }
  for (int i = threadIdx.x; i < args.dispatch.num_tokens * context.sent_ints; i += kThreads) plan.sent_item[i] = -1;
  for (int t = threadIdx.x; t < args.dispatch.num_tokens; t += kThreads) plan.sent_k[t] = 0;
  __syncthreads();
  return usable;
}

// Where every token of this rank goes.
__device__ void list_items(const Context& context, const PrepareArgs& args, const Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = context.sizes.num_experts, local = context.sizes.num_local_experts();
  const int max_copies = context.sizes.max_copies(), num_topk = context.sizes.num_topk;
  if (warp >= args.plan_warps) return;
  int* by_expert = scratch.expert_place + warp * experts;
  int* by_rank = scratch.rank_place + warp * kMaxRanks;
  for (int e = lane; e < experts; e += 32) by_expert[e] += scratch.expert_before[e];
  __syncwarp();
  const bool expert_layout = args.dispatch.layout == Layout::kExpert;
  const Range range = range_of(context, args.dispatch.num_tokens, args.plan_warps, warp);
  for (int token = range.begin; token < range.end; token += range.step) {
    const Choice choice = load_choice(context, args.dispatch.topk_idx, token, range.end, false);
    const bool valid = choice.expert >= 0, leads = valid && choice.before == 0;
    const int row = take_place(by_expert, choice.expert, valid);
    const int own_number = take_place(by_rank, choice.rank, leads);
    const int number = __shfl_sync(~0u, own_number, choice.leader);
    const uint32_t all = __ballot_sync(~0u, valid);
    if (valid) {
      const size_t place = static_cast<size_t>(choice.rank) * context.sizes.max_tokens + number;
      const Item item{context.own().items + place * context.item_ints, max_copies};
      item.value(choice.before) = expert_layout ? row : choice.expert - choice.rank * local;
      item.k(choice.before) = static_cast<uint8_t>(choice.k);
      if (leads) {
        item.token() = choice.token;
        item.num_copies() = choice.num;
        args.plan.sent_item[choice.token * context.sent_ints + choice.rank] = number;
      }
    }
    if (choice.k == 0 && choice.token < range.end && lane / num_topk < range.step)
      args.plan.sent_k[choice.token] = (all >> lane) & (num_topk == 32 ? ~0u : (1u << num_topk) - 1);
  }
}

__device__ void make_plan(const Context& context, const PrepareArgs& args, char* shared, uint64_t epoch) {
  __shared__ bool arrived;
  Scratch scratch;
  carve_scratch(shared, context.sizes, args.plan_warps, &scratch);
  count_tokens(context, args, scratch);
  send_heads(context, args, scratch, epoch);
  if (threadIdx.x < 32) {
    const bool ok = wait_for_ranks(context, kDispatch, Phase::kCounts, epoch, context.own().headed, epoch);
    if (threadIdx.x == 0) arrived = ok;
  }
  __syncthreads();
  if (!arrived) return;
  place_groups(context, args, scratch);
  if (start_plan(context, args, scratch)) list_items(context, args, scratch);
  __syncthreads();
  raise_at_all(context, &Region::listed, epoch);
}

// Copies vectors of 16 bytes by a warp, several loads under way at a time.
__device__ void copy_vectors(uint4* to, const uint4* from, int num) {
  constexpr int kUnroll = 7;
  for (int v = threadIdx.x % 32; v < num; v += 32 * kUnroll) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (v + 32 * i < num) values[i] = __ldg(from + v + 32 * i);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (v + 32 * i < num) to[v + 32 * i] = values[i];
  }
}

// A record per token: its row, then its scales, then its weights, each padded to 16 bytes.
__device__ void stage(const Context& context, const PrepareArgs& args, int block, int num_blocks) {
  const DispatchArgs& dispatch = args.dispatch;
  const int lane = threadIdx.x % 32, num_topk = context.sizes.num_topk, num_scales = dispatch.scale_bytes / 4;
  for (int t = block + num_blocks * (threadIdx.x / 32); t < dispatch.num_tokens; t += num_blocks * kWarps) {
    char* record = context.own().staging + static_cast<size_t>(t) * args.record_bytes;
    const char* row = dispatch.rows + static_cast<size_t>(t) * dispatch.row_bytes;
    copy_vectors(reinterpret_cast<uint4*>(record), reinterpret_cast<const uint4*>(row), dispatch.row_bytes / kVector);
    float* tail = reinterpret_cast<float*>(record + dispatch.row_bytes);
    for (int i = lane; i < num_scales; i += 32) tail[i] = __ldg(dispatch.scales + static_cast<size_t>(t) * num_scales + i);
    tail += (num_scales + 3) / 4 * 4;
    if (dispatch.topk_weights && lane < num_topk)
      tail[lane] = __ldg(dispatch.topk_weights + static_cast<size_t>(t) * num_topk + lane);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    prepare_kernel(const __grid_constant__ Context context, const __grid_constant__ PrepareArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ bool free_to_write;
  const uint64_t epoch = context.state->epoch + 1;
  if (has_failed(context)) return;
  if (threadIdx.x < 32) {
    const bool ok = wait_for_ranks(context, kDispatch, Phase::kFreeStaging, epoch, context.own().consumed,
                                   context.state->staged_epoch);
    if (threadIdx.x == 0) free_to_write = ok;
  }
  __syncthreads();
  if (!free_to_write) return;
  const bool plans = args.dispatch.topk_idx != nullptr;
  if (plans && blockIdx.x == 0) make_plan(context, args, shared, epoch);
  const int first = plans && gridDim.x > 1 ? 1 : 0;
  if (static_cast<int>(blockIdx.x) < first) return;
  stage(context, args, blockIdx.x - first, gridDim.x - first);
  if (last_block(&context.state->stage_done, gridDim.x - first)) raise_at_all(context, &Region::staged, epoch);
}

}  // namespace

void Engine::prepare(const DispatchArgs& args, int32_t* plan, cudaStream_t stream) const {
  const Sizes& sizes = context_.sizes;
  PrepareArgs all{args, read_plan(sizes, plan), record_bytes(sizes, args), kWarps};
  while (carve_scratch(nullptr, sizes, all.plan_warps, nullptr) > kMaxShared - 1024) --all.plan_warps;
  const size_t shared = args.topk_idx ? carve_scratch(nullptr, sizes, all.plan_warps, nullptr) : 0;
  launch(prepare_kernel, num_sms_, kThreads, shared, stream, context_, all);
}

}  // namespace ep::cuda
