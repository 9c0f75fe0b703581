// The host describes a dispatch, and divides the shared memory of its blocks: between the scratch of a plan and later
// the pull warps' rings, the stage warps' counters, and the chunks seen by each warp.
#pragma once
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/dispatch/pull.cuh"
#include "cuda/dispatch/quantize.cuh"
#include "cuda/plan/scan.cuh"

namespace ep::cuda {

// Places of a pull warp's ring for float8 rows that are staged as they are: more loads under way disturb the staging.
// Measured on 2 H200 with 4096 x 7168: 3 places 260 us, 2 places 252 us; 8192 x 2048: 186 and 237 us; quantized rows of
// 4096 x 7168: 402 and 429 us. To measure again: benchmarks/compare_builds.py --operations "dispatch FP8" "dispatch,
// quantize".
constexpr uint32_t pair_places(uint32_t row_bytes) { return row_bytes > 4096 ? 2 : 3; }

// [host] Describe what every launch of a dispatch has.
inline void describe_rows(RowParams& params, const Context& context, const RowArgs& args, int32_t* plan) {
  const Config& config = context.config;
  params.plan = read_plan(config, plan);
  params.plan_kind = args.topk_idx ? PlanKind::kNew : PlanKind::kGiven;
  params.inverse = 0xffffffffu / config.num_local_experts() + 1;
  params.inverse_topk = 0xffffffffu / config.num_topk + 1;
  params.rail_blocks = args.rail_blocks;
  params.row_stride = static_cast<uint32_t>(row_stride(args.row_bytes));
  params.parts_of_row = args.quantizes ? RowPart::num_in_row(config.hidden / BFloat16::kElements) : 1;
  params.bulk_scales = has_bulk_scales(args.scale_bytes);
}

// [host] Return the bytes of a row's scales that its last piece takes along.
inline uint32_t bulk_scale_bytes(const RowParams& params, const RowArgs& args) {
  return params.bulk_scales ? args.scale_bytes : 0;
}

// [host] Return the most places of a pull warp's ring.
inline uint32_t max_places(const RowParams& params, const RowArgs& args) {
  return params.bulk_scales && !args.quantizes ? pair_places(args.row_bytes) : Pieces::kMaxPlaces;
}

// [host] Lay out the counters of the stage warps, and the chunks seen by each warp of a block. Return their bytes.
inline size_t lay_out_counters(RowParams& params, const Context& context, int num_warps) {
  params.seen_at = static_cast<uint32_t>(round_up(context.max_token_chunks * sizeof(uint32_t), Cursor::kAlignment));
  return params.seen_at + num_warps * context.num_ranks * sizeof(int16_t);
}

// [host] Divide the tokens among planning blocks, with as many warps in each as have room for their scratch. Return the
// bytes of the scratch.
inline size_t divide_plan(RowParams& params, const Context& context, const RowArgs& args, size_t room) {
  const auto scratch = [&] {
    Cursor c;
    Scratch::carve(c, context.config, params.plan_warps);
    return c.size();
  };
  const auto share = [](int num, int parts) { return (num + parts - 1) / parts; };
  params.plan_warps = PullWarps::kWarps;
  while (scratch() > room) --params.plan_warps;
  const int batches = share(args.num_tokens, 32);
  params.plan_blocks = std::clamp(share(batches, params.plan_warps), 1, args.num_blocks - args.rail_blocks);
  params.batches_of_block = share(batches, params.plan_blocks);
  params.batches_of_warp = share(params.batches_of_block, params.plan_warps);
  return scratch();
}

// [host] Give the pull warps' rings all of `room`. Return the bytes of the pull warps' memory.
template <int kTogether>
size_t divide_rings(RowParams& params, const Context& context, const RowArgs& args, size_t room) {
  const auto memory = [&] {
    Cursor c;
    PullMemory<kTogether>::carve(c, context, params.pulled, 0);
    return c.size();
  };
  params.pulled = make_pieces(args.row_bytes, bulk_scale_bytes(params, args), (room - memory()) / PullWarps::kWarps,
                              kMaxPiece, max_places(params, args));
  return memory();
}

// [host] Divide the shared memory of a block with this many warps, which fetch so many items together. Return its
// bytes.
template <int kTogether, class Params>
size_t divide_shared(Params& params, const Context& context, int num_warps) {
  const size_t counters = lay_out_counters(params, context, num_warps), room = kUsableShared - counters;
  size_t shared = 0;
  if (params.plans()) shared = divide_plan(params, context, params.args, room);
  if (params.pulls()) shared = std::max(shared, divide_rings<kTogether>(params, context, params.args, room));
  if (params.rail_blocks > 0) shared = room;  // for the senders' LongPuts
  params.counters_at = static_cast<uint32_t>(shared);
  return shared + counters;
}

}  // namespace ep::cuda
