// Histograms of choices.
#pragma once
#include "common/balance.h"

namespace ep::cuda {

// [block] Count this block's share of the choices: topk_idx [num_choices] -> counts [num_experts] in shared memory.
// Entries that are no expert's are left out. Ends with a barrier.
template <int kThreads, class Index>
__device__ inline void count_share(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts) {
  for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_choices; i += step) {
    const int64_t expert = topk_idx[i];
    if (expert >= 0 && expert < num_experts) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
}

}  // namespace ep::cuda
