// A dispatch in decode layout: a place for every row that an expert may get, so that no shape depends on counts. Rows
// for ranks of the own node are pushed to them, instead of staged. Scales are stored by column, as grouped GEMMs take
// them.
#pragma once
#include <algorithm>

#include "cuda/decode/row_slots.cuh"
#include "cuda/dispatch/stage.cuh"
#include "cuda/plan/item.cuh"

namespace ep::cuda {

// Written by Engine::decode_dispatch, read by all threads.
struct DecodeDispatchParams : RowParams, PushParams {
  static constexpr bool kScalesByColumn = true;
  static constexpr bool kAllFit = true;
  static constexpr bool kPushesMetadata = true;

  DecodeDispatchArgs args;
  DecodeLaunch launch;
  bool pushes;         // rows for ranks of this node are pushed to their slots (row_slot), not staged
  bool stages_rows;    // senders read this rank's staged rows, or with a large node all ranks
  int rows_per_group;  // rows from one expert to the next

  // [host] [thread] Return whether this launch stages or pushes; pulls; sends rows to other nodes; makes a plan.
  EP_HOST_DEVICE bool stages() const { return launch != DecodeLaunch::kReceive; }
  EP_HOST_DEVICE bool pulls() const { return launch != DecodeLaunch::kSend; }
  EP_HOST_DEVICE bool sends() const { return stages(); }
  EP_HOST_DEVICE bool plans() const { return stages() && new_plan(); }
  // [host] [thread] Return whether rows of this rank for itself are read from the caller's tensor. With a hook they are
  // pushed like others: between the two launches the caller may overwrite them.
  EP_HOST_DEVICE bool reads_own_rows() const { return !args.quantizes && launch == DecodeLaunch::kWhole; }
  // [host] [thread] Weights do not travel, and no host waits for counts.
  EP_HOST_DEVICE bool has_weights() const { return false; }
  __device__ bool has_rank_layout() const { return false; }
  EP_HOST_DEVICE bool reports_counts() const { return false; }
  EP_HOST_DEVICE uint64_t ticket() const { return 0; }

  // [thread] Return the first output row of an expert of a rank.
  __device__ int64_t group_begin(int expert, int64_t) const { return int64_t{expert} * rows_per_group; }
  // [thread] Give the caller the tokens of one expert.
  __device__ void write_counts(int expert, int tokens, int) const { args.out_counts[expert] = tokens; }

  // [thread] Return the number of words of a row's scales in the output.
  __device__ int num_scale_words() const { return args.scale_bytes / (args.packs_scales ? 16 : 4); }
  // [thread] Return one of them. `scales`: of the row's token.
  __device__ uint32_t scale_word(int word, const float* scales) const {
    if (!args.packs_scales) return __float_as_uint(scales[word]);
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= (__float_as_uint(scales[4 * word + i]) >> 23) << 8 * i;
    return value;
  }
  // [thread] Return the index of a row's first word of scales in the output. The next words follow rows_per_group
  // apart.
  __device__ int64_t scale_at(int row) const {
    const int group = row / rows_per_group;
    return static_cast<int64_t>(group) * num_scale_words() * rows_per_group + (row - group * rows_per_group);
  }
  // [thread] Write one word of a row's scales. `scales`: of its token.
  __device__ void write_scale(int row, int word, const float* scales) const {
    const int64_t at = scale_at(row) + static_cast<int64_t>(word) * rows_per_group;
    reinterpret_cast<uint32_t*>(args.out_scales)[at] = scale_word(word, scales);
  }
  // [warp] Store the scales of an item for each lane with a copy of it: its output row, or -1. `scales`: of the item's
  // token, in shared memory. Bulk loads may overwrite them afterwards.
  __device__ void store_columns(const float* scales, int row) const {
    const int64_t at = row >= 0 ? scale_at(row) : -1;
    const uint32_t copies = __ballot_sync(~0u, at >= 0);
    const int num_words = num_scale_words();
#pragma unroll 1
    for (int word = threadIdx.x % 32, begin = 0; begin < num_words; begin += 32, word += 32) {
      const uint32_t value = word < num_words ? scale_word(word, scales) : 0;
      auto* const to = reinterpret_cast<uint32_t*>(args.out_scales) + int64_t{word} * rows_per_group;
#pragma unroll 1
      for (uint32_t left = copies; left != 0; left &= left - 1) {
        const int64_t of_copy = __shfl_sync(~0u, at, __ffs(left) - 1);
        if (word < num_words) to[of_copy] = value;
      }
    }
    ptx::fence_shared_before_bulk();
  }
};

// [thread] Return the metadata of a row of `source` that is pushed to local rank `owner`: behind the row.
template <Kernels K>
__device__ inline char* pushed_metadata(const Op<K>& op, const DecodeDispatchParams& params, int owner, int source,
                                        int token) {
  return row_slot(op, owner, source, token) + params.args.row_bytes;
}

// [thread] Return where the caller has metadata: scales.
template <Kernels K>
__device__ inline Metadata metadata_of_caller(const Op<K>&, const DecodeDispatchParams& params) {
  return {params.args, nullptr, 0, 0};
}

// [thread] Return the row of a received token, and its metadata: in its slot here, the metadata behind the row; or as
// in other layouts.
template <Kernels K>
__device__ inline const char* row_of(const Op<K>& op, const DecodeDispatchParams& params, int source, int token) {
  if (params.pushes && op.node_of(source) == op.context.node) return row_slot(op, op.context.local, source, token);
  return row_in_inbox(op, params, source, token);
}
template <Kernels K>
__device__ inline const char* metadata_of(const Op<K>& op, const DecodeDispatchParams& params, int source, int token) {
  if (params.pushes && op.node_of(source) == op.context.node)
    return pushed_metadata(op, params, op.context.local, source, token);
  return metadata_in_inbox(op, params, source, token);
}

// [thread] Deliver nothing beside rows and scales.
template <Kernels K>
__device__ inline void deliver_weights(const Op<K>&, const DecodeDispatchParams&, const Item&, int, bool,
                                       const float*) {}

}  // namespace ep::cuda
