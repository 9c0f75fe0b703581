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

// One warp's parts of the rows: every step-th part of the rank. Where a warp stages whole rows, a row has one part.
struct Share {
  int first, step, parts, num;

  // [warp] Find this warp's parts of `num_tokens` rows.
  __device__ Share(const Op& op, int num_tokens, int parts_of_row)
      : first(op.block + op.num_blocks * Helpers::warp()), step(op.num_blocks * Helpers::kWarps), parts(parts_of_row) {
    num = first < num_tokens * parts ? (num_tokens * parts - 1 - first) / step + 1 : 0;
  }
  // [thread] Return the token of the warp's i-th part, and the number of the part in its row.
  __device__ int token(int i) const { return (first + i * step) / parts; }
  __device__ int part(int i) const { return (first + i * step) % parts; }
};

// One token's scales and weights on their way to its tail, in registers. Loaded before the token's row and stored after
// it, so that all loads of a token are under way together.
struct TailCopy {
  static constexpr int kTogether = 2;  // scales of a lane: all of them up to 64 scales, 8192 elements

  const int num_scales, num_weights;
  const float *from_scales, *from_weights;  // of the token
  float scales[kTogether], weight;

  // [warp] Start to load; without `is_first`, do nothing: the token's tail belongs to the first part of its row.
  __device__ TailCopy(const Op& op, const DispatchArgs& args, size_t token, bool is_first)
      : num_scales(is_first && args.scales ? args.scale_bytes / 4 : 0),
        num_weights(is_first && args.topk_weights ? op.context.config.num_topk : 0),
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

// [warp] Stage the warp's parts one by one, and finish chunks on the way. `stage_part(i, token, tail)` writes the i-th
// one, and the scales that it computes.
template <class StagePart>
__device__ void stage_parts(const Op& op, const DispatchParams& params, const Share& share, StagedChunks& chunks,
                            const StagePart& stage_part) {
  char* const tails = op.context.inbox_of(op.rank(), &Inbox::tails);
#pragma unroll 1
  for (int i = 0; i < share.num; ++i) {
    const size_t token = share.token(i);
    chunks.finish_before(static_cast<int>(token) >> op.context.config.log_token_chunk);
    auto* const tail = reinterpret_cast<float*>(tails + token * params.tail_bytes);
    const TailCopy copy(op, params.args, token, share.part(i) == 0);
    stage_part(i, token, tail);
    copy.store(tail, params.weights_at);
  }
  chunks.finish_before(chunks.num_chunks);
}

// [warp] Stage rows as they are. This function and the next one are not inlined: together they need too many registers.
__device__ __noinline__ inline void stage_copies(Op op, const DispatchParams& params, Share share,
                                                 StagedChunks chunks) {
  const DispatchArgs& args = params.args;
  char* const staging = op.context.inbox_of(op.rank(), &Inbox::staging);
  stage_parts(op, params, share, chunks, [&](int, size_t token, float*) {
    if (!params.stages_rows) return;
    auto* to = reinterpret_cast<uint4*>(staging + token * params.row_stride);
    copy_words<uint4, 14>(to, reinterpret_cast<const uint4*>(args.rows + token * args.row_bytes), args.row_bytes);
  });
}

// [warp] Stage bfloat16 rows as float8, and their scales in the tails. The next part is loaded meanwhile.
__device__ __noinline__ inline void stage_quantized(Op op, const DispatchParams& params, Share share,
                                                    StagedChunks chunks) {
  const Context& context = op.context;
  char* const staging = context.inbox_of(op.rank(), &Inbox::staging);
  const int num_scale_blocks = context.config.hidden / kScaleBlock;
  RowPart part, next;
  const auto load = [&](int i) {
    const char* const row = params.args.rows + static_cast<size_t>(share.token(i)) * context.row_bytes;
    if (i < share.num) next.load(reinterpret_cast<const uint4*>(row), share.part(i), num_scale_blocks);
  };
  load(0);
  stage_parts(op, params, share, chunks, [&](int i, size_t token, float* tail) {
    part = next;
    load(i + 1);
    part.quantize(staging + token * params.row_stride, tail, share.part(i), num_scale_blocks);
  });
}

// [team] Stage rows and tails of this block's tokens, chunk by chunk. Called by the helpers of each block, after
// wait_for_free_staging. `counters`: [max_token_chunks] in shared memory. Wait for nothing. A chunk's `staged` rises
// once the helpers of all blocks have finished the chunk. No barrier at the end.
__device__ inline void stage(const Op& op, const DispatchParams& params, uint32_t* counters) {
  // Clear the counters of this block.
  for (int i = Helpers::thread(); i < op.context.max_token_chunks; i += Helpers::kThreads) counters[i] = 0;
  Helpers::sync();
  // Stage.
  const int parts_of_row = params.args.quantizes ? RowPart::num_in_row(op.context.config.hidden / kScaleBlock) : 1;
  const Share share(op, params.args.num_tokens, parts_of_row);
  const StagedChunks chunks(op, counters, params.args.num_tokens);
  if (params.args.quantizes)
    stage_quantized(op, params, share, chunks);
  else
    stage_copies(op, params, share, chunks);
}

}  // namespace ep::cuda::EP_KERNELS
