// Staging: a rank puts its rows, and their scales and weights (tails), where all ranks of the node can read them.
#pragma once
#include <cuda_fp8.h>

#include "cuda/dispatch.cuh"
#include "cuda/sum_rows.cuh"

namespace ep::cuda {

// a / b as IEEE 754 rounds it, given 1 / b, unless it is so small (2^-45) that float8 has 0 for it.
__device__ inline float divide(float a, float b, float reciprocal) {
  const float near = a * reciprocal, nearer = __fmaf_rn(__fmaf_rn(-near, b, a), reciprocal, near);
  return copysignf(__fmaf_rn(__fmaf_rn(-nearer, b, a), reciprocal, nearer), a);  // the sums lose the sign of -0
}

// The same for any magnitudes.
__device__ __noinline__ inline void divide_all(float (&values)[BFloat16::kElements], float by) {
  for (float& value : values) value = __fdiv_rn(value, by);
}

// The largest magnitude of 8 bfloat16 in each 16 lanes, as bits. Those of magnitudes are ordered as they are; NaN is
// the largest.
__device__ inline uint32_t largest_magnitude(const uint4& vector) {
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  uint32_t most = __vmaxu2(__vmaxu2(vector.x & kMagnitudes, vector.y & kMagnitudes),
                           __vmaxu2(vector.z & kMagnitudes, vector.w & kMagnitudes));
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, offset));
  return max(most >> 16, most & 0xffff);
}

// Quantises a bfloat16 row by a warp, bitwise as ep_dispatcher/float8.py: a block of 128 elements by half of it.
__device__ inline void quantize_row(char* to, float* scales, const uint4* from, int num_blocks) {
  constexpr float kLargest = 448, kSmallest = 0x1p-126f;
  constexpr int kTogether = 7, kElements = BFloat16::kElements;  // blocks at a time, by half a warp
  const int half = threadIdx.x % 32 / 16, lane = threadIdx.x % 16;
#pragma unroll 1
  for (int first = half; first - half < num_blocks; first += 2 * kTogether) {
    uint4 vectors[kTogether];
    uint32_t most = 0;  // of block `lane`
#pragma unroll
    for (int i = 0; i < kTogether; ++i) vectors[i] = __ldg(from + min(first + 2 * i, num_blocks - 1) * 16 + lane);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const uint32_t its_most = largest_magnitude(vectors[i]);
      if (lane == i) most = its_most;
    }
    const float amax = __uint_as_float(most << 16);
    float scale = __fdiv_rn(amax, kLargest);
    if (scale < kSmallest) scale = kSmallest;  // and not when it is NaN
    const float reciprocal = __frcp_rn(scale);
    const bool plain = __all_sync(~0u, lane >= kTogether || (amax > 0x1p-60f && amax < 0x1p120f));  // as most rows are
    if (lane < kTogether && first + 2 * lane < num_blocks) scales[first + 2 * lane] = scale;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float its_scale = __shfl_sync(~0u, scale, i, 16), its_reciprocal = __shfl_sync(~0u, reciprocal, i, 16);
      float values[kElements];
      BFloat16::load(vectors[i], values);
      if (plain) {
#pragma unroll
        for (float& value : values) value = divide(value, its_scale, its_reciprocal);
      } else {
        divide_all(values, its_scale);
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
    }
  }
}

__device__ inline float* own_tail(const Context& context, const DispatchCall& call, int token) {
  return reinterpret_cast<float*>(context.own().tails + static_cast<size_t>(token) * call.tail_bytes);
}

// A warp's part of some tokens: first, first + step, ...
struct Share {
  int first, step, num;

  __device__ Share(int begin, int end)
      : first(begin + blockIdx.x + gridDim.x * (Helpers::thread() / 32)), step(gridDim.x * Helpers::kWarps) {
    num = first < end ? (end - 1 - first) / step + 1 : 0;
  }
};

// The rows as they are: one lane loads and stores all of them.
__device__ inline void stage_rows(const Context& context, const DispatchCall& call, const Share& share,
                                  const Pieces& pieces, char* ring, uint64_t* full) {
  const DispatchArgs& args = call.dispatch;
  struct Cursor {
    int token;
    uint32_t piece, place, parity;
  } load{share.first, 0, 0, 0}, store = load;
  const auto advance = [&](Cursor& c) {
    if (++c.piece == pieces.num) c.piece = 0, c.token += share.step;
    if (++c.place == pieces.num_places) c.place = 0, c.parity ^= 1;
  };
  const int total = share.num * static_cast<int>(pieces.num), places = pieces.num_places;
#pragma unroll 1
  for (int loaded = 0, stored = 0; stored < total; ++stored) {
#pragma unroll 1
    for (; loaded < total && loaded - stored < places - (stored > 0); ++loaded) {
      const char* row = args.rows + static_cast<size_t>(load.token) * args.row_bytes;
      load_piece(pieces, ring, load.place, full + load.place, load.piece, row,
                 reinterpret_cast<const char*>(args.scales) + static_cast<size_t>(load.token) * args.scale_bytes);
      advance(load);
    }
    ptx::barrier_wait(full + store.place, store.parity);
    char* row = context.own().staging + static_cast<size_t>(store.token) * call.row_stride;
    ptx::bulk_store(row + store.piece * pieces.bytes, pieces.place(ring, store.place), pieces.bytes_of(store.piece));
    if (const uint32_t bytes = pieces.scale_bytes_of(store.piece); bytes > 0)
      ptx::bulk_store(own_tail(context, call, store.token), pieces.scale_place(ring, store.place), bytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
    advance(store);
  }
  ptx::bulk_wait<0>();
}

// Scales, if they are not staged yet, and the weights behind them, by a warp.
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
  if (args.scales && !call.bulk_scales) copy(args.scales, num_scales, 0);
  if (num_weights > 0) copy(args.topk_weights, num_weights, (num_scales + 3) / 4 * 4);
}

// By the helpers: rows and tails of the early tokens of this rank or of the others, where peers read them.
__device__ __noinline__ inline void stage(const Context& context, const DispatchCall& call, char* shared,
                                          uint64_t epoch, bool early) {
  __shared__ uint64_t barriers[2][Helpers::kWarps][Pieces::kMostPlaces];
  const DispatchArgs& args = call.dispatch;
  const int num_early = call.early_tokens(context);
  if (!early && num_early == args.num_tokens) return;
  const int end = early ? num_early : args.num_tokens;
  const Share share(early ? 0 : num_early, end);
  const int warp = Helpers::thread() / 32, lane = threadIdx.x % 32;
  if (args.quantizes) {
#pragma unroll 1
    for (int token = share.first; token < end; token += share.step) {
      const char* row = args.rows + static_cast<size_t>(token) * context.row_bytes;
      quantize_row(context.own().staging + static_cast<size_t>(token) * call.row_stride, own_tail(context, call, token),
                   reinterpret_cast<const uint4*>(row), context.sizes.hidden / kScaleBlock);
    }
  } else if (context.sizes.num_ranks > 1 && lane == 0) {  // nobody else reads this rank's own rows from there
    const Pieces& pieces = early ? call.early : call.late;
    uint64_t* full = barriers[early][warp];
    for (uint32_t i = 0; i < Pieces::kMostPlaces; ++i) ptx::barrier_init(full + i, 1);
    ptx::fence_barrier_init();
    char* rings = shared + (early ? call.early_at : call.late_at);
    stage_rows(context, call, share, pieces, rings + warp * pieces.ring_bytes(), full);
  }
  __syncwarp();
  stage_tails(context, call, share);
  if (last_block<Helpers>(&context.state->stage_done, gridDim.x))
    raise_at_all<Helpers>(context, &Region::staged, 2 * epoch - (end < args.num_tokens));
}

}  // namespace ep::cuda
