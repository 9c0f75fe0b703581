// Staging: the stage warps copy this rank's rows and metadata (scales and weights) to its inbox, chunk by chunk. All
// ranks of the node, and this rank's senders, read them there. In decode layout they push rows and metadata to the
// ranks of the node instead, and only the senders read the inbox.
#pragma once
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/dispatch/quantize.cuh"

namespace ep::cuda::EP_KERNELS {

// Chunks staged by one warp. The last warp of all blocks to finish a chunk raises `staged` at the node. With the last
// chunk it also raises the flags of all chunks without tokens: no wait for a chunk lasts for ever.
struct StagedChunks {
  const Op op;
  const ChunkArrivals arrivals;
  const int num_chunks;
  int chunk = 0;  // first chunk not yet finished by this warp

  // [warp] Begin with no chunk finished. `counters`: as in `stage`.
  __device__ StagedChunks(const Op& op, uint32_t* counters, int num_tokens)
      : op(op),
        arrivals{counters, StageWarps::kWarps, op.context.arrays.staged_done, uint32_t(op.num_blocks)},
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

// The part of a row that a warp stages next. The stage warps of the blocks from DispatchParams::first_staging_block on
// take parts in turn. A row staged in one go has one part.
struct Share {
  int token, part;
  int num_tokens, parts_of_row;
  int step_tokens, step_parts;

  // [warp] Find this warp's first part.
  __device__ Share(const Op& op, const DispatchParams& params)
      : num_tokens(params.args.num_tokens), parts_of_row(params.parts_of_row) {
    const int block = op.block - params.first_staging_block, num_blocks = op.num_blocks - params.first_staging_block;
    const int first = block + num_blocks * StageWarps::warp(), step = num_blocks * StageWarps::kWarps;
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

// Where the row and the metadata of a token go, as a set of targets. A target is a local rank, to whose slot they are
// pushed, or this rank's inbox, where they are staged for pull warps or senders.
struct Targets {
  static constexpr int kInbox = DispatchParams::kInbox;

  const Op& op;
  const DispatchParams& params;
  const bool pushes;  // whether ranks may be targets
  int choice = -1;    // of the loaded token, in each lane: an expert; with a handle an item number or -1

  __device__ Targets(const Op& op, const DispatchParams& params)
      : op(op), params(params), pushes(params.pushes && (params.new_plan || params.plan.head->usable)) {}

  // [warp] Start to load what tells the targets of a token.
  __device__ void load(int token) {
    if (!pushes) return;
    const Context& context = op.context;
    const int lane = threadIdx.x % 32;
    choice = -1;
    if (params.new_plan) {
      if (lane < context.config.num_topk) choice = load_choice(token, lane);
    } else if (lane < op.ranks_per_node()) {
      const size_t row = static_cast<size_t>(context.node) * context.config.max_tokens + token;
      choice = __ldg(params.plan.tables + row * context.table_ints + lane);
    }
  }

  // [warp] Return the targets of the loaded token, a bit for each.
  __device__ uint32_t find(int token) const {
    const int lane = threadIdx.x % 32;
    uint32_t targets = 0;
    if (pushes && params.new_plan) {
      targets = bit_of_expert(choice);
      for (int k = lane + 32; k < op.context.config.num_topk; k += 32) targets |= bit_of_expert(load_choice(token, k));
    } else if (pushes) {
      targets = static_cast<uint32_t>(choice >= 0) << lane;
    }
    if (pushes) targets = __reduce_or_sync(~0u, targets);
    const bool has_inbox = !params.pushes || op.context.num_nodes() > 1;
    return targets | static_cast<uint32_t>(has_inbox) << kInbox;
  }

  // [thread] Return where the row of a token goes, and its metadata.
  __device__ char* row(int target, int token) const {
    if (target != kInbox) return row_slot(op.context, target, op.rank(), token);
    return op.context.inbox_holding(op.rank(), &Inbox::staging) + static_cast<size_t>(token) * params.row_stride;
  }
  __device__ float* metadata(int target, int token) const {
    return reinterpret_cast<float*>(target != kInbox ? row(target, token) + params.args.row_bytes
                                                     : op.context.inbox_holding(op.rank(), &Inbox::metadata) +
                                                           static_cast<size_t>(token) * params.metadata_bytes);
  }

 private:
  // [thread] Load the low half of an entry of topk_idx. If the entry is invalid, the row may go to a rank that does not
  // read it.
  __device__ int load_choice(int token, int k) const {
    const size_t index = static_cast<size_t>(token) * op.context.config.num_topk + k;
    return __ldg(reinterpret_cast<const int*>(params.args.topk_idx + index));
  }
  // [thread] Return the bit of the local rank with an expert; 0 for no expert, and for a rank elsewhere.
  __device__ uint32_t bit_of_expert(uint32_t expert) const {
    if (expert >= static_cast<uint32_t>(op.context.config.num_experts)) return 0;
    const uint32_t rank = quotient(expert, params.inverse);
    const int local = static_cast<int>(rank) - op.first_local_rank();
    return local >= 0 && local < op.ranks_per_node() ? 1u << local : 0;
  }
};

// [thread] Call run(target) for each target of a set.
template <class Run>
__device__ void for_each_target(uint32_t targets, const Run& run) {
#pragma unroll 1
  for (; targets != 0; targets &= targets - 1) run(__ffs(targets) - 1);
}

// Metadata at the caller. Read from the parameters once.
struct Metadata {
  const float *from_scales, *from_weights;
  int num_scales, num_weights, weights_at;

  __device__ Metadata(const Op& op, const DispatchParams& params)
      : from_scales(params.args.scales),
        from_weights(params.args.topk_weights),
        num_scales(from_scales ? params.args.scale_bytes / 4 : 0),
        num_weights(from_weights ? op.context.config.num_topk : 0),
        weights_at(params.weights_at) {}
};

// One token's scales and weights on their way to its metadata, in registers. They go with the first part of the row:
// loaded before it and stored after it, so that all loads overlap.
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
    for (int i = 0; i < kTogether; ++i)
      if (lane + 32 * i < num_scales) scales[i] = __ldg(from_scales() + lane + 32 * i);
    if (lane < num_weights) weight = __ldg(metadata.from_weights + static_cast<size_t>(token) * num_weights + lane);
  }

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

// [warp] Stage the warp's parts one by one, and finish chunks on the way. `stage_part(share)` writes one of them, and
// scales computed for it to the metadata. It returns the targets.
template <class StagePart>
__device__ void stage_parts(const Op& op, const DispatchParams& params, Share share, StagedChunks& chunks,
                            const Targets& targets, const StagePart& stage_part) {
  const Metadata metadata(op, params);
  const int log_token_chunk = op.context.config.log_token_chunk;
#pragma unroll 1
  for (; share.has_part(); share = share.next()) {
    chunks.finish_before(share.token >> log_token_chunk);
    const MetadataCopy copy(metadata, share);
    const uint32_t to = stage_part(share);
    if (copy.num_scales > 0 || copy.num_weights > 0)
      for_each_target(to, [&](int target) { copy.store(targets.metadata(target, share.token)); });
  }
  chunks.finish_before(chunks.num_chunks);
}

// [warp] Stage rows as they are. This function and the next one are inlined: by a reference they would load parameters
// through the caches of memory.
__device__ inline void stage_copies(const Op& op, const DispatchParams& params, Share share, StagedChunks chunks) {
  constexpr int kTogether = 14;  // loads of a thread under way: a row of 14336 bytes takes two turns
  const char* const from = params.args.rows;
  const uint32_t row_bytes = params.args.row_bytes;
  const int num = static_cast<int>(row_bytes / sizeof(uint4)), lane = threadIdx.x % 32;
  Targets targets(op, params);
  stage_parts(op, params, share, chunks, targets, [&](const Share& at) {
    targets.load(at.token);
    const auto* const row = reinterpret_cast<const uint4*>(from + static_cast<size_t>(at.token) * row_bytes) + lane;
    uint32_t to = targets.pushes ? ~0u : targets.find(at.token);
#pragma unroll 1
    for (int first = 0; first < num && (to & params.row_targets) != 0; first += 32 * kTogether) {
      uint4 words[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (first + lane + 32 * i < num) words[i] = __ldcg(row + first + 32 * i);
      if (first == 0) to = targets.find(at.token);
      for_each_target(to & params.row_targets, [&](int target) {
        auto* const target_row = reinterpret_cast<uint4*>(targets.row(target, at.token)) + lane;
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (first + lane + 32 * i < num) target_row[first + 32 * i] = words[i];
      });
    }
    return to;
  });
}

// [warp] Stage bfloat16 rows as float8, and their scales in the metadata. The next part is loaded meanwhile.
template <bool kMx>
__device__ void stage_quantized(const Op& op, const DispatchParams& params, Share share, StagedChunks chunks) {
  const char* const from = params.args.rows;
  const uint32_t row_bytes = op.context.row_bytes;
  const int num_vectors = op.context.config.hidden / BFloat16::kElements;
  const bool powers_of_two = params.args.powers_of_two;
  RowPart next;
  Targets targets(op, params);
  const auto load = [&](const Share& at) {
    const auto* const row = reinterpret_cast<const uint4*>(from + static_cast<size_t>(at.token) * row_bytes);
    if (!at.has_part()) return;
    targets.load(at.token);
    next.load(row, at.part, num_vectors);
  };
  load(share);
  stage_parts(op, params, share, chunks, targets, [&](const Share& at) {
    const RowPart part = next;
    const uint32_t to = targets.find(at.token);
    load(at.next());
    const RowPart::Quantized quantized = part.quantize<kMx>(powers_of_two);
    for_each_target(to, [&](int target) {
      RowPart::store<kMx>(quantized, targets.row(target, at.token), targets.metadata(target, at.token), at.part,
                          num_vectors);
    });
    return to;
  });
}

// [team] Stage rows and metadata of this block's tokens, chunk by chunk. Called by the stage warps of each block, after
// wait_for_free_staging. `counters`: [max_token_chunks] in shared memory. Wait for nothing. A chunk's `staged` rises
// once the stage warps of all blocks have finished the chunk. No barrier at the end. Only with kMayQuantize are there
// launches that quantise.
template <bool kMayQuantize>
__device__ void stage(const Op& op, const DispatchParams& params, uint32_t* counters) {
  // Clear the counters of this block.
  for (int i = StageWarps::thread(); i < op.context.max_token_chunks; i += StageWarps::kThreads) counters[i] = 0;
  StageWarps::sync();
  // Stage.
  const Share share(op, params);
  const StagedChunks chunks(op, counters, params.args.num_tokens);
  if (kMayQuantize && params.args.quantizes && params.args.scale_size == 1)
    stage_quantized<true>(op, params, share, chunks);
  else if (kMayQuantize && params.args.quantizes)
    stage_quantized<false>(op, params, share, chunks);
  else
    stage_copies(op, params, share, chunks);
}

}  // namespace ep::cuda::EP_KERNELS
