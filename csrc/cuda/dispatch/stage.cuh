// Staging: the stage warps copy this rank's rows and metadata (scales and weights) to its inbox, chunk by chunk. All
// ranks of the node, and this rank's senders, read them there.
#pragma once
#include "cuda/device/copy.cuh"
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/dispatch/quantize.cuh"

namespace ep::cuda {

// Chunks staged by one warp. The last warp of all blocks to finish a chunk raises `staged` at the node. With the last
// chunk it also raises the flags of all chunks without tokens: no wait for a chunk lasts for ever.
template <Kernels K>
struct StagedChunks {
  const Op<K> op;
  const ChunkArrivals arrivals;
  const int num_chunks;
  int chunk = 0;  // first chunk not yet finished by this warp

  // [warp] Begin with no chunk finished. `counters`: as in `stage`.
  __device__ StagedChunks(const Op<K>& op, uint32_t* counters, int num_tokens)
      : op(op),
        arrivals{counters, StageWarps<K>::kWarps, op.context.arrays.staged_done, uint32_t(op.num_blocks)},
        num_chunks(op.context.config.num_token_chunks(num_tokens)) {}

  // [warp] Finish all chunks before `end`: this warp has staged its parts of them. It counts itself in for each, also
  // without a part.
  // raises: staged
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

// The part of a row that a warp stages next. The stage warps of all blocks but the first ones take parts in turn. A row
// staged in one go has one part.
struct Share {
  int token, part;
  int num_tokens, parts_of_row;
  int step_tokens, step_parts;

  // [warp] Find this warp's first part. Blocks before `first_block` stage nothing.
  template <Kernels K>
  __device__ Share(const Op<K>& op, int num_tokens, int parts_of_row, int first_block = 0)
      : num_tokens(num_tokens), parts_of_row(parts_of_row) {
    const int block = op.block - first_block, num_blocks = op.num_blocks - first_block;
    const int first = block + num_blocks * StageWarps<K>::warp(), step = num_blocks * StageWarps<K>::kWarps;
    token = block < 0 ? num_tokens : first, step_tokens = step, part = step_parts = 0;
    if (parts_of_row == 1 || block < 0) return;  // a division is slow
    token = first / parts_of_row, part = first % parts_of_row;
    step_tokens = step / parts_of_row, step_parts = step % parts_of_row;
  }
  // [thread] Return whether there is a part.
  __device__ bool has_part() const { return token < num_tokens; }
  // [thread] Return the share after this part.
  __device__ Share next() const {
    Share next = *this;
    next.token += step_tokens, next.part += step_parts;
    if (next.part >= parts_of_row) next.part -= parts_of_row, ++next.token;
    return next;
  }
};

// Metadata at the caller. Read from the parameters once.
struct Metadata {
  const float *from_scales, *from_weights;
  int num_scales, num_weights, weights_at;

  __device__ Metadata(const RowArgs& args, const float* topk_weights, int num_topk, int weights_at)
      : from_scales(args.scales),
        from_weights(topk_weights),
        num_scales(from_scales ? args.scale_bytes / 4 : 0),
        num_weights(from_weights ? num_topk : 0),
        weights_at(weights_at) {}
};

// One token's scales and weights on their way to its metadata, in registers. They go with the first part of the row:
// loaded before it and stored after it, so that all loads overlap. With kClears values that are not loaded are 0: then
// the compiler needs fewer registers where few are left, and otherwise more.
template <bool kClears>
struct MetadataCopy {
  static constexpr int kTogether = 2;  // scales of a lane: all of them up to 64 scales, 8192 elements

  const Metadata& metadata;
  const int token, num_scales, num_weights;
  float scales[kTogether], weight;

  // [warp] Start to load.
  __device__ MetadataCopy(const Metadata& metadata, const Share& share)
      : metadata(metadata),
        token(share.token),
        num_scales(share.part == 0 ? metadata.num_scales : 0),
        num_weights(share.part == 0 ? metadata.num_weights : 0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (kClears) scales[i] = 0;
      if (lane + 32 * i < num_scales) scales[i] = __ldg(from_scales() + lane + 32 * i);
    }
    if (kClears) weight = 0;
    if (lane < num_weights) weight = __ldg(metadata.from_weights + static_cast<size_t>(token) * num_weights + lane);
  }

  // [thread] Return whether there are any values.
  __device__ bool has_any() const { return num_scales > 0 || num_weights > 0; }

  // [warp] Store the loaded values. Copy further scales and weights, if there are any.
  __device__ void store(float* token_metadata) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (lane + 32 * i < num_scales) token_metadata[lane + 32 * i] = scales[i];
#pragma unroll 1
    for (int i = lane + 32 * kTogether; i < num_scales; i += 32) token_metadata[i] = __ldg(from_scales() + i);
    if (lane < num_weights) token_metadata[metadata.weights_at + lane] = weight;
    const float* const from_weights = metadata.from_weights + static_cast<size_t>(token) * num_weights;
#pragma unroll 1
    for (int i = lane + 32; i < num_weights; i += 32) token_metadata[metadata.weights_at + i] = __ldg(from_weights + i);
  }

 private:
  __device__ const float* from_scales() const { return metadata.from_scales + static_cast<size_t>(token) * num_scales; }
};

// [warp] Stage the warp's parts one by one, and finish chunks on the way. `stage_part(share, copy)` writes one of them,
// its scales if they are computed here, and the values that `copy` brings.
template <Kernels K, class StagePart>
__device__ void stage_parts(const Op<K>& op, const Metadata& metadata, Share share, StagedChunks<K>& chunks,
                            const StagePart& stage_part) {
  const int log_token_chunk = op.context.config.log_token_chunk;
#pragma unroll 1
  for (; share.has_part(); share = share.next()) {
    chunks.finish_before(share.token >> log_token_chunk);
    const MetadataCopy<K == Kernels::kDirect> copy(metadata, share);
    stage_part(share, copy);
  }
  chunks.finish_before(chunks.num_chunks);
}

// Where this rank stages rows and metadata: in its own inbox.
struct Staging {
  char *rows, *metadata;
  uint32_t row_stride, metadata_bytes;

  template <Kernels K>
  __device__ Staging(const Op<K>& op, const RowParams& params)
      : rows(op.my_inbox(op.context.node, &Inbox::staging)),
        metadata(op.my_inbox(op.context.node, &Inbox::metadata)),
        row_stride(params.row_stride),
        metadata_bytes(params.metadata_bytes) {}

  __device__ char* row_of(int token) const { return rows + static_cast<size_t>(token) * row_stride; }
  __device__ float* metadata_of(int token) const {
    return reinterpret_cast<float*>(metadata + static_cast<size_t>(token) * metadata_bytes);
  }
};

// [warp] Stage rows as they are. This function and the next one are inlined: by a reference they would load parameters
// through the caches of memory.
template <Kernels K>
__device__ inline void stage_copies(const Op<K>& op, const DispatchParams& params, Share share,
                                    StagedChunks<K> chunks) {
  constexpr int kTogether = 14;  // loads of a thread under way: a row of 14336 bytes takes two turns
  const char* const from = params.args.rows;
  const uint32_t row_bytes = params.args.row_bytes;
  const Staging staging(op, params);
  const Metadata metadata(params.args, params.args.topk_weights, op.context.config.num_topk, params.weights_at);
  stage_parts(op, metadata, share, chunks, [&](const Share& at, const auto& copy) {
    if (params.stages_rows) {
      const auto* const row = reinterpret_cast<const uint4*>(from + static_cast<size_t>(at.token) * row_bytes);
      copy_words<uint4, kTogether>(reinterpret_cast<uint4*>(staging.row_of(at.token)), row, row_bytes);
    }
    if (copy.has_any()) copy.store(staging.metadata_of(at.token));
  });
}

// [warp] Stage bfloat16 rows as float8, and their scales in the metadata. The next part is loaded meanwhile.
template <bool kMx, Kernels K>
__device__ void stage_quantized(const Op<K>& op, const DispatchParams& params, Share share, StagedChunks<K> chunks) {
  const char* const from = params.args.rows;
  const uint32_t row_bytes = op.context.row_bytes;
  const int num_vectors = op.context.config.hidden / BFloat16::kElements;
  const bool powers_of_two = params.args.powers_of_two;
  const Staging staging(op, params);
  const Metadata metadata(params.args, params.args.topk_weights, op.context.config.num_topk, params.weights_at);
  RowPart next;
  const auto load = [&](const Share& at) {
    const auto* const row = reinterpret_cast<const uint4*>(from + static_cast<size_t>(at.token) * row_bytes);
    if (at.has_part()) next.load(row, at.part, num_vectors);
  };
  load(share);
  stage_parts(op, metadata, share, chunks, [&](const Share& at, const auto& copy) {
    const RowPart part = next;
    load(at.next());
    const RowPart::Quantized quantized = part.quantize<kMx>(powers_of_two);
    float* const token_metadata = staging.metadata_of(at.token);
    RowPart::store<kMx>(quantized, staging.row_of(at.token), token_metadata, at.part, num_vectors);
    if (copy.has_any()) copy.store(token_metadata);
  });
}

// [team] Clear the stage warps' counters of this block: [max_token_chunks] in shared memory.
template <Kernels K>
__device__ inline uint32_t* clear_counters(const Op<K>& op, const RowParams& params, char* shared) {
  auto* const counters = reinterpret_cast<uint32_t*>(shared + params.counters_at);
  for (int i = StageWarps<K>::thread(); i < op.context.max_token_chunks; i += StageWarps<K>::kThreads) counters[i] = 0;
  StageWarps<K>::sync();
  return counters;
}

// [team] Stage rows and metadata of this block's tokens, chunk by chunk. Called by the stage warps of each block, after
// wait_for_free_staging. Wait for nothing. A chunk's `staged` rises once the stage warps of all blocks have finished
// the chunk. No barrier at the end.
template <Kernels K>
__device__ void stage(const Op<K>& op, const DispatchParams& params, char* shared) {
  uint32_t* const counters = clear_counters(op, params, shared);
  const Share share(op, params.args.num_tokens, params.parts_of_row);
  const StagedChunks<K> chunks(op, counters, params.args.num_tokens);
  if (params.args.quantizes && params.args.scale_size == 1)
    stage_quantized<true>(op, params, share, chunks);
  else if (params.args.quantizes)
    stage_quantized<false>(op, params, share, chunks);
  else
    stage_copies(op, params, share, chunks);
}

}  // namespace ep::cuda
