// Pushing rows: the stage warps store this rank's rows in the slots of the ranks of the node with an expert of the
// token. In decode layout their metadata go along, and between nodes rows and metadata are also staged, for the
// senders. In expert and rank layout the slots have no room for weights, so metadata are staged alone.
#pragma once
#include "cuda/decode/row_slots.cuh"
#include "cuda/dispatch/stage.cuh"

namespace ep::cuda {

// Where the row and the metadata of a token go, as a set of targets. A target is a local rank, to whose slot they are
// pushed, or this rank's inbox, where they are staged for pull warps or senders.
template <Kernels K, class Params>
struct Targets {
  const Op<K>& op;
  const Params& params;
  const bool pushes;  // whether ranks may be targets
  int choice = -1;    // of the loaded token, in each lane: an expert; with a handle an item number or -1

  __device__ Targets(const Op<K>& op, const Params& params)
      : op(op), params(params), pushes(params.pushes && (params.new_plan() || params.plan.head->usable)) {}

  // [warp] Start to load what tells the targets of a token.
  __device__ void load(int token) {
    if (!pushes) return;
    const Context& context = op.context;
    const int lane = threadIdx.x % 32;
    choice = -1;
    if (params.new_plan()) {
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
    if (pushes && params.new_plan()) {
      targets = bit_of_expert(choice);
      for (int k = lane + 32; k < op.context.config.num_topk; k += 32) targets |= bit_of_expert(load_choice(token, k));
    } else if (pushes) {
      targets = static_cast<uint32_t>(choice >= 0) << lane;
    }
    if (pushes) targets = __reduce_or_sync(~0u, targets);
    return targets | static_cast<uint32_t>(has_inbox()) << kInboxTarget;
  }

  // [thread] Return where the row of a token goes, and its metadata.
  __device__ char* row(int target, int token) const {
    if (!is_inbox(target)) return row_slot(op, target, op.rank(), token);
    return op.my_inbox(op.context.node, &Inbox::staging) + static_cast<size_t>(token) * params.row_stride;
  }
  __device__ float* metadata(int target, int token) const {
    char* const metadata = is_inbox(target) ? op.my_inbox(op.context.node, &Inbox::metadata) +
                                                  static_cast<size_t>(token) * params.metadata_bytes
                                            : pushed_metadata(op, params, target, op.rank(), token);
    return reinterpret_cast<float*>(metadata);
  }

 private:
  // [thread] Return whether the inbox is a target; whether this target is the inbox.
  __device__ bool has_inbox() const { return !params.pushes || op.num_nodes() > 1; }
  __device__ bool is_inbox(int target) const { return target == kInboxTarget && has_inbox(); }
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

// [warp] Push rows as they are.
template <Kernels K, class Params>
__device__ inline void push_copies(const Op<K>& op, const Params& params, Share share, StagedChunks<K> chunks) {
  constexpr int kTogether = 14;  // loads of a thread under way, as in stage_copies
  const char* const from = params.args.rows;
  const uint32_t row_bytes = params.args.row_bytes;
  const int num = static_cast<int>(row_bytes / sizeof(uint4)), lane = threadIdx.x % 32;
  const Metadata metadata = metadata_of_caller(op, params);
  const uint32_t own = 1u << op.context.local;  // staged metadata have one place
  Targets targets(op, params);
  stage_parts(op, metadata, share, chunks, [&](const Share& at, const auto& copy) {
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
    if (copy.has_any())
      for_each_target(Params::kPushesMetadata ? to : own,
                      [&](int target) { copy.store(targets.metadata(target, at.token)); });
  });
}

// [warp] Push bfloat16 rows as float8, and their scales. The next part is loaded meanwhile.
template <bool kMx, Kernels K, class Params>
__device__ void push_quantized(const Op<K>& op, const Params& params, Share share, StagedChunks<K> chunks) {
  const char* const from = params.args.rows;
  const uint32_t row_bytes = op.context.row_bytes;
  const int num_vectors = op.context.config.hidden / BFloat16::kElements;
  const bool powers_of_two = params.args.powers_of_two;
  const Metadata metadata = metadata_of_caller(op, params);
  RowPart next;
  Targets targets(op, params);
  const auto load = [&](const Share& at) {
    const auto* const row = reinterpret_cast<const uint4*>(from + static_cast<size_t>(at.token) * row_bytes);
    if (!at.has_part()) return;
    targets.load(at.token);
    next.load(row, at.part, num_vectors);
  };
  load(share);
  stage_parts(op, metadata, share, chunks, [&](const Share& at, const auto& copy) {
    const RowPart part = next;
    const uint32_t to = targets.find(at.token);
    load(at.next());
    const RowPart::Quantized quantized = part.quantize<kMx>(powers_of_two);
    for_each_target(to, [&](int target) {
      RowPart::store<kMx>(quantized, targets.row(target, at.token), targets.metadata(target, at.token), at.part,
                          num_vectors);
    });
    if (params.has_weights() && copy.has_any()) copy.store(targets.metadata(op.context.local, at.token));
  });
}

// [team] Push rows and metadata of this block's tokens, chunk by chunk. Called by the stage warps of each block, after
// wait_for_free_slots. Wait for nothing. A chunk's `staged` rises once the stage warps of all blocks have finished the
// chunk. No barrier at the end. Only launches with kMayQuantize may quantize.
template <bool kMayQuantize, Kernels K, class Params>
__device__ void push_rows(const Op<K>& op, const Params& params, char* shared) {
  uint32_t* const counters = clear_counters(op, params, shared);
  const Share share(op, params.args.num_tokens, params.parts_of_row, params.first_staging_block);
  const StagedChunks<K> chunks(op, counters, params.args.num_tokens);
  if (kMayQuantize && params.args.quantizes && params.args.scale_size == 1)
    push_quantized<true>(op, params, share, chunks);
  else if (kMayQuantize && params.args.quantizes)
    push_quantized<false>(op, params, share, chunks);
  else
    push_copies(op, params, share, chunks);
}

}  // namespace ep::cuda
