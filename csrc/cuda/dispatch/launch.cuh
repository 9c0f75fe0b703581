// The host's side of a dispatch: it describes a launch, and divides the shared memory of a block.
#pragma once
#include <type_traits>

#include "cuda/decode/launch_direct.cuh"
#include "cuda/device/launch.h"
#include "cuda/dispatch/direct_kernel.cuh"
#include "cuda/dispatch/dispatch_kernel.cuh"
#include "cuda/dispatch/divide_shared.cuh"

namespace ep::cuda {

// [host] Describe a launch, except for the division of shared memory.
inline void describe_dispatch(DispatchParams& params, const Context& context, const DispatchArgs& args, int32_t* plan,
                              Launch launch) {
  const Config& config = context.config;
  describe_rows(params, context, args, plan);
  params.args = args;
  params.launch = launch;
  params.metadata_bytes = metadata_bytes(config, args);
  params.weights_at = static_cast<int>(round_up(args.scale_bytes, kVector) / sizeof(float));
  // Nobody reads staged rows if this rank is alone on its node, takes its own rows from the caller's tensor, and sends
  // them from there.
  params.stages_rows = config.ranks_per_node > 1 || !context.maps_all() || !params.reads_own_rows();
}

// [host] Launch a dispatch that makes a direct plan.
template <Kernels K>
void launch_direct_dispatch(const Context& context, const DispatchArgs& args, int32_t* plan, Launch part,
                            cudaStream_t stream) {
  DirectDispatchParams params{};
  describe_dispatch(params, context, args, plan, part);
  if (params.stages()) params.prefetched_bytes = bytes_of_caller(context, args);
  params.row_targets = params.reads_own_rows() ? ~(1u << context.local) : ~0u;
  // A launch for few tokens waits for its code to load, so rows that are not quantized have a smaller kernel.
  constexpr bool kAlwaysMay = K != Kernels::kDirect;
  const auto kernel =
      kAlwaysMay || args.quantizes ? direct_dispatch_kernel<K, true> : direct_dispatch_kernel<K, kAlwaysMay>;
  launch_direct<K>(kernel, params, context, stream);
}

template <Kernels K>
void Engine::launch_dispatch(const DispatchArgs& args, int32_t* plan, Launch part, cudaStream_t stream) const {
  const Context context = context_of(args.wait_ns, part == Launch::kPull);
  if constexpr (K == Kernels::kDirect || K == Kernels::kTimed)
    if (context.config.plans_directly && args.topk_idx)
      return launch_direct_dispatch<K>(context, args, plan, part, stream);
  if constexpr (K != Kernels::kDirect) {
    DispatchParams params{};
    describe_dispatch(params, context, args, plan, part);
    const auto launch_with = [&](auto together) {
      constexpr int kTogether = decltype(together)::value;
      const size_t shared = divide_shared<kTogether>(params, context, DispatchBlock<K>::kWarps);
      const auto kernel = dispatch_kernel<K, kTogether>;
      launch(kernel, args.num_blocks, DispatchBlock<K>::kThreads, shared, stream, context, params);
    };
    if constexpr (K == Kernels::kOneNode)  // measured there alone; launches that time their waits deal items out
      if (args.row_bytes >= kTakenRowBytes) return launch_with(std::integral_constant<int, kTakenItems>());
    launch_with(std::integral_constant<int, kDealtItems>());
  }
}

}  // namespace ep::cuda
