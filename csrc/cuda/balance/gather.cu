// A gather of counts: every rank of a node learns how often each rank has chosen each expert. It is an operation like
// dispatch and combine, with a Call, an epoch and a verdict, but it moves no rows. Without experts it is a barrier.
//
// All blocks count. The last one to arrive adds up their counts, sends them to every rank, announces the Call, and
// waits for those of the others. No block waits for another block, so they need not all be resident.
#include <algorithm>

#include "cuda/balance/count.cuh"
#include "cuda/device/launch.h"
#include "cuda/sync/call.cuh"

namespace ep::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kChoicesPerThread = 4;

using Block = Team<0, 0, kThreads>;

// [thread] Return the Call of a gather. Ranks of which one gathers and the other is in a barrier differ in its bytes.
__device__ Call call_of(const GatherArgs& args) {
  Call call{};
  call.set(Field::kOperation, static_cast<int32_t>(Operation::kGather));
  call.set(Field::kRowBytes, static_cast<int32_t>(args.num_experts * sizeof(int32_t)));
  return call;
}

// [block] Add up the counts of all blocks, and write the sums to every rank of the node. Called in the last block.
template <Kernels K>
__device__ void send_counts(const Op<K>& op, const GatherArgs& args) {
  const int32_t* const of_blocks = op.context.arrays.block_num_tokens;
  for (int expert = threadIdx.x; expert < args.num_experts; expert += kThreads) {
    int32_t sum = 0;
#pragma unroll 8
    for (int block = 0; block < static_cast<int>(gridDim.x); ++block)
      sum += __ldcg(of_blocks + block * args.num_experts + expert);
    for (int local = 0; local < op.ranks_per_node(); ++local) counts_at(op, local, op.rank()).data[expert] = sum;
  }
}

// [block] Write the counts of all ranks to the output; zeros if there are none.
template <Kernels K>
__device__ void write_counts(const Op<K>& op, const GatherArgs& args, bool has_counts) {
  for (int i = threadIdx.x; i < op.num_ranks() * args.num_experts; i += kThreads) {
    const int source = i / args.num_experts, expert = i - source * args.num_experts;
    args.counts[i] = has_counts ? __ldcg(own_counts(op, source).data + expert) : 0;
  }
}

template <class Index, Kernels K>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ Context context, const __grid_constant__ GatherArgs args) {
  __shared__ int32_t counts[balance::kMaxExperts];
  const Op<K> op{context, Operation::kGather, context.state->epoch + 1, 0, 1, false};
  if (__syncthreads_or(has_aborted(context))) return write_counts(op, args, false);
  // Count.
  count_share<kThreads>(static_cast<const Index*>(args.topk_idx), args.num_choices, args.num_experts, counts);
  int32_t* const of_block = context.arrays.block_num_tokens + blockIdx.x * args.num_experts;
  for (int expert = threadIdx.x; expert < args.num_experts; expert += kThreads) of_block[expert] = counts[expert];
  if (!last_block<Block>(&context.state->count_done, gridDim.x)) return;
  // Send, and agree.
  send_counts(op, args);
  Block::sync();
  // The Call covers the counts, and all that this rank has stored in earlier kernels: gradients in slots, for example.
  if (threadIdx.x < 32) announce(op, call_of(args), true);
  const Verdict verdict = first_warp_waits<Block>([&] { return agree(op); });
  write_counts(op, args, verdict == Verdict::kAgree);
  if (verdict == Verdict::kAborted) return;
  Block::sync();  // the counts have been read
  complete<Block>(op, nullptr, nullptr, verdict == Verdict::kDiffer);
}

// [host] Return the kernel.
template <class Index>
auto kernel_for(const GatherArgs& args) {
  return args.wait_ns ? gather_kernel<Index, Kernels::kTimed> : gather_kernel<Index, Kernels::kOneNode>;
}

}  // namespace

void Engine::gather_counts(const GatherArgs& args, cudaStream_t stream) const {
  const auto needed = (args.num_choices + kThreads * kChoicesPerThread - 1) / (kThreads * kChoicesPerThread);
  const int blocks = static_cast<int>(std::clamp<int64_t>(needed, 1, args.num_blocks));
  const auto kernel = args.index_bytes == 4 ? kernel_for<int32_t>(args) : kernel_for<int64_t>(args);
  launch(kernel, blocks, kThreads, 0, stream, context_of(args.wait_ns, false), args);
}

}  // namespace ep::cuda
