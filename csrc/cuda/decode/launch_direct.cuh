// The host's side of a launch that makes a direct plan.
#pragma once
#include "cuda/decode/place.cuh"
#include "cuda/device/launch.h"
#include "cuda/dispatch/divide_shared.cuh"

namespace ep::cuda {

// [host] Return the bytes of the caller's rows.
inline uint32_t bytes_of_caller(const Context& context, const RowArgs& args) {
  return args.num_tokens * (args.quantizes ? context.row_bytes : args.row_bytes);
}

// [host] Divide the shared memory of a block between a direct plan, the pull warps' rings, and the counters of the
// stage warps. Return its bytes.
template <class Params>
size_t divide_shared_directly(Params& params, const Context& context, int num_warps) {
  const RowArgs& args = params.args;
  const size_t counters = lay_out_counters(params, context, num_warps), room = kUsableShared - counters;
  Cursor c;
  params.direct_plan = DirectPlan::carve(c, context.config, Params::kAllFit);
  size_t shared = round_up(c.size(), kLine);
  params.rings_at = static_cast<uint32_t>(shared);
  if (params.pulls()) {
    const auto rings = [&] {
      Cursor c;
      carve_rings(c, params.pulled, PullWarps::kWarps, 0);
      return c.size();
    };
    const size_t ring = (room - shared - rings()) / PullWarps::kWarps;
    params.pulled =
        make_pieces(args.row_bytes, bulk_scale_bytes(params, args), ring, kMaxPiece, max_places(params, args));
    shared += rings();
  }
  params.counters_at = static_cast<uint32_t>(shared);
  return shared + counters;
}

// [host] Launch a kernel that makes a direct plan.
template <Kernels K, class Params>
void launch_direct(void (*kernel)(Context, Params), Params& params, const Context& context, cudaStream_t stream) {
  using Stage = StageWarps<K>;
  // Block 0 sends the choices and begins to stage late. If the others take no more turns without it, it stages nothing.
  const RowArgs& args = params.args;
  const auto turns = [&](int staging_blocks) {
    const int warps = staging_blocks * Stage::kWarps;
    return (int64_t{args.num_tokens} * params.parts_of_row + warps - 1) / warps;
  };
  params.first_staging_block = args.num_blocks > 1 && turns(args.num_blocks - 1) == turns(args.num_blocks);
  const size_t shared = divide_shared_directly(params, context, DispatchBlock<K>::kWarps);
  launch(kernel, args.num_blocks, DispatchBlock<K>::kThreads, shared, stream, context, params);
}

}  // namespace ep::cuda
