// The host's side of a dispatch in decode layout.
#pragma once
#include <algorithm>

#include "cuda/decode/dispatch_kernels.cuh"
#include "cuda/decode/launch_direct.cuh"
#include "cuda/device/launch.h"
#include "cuda/dispatch/divide_shared.cuh"

namespace ep::cuda {

// [host] Describe a launch, except for the division of shared memory.
inline void describe_decode(DecodeDispatchParams& params, const Context& context, const DecodeDispatchArgs& args,
                            int32_t* plan, DecodeLaunch launch) {
  const Config& config = context.config;
  describe_rows(params, context, args, plan);
  params.args = args;
  params.launch = launch;
  // The first launch has made a direct plan.
  if (config.plans_directly && launch == DecodeLaunch::kReceive) params.plan_kind = PlanKind::kGiven;
  params.metadata_bytes = metadata_bytes(config, args);
  params.rows_per_group = config.num_ranks() * config.max_tokens;
  if (params.stages() && config.plans_directly) params.prefetched_bytes = bytes_of_caller(context, args);
  // A row has a target for each rank of the node, and between nodes the inbox.
  const bool one_node = config.num_nodes == 1;
  params.pushes = config.ranks_per_node <= (one_node ? kInboxTarget + 1 : kInboxTarget);
  // With pushes senders are the only readers of staged rows. They read the caller's rows where they can.
  const bool sends_staged = !one_node && (!context.maps_all() || args.quantizes);
  params.stages_rows = !params.pushes || sends_staged;
  params.row_targets = ~0u;
  if (params.pushes && params.reads_own_rows()) params.row_targets &= ~(1u << context.local);
  if (!one_node && !params.stages_rows) params.row_targets &= ~(1u << kInboxTarget);
}

// [host] Launch the kernel that only places rows, if it can: all metadata are scales that come with the rows, and a
// lane has a word of an item. Return whether it can.
template <Kernels K>
bool launch_place(DecodeDispatchParams& params, const Context& context, cudaStream_t stream) {
  const DecodeDispatchArgs& args = params.args;
  const uint32_t scale_bytes = bulk_scale_bytes(params, args);
  const bool can = context.config.plans_directly && params.launch == DecodeLaunch::kReceive && params.pushes &&
                   context.item_ints <= 32 && params.metadata_bytes == round_up(scale_bytes, kVector);
  if (!can) return false;
  params.pulled = make_pieces(args.row_bytes, scale_bytes, kUsableShared / PlaceWarps::kWarps - kVector * 4, kMaxPiece,
                              Pieces::kMaxPlaces);
  Cursor c;
  carve_rings(c, params.pulled, PlaceWarps::kWarps, 0);
  launch(place_kernel<K>, args.num_blocks, PlaceWarps::kThreads, c.size(), stream, context, params);
  return true;
}

template <Kernels K>
void Engine::launch_decode_dispatch(const DecodeDispatchArgs& args, int32_t* plan, DecodeLaunch part,
                                    cudaStream_t stream) const {
  constexpr bool kMayPlanDirectly = K == Kernels::kDecodeDirect || K == Kernels::kDecodeExtras;
  const Context context = context_of(args.wait_ns, part == DecodeLaunch::kReceive);
  const bool plans_directly = context.config.plans_directly && args.topk_idx && part != DecodeLaunch::kReceive;
  if constexpr (kMayPlanDirectly) {
    if (plans_directly) {
      DirectDecodeParams params{};
      describe_decode(params, context, args, plan, part);
      // A launch for few tokens waits for its code to load, so rows that are not quantized have a smaller kernel.
      constexpr bool kAlwaysMay = K != Kernels::kDecodeDirect;
      const auto kernel =
          kAlwaysMay || args.quantizes ? direct_decode_kernel<K, true> : direct_decode_kernel<K, kAlwaysMay>;
      return launch_direct<K>(kernel, params, context, stream);
    }
  }
  if constexpr (K != Kernels::kDecodeDirect) {
    DecodeDispatchParams params{};
    describe_decode(params, context, args, plan, part);
    if constexpr (K == Kernels::kDecode)
      if (launch_place<K>(params, context, stream)) return;
    const size_t shared = divide_shared<kDealtItems>(params, context, DispatchBlock<K>::kWarps);
    launch(decode_dispatch_kernel<K>, args.num_blocks, DispatchBlock<K>::kThreads, shared, stream, context, params);
  }
}

}  // namespace ep::cuda
