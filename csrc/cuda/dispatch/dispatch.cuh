// One launch of the dispatch kernel: its parameters, and the tasks of its warps.
#pragma once
#include <algorithm>

#include "cuda/device/warp.cuh"
#include "cuda/engine.h"
#include "cuda/plan/direct_plan.cuh"
#include "cuda/sync/call.cuh"

namespace ep::cuda::EP_KERNELS {

// Eight of a block's warps are pull warps: they plan, then pull rows to their final rows in the output. Meanwhile the
// others, the stage warps, stage this rank's rows and metadata, deliver the metadata of received rows, and clear rows
// without a token. Few tokens wait for the quantising of their rows, which more warps end sooner.
constexpr int kPullThreads = 256, kStageThreads = kDirect ? 384 : 256;
constexpr int kBlockThreads = kPullThreads + kStageThreads, kBlockWarps = kBlockThreads / 32;
static_assert(kBlockWarps <= kStampedWarps);
using Block = Team<0, 0, kBlockThreads>;
using PullWarps = Team<1, 0, kPullThreads>;
using StageWarps = Team<2, kPullThreads, kStageThreads>;

// Pieces of a row, and a pull warp's ring for them in shared memory. Each place of the ring holds one piece. The last
// piece of a row takes the row's scales along, if they can be copied in bulk.
struct Pieces {
  static constexpr uint32_t kMaxPlaces = 4;

  uint32_t bytes, num, last_bytes;  // of one piece; pieces per row; bytes of the last piece
  uint32_t scale_bytes;             // of a row; 0: no scales, or stage warps deliver them
  uint32_t num_places;

  // [host] [thread] Return the bytes of one place for scales, and of the whole ring.
  EP_HOST_DEVICE constexpr uint32_t scale_stride() const { return (scale_bytes + 127) / 128 * 128; }
  EP_HOST_DEVICE constexpr size_t ring_bytes() const {
    return static_cast<size_t>(num_places) * (bytes + scale_stride());
  }
  // [thread] Return the bytes of a piece, and of the scales with it.
  __device__ uint32_t bytes_of(uint32_t piece) const { return piece == num - 1 ? last_bytes : bytes; }
  __device__ uint32_t scale_bytes_of(uint32_t piece) const { return piece == num - 1 ? scale_bytes : 0; }
  // [thread] Return the memory of place `i`, for a piece and for scales.
  __device__ char* place(char* ring, uint32_t i) const { return ring + i * bytes; }
  __device__ char* scale_place(char* ring, uint32_t i) const { return ring + num_places * bytes + i * scale_stride(); }
};

// [host] Split a row into pieces of at most max_piece bytes, so that a ring of ring_bytes holds two or more, and at
// most max_places.
inline Pieces make_pieces(uint32_t row_bytes, uint32_t scale_bytes, size_t ring_bytes, uint32_t max_piece,
                          uint32_t max_places) {
  Pieces pieces{};
  pieces.scale_bytes = scale_bytes;
  max_piece = static_cast<uint32_t>(std::min<size_t>(max_piece, ring_bytes / 2 - pieces.scale_stride()));
  // Take whole lines where possible: otherwise the hardware splits each request.
  for (uint32_t num = (row_bytes + max_piece - 1) / max_piece; pieces.bytes == 0 || pieces.bytes > max_piece; ++num)
    pieces.bytes = static_cast<uint32_t>(row_stride((row_bytes + num - 1) / num));
  pieces.num = (row_bytes + pieces.bytes - 1) / pieces.bytes;
  pieces.last_bytes = row_bytes - (pieces.num - 1) * pieces.bytes;
  const size_t places = ring_bytes / (pieces.bytes + pieces.scale_stride());
  pieces.num_places = static_cast<uint32_t>(std::min<size_t>(places, max_places));
  return pieces;
}

// One end of a pull warp's ring: the next piece, its item, and its place.
struct PieceCursor {
  int item = 0;  // n-th item of the pull warp, from 0
  uint32_t piece = 0;
  RingPlace ring{};

  // [thread] Go to the next piece and the next place.
  __device__ __forceinline__ void advance(const Pieces& pieces) {
    if (++piece == pieces.num) piece = 0, ++item;
    ring.advance(pieces.num_places);
  }
};

// [thread] Start the load of one piece, and with the last piece of a row the load of its scales. The place is free.
// `full` of the place ends its round when both have landed.
__device__ inline void load_piece(const Pieces& pieces, char* ring, uint64_t* full, const PieceCursor& at,
                                  const char* row, const char* scales) {
  const uint32_t place = at.ring.place, bytes = pieces.bytes_of(at.piece);
  const uint32_t scale_bytes = pieces.scale_bytes_of(at.piece);
  ptx::barrier_arrive_expect(full + place, bytes + scale_bytes);
  ptx::bulk_load(pieces.place(ring, place), row + at.piece * pieces.bytes, bytes, full + place);
  if (scale_bytes > 0) ptx::bulk_load(pieces.scale_place(ring, place), scales, scale_bytes, full + place);
}

// [thread] Create the mbarriers of a pull warp's ring. Called by lane 0, before __syncwarp.
__device__ inline void init_places(uint64_t* full) {
  for (uint32_t i = 0; i < Pieces::kMaxPlaces; ++i) ptx::barrier_init(full + i, 1);
  ptx::fence_barrier_init();
}

// Written by Engine::dispatch, read by all threads.
struct DispatchParams {
  static constexpr int kInbox = 31;  // the inbox among the targets of a row; those before it are ranks of the node

  DispatchArgs args;
  Plan plan;
  // Tasks of this launch. With `stages`: plan or announce, exchange the Calls, stage. With `pulls`: compare the Calls,
  // move lists and rows between nodes, pull, deliver, complete the operation. If the host needs the counts to make the
  // outputs, it launches twice for one epoch: stages, then pulls.
  bool stages, pulls;
  // In decode layout rows for ranks of this node are pushed to their slots, not staged (row_slot), if a node has at
  // most kInbox ranks.
  bool pushes;
  uint32_t inverse, inverse_topk;  // 2^32 / num_local_experts and 2^32 / num_topk, rounded up, for `quotient`
  bool new_plan;                   // planned by this launch, or by the one before it for the same operation
  bool direct;                     // read by is_direct() in kernels with extras
  DirectPlan direct_plan;          // laid out without a base: `in` gives that of a block
  int rail_blocks;                 // last blocks of the launch
  int plan_blocks, plan_warps;     // with plans(): blocks with pull warps at work on the plan, and such warps per block
  int batches_of_block, batches_of_warp;  // batches of 32 tokens that they scan
  uint32_t prefetched_bytes;              // of the caller's rows, with few tokens
  bool stages_rows;                       // there are readers of this rank's staged rows
  uint32_t row_targets;                   // a bit per local rank, and one for the inbox: rows go there (Targets)
  int parts_of_row;                       // a row is staged in so many parts
  int first_staging_block;                // earlier blocks stage nothing
  uint32_t row_stride;                    // [bytes] from one staged row to the next
  uint32_t metadata_bytes;                // [bytes] of one token
  int rows_per_group;                     // decode layout: rows from one expert to the next; else 0
  int weights_at;                         // [floats] from the start of the metadata to its weights
  Pieces pulled;                          // pieces of a row in the pull warps' rings
  bool bulk_scales;                       // the last piece of a row takes its scales along
  uint32_t rings_at;                      // [bytes] from the start of shared memory to the pull warps' memory for pulls
  uint32_t counters_at;                   // [bytes] from the start of shared memory to the stage warps' counters
  uint32_t seen_at;                       // [bytes] from there to int16 [kBlockWarps, num_ranks] for StagedFlags

  // [host] [thread] Return whether the new plan is a direct plan (direct.cuh): each launch makes it anew.
  __host__ __device__ bool is_direct() const { return kDirect || (kExtras && direct); }
  // [host] [thread] Return whether this launch makes a plan that is no direct one.
  __host__ __device__ bool plans() const { return stages && new_plan && !is_direct(); }
  // [host] [thread] Return whether the host waits for the counts, between two launches.
  __host__ __device__ bool counts() const { return args.ticket != 0; }
  // [host] [thread] Return whether this is one of the two launches of a dispatch with a hook.
  __host__ __device__ bool has_hook() const { return stages != pulls && !counts(); }
  // [host] [thread] Return whether rows of this rank for itself are read from the caller's tensor. With a hook they are
  // pushed like others: between the two launches the caller may overwrite them.
  __host__ __device__ bool reads_own_rows() const { return !args.quantizes && ((stages && pulls) || counts()); }

  // [thread] Give the caller the counts of one expert: its tokens, and its rows with padding.
  __device__ void write_counts(int expert, int tokens, int rows) const {
    if (args.layout == Layout::kDecode) {
      args.out_counts[expert] = tokens;
    } else {
      args.out_tokens_per_expert[expert] = tokens;
      args.out_rows_per_expert[expert] = rows;
    }
  }
  // [thread] Return the number of words of a row's scales in the output.
  __device__ int num_scale_words() const { return args.scale_bytes / (args.packs_scales ? 16 : 4); }
  // [thread] Return one of them. `scales`: of the row's token.
  __device__ uint32_t scale_word(int word, const float* scales) const {
    if (!args.packs_scales) return __float_as_uint(scales[word]);
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= (__float_as_uint(scales[4 * word + i]) >> 23) << 8 * i;
    return value;
  }
  // [thread] Return the index of a row's first word of scales in the output. The next words follow one by one, or in
  // decode layout rows_per_group apart.
  __device__ int64_t scale_at(int row) const {
    if (rows_per_group == 0) return static_cast<int64_t>(row) * num_scale_words();
    const int group = row / rows_per_group;
    return static_cast<int64_t>(group) * num_scale_words() * rows_per_group + (row - group * rows_per_group);
  }
  // [thread] Write one word of a row's scales. `scales`: of its token.
  __device__ void write_scale(int row, int word, const float* scales) const {
    const int64_t at = scale_at(row) + static_cast<int64_t>(word) * std::max(rows_per_group, 1);
    reinterpret_cast<uint32_t*>(args.out_scales)[at] = scale_word(word, scales);
  }
};

// [thread] Return n / d, given 2^32 / d, rounded up (0 for d = 1). Exact while n * d is below 2^32.
__device__ inline int quotient(int n, uint32_t inverse) { return inverse == 0 ? n : __umulhi(n, inverse); }

// [thread] Return the place of a pushed row in the slots of local rank `owner`: of a token of `source`, a rank of this
// node. Its metadata follow it.
__device__ inline char* row_slot(const Context& context, int owner, int source, int token) {
  const size_t slot = static_cast<size_t>(context.local_of(source)) * context.config.max_tokens + token;
  return context.peers.at(context.own.slots, owner) + slot * context.slot_stride;
}

// [thread] Return the metadata of a received token.
__device__ inline const char* metadata_of(const Context& context, const DispatchParams& params, int source, int token) {
  if (params.pushes && context.node_of(source) == context.node)
    return row_slot(context, context.local, source, token) + params.args.row_bytes;
  return context.inbox_holding(source, &Inbox::metadata) + static_cast<size_t>(token) * params.metadata_bytes;
}

}  // namespace ep::cuda::EP_KERNELS
