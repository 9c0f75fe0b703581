// The gate between a pull and the GEMM that waits for its rows, with extras (config.h).
#define EP_WITH_EXTRAS
#include "cuda/device/launch.h"
#include "cuda/engine.h"
#include "cuda/sync/wait.cuh"

namespace ep::cuda {
using namespace EP_KERNELS;

namespace {

constexpr int kGateThreads = 128;

// Wait until all blocks of a pull have begun: kernels behind this one may take the other SMs. A pull that cannot begin
// has no limit of its own. So after the limit abort this rank, and then count all its rows in: kernels of experts end,
// and their SMs are free for the blocks of the pull, which end too. Launched by Engine::wait_until_begun, in one block.
__global__ void __launch_bounds__(kGateThreads, 1)
    gate_kernel(const __grid_constant__ Context context, const __grid_constant__ Waves waves, int num_groups) {
  const Op op{context, Operation::kDispatch, context.state->epoch + 1, 0, 1};
  const uint64_t begin = ptx::nanoseconds();
  bool has_begun = true;
  for (int turn = 1; threadIdx.x == 0; ++turn) {
    has_begun = ptx::load_acquire_on_gpu(waves.begun) >= waves.num_blocks;
    if (has_begun) break;
    if (turn % 32 != 0) continue;
    // Kernels that wait for peers may hold the SMs: their limit is over first.
    const uint64_t waited = ptx::nanoseconds() - begin;
    if (waited > context.timeout_ns + 2 * kPatienceNs)
      abort_rank(op, Phase::kMultiprocessors, bit_of(op.rank()), waited);
    if (has_aborted(context)) break;
  }
  if (__syncthreads_and(has_begun)) return;
  for (int i = threadIdx.x; i < num_groups; i += kGateThreads) atomicAdd(waves.done + i, kWaveRows);
}

}  // namespace

void Engine::wait_until_begun(const Waves& waves, int num_groups, cudaStream_t stream) const {
  launch(gate_kernel, 1, kGateThreads, 0, stream, Context{context_}, waves, num_groups);
}

}  // namespace ep::cuda
