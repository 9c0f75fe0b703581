// The host's side of a dispatch: it describes a launch, and divides the shared memory of a block.
#pragma once
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/dispatch/dispatch_kernel.cuh"
#include "cuda/dispatch/divide_shared.cuh"

namespace ep::cuda {

// [host] Describe a launch, except for the division of shared memory.
inline DispatchParams describe_dispatch(const Context& context, const DispatchArgs& args, int32_t* plan,
                                        Launch launch) {
  const Config& config = context.config;
  DispatchParams params{};
  describe_rows(params, context, args, plan);
  params.args = args;
  params.launch = launch;
  params.metadata_bytes = metadata_bytes(config, args);
  params.weights_at = static_cast<int>(round_up(args.scale_bytes, kVector) / sizeof(float));
  // Nobody reads staged rows if this rank is alone on its node, takes its own rows from the caller's tensor, and sends
  // them from there.
  params.stages_rows = config.ranks_per_node > 1 || !context.maps_all() || !params.reads_own_rows();
  return params;
}

template <Kernels K>
void Engine::launch_dispatch(const DispatchArgs& args, int32_t* plan, Launch part, cudaStream_t stream) const {
  DispatchParams params = describe_dispatch(context_, args, plan, part);
  const size_t shared = divide_shared(params, context_, DispatchBlock<K>::kWarps);
  const Context context = context_of(args.wait_ns, part == Launch::kPull);
  launch(dispatch_kernel<K>, args.num_blocks, DispatchBlock<K>::kThreads, shared, stream, context, params);
}

}  // namespace ep::cuda
