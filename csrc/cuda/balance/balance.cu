// Planning is two kernels: sum_counts, then plan_node with a block for each node, whose threads try a threshold each.
// Rewriting is two kernels: one sends every choice home, then a block for each slot takes its choices from there.
#include <algorithm>
#include <climits>

#include "cuda/balance/balance.h"
#include "cuda/device/check.h"
#include "cuda/device/launch.h"
#include "cuda/device/warp.cuh"

namespace ep::cuda {
namespace {

using balance::Attempt, balance::Copy, balance::Node, balance::Sizes, balance::Thresholds;

constexpr int kThreads = 256;  // of a block that counts, sums or plans
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCountBlocks = 128;  // each adds up to num_experts sums to the same memory
constexpr int kChoicesPerThread = 8;

// ---- Counting ----

template <class Index>
__global__ void __launch_bounds__(kThreads)
    count_choices(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts) {
  __shared__ int32_t block_counts[balance::kMaxExperts];
  for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) block_counts[expert] = 0;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_choices; i += step) {
    const int64_t expert = topk_idx[i];
    if (expert >= 0 && expert < num_experts) atomicAdd(&block_counts[expert], 1);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < num_experts; expert += kThreads)
    if (block_counts[expert] > 0) atomicAdd(&counts[expert], block_counts[expert]);
}

// ---- Planning ----

struct PlanParams {
  Sizes sizes;
  int32_t num_attempts;   // of a block at a time, at most kThreads
  const int64_t* totals;  // [num_experts]
  Copy* copies;           // [num_ranks, num_slots]
  int32_t* rows;          // [2, num_ranks]
  int16_t rank_at[balance::kMaxRanks];
};

// Sum the counts of 32 experts in a block. Each warp takes some of the sources.
__global__ void __launch_bounds__(kThreads)
    sum_counts(Sizes sizes, const int32_t* counts, int64_t row_stride, int64_t* totals) {
  __shared__ int64_t sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, expert = blockIdx.x * 32 + lane;
  int64_t sum = 0;
  if (expert < sizes.num_experts())
    for (int source = warp; source < sizes.num_ranks; source += kWarps)
      sum += balance::count_of(counts, row_stride, source, expert);
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || expert >= sizes.num_experts()) return;
  for (int other = 1; other < kWarps; ++other) sum += sums[other][lane];
  totals[expert] = sum;
}

// [thread] Return the rows of a rank's own experts.
__device__ int64_t load_of(const PlanParams& params, int rank) {
  const int m = params.sizes.num_local_experts;
  int64_t load = 0;
  for (int j = 0; j < m; ++j) load += params.totals[rank * m + j];
  return load;
}

__global__ void __launch_bounds__(kThreads) plan_node(const __grid_constant__ PlanParams params) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ unsigned long long group_total, group_max;  // integers: the order of atomic operations does not matter
  __shared__ int first_feasible;
  const Sizes sizes = params.sizes;
  const int m = sizes.num_local_experts;
  const int16_t* rank_at = params.rank_at + blockIdx.x * sizes.ranks_per_node;
  Cursor c(shared);
  const Node node = balance::carve_node(c, sizes);
  const Attempt attempts = Attempt::carve(c, sizes, params.num_attempts);
  if (threadIdx.x == 0) {
    group_total = 0, group_max = 0;
    first_feasible = INT_MAX;
  }
  __syncthreads();

  // Load the rows of the group's ranks, and of the node's ranks and experts.
  for (int rank = threadIdx.x; rank < sizes.num_ranks; rank += kThreads) {
    const int64_t load = load_of(params, rank);
    atomicAdd(&group_total, static_cast<unsigned long long>(load));
    atomicMax(&group_max, static_cast<unsigned long long>(load));
  }
  for (int i = threadIdx.x; i < sizes.ranks_per_node; i += kThreads) {
    node.rank[i] = rank_at[i];
    node.load[i] = load_of(params, rank_at[i]);
  }
  for (int expert = threadIdx.x; expert < sizes.experts_of_node(); expert += kThreads)
    node.total[expert] = params.totals[rank_at[expert / m] * m + expert % m];
  __syncthreads();

  // Sort the experts of each rank.
  for (int expert = threadIdx.x; expert < sizes.experts_of_node(); expert += kThreads)
    balance::put_in_order(sizes, node, expert / m, expert % m);
  __syncthreads();

  // Try thresholds in ascending order, one a thread, until one of them is feasible. One above all loads is.
  const Thresholds thresholds =
      balance::thresholds_of(sizes, node, static_cast<int64_t>(group_total), static_cast<int64_t>(group_max));
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
  for (int i = threadIdx.x; i < sizes.slots_of_node(); i += kThreads) {
    const int rank = i / sizes.num_slots, slot = i % sizes.num_slots;
    params.copies[node.rank[rank] * sizes.num_slots + slot] = balance::copy_in(sizes, node, best, rank, slot);
  }
  for (int i = threadIdx.x; i < sizes.ranks_per_node; i += kThreads) {
    params.rows[node.rank[i]] = static_cast<int32_t>(node.load[i]);
    params.rows[sizes.num_ranks + node.rank[i]] = static_cast<int32_t>(best.load[i]);
  }
}

// [host] Return the bytes of shared memory that plan_node needs.
size_t plan_shared(const Sizes& sizes, int num_attempts) {
  Cursor c;
  balance::carve_node(c, sizes);
  Attempt::carve(c, sizes, num_attempts);
  return c.size();
}

// ---- Rewriting ----

constexpr int kSlotThreads = 1024;  // of a block that looks for the choices of a slot
constexpr int kSlotWarps = kSlotThreads / 32;
constexpr int kChunkTokens = 32 * kSlotThreads;  // a word of 32 tokens for each thread

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

// Send every choice to its home.
template <class Index>
__global__ void __launch_bounds__(kThreads) send_home(const __grid_constant__ RewriteParams<Index> params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < params.num_tokens * params.num_topk)
    params.physical[i] = balance::physical_at_home(params.sizes, params.topk_idx[i]);
}

// [block] Replace each thread's value by the sum of those of lower threads. Return the sum of all.
__device__ int sum_before(int& value) {
  __shared__ int warp_sums[kSlotWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = inclusive_sum(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int other = 0; other < kSlotWarps; ++other) {
    if (other < warp) before += warp_sums[other];
    all += warp_sums[other];
  }
  __syncthreads();  // everybody has read the sums: the next call may write them
  value = before + sum - value;
  return all;
}

// Find the choices that go to a slot, one slot a block: number the tokens with its expert in ascending order.
template <class Index>
__global__ void __launch_bounds__(kSlotThreads) send_to_slots(const __grid_constant__ RewriteParams<Index> params) {
  __shared__ unsigned long long before;      // choices of the expert on earlier sources
  __shared__ uint32_t tokens[kSlotThreads];  // a bit for each token of the chunk: it has the expert
  __shared__ int earlier[kSlotThreads];      // tokens with the expert in the words of `tokens` before this one
  const Sizes sizes = params.sizes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_topk = params.num_topk;
  const Copy copy = params.copies[blockIdx.x];
  const int expert = copy.expert;
  if (expert < 0 || expert >= sizes.num_experts()) return;

  // Count the choices of earlier sources.
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  for (int source = threadIdx.x; source < params.rank; source += kSlotThreads)
    atomicAdd(&before,
              static_cast<unsigned long long>(balance::count_of(params.counts, params.row_stride, source, expert)));
  __syncthreads();
  int64_t next = static_cast<int64_t>(before);  // number of the chunk's first choice
  const int64_t own = balance::count_of(params.counts, params.row_stride, params.rank, expert);
  if (!balance::serves(copy, next, own)) return;

  const int64_t physical = balance::physical_of_slot(sizes, blockIdx.x);
  for (int64_t first = 0; first < params.num_tokens && next < copy.end; first += kChunkTokens) {
    const int64_t chunk = balance::smaller(kChunkTokens, params.num_tokens - first);
    const int num_words = static_cast<int>((chunk + 31) / 32);

    // Mark the tokens that have the expert.
    for (int word = warp; word < num_words; word += kSlotWarps) {
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

    // Take those whose number is the slot's.
    for (int word = warp; word < num_words; word += kSlotWarps) {
      const uint32_t marks = tokens[word];
      if ((marks >> lane & 1) == 0) continue;
      const int64_t number = next + earlier[word] + __popc(marks & ((1u << lane) - 1));
      if (number < copy.begin || number >= copy.end) continue;
      const int64_t at = (first + word * 32 + lane) * num_topk;
      for (int k = 0; k < num_topk; ++k)
        if (params.topk_idx[at + k] == expert) params.physical[at + k] = physical;
    }
    next += all;
    __syncthreads();  // the next chunk writes `tokens`
  }
}

// [host] Return the blocks of so many threads for that many elements.
int blocks_for(int64_t elements, int threads) { return static_cast<int>((elements + threads - 1) / threads); }

}  // namespace

template <class Index>
void balance_count(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts, cudaStream_t stream) {
  check(cudaMemsetAsync(counts, 0, num_experts * sizeof(int32_t), stream), "zero counts");
  if (num_choices == 0) return;
  const int blocks = std::min(kMaxCountBlocks, blocks_for(num_choices, kThreads * kChoicesPerThread));
  launch(count_choices<Index>, blocks, kThreads, 0, stream, topk_idx, num_choices, num_experts, counts);
}

void balance_plan(const Sizes& sizes, const std::vector<int>& rank_at, const int32_t* counts, int64_t row_stride,
                  int64_t* totals, Copy* copies, int32_t* rows, cudaStream_t stream) {
  PlanParams params{sizes, kThreads, totals, copies, rows, {}};
  std::copy(rank_at.begin(), rank_at.end(), params.rank_at);
  while (plan_shared(sizes, params.num_attempts) > kUsableShared) params.num_attempts /= 2;
  launch(sum_counts, blocks_for(sizes.num_experts(), 32), kThreads, 0, stream, sizes, counts, row_stride, totals);
  launch(plan_node, sizes.num_nodes(), kThreads, plan_shared(sizes, params.num_attempts), stream, params);
}

template <class Index>
void balance_rewrite(const Sizes& sizes, int rank, const Index* topk_idx, int64_t num_tokens, int num_topk,
                     const int32_t* counts, int64_t row_stride, const Copy* copies, int64_t* physical,
                     cudaStream_t stream) {
  if (num_tokens * num_topk == 0) return;
  const RewriteParams<Index> params{sizes, rank, num_topk, num_tokens, topk_idx, counts, row_stride, copies, physical};
  launch(send_home<Index>, blocks_for(num_tokens * num_topk, kThreads), kThreads, 0, stream, params);
  launch(send_to_slots<Index>, sizes.slots_of_all(), kSlotThreads, 0, stream, params);
}

template void balance_count(const int32_t*, int64_t, int, int32_t*, cudaStream_t);
template void balance_count(const int64_t*, int64_t, int, int32_t*, cudaStream_t);
template void balance_rewrite(const Sizes&, int, const int32_t*, int64_t, int, const int32_t*, int64_t, const Copy*,
                              int64_t*, cudaStream_t);
template void balance_rewrite(const Sizes&, int, const int64_t*, int64_t, int, const int32_t*, int64_t, const Copy*,
                              int64_t*, cudaStream_t);

}  // namespace ep::cuda
