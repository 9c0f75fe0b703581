// Placing: pushed rows go from their slots to the output. The code is short, because it begins cold and the caller
// waits for it: a warp loads a row, and each lane with a copy of the row stores it.
#pragma once
#include "cuda/decode/decode_dispatch.cuh"
#include "cuda/decode/direct.cuh"

namespace ep::cuda {

using DirectDecodeParams = DirectParams<DecodeDispatchParams>;

// [host] [thread] Lay out the rings of `num_warps` warps, or measure them. Return ring and mbarriers of one warp.
EP_HOST_DEVICE inline std::pair<char*, uint64_t*> carve_rings(Cursor& c, const Pieces& pieces, int num_warps,
                                                              int warp) {
  char* const rings = c.take<char>(num_warps * pieces.ring_bytes());
  uint64_t* const full = c.take<uint64_t>(num_warps * Pieces::kMaxPlaces);
  return {rings + warp * pieces.ring_bytes(), full + warp * Pieces::kMaxPlaces};
}

// [warp] Place the rows of this warp's items, and their scales. Loads overlap with the stores of the piece before.
// Return false after an abort of this rank. In all cases no load is under way, and all begun stores are written.
//   ring, full: this warp's places, at least two, and their mbarriers
//   find_item(n, source, token): find the warp's n-th item; return false behind the last one
//   wait_for_row(source, token): wait until its row may be read by bulk loads; return false after an abort
//   find_row(source, token): return the output row of the lane's copy of the item found last, or -1. In rank layout
//   one lane has the item's row
template <Kernels K, class Params, class FindItem, class WaitForRow, class FindRow>
__device__ bool place_rows(const Op<K>& op, const Params& params, char* ring, uint64_t* full, const FindItem& find_item,
                           const WaitForRow& wait_for_row, const FindRow& find_row) {
  const RowArgs& args = params.args;
  const Pieces& pieces = params.pulled;
  const int lane = threadIdx.x % 32;
  PieceCursor load, store;
  int row = -1;
  // Wait for the piece of `store`, and store it.
  const auto store_piece = [&] {
    ptx::barrier_wait(full + store.ring.place, store.ring.parity);
    if (kStamps && store.item == 0) stamp(op, Step::kLanded);
    const char* const scales = pieces.scale_place(ring, store.ring.place);
    const uint32_t scale_bytes = pieces.scale_bytes_of(store.piece);
    if (row >= 0) {
      ptx::bulk_store(args.out_rows + static_cast<size_t>(row) * args.row_bytes + store.piece * pieces.bytes,
                      pieces.place(ring, store.ring.place), pieces.bytes_of(store.piece));
      if (scale_bytes > 0 && !Params::kScalesByColumn)
        ptx::bulk_store(reinterpret_cast<char*>(args.out_scales) + static_cast<size_t>(row) * scale_bytes, scales,
                        scale_bytes);
    }
    ptx::bulk_commit();
    if constexpr (Params::kScalesByColumn)
      if (scale_bytes > 0) params.store_columns(reinterpret_cast<const float*>(scales), row);
    store.advance(pieces);
  };
  int source, token;
  bool ok = true;
#pragma unroll 1
  for (int n = 0; find_item(n, source, token) && (ok = wait_for_row(source, token)); ++n) {
    const bool at_home = source == op.rank() && params.reads_own_rows();
    const char* const from = at_home ? args.rows + static_cast<size_t>(token) * args.row_bytes
                                     : row_slot(op, op.context.local, source, token);
    const char* const scales =
        at_home ? reinterpret_cast<const char*>(args.scales) + static_cast<size_t>(token) * args.scale_bytes
                : pushed_metadata(op, params, op.context.local, source, token);
#pragma unroll 1
    do {
      // The place is free: only the last group of stores may still read its own one, if there are three places.
      pieces.num_places > 2 ? ptx::bulk_wait_read<1>() : ptx::bulk_wait_read<0>();
      __syncwarp();
      if (lane == 0) load_piece(pieces, ring, full, load, from, scales);
      const bool is_first = load.piece == 0;
      if (load.item > 0 || !is_first) store_piece();
      load.advance(pieces);
      if (is_first) row = find_row(source, token);
    } while (load.piece > 0);
  }
  if (load.item > 0) store_piece();
  stamp(op, Step::kPulled);
  ptx::bulk_wait<0>();
  stamp(op, Step::kStored);
  return ok;
}

// [warp] Find a received token by its number, counted from word `first_word` of the tokens of all sources on; behind
// the last word follows word 0. Return false if there are fewer. The choices are counted.
__device__ inline bool find_in_warp(const DirectPlan& plan, int first_word, int number, int& source, int& token) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int begin = 0; begin < plan.words; begin += 32) {
    // A lane takes a word of 32 tokens.
    int word = begin + lane + first_word;
    if (word >= plan.words) word -= plan.words;
    const uint32_t tokens = begin + lane < plan.words ? plan.received[word] : 0;
    const int num = __popc(tokens), up_to = inclusive_sum(num), all = __shfl_sync(~0u, up_to, 31);
    if (number >= all) {
      number -= all;
      continue;
    }
    // Find the word, then the bit: a lane tests one.
    const int at = __popc(__ballot_sync(~0u, up_to <= number));
    number -= __shfl_sync(~0u, up_to - num, at);
    word = __shfl_sync(~0u, word, at);
    const uint32_t its_tokens = __shfl_sync(~0u, tokens, at);
    const bool is_it = (its_tokens >> lane & 1) && __popc(its_tokens & ((1u << lane) - 1)) == number;
    source = word / plan.source_words;
    token = 32 * (word - source * plan.source_words) + __ffs(__ballot_sync(~0u, is_it)) - 1;
    return true;
  }
  return false;
}

// [warp] Wait until the row and the metadata of a received token may be read, by bulk loads too. Return false after an
// abort of this rank.
template <Kernels K>
__device__ inline bool wait_for_token(const Op<K>& op, const StagedFlags& staged, int source, int token) {
  const int chunk = token >> op.context.config.log_token_chunk;
  return chunk <= staged.seen(source) || staged.wait(op, source, chunk);
}

// [thread] Return the local expert of the lane's choice of a received token, -1 for none and for one elsewhere.
template <Kernels K>
__device__ inline int local_choice(const Op<K>& op, const DirectPlan& plan, int source, int token) {
  const int lane = threadIdx.x % 32, num_local = op.context.num_local_experts;
  const int e =
      lane < op.context.config.num_topk ? plan.choices_of(op, source, token)[lane] - op.rank() * num_local : -1;
  return static_cast<unsigned>(e) < static_cast<unsigned>(num_local) ? e : -1;
}

// [team] Write all items of a usable direct plan to memory, for later operations; the warps share them. Called by the
// same team in each block.
template <class Team, Kernels K, class Params>
__device__ inline void keep_items(const Op<K>& op, const Params& params, char* shared) {
  const DirectPlan plan = params.direct_plan.in(shared);
  const bool is_first = threadIdx.x % 32 == 0;
  int source, token;
#pragma unroll 1
  for (int n = op.block + op.num_blocks * Team::warp(); find_in_warp(plan, 0, n, source, token);
       n += op.num_blocks * Team::kWarps) {
    int32_t* const item = params.plan.items + static_cast<size_t>(n) * op.context.item_ints;
    write_items(op, params, shared, source, is_first ? token : -1, is_first ? item : nullptr);
  }
}

// [team] Deliver the scales that do not come with the rows, after keep_items of the same warps. Wait until the rows of
// an item are staged. Called by the stage warps of each block. Return false after an abort of this rank: a warp may
// then leave alone, so no barrier of the team may follow. Not inlined: few launches call it, and it costs registers.
template <Kernels K>
__device__ __noinline__ inline bool deliver_direct_scales(Op<K> op, const DirectDecodeParams& params, char* shared) {
  const DirectPlan plan = params.direct_plan.in(shared);
  const StagedFlags staged = staged_flags(op, params, shared);
  int source, token;
#pragma unroll 1
  for (int n = op.block + op.num_blocks * StageWarps<K>::warp(); find_in_warp(plan, 0, n, source, token);
       n += op.num_blocks * StageWarps<K>::kWarps) {
    if (!wait_for_token(op, staged, source, token)) return false;
    const auto* const scales = reinterpret_cast<const float*>(metadata_of(op, params, source, token));
    const Item item{params.plan.items + static_cast<size_t>(n) * op.context.item_ints, op.context.max_copies};
#pragma unroll 1
    for (int word = threadIdx.x % 32; word < params.num_scale_words(); word += 32)
#pragma unroll 1
      for (int copy = 0; copy < item.num_copies(); ++copy) params.write_scale(item.value(copy), word, scales);
  }
  return true;
}

// [warp] Create the mbarriers of this pull warp's ring, before place_direct.
template <Kernels K, class Params>
__device__ inline void make_ring(const Op<K>&, const Params& params, char* shared) {
  Cursor c(shared + params.rings_at);
  const auto [ring, full] = carve_rings(c, params.pulled, PullWarps::kWarps, PullWarps::warp());
  if (threadIdx.x % 32 == 0) init_places(full);
  __syncwarp();
}

// [warp] Place the rows of this pull warp's items of a direct plan. The choices are summed, and all ranks agree. Where
// all rows fit, head and layout may be unwritten; else the plan is usable. Return as place_rows. Items have the order
// of the plan, but each rank begins with its own tokens. So at any time different ranks have different sources.
template <Kernels K, class Params>
__device__ inline bool place_direct(const Op<K>& op, const Params& params, char* shared) {
  const DirectPlan plan = params.direct_plan.in(shared);
  Cursor c(shared + params.rings_at);
  const auto [ring, full] = carve_rings(c, params.pulled, PullWarps::kWarps, PullWarps::warp());
  const StagedFlags staged = staged_flags(op, params, shared);
  const int first = op.block + op.num_blocks * PullWarps::warp(), step = op.num_blocks * PullWarps::kWarps;
  int number;  // of the item found last, in this order
  const auto find_item = [&](int n, int& source, int& token) {
    number = first + step * n;
    return find_in_warp(plan, op.rank() * plan.source_words, number, source, token);
  };
  const auto wait_for_row = [&](int source, int token) {
    const bool at_home = source == op.rank() && params.reads_own_rows();
    return at_home || wait_for_token(op, staged, source, token);
  };
  const auto find_row = [&](int source, int token) {
    if (params.has_rank_layout()) {
      // The order of the plan begins with rank 0.
      const int index = plan.head->item_begin()[op.rank()] + number, num_items = plan.head->num_items;
      return threadIdx.x % 32 > 0 ? -1 : index < num_items ? index : index - num_items;
    }
    const int e = local_choice(op, plan, source, token);
    return e < 0 ? -1 : row_of_choice(op, params, plan, source, token, e);
  };
  return place_rows(op, params, ring, full, find_item, wait_for_row, find_row);
}

// A block of the kernel that only places rows: the second launch of a dispatch with a hook. So many warps have a ring
// with room for a row of 7168 bfloat16, and an item each with 128 tokens of 2 ranks on 24 multiprocessors.
using PlaceWarps = Team<0, 0, 384>;

// [warp] Place the rows of this warp's items of a usable plan in memory, once those of all ranks are in their slots.
// Return as place_rows.
// waits: staged (rows)
template <Kernels K>
__device__ inline bool place_planned(const Op<K>& op, const DecodeDispatchParams& params, char* ring, uint64_t* full) {
  const Context& context = op.context;
  const PlanHead& head = *params.plan.head;
  const int lane = threadIdx.x % 32, num_ranks = op.num_ranks(), most = num_ranks * context.config.max_tokens;
  // Read the first item, also where the plan has none: these loads overlap. A lane has a word of an item.
  const auto load_item = [&](int index) {
    const size_t at = static_cast<size_t>(min(index, most - 1)) * context.item_ints + lane;
    return lane < context.item_ints ? params.plan.items[at] : 0;
  };
  int next = op.block + op.num_blocks * (threadIdx.x / 32), item = 0, next_item = load_item(next);
  const int num_items = head.num_items, end_of_source = lane < num_ranks ? head.item_begin()[lane + 1] : INT32_MAX;
  // A rank raises its last flag with its last rows.
  const int rank = min(lane, num_ranks - 1);
  const uint64_t* const flag = op.context.own.staged + (static_cast<size_t>(rank) + 1) * context.max_token_chunks - 1;
  if (!wait_until(op, Phase::kRows, flag, op.epoch, rank, rank)) return false;
  ptx::fence_before_bulk();
  stamp(op, Step::kRows);
  const auto find_item = [&](int, int& source, int& token) {
    const int index = next;
    if (index >= num_items) return false;
    item = next_item;
    next_item = load_item(next += op.num_blocks * PlaceWarps::kWarps);
    source = __popc(__ballot_sync(~0u, index >= end_of_source));
    token = __shfl_sync(~0u, item, 0);
    return true;
  };
  const auto find_row = [&](int, int) {
    const int num_copies = __shfl_sync(~0u, item, 1), row = __shfl_sync(~0u, item, (2 + lane) % 32);
    return lane < num_copies ? row : -1;
  };
  return place_rows(op, params, ring, full, find_item, [](int, int) { return true; }, find_row);
}

}  // namespace ep::cuda
