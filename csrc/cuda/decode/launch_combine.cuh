// The host's side of a combine in decode layout.
#pragma once
#include "cuda/combine/divide_shared.cuh"
#include "cuda/decode/combine_kernels.cuh"
#include "cuda/device/launch.h"

namespace ep::cuda {

// [host] Launch the combine of very few tokens.
template <Kernels K>
void launch_few(DecodeCombineParams& params, const Context& context, cudaStream_t stream) {
  // Plans of decode layout have room for all items.
  params.prefetched_bytes = static_cast<uint32_t>(plan_capacity(context.config, -1) * sizeof(int32_t));
  with_element(context, [&](auto element) {
    launch(few_kernel<K, decltype(element)>, params.args.num_blocks, Pipeline::kThreads, 0, stream, context, params);
  });
}

template <Kernels K>
void Engine::launch_decode_combine(const DecodeCombineArgs& args, int32_t* plan, DecodeLaunch part,
                                   cudaStream_t stream) const {
  const Config& config = context_.config;
  const Context context = context_of(args.wait_ns, part == DecodeLaunch::kReceive);
  DecodeCombineParams params{};
  params.args = args;
  params.launch = part;
  describe_sums(params, context, args, plan, Records::kBatch);
  if constexpr (!has_several_nodes(K))
    if (config.tags_sums()) return launch_few<K>(params, context, stream);
  const bool halves_rows = has_long_rows(context) && config.num_nodes == 1 && !config.plans_directly;
  const size_t shared = divide_shared(params, context, halves_rows);
  const auto run = [&](auto summing) {
    launch(decode_combine_kernel<K, decltype(summing)>, args.num_blocks, Pipeline::kThreads, shared, stream, context,
           params);
  };
  with_summing<!has_several_nodes(K), true>(context, halves_rows, run);
}

}  // namespace ep::cuda
