// Staging: a rank puts its rows, and their scales and weights (tails), where all ranks of the node can read them.
#pragma once
#include <cuda_fp8.h>

#include "cuda/dispatch.cuh"
#include "cuda/sum_rows.cuh"

namespace ep::cuda {

// The larger magnitude; NaN when one of them is.
__device__ inline float larger(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

// a / b as IEEE 754 rounds it, given 1 / b: for magnitudes that keep all remainders normal.
__device__ inline float divide(float a, float b, float reciprocal) {
  const float near = a * reciprocal, nearer = __fmaf_rn(__fmaf_rn(-near, b, a), reciprocal, near);
  return __fmaf_rn(__fmaf_rn(-nearer, b, a), reciprocal, nearer);
}

// Quantises a bfloat16 row by a warp, bitwise as ep_dispatcher/float8.py: a block of 128 elements by half of it.
__device__ inline void quantize_row(char* to, float* scales, const uint4* from, int num_blocks) {
  constexpr float kLargest = 448, kSmallest = 0x1p-126f;
  constexpr int kTogether = 7, kElements = BFloat16::kElements;
  const int half = threadIdx.x % 32 / 16, lane = threadIdx.x % 16;
#pragma unroll 1
  for (int first = half; first - half < num_blocks; first += 2 * kTogether) {
    uint4 vectors[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) vectors[i] = __ldg(from + min(first + 2 * i, num_blocks - 1) * 16 + lane);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float values[kElements], most = 0;
      BFloat16::load(vectors[i], values);
#pragma unroll
      for (float value : values) most = larger(most, fabsf(value));
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) most = larger(most, __shfl_xor_sync(~0u, most, offset));
      const float scale = larger(__fdiv_rn(most, kLargest), kSmallest);
      if (most > 0x1p-60f && most < 0x1p120f) {
        const float reciprocal = __frcp_rn(scale);
#pragma unroll
        for (float& value : values) value = divide(value, scale, reciprocal);
      } else {
#pragma unroll 1
        for (float& value : values) value = __fdiv_rn(value, scale);
      }
      const int block = first + 2 * i;
      if (block >= num_blocks) continue;
      uint32_t words[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const auto low = __nv_cvt_float2_to_fp8x2({values[4 * w], values[4 * w + 1]}, __NV_SATFINITE, __NV_E4M3);
        const auto high = __nv_cvt_float2_to_fp8x2({values[4 * w + 2], values[4 * w + 3]}, __NV_SATFINITE, __NV_E4M3);
        words[w] = low | static_cast<uint32_t>(high) << 16;
      }
      reinterpret_cast<uint2*>(to)[block * 16 + lane] = {words[0], words[1]};
      if (lane == 0) scales[block] = scale;
    }
  }
}

__device__ inline float* own_tail(const Context& context, const DispatchCall& call, int token) {
  return reinterpret_cast<float*>(context.own().tails + static_cast<size_t>(token) * call.tail_bytes);
}

// A warp's part of the tokens: first, first + step, ...
struct Share {
  int first, step, num;

  __device__ explicit Share(int num_tokens)
      : first(blockIdx.x + gridDim.x * (Helpers::thread() / 32)), step(gridDim.x * Helpers::kWarps) {
    num = first < num_tokens ? (num_tokens - 1 - first) / step + 1 : 0;
  }
};

// The rows as they are: one lane loads and stores all of them.
__device__ inline void stage_rows(const Context& context, const DispatchCall& call, const Share& share, char* ring,
                                  uint64_t* full) {
  const Pieces& pieces = call.staged;
  struct Cursor {
    int token;
    uint32_t piece, place, parity;
  } load{share.first, 0, 0, 0}, store = load;
  const auto advance = [&](Cursor& c) {
    if (++c.piece == pieces.num) c.piece = 0, c.token += share.step;
    if (++c.place == pieces.num_places) c.place = 0, c.parity ^= 1;
  };
  const int total = share.num * static_cast<int>(pieces.num);
  for (int loaded = 0, stored = 0; stored < total; ++stored) {
    for (; loaded < total && loaded - stored < static_cast<int>(pieces.num_places) - (stored > 0); ++loaded) {
      const uint32_t bytes = pieces.bytes_of(load.piece);
      const char* row = call.dispatch.rows + static_cast<size_t>(load.token) * call.dispatch.row_bytes;
      ptx::barrier_arrive_expect(full + load.place, bytes);
      ptx::bulk_load(ring + load.place * pieces.bytes, row + load.piece * pieces.bytes, bytes, full + load.place);
      advance(load);
    }
    ptx::barrier_wait(full + store.place, store.parity);
    char* row = context.own().staging + static_cast<size_t>(store.token) * call.row_stride;
    ptx::bulk_store(row + store.piece * pieces.bytes, ring + store.place * pieces.bytes, pieces.bytes_of(store.piece));
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
    advance(store);
  }
  ptx::bulk_wait<0>();
}

// Scales, and the weights behind them, by a warp.
__device__ inline void stage_tails(const Context& context, const DispatchCall& call, const Share& share) {
  const DispatchArgs& args = call.dispatch;
  const int num_scales = args.scale_bytes / 4, num_weights = args.topk_weights ? context.sizes.num_topk : 0;
  const auto copy = [&](const float* from, int per_token, int offset) {
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < share.num * per_token; i += 32) {
      const int token = share.first + i / per_token * share.step, number = i % per_token;
      own_tail(context, call, token)[offset + number] = __ldg(from + static_cast<size_t>(token) * per_token + number);
    }
  };
  if (args.scales) copy(args.scales, num_scales, 0);
  if (num_weights > 0) copy(args.topk_weights, num_weights, (num_scales + 3) / 4 * 4);
}

// By the helpers: this rank's rows and tails, where peers read them.
__device__ inline void stage(const Context& context, const DispatchCall& call, char* shared, uint64_t epoch) {
  __shared__ uint64_t full[Helpers::kWarps][Pieces::kMostPlaces];
  const DispatchArgs& args = call.dispatch;
  const Share share(args.num_tokens);
  const int warp = Helpers::thread() / 32, lane = threadIdx.x % 32;
  if (args.quantizes) {
#pragma unroll 1
    for (int token = share.first; token < args.num_tokens; token += share.step) {
      const char* row = args.rows + static_cast<size_t>(token) * context.row_bytes;
      quantize_row(context.own().staging + static_cast<size_t>(token) * call.row_stride, own_tail(context, call, token),
                   reinterpret_cast<const uint4*>(row), context.sizes.hidden / kScaleBlock);
    }
  } else if (context.sizes.num_ranks > 1 && lane == 0) {  // nobody else reads this rank's own rows from there
    for (uint32_t i = 0; i < Pieces::kMostPlaces; ++i) ptx::barrier_init(full[warp] + i, 1);
    ptx::fence_barrier_init();
    stage_rows(context, call, share, shared + call.staged_at + warp * call.staged.ring_bytes(), full[warp]);
  }
  __syncwarp();
  stage_tails(context, call, share);
  if (last_block<Helpers>(&context.state->stage_done, gridDim.x))
    raise_at_all<Helpers>(context, &Region::staged, epoch);
}

}  // namespace ep::cuda
