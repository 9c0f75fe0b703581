// A router's map of chosen experts, as columns of top-k experts; and the gradient of its probabilities.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace ep::cuda {

// Every expert of the map is `slices` experts of the group, one for each rank that holds a slice of it. The group's
// ranks count the slices fastest.
struct Routing {
  int32_t num_tokens, num_experts, topk;
  int32_t slices;            // 1 without expert tensor parallelism
  int32_t experts_per_rank;  // num_experts = experts_per_rank x ranks / slices
  bool skips_zeros;          // an expert with probability 0 is none
  DType dtype;               // of the probabilities
};

// [host] Write the experts of each token in ascending order, slice by slice, and their probabilities:
//   map [num_tokens, num_experts], probs likewise -> topk_idx, weights [num_tokens, slices * topk]
// Behind a token's experts are -1 and 0. A token with more than topk experts gets, in its last column, an expert that
// does not exist.
void map_to_columns(const Routing& routing, const bool* map, const void* probs, int64_t* topk_idx, float* weights,
                    cudaStream_t stream);

// [host] Compute the gradient of probs from the gradient of weights: 0 where the map has no expert.
void columns_to_map(const Routing& routing, const int64_t* topk_idx, const float* grad_weights, void* grad_probs,
                    cudaStream_t stream);

}  // namespace ep::cuda
