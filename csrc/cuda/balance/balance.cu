// Counting is one kernel (gather.cu has one that also sends). Planning is one kernel, with a block for each node, whose
// threads try a threshold each. Rewriting is one kernel: a block for each expert with copies sends all its choices, and
// the other blocks send the choices of other experts home.
#include <algorithm>
#include <climits>

#include "cuda/balance/balance.h"
#include "cuda/balance/count.cuh"
#include "cuda/device/check.h"
#include "cuda/device/launch.h"
#include "cuda/device/warp.cuh"

namespace ep::cuda {
namespace {

using balance::Attempt, balance::Copy, balance::Node, balance::Sizes, balance::Thresholds;

// ---- Counting ----

constexpr int kCountThreads = 256;
constexpr int kMaxCountBlocks = 128;  // each adds up to num_experts sums to the same memory
constexpr int kChoicesPerThread = 8;

template <class Index>
__global__ void __launch_bounds__(kCountThreads)
    count_choices(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts) {
  __shared__ int32_t block_counts[balance::kMaxExperts];
  count_share<kCountThreads>(topk_idx, num_choices, num_experts, block_counts);
  for (int expert = threadIdx.x; expert < num_experts; expert += kCountThreads)
    if (block_counts[expert] > 0) atomicAdd(&counts[expert], block_counts[expert]);
}

// ---- Planning ----

constexpr int kPlanThreads = 1024;
constexpr int kMaxAttempts = 256;  // of a block at a time: each has arrays in shared memory

struct PlanParams {
  Sizes sizes;
  int32_t num_attempts;   // of a block at a time, at most kMaxAttempts
  const int32_t* counts;  // [num_ranks, row_stride]
  int64_t row_stride;
  Copy* copies;   // [num_ranks, num_slots]
  int32_t* rows;  // [2, num_ranks]
  int16_t rank_at[balance::kMaxRanks];
};

// Sums of 64 bits in shared memory. The order in which integers are added does not matter.
using Sum = unsigned long long;
static_assert(sizeof(Sum) == sizeof(int64_t));

// [block] Sum the counts of every expert over the sources: totals [num_experts]. Ends with a barrier.
__device__ void sum_counts(const PlanParams& params, Sum* totals) {
  constexpr int kMaxParts = 8;  // atomic additions of 64 bits to one address are slow
  const Sizes& sizes = params.sizes;
  const int num_experts = sizes.num_experts();
  for (int expert = threadIdx.x; expert < num_experts; expert += kPlanThreads) totals[expert] = 0;
  __syncthreads();
  // So many threads share the sources of an expert.
  const int num_parts = max(1, min(min(kMaxParts, sizes.num_ranks), kPlanThreads / num_experts));
  for (int i = threadIdx.x; i < num_experts * num_parts; i += kPlanThreads) {
    const int part = i / num_experts, expert = i - part * num_experts;
    Sum sum = 0;
#pragma unroll 8
    for (int source = part; source < sizes.num_ranks; source += num_parts)
      sum += balance::count_of(params.counts, params.row_stride, source, expert);
    atomicAdd(totals + expert, sum);
  }
  __syncthreads();
}

// Rows of all ranks of the group, and of the fullest one.
struct GroupRows {
  int64_t total, max;
};

// [warp] Find them. Return the same in all lanes.
__device__ GroupRows rows_of_group(const int64_t* loads, int num_ranks) {
  GroupRows rows{0, 0};
  for (int rank = threadIdx.x % 32; rank < num_ranks; rank += 32) {
    rows.total += loads[rank];
    rows.max = balance::larger(rows.max, loads[rank]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    rows.total += __shfl_xor_sync(~0u, rows.total, distance);
    rows.max = balance::larger(rows.max, __shfl_xor_sync(~0u, rows.max, distance));
  }
  return rows;
}

__global__ void __launch_bounds__(kPlanThreads) plan_node(const __grid_constant__ PlanParams params) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ Sum totals[balance::kMaxExperts];
  __shared__ int64_t loads[balance::kMaxRanks];  // rows of each rank's own experts
  __shared__ GroupRows group;
  __shared__ int first_feasible;
  const Sizes sizes = params.sizes;
  const int m = sizes.num_local_experts;
  const int16_t* rank_at = params.rank_at + blockIdx.x * sizes.ranks_per_node;
  Cursor c(shared);
  const Node node = balance::carve_node(c, sizes);
  const Attempt attempts = Attempt::carve(c, sizes, params.num_attempts);
  if (threadIdx.x == 0) first_feasible = INT_MAX;

  // Find the rows of experts, and those of ranks.
  sum_counts(params, totals);
  for (int rank = threadIdx.x; rank < sizes.num_ranks; rank += kPlanThreads) {
    int64_t load = 0;
    for (int j = 0; j < m; ++j) load += static_cast<int64_t>(totals[rank * m + j]);
    loads[rank] = load;
  }
  for (int expert = threadIdx.x; expert < sizes.experts_of_node(); expert += kPlanThreads)
    node.total[expert] = static_cast<int64_t>(totals[rank_at[expert / m] * m + expert % m]);
  __syncthreads();
  if (threadIdx.x < 32) {
    const GroupRows rows = rows_of_group(loads, sizes.num_ranks);
    if (threadIdx.x == 0) group = rows;
  }
  for (int i = threadIdx.x; i < sizes.ranks_per_node; i += kPlanThreads) {
    node.rank[i] = rank_at[i];
    node.load[i] = loads[rank_at[i]];
  }
  // Sort the experts of each rank.
  for (int expert = threadIdx.x; expert < sizes.experts_of_node(); expert += kPlanThreads)
    balance::put_in_order(sizes, node, expert / m, expert % m);
  __syncthreads();

  // Try thresholds in ascending order, one a thread, until one of them is feasible. One above all loads is.
  const Thresholds thresholds = balance::thresholds_of(sizes, node, group.total, group.max);
  int first = 0;  // number of the first thread's threshold
  for (;; first += params.num_attempts) {
    bool is_feasible = false;
    if (threadIdx.x < params.num_attempts) {
      const int own = first + threadIdx.x;
      is_feasible = balance::hand_out(sizes, node, attempts.at(threadIdx.x), thresholds.start + own * thresholds.step);
      if (is_feasible) atomicMin(&first_feasible, own);
    }
    if (__syncthreads_or(is_feasible)) break;
  }

  // Write the copies and rows of the lowest one.
  const Attempt best = attempts.at(first_feasible - first);
  for (int i = threadIdx.x; i < sizes.slots_of_node(); i += kPlanThreads) {
    const int rank = i / sizes.num_slots, slot = i % sizes.num_slots;
    params.copies[node.rank[rank] * sizes.num_slots + slot] = balance::copy_in(sizes, node, best, rank, slot);
  }
  for (int i = threadIdx.x; i < sizes.ranks_per_node; i += kPlanThreads) {
    params.rows[node.rank[i]] = static_cast<int32_t>(node.load[i]);
    params.rows[sizes.num_ranks + node.rank[i]] = static_cast<int32_t>(best.load[i]);
  }
}

// [bytes] dynamic shared memory that plan_node may have: kUsableShared without its static variables.
constexpr size_t kPlanShared = kUsableShared - 13 * 1024;

// [host] Return the bytes of dynamic shared memory that plan_node needs.
size_t plan_shared(const Sizes& sizes, int num_attempts) {
  Cursor c;
  balance::carve_node(c, sizes);
  Attempt::carve(c, sizes, num_attempts);
  return c.size();
}

// ---- Rewriting ----

constexpr int kRewriteThreads = 1024;
constexpr int kRewriteWarps = kRewriteThreads / 32;
constexpr int kChunkTokens = 32 * kRewriteThreads;  // a word of 32 tokens for each thread
constexpr int kHomeChoices = 4;                     // that a thread sends home

template <class Index>
struct RewriteParams {
  Sizes sizes;
  int32_t rank, num_topk;
  int64_t num_tokens;
  const Index* topk_idx;  // [num_tokens, num_topk]
  const int32_t* counts;  // [num_ranks, row_stride]
  int64_t row_stride;
  const Copy* copies;  // [num_ranks, num_slots]
  int64_t* physical;   // [num_tokens, num_topk]
};

// [block] Send the choices of experts without copies home: this block's share of them. Entries that are no expert's
// stay so.
template <class Index>
__device__ void send_home(const RewriteParams<Index>& params, int block, int num_blocks) {
  __shared__ uint32_t has_copies[balance::kMaxExperts / 32];  // a bit for each expert
  const Sizes& sizes = params.sizes;
  for (int word = threadIdx.x; word < balance::kMaxExperts / 32; word += kRewriteThreads) has_copies[word] = 0;
  __syncthreads();
  for (int slot = threadIdx.x; slot < sizes.slots_of_all(); slot += kRewriteThreads) {
    const int expert = params.copies[slot].expert;
    if (expert >= 0 && expert < sizes.num_experts()) atomicOr(&has_copies[expert / 32], 1u << expert % 32);
  }
  __syncthreads();
  const int64_t num_choices = params.num_tokens * params.num_topk, step = int64_t{num_blocks} * kRewriteThreads;
#pragma unroll 4
  for (int64_t i = int64_t{block} * kRewriteThreads + threadIdx.x; i < num_choices; i += step) {
    const int64_t expert = params.topk_idx[i];
    const bool is_expert = expert >= 0 && expert < sizes.num_experts();
    if (is_expert && (has_copies[expert / 32] >> expert % 32 & 1)) continue;
    params.physical[i] = balance::physical_at_home(sizes, expert);
  }
}

// [block] Replace each thread's value by the sum of those of lower threads. Return the sum of all.
__device__ int sum_before(int& value) {
  __shared__ int warp_sums[kRewriteWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = inclusive_sum(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int other = 0; other < kRewriteWarps; ++other) {
    if (other < warp) before += warp_sums[other];
    all += warp_sums[other];
  }
  __syncthreads();  // everybody has read the sums: the next call may write them
  value = before + sum - value;
  return all;
}

// A copy of the expert that a block sends.
struct CopyInSlot {
  int32_t begin, end;  // as in Copy
  int32_t slot;        // rank * num_slots + slot
};

// [block] List the copies of one expert, in any order. Return their number, or 0 if the expert has a copy in a slot
// before `first_slot`: the block of that slot sends it. Ends with a barrier.
template <class Index>
__device__ int list_copies(const RewriteParams<Index>& params, int first_slot, int expert, CopyInSlot* list) {
  __shared__ int count, first;
  if (threadIdx.x == 0) count = 0, first = INT_MAX;
  __syncthreads();
  for (int slot = threadIdx.x; slot < params.sizes.slots_of_all(); slot += kRewriteThreads) {
    const Copy copy = params.copies[slot];
    if (copy.expert != expert) continue;
    atomicMin(&first, slot);
    const int at = atomicAdd(&count, 1);
    if (at < balance::kMaxLocal) list[at] = {copy.begin, copy.end, slot};  // a plan has no more: one for each rank
  }
  __syncthreads();
  return first == first_slot ? min(count, balance::kMaxLocal) : 0;
}

// [block] Send all choices of the expert in a slot: number the tokens that have it in ascending order.
template <class Index>
__device__ void send_expert(const RewriteParams<Index>& params, int first_slot) {
  __shared__ CopyInSlot copies[balance::kMaxLocal];
  __shared__ unsigned long long before;         // choices of the expert on earlier sources
  __shared__ uint32_t tokens[kRewriteThreads];  // a bit for each token of the chunk: it has the expert
  __shared__ int earlier[kRewriteThreads];      // tokens with the expert in the words of `tokens` before this one
  const Sizes& sizes = params.sizes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_topk = params.num_topk;
  const int expert = params.copies[first_slot].expert;
  if (expert < 0 || expert >= sizes.num_experts()) return;
  const int num_copies = list_copies(params, first_slot, expert, copies);
  if (num_copies == 0) return;

  // Count the choices of earlier sources.
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  for (int source = threadIdx.x; source < params.rank; source += kRewriteThreads)
    atomicAdd(&before,
              static_cast<unsigned long long>(balance::count_of(params.counts, params.row_stride, source, expert)));
  __syncthreads();
  int64_t next = static_cast<int64_t>(before);  // number of the chunk's first choice

  const int64_t home = balance::physical_at_home(sizes, expert);
  for (int64_t first = 0; first < params.num_tokens; first += kChunkTokens) {
    const int64_t chunk = balance::smaller(kChunkTokens, params.num_tokens - first);
    const int num_words = static_cast<int>((chunk + 31) / 32);

    // Mark the tokens that have the expert.
    for (int word = warp; word < num_words; word += kRewriteWarps) {
      const int64_t token = first + word * 32 + lane;
      bool has_expert = false;
      if (token < params.num_tokens) {
        const Index* choices = params.topk_idx + token * num_topk;
        for (int k = 0; k < num_topk; ++k) has_expert |= choices[k] == expert;
      }
      const uint32_t marks = __ballot_sync(~0u, has_expert);
      if (lane == 0) tokens[word] = marks;
    }
    __syncthreads();

    // Number them.
    int sum = static_cast<int>(threadIdx.x) < num_words ? __popc(tokens[threadIdx.x]) : 0;
    const int all = sum_before(sum);
    earlier[threadIdx.x] = sum;
    __syncthreads();

    // Send each to the copy that serves its number, or home.
    for (int word = warp; word < num_words; word += kRewriteWarps) {
      const uint32_t marks = tokens[word];
      if ((marks >> lane & 1) == 0) continue;
      const int64_t number = next + earlier[word] + __popc(marks & ((1u << lane) - 1));
      int64_t physical = home;
      for (int i = 0; i < num_copies; ++i)
        if (number >= copies[i].begin && number < copies[i].end)
          physical = balance::physical_of_slot(sizes, copies[i].slot);
      const int64_t at = (first + word * 32 + lane) * num_topk;
      for (int k = 0; k < num_topk; ++k)
        if (params.topk_idx[at + k] == expert) params.physical[at + k] = physical;
    }
    next += all;
    __syncthreads();  // the next chunk writes `tokens`
  }
}

// The blocks of slots come first, as theirs is the longer way.
template <class Index>
__global__ void __launch_bounds__(kRewriteThreads)
    rewrite_choices(const __grid_constant__ RewriteParams<Index> params) {
  const int num_slots = params.sizes.slots_of_all(), block = static_cast<int>(blockIdx.x);
  if (block < num_slots)
    send_expert(params, block);
  else
    send_home(params, block - num_slots, static_cast<int>(gridDim.x) - num_slots);
}

// [host] Return the blocks of so many threads for that many elements.
int blocks_for(int64_t elements, int threads) { return static_cast<int>((elements + threads - 1) / threads); }

}  // namespace

template <class Index>
void balance_count(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts, cudaStream_t stream) {
  check(cudaMemsetAsync(counts, 0, num_experts * sizeof(int32_t), stream), "zero counts");
  if (num_choices == 0) return;
  const int blocks = std::min(kMaxCountBlocks, blocks_for(num_choices, kCountThreads * kChoicesPerThread));
  launch(count_choices<Index>, blocks, kCountThreads, 0, stream, topk_idx, num_choices, num_experts, counts);
}

void balance_plan(const Sizes& sizes, const std::vector<int>& rank_at, const int32_t* counts, int64_t row_stride,
                  Copy* copies, int32_t* rows, cudaStream_t stream) {
  PlanParams params{sizes, kMaxAttempts, counts, row_stride, copies, rows, {}};
  std::copy(rank_at.begin(), rank_at.end(), params.rank_at);
  while (plan_shared(sizes, params.num_attempts) > kPlanShared) params.num_attempts /= 2;
  launch(plan_node, sizes.num_nodes(), kPlanThreads, plan_shared(sizes, params.num_attempts), stream, params);
}

template <class Index>
void balance_rewrite(const Sizes& sizes, int rank, const Index* topk_idx, int64_t num_tokens, int num_topk,
                     const int32_t* counts, int64_t row_stride, const Copy* copies, int64_t* physical,
                     cudaStream_t stream) {
  if (num_tokens * num_topk == 0) return;
  const RewriteParams<Index> params{sizes, rank, num_topk, num_tokens, topk_idx, counts, row_stride, copies, physical};
  const int home_blocks = blocks_for(num_tokens * num_topk, kRewriteThreads * kHomeChoices);
  launch(rewrite_choices<Index>, sizes.slots_of_all() + home_blocks, kRewriteThreads, 0, stream, params);
}

template void balance_count(const int32_t*, int64_t, int, int32_t*, cudaStream_t);
template void balance_count(const int64_t*, int64_t, int, int32_t*, cudaStream_t);
template void balance_rewrite(const Sizes&, int, const int32_t*, int64_t, int, const int32_t*, int64_t, const Copy*,
                              int64_t*, cudaStream_t);
template void balance_rewrite(const Sizes&, int, const int64_t*, int64_t, int, const int32_t*, int64_t, const Copy*,
                              int64_t*, cudaStream_t);

}  // namespace ep::cuda
