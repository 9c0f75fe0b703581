// Comparison of a routing with the routing of a plan, before a dispatch with this plan.
#include <algorithm>

#include "cuda/device/check.h"
#include "cuda/engine.h"

namespace ep::cuda {
namespace {

constexpr int kThreads = 512, kMostBlocks = 32;

// A thread that finds a difference records it as the error of the next operation, which publishes it. No operation of
// this rank runs beside this kernel, so only its own threads compete.
// reports: kOtherRouting
__global__ void __launch_bounds__(kThreads)
    find_difference_of(RoutingComparison args, int num_entries, int num_topk, StateArrays arrays) {
  State* const state = arrays.state;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_entries; i += gridDim.x * kThreads) {
    const int64_t planned = args.planned[i], given = args.given[i];
    if (planned == given) continue;
    if (atomicCAS(&state->error, 0u, static_cast<uint32_t>(Error::kOtherRouting)) != 0) return;
    ErrorFacts& facts = state->facts;
    facts.detail[0] = i / num_topk;
    facts.detail[1] = i % num_topk;
    facts.detail[2] = args.where[0];
    facts.detail[3] = args.where[1];
    facts.value = given;
    arrays.error_rows[0][0] = planned;
    return;
  }
}

}  // namespace

void Engine::compare_routing(const RoutingComparison& args, cudaStream_t stream) const {
  const int num_topk = context_.config.num_topk, num_entries = args.num_tokens * num_topk;
  if (num_entries == 0) return;
  const int blocks = std::min((num_entries + kThreads - 1) / kThreads, kMostBlocks);
  find_difference_of<<<blocks, kThreads, 0, stream>>>(args, num_entries, num_topk, context_.arrays);
  check(cudaGetLastError(), "comparison of routings");
}

}  // namespace ep::cuda
