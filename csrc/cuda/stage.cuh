// Staging: the helpers copy this rank's rows and tails (scales and weights) to its inbox, chunk by chunk. All ranks of
// the node, and this rank's senders, read them there.
#pragma once
#include "cuda/copy.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/quantize.cuh"

namespace ep::cuda::EP_KERNELS {

// Chunks staged by one warp. The last warp of all blocks to finish a chunk raises `staged` at the node. The last chunk
// also raises the flags of all chunks without tokens: no wait for a chunk lasts for ever.
struct StagedChunks {
  const Op op;
  const ChunkArrivals arrivals;
  const int num_chunks;
  int chunk = 0;  // first chunk not yet finished by this warp

  // [warp] Begin with no chunk finished. `counters`: as in `stage`.
  __device__ StagedChunks(const Op& op, uint32_t* counters, int num_tokens)
      : op(op),
        arrivals{counters, Helpers::kWarps, op.context.arrays.staged_done, uint32_t(op.num_blocks)},
        num_chunks(op.context.config.num_token_chunks(num_tokens)) {}

  // [warp] Finish all chunks before `end`: this warp has staged its tokens of them. Chunks without a token of this warp
  // count too.
  __device__ void finish_before(int end) {
    if (chunk >= end) return;
    __syncwarp();
    for (; chunk < end; ++chunk) {
      if (threadIdx.x % 32 != 0 || !arrivals.arrive(chunk)) continue;
      uint64_t* const flags = op.context.own.staged + static_cast<size_t>(op.rank()) * op.context.max_token_chunks;
      const int past = chunk == num_chunks - 1 ? op.context.max_token_chunks : chunk + 1;
      for (int flag = chunk; flag < past; ++flag) raise_on_node(op.context, flags + flag, op.epoch);
    }
  }
};

// One warp's tokens, or parts of rows: every step-th one of the rank.
struct Share {
  int first, step, num;

  // [warp] Find this warp's share of the rank's `num_in_all`.
  __device__ Share(const Op& op, int num_in_all)
      : first(op.block + op.num_blocks * Helpers::warp()), step(op.num_blocks * Helpers::kWarps) {
    num = first < num_in_all ? (num_in_all - 1 - first) / step + 1 : 0;
  }
  __device__ int at(int i) const { return first + i * step; }
};

// One token's scales and weights on their way to its tail, in registers. Loaded before the token's row and stored after
// it, so that all loads of a token are under way together.
struct TailCopy {
  static constexpr int kTogether = 2;  // scales of a lane: all of them up to 64 scales, 8192 elements

  const int num_scales, num_weights;
  const float *from_scales, *from_weights;  // of the token
  float scales[kTogether], weight;

  // [warp] Start to load.
  __device__ TailCopy(const Op& op, const DispatchArgs& args, size_t token)
      : num_scales(args.scales ? args.scale_bytes / 4 : 0),
        num_weights(args.topk_weights ? op.context.config.num_topk : 0),
        from_scales(args.scales + token * num_scales),
        from_weights(args.topk_weights + token * num_weights) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (lane + 32 * i < num_scales) scales[i] = __ldg(from_scales + lane + 32 * i);
    if (lane < num_weights) weight = __ldg(from_weights + lane);
  }

  // [warp] Store the loaded values. Copy further scales, if there are any.
  __device__ void store(float* tail, int weights_at) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (lane + 32 * i < num_scales) tail[lane + 32 * i] = scales[i];
#pragma unroll 1
    for (int i = lane + 32 * kTogether; i < num_scales; i += 32) tail[i] = __ldg(from_scales + i);
    if (lane < num_weights) tail[weights_at + lane] = weight;
  }
};
static_assert(kMaxTopk <= 32, "a lane per weight");

// [warp] Stage the warp's rows as they are, and their tails. Finish chunks on the way. This function and the next one
// are not inlined: together they need too many registers.
__device__ __noinline__ inline void stage_copies(Op op, const DispatchParams& params, StagedChunks chunks) {
  const DispatchArgs& args = params.args;
  char* const staging = op.context.inbox_of(op.rank(), &Inbox::staging);
  char* const tails = op.context.inbox_of(op.rank(), &Inbox::tails);
  const Share share(op, args.num_tokens);
#pragma unroll 1
  for (int i = 0; i < share.num; ++i) {
    const size_t token = share.at(i);
    chunks.finish_before(share.at(i) >> op.context.config.log_token_chunk);
    const TailCopy copy(op, args, token);
    if (params.stages_rows) {
      auto* to = reinterpret_cast<uint4*>(staging + token * params.row_stride);
      copy_words<uint4, 14>(to, reinterpret_cast<const uint4*>(args.rows + token * args.row_bytes), args.row_bytes);
    }
    copy.store(reinterpret_cast<float*>(tails + token * params.tail_bytes), params.weights_at);
  }
  chunks.finish_before(chunks.num_chunks);
}

// [warp] Stage bfloat16 rows as float8, and their tails: the warp's parts of rows one by one, the next one loading
// meanwhile. Finish chunks on the way. Few tokens have fewer rows than there are warps, so a row's parts are shared
// out.
__device__ __noinline__ inline void stage_quantized(Op op, const DispatchParams& params, StagedChunks chunks) {
  const Context& context = op.context;
  const DispatchArgs& args = params.args;
  char* const staging = context.inbox_of(op.rank(), &Inbox::staging);
  char* const tails = context.inbox_of(op.rank(), &Inbox::tails);
  const int lane = threadIdx.x % 32, num_topk = context.config.num_topk;
  // Divide a row into as few parts as possible, of equal size.
  const int num_scales = context.config.hidden / kScaleBlock;
  const int num_parts = (num_scales + QuantizedPart::kMost - 1) / QuantizedPart::kMost;
  const int most = (num_scales + num_parts - 1) / num_parts;
  const Share share(op, args.num_tokens * num_parts);
  struct Place {
    int token, first, num;  // scale blocks of the part
  };
  const auto place_of = [&](int i) -> Place {
    const int token = share.at(i) / num_parts, first = (share.at(i) - token * num_parts) * most;
    return {token, first, min(most, num_scales - first)};
  };
  QuantizedPart next;
  const auto load = [&](const Place& at) {
    const char* const row = args.rows + static_cast<size_t>(at.token) * context.row_bytes;
    next.load(reinterpret_cast<const uint4*>(row) + at.first * 16, at.num);
  };
  if (share.num > 0) load(place_of(0));
#pragma unroll 1
  for (int i = 0; i < share.num; ++i) {
    const Place at = place_of(i);
    const size_t token = at.token;
    const QuantizedPart part = next;
    if (i + 1 < share.num) load(place_of(i + 1));
    chunks.finish_before(at.token >> context.config.log_token_chunk);
    auto* const tail = reinterpret_cast<float*>(tails + token * params.tail_bytes);
    const bool has_weight = args.topk_weights && at.first == 0 && lane < num_topk;
    const float weight = has_weight ? __ldg(args.topk_weights + token * num_topk + lane) : 0;
    part.store(staging + token * params.row_stride + at.first * kScaleBlock, tail + at.first, at.num);
    if (has_weight) tail[params.weights_at + lane] = weight;
  }
  chunks.finish_before(chunks.num_chunks);
}

// [team] Stage rows and tails of this block's tokens, chunk by chunk. Called by the helpers of each block, after
// wait_for_free_staging. `counters`: [max_token_chunks] in shared memory. Wait for nothing. A chunk's `staged` rises
// once the helpers of all blocks have finished the chunk. No barrier at the end.
__device__ inline void stage(const Op& op, const DispatchParams& params, uint32_t* counters) {
  // Clear the counters of this block.
  for (int i = Helpers::thread(); i < op.context.max_token_chunks; i += Helpers::kThreads) counters[i] = 0;
  Helpers::sync();
  // Stage.
  const StagedChunks chunks(op, counters, params.args.num_tokens);
  if (params.args.quantizes)
    stage_quantized(op, params, chunks);
  else
    stage_copies(op, params, chunks);
}

}  // namespace ep::cuda::EP_KERNELS
