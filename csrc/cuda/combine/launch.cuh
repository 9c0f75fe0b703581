// The host's side of a combine: it describes a launch, and divides the shared memory of a block.
#pragma once
#include "cuda/combine/combine_kernel.cuh"
#include "cuda/combine/divide_shared.cuh"
#include "cuda/device/launch.h"

namespace ep::cuda {

template <Kernels K>
void Engine::launch_combine(const CombineArgs& args, int32_t* plan, cudaStream_t stream) const {
  const bool one_node = context_.config.num_nodes == 1, is_long = has_long_rows(context_);
  const bool halves_rows = is_long && one_node;
  CombineParams params{};
  params.args = args;
  describe_sums(params, context_, args, plan, is_long && one_node ? 8 : Records::kBatch);
  const size_t shared = divide_shared(params, context_, halves_rows);
  const Context context = context_of(args.wait_ns, false);
  const auto run = [&](auto summing) {
    launch(combine_kernel<K, decltype(summing)>, args.num_blocks, Pipeline::kThreads, shared, stream, context, params);
  };
  with_summing<K != Kernels::kSeveralNodes, K != Kernels::kOneNode>(context_, halves_rows, run);
}

}  // namespace ep::cuda
