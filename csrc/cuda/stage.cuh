// Staging: a rank puts its rows where all ranks of the node can read them.
#pragma once
#include "cuda/engine.h"
#include "cuda/wait.cuh"

namespace ep::cuda {

// Copies vectors of 16 bytes by a warp, several loads under way at a time.
__device__ inline void copy_vectors(uint4* to, const uint4* from, int num) {
  constexpr int kUnroll = 10;
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

// Called by all threads of all blocks.
__device__ inline void stage(const Context& context, const DispatchArgs& args, uint32_t stride, uint32_t tail_bytes) {
  const int lane = threadIdx.x % 32, num_topk = context.sizes.num_topk, num_scales = args.scale_bytes / 4;
  const int warps = gridDim.x * (blockDim.x / 32);
  for (int t = blockIdx.x + gridDim.x * (threadIdx.x / 32); t < args.num_tokens; t += warps) {
    char* to = context.own().staging + static_cast<size_t>(t) * stride;
    const char* row = args.rows + static_cast<size_t>(t) * args.row_bytes;
    copy_vectors(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(row), args.row_bytes / kVector);
    float* tail = reinterpret_cast<float*>(context.own().tails + static_cast<size_t>(t) * tail_bytes);
    for (int i = lane; i < num_scales; i += 32) tail[i] = __ldg(args.scales + static_cast<size_t>(t) * num_scales + i);
    tail += (num_scales + 3) / 4 * 4;
    if (args.topk_weights && lane < num_topk)
      tail[lane] = __ldg(args.topk_weights + static_cast<size_t>(t) * num_topk + lane);
  }
}

}  // namespace ep::cuda
