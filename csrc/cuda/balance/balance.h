// Balanced experts on GPUs: counts, the plan of copies, and physical numbers. common/balance.h has the algorithm.
//
// The host waits for nothing and allocates nothing, so a CUDA graph can capture all three.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "common/balance.h"

namespace ep::cuda {

// [host] Count the choices of each expert: topk_idx [num_choices] -> counts [num_experts]. Entries that are no expert's
// are left out.
template <class Index>
void balance_count(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts, cudaStream_t stream);

// [host] Plan the copies. rank_at lies in the host's memory, all else on the GPU.
//   rank_at  [num_ranks] the ranks, node by node
//   counts   [num_ranks, row_stride], of which the first num_experts columns are read
//   copies   [num_ranks, num_slots]
//   rows     [2, num_ranks] rows of each rank before and after
// The counts add up to 2^31 - 1 rows at most. Nobody looks whether they do.
void balance_plan(const balance::Sizes& sizes, const std::vector<int>& rank_at, const int32_t* counts,
                  int64_t row_stride, balance::Copy* copies, int32_t* rows, cudaStream_t stream);

// [host] Write the physical expert of each choice of one rank: topk_idx [num_tokens, num_topk] -> physical.
template <class Index>
void balance_rewrite(const balance::Sizes& sizes, int rank, const Index* topk_idx, int64_t num_tokens, int num_topk,
                     const int32_t* counts, int64_t row_stride, const balance::Copy* copies, int64_t* physical,
                     cudaStream_t stream);

}  // namespace ep::cuda
