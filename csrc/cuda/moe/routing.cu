// One warp for each token: a coalesced pass over its row of the map.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/check.h"
#include "cuda/moe/routing.h"

namespace ep::cuda {
namespace {

constexpr int kWarps = 4;  // of a block

// [thread] Return the number that the group gives a slice of an expert.
__device__ int64_t of_group(const Routing& r, int expert, int slice) {
  return (static_cast<int64_t>(expert / r.experts_per_rank) * r.slices + slice) * r.experts_per_rank +
         expert % r.experts_per_rank;
}

// [thread] Return the expert of which this is the first slice.
__device__ int64_t of_map(const Routing& r, int64_t expert) {
  return expert / (static_cast<int64_t>(r.experts_per_rank) * r.slices) * r.experts_per_rank +
         expert % r.experts_per_rank;
}

// [thread] Return the token of this warp.
__device__ int64_t own_token() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }

template <class Prob>
__global__ void __launch_bounds__(32 * kWarps)
    columns_of(Routing r, const bool* map, const Prob* probs, int64_t* topk_idx, float* weights) {
  const int64_t token = own_token();
  if (token >= r.num_tokens) return;
  const int lane = threadIdx.x % 32;
  map += token * r.num_experts, probs += token * r.num_experts;
  topk_idx += token * r.topk * r.slices, weights += token * r.topk * r.slices;
  int found = 0;
  for (int first = 0; first < r.num_experts; first += 32) {
    const int expert = first + lane;
    bool chosen = expert < r.num_experts && map[expert];
    if (r.skips_zeros) chosen = chosen && static_cast<float>(probs[expert]) != 0;
    const uint32_t all = __ballot_sync(~0u, chosen);
    const int column = found + __popc(all & ((1u << lane) - 1));
    if (chosen && column < r.topk) {
      const float weight = static_cast<float>(probs[expert]);
      for (int slice = 0; slice < r.slices; ++slice) {
        topk_idx[slice * r.topk + column] = of_group(r, expert, slice);
        weights[slice * r.topk + column] = weight;
      }
    }
    found += __popc(all);
  }
  for (int column = found + lane; column < r.topk; column += 32)
    for (int slice = 0; slice < r.slices; ++slice) {
      topk_idx[slice * r.topk + column] = -1;
      weights[slice * r.topk + column] = 0;
    }
  __syncwarp();  // another lane has written the last column
  if (lane == 0 && found > r.topk && r.topk > 0)
    topk_idx[r.slices * r.topk - 1] = static_cast<int64_t>(r.num_experts) * r.slices;
}

template <class Prob>
__global__ void __launch_bounds__(32 * kWarps)
    map_of(Routing r, const int64_t* topk_idx, const float* grad_weights, Prob* grad_probs) {
  const int64_t token = own_token();
  if (token >= r.num_tokens) return;
  const int lane = threadIdx.x % 32;
  topk_idx += token * r.topk * r.slices, grad_weights += token * r.topk * r.slices;
  grad_probs += token * r.num_experts;
  for (int expert = lane; expert < r.num_experts; expert += 32) grad_probs[expert] = static_cast<Prob>(0.0f);
  __syncwarp();  // zeros first
  for (int column = lane; column < r.topk; column += 32) {
    const int64_t first = topk_idx[column];
    if (first < 0 || first >= static_cast<int64_t>(r.num_experts) * r.slices) continue;
    float sum = grad_weights[column];
    for (int slice = 1; slice < r.slices; ++slice) sum += grad_weights[slice * r.topk + column];
    grad_probs[of_map(r, first)] = static_cast<Prob>(sum);
  }
}

// [host] Call run with a null pointer to the dtype.
template <class Run>
void with_dtype(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat32:
      return run(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return run(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kFloat16:
      return run(static_cast<__half*>(nullptr));
  }
}

int blocks_of(const Routing& routing) { return (routing.num_tokens + kWarps - 1) / kWarps; }

}  // namespace

void map_to_columns(const Routing& routing, const bool* map, const void* probs, int64_t* topk_idx, float* weights,
                    cudaStream_t stream) {
  if (routing.num_tokens == 0) return;
  with_dtype(routing.dtype, [&](auto* type) {
    columns_of<<<blocks_of(routing), 32 * kWarps, 0, stream>>>(
        routing, map, static_cast<decltype(type)>(const_cast<void*>(probs)), topk_idx, weights);
  });
  check(cudaGetLastError(), "routing map");
}

void columns_to_map(const Routing& routing, const int64_t* topk_idx, const float* grad_weights, void* grad_probs,
                    cudaStream_t stream) {
  if (routing.num_tokens == 0) return;
  with_dtype(routing.dtype, [&](auto* type) {
    map_of<<<blocks_of(routing), 32 * kWarps, 0, stream>>>(routing, topk_idx, grad_weights,
                                                           static_cast<decltype(type)>(grad_probs));
  });
  check(cudaGetLastError(), "gradient of a routing map");
}

}  // namespace ep::cuda
