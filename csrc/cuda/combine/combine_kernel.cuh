// The combine kernel of expert and rank layout, from the first step to the last. Most blocks push: they sum the rows of
// every item and store the sum in a slot at the token's owner, or at the owner's rail peer here, chunk by chunk. The
// others reduce: they wait for chunks and sum the partial sums of each token. Tokens of other nodes come first, and
// rail blocks send their sums to the owners. A pushing block reduces too, after its last push. The warps of a block:
//
//   preparing warp   push:   queue a task per item       (push.cuh)
//                    agree:  wait until all ranks have begun this combine
//                    reduce: queue a task per token      (reduce.cuh)
//   issuing warps    load the rows of each task          (pipeline.cuh)
//   summing warps    sum the rows of each task, store the sum, raise the flags of complete chunks
//   rail blocks      send sums to the rail peers, and relay those sent here (rail_sums.cuh)
#pragma once
#include "cuda/combine/blocks.cuh"
#include "cuda/rail/rail_sums.cuh"

namespace ep::cuda {

// [warp] Announce this combine. Called in warp 0 of block 0, once slots are free: this block pushes.
template <Kernels K>
__device__ inline void announce_combine(const Op<K>& op, const CombineParams& params) {
  const PlanHead& head = *params.plan.head;
  Call call{};
  const auto set = [&](Field field, int32_t value) { call.set(field, value); };
  set(Field::kOperation, static_cast<int32_t>(Operation::kCombine));
  set(Field::kPlan, head.made);
  set(Field::kWeights, params.args.topk_weights != nullptr);
  set(Field::kNumTokens, params.args.num_tokens);
  set(Field::kNumChunks, end_of_pushed(op, head));
  announce(op, call, false);
  stamp(op, Step::kSent);
}

// Launched by Engine::combine: all blocks are resident at the same time, because they wait for each other. The last
// block to arrive completes the operation. After an abort there is none, and the operation never completes.
// waits: slots_free (free slots)
template <Kernels K, class Summing>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    combine_kernel(const __grid_constant__ Context context, const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kNumTeams = Pipeline::kSummingWarps / Summing::kWarps;
  const Op<K> op{context,
                 Operation::kCombine,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x) - params.rail_blocks,
                 false};
  stamp(op, Step::kCombine);
  // Look whether slots are free: mostly they are, and nobody has to wait. These loads overlap: State::aborted, the
  // plan's sizes, `slots_free`. The last one is an acquire, so loads after it would wait for it.
  const bool aborted = has_aborted(context);
  const PlanSizes sizes = *params.plan.head;
  const int num_own = adds_own_rows(op) ? params.plan.head->items_of(op.rank()) : 0;
  const bool sees_free = poll_once(op, context.own.slots_free, context.state->pushed_epoch, threadIdx.x);
  const Part pushers{op.block, num_push_blocks(op, params, sizes, num_own)};
  // Leave after an abort: all threads of the block, or none.
  const bool is_free = !__syncthreads_or(aborted || !sees_free);
  if (!is_free && __syncthreads_or(aborted)) return;
  const bool pushes = pushers.has_block(), is_rail = op.is_rail();
  // Choose the blocks for tokens of other nodes: those without pushes, or all where all push.
  const int first = pushers.num_blocks < op.num_blocks ? pushers.num_blocks : 0;
  const Part for_others{op.block - first, op.num_blocks - first};
  CombineMemory memory = params.memory.in(shared);

  // Wait for free slots before the first push, and announce. Meanwhile the other warps initialise shared memory.
  bool ok = true;
  if (threadIdx.x < 32) {
    if (pushes && !is_free)
      ok = wait_for_node(op, Phase::kFreeSlots, context.own.slots_free, context.state->pushed_epoch);
    stamp(op, Step::kFree);
    if (ok && op.block == 0) announce_combine(op, params);
  } else {
    init_memory(op, params, memory, kNumTeams);
  }
  if (!__syncthreads_and(ok)) return;

  // Push the weights: the chunk flags cover them.
  if (pushes && params.args.topk_weights) {
    push_weights(op, params, pushers);
    __syncthreads();
  }

  // Push and reduce the rows, each warp in its role.
  Verdict verdict = Verdict::kAgree;
  if (is_rail) {
    verdict = run_rail(op, params, memory.pipeline.smem_stages);
  } else
    switch (Pipeline::role()) {
      case Pipeline::Role::kIssue:
        Issuer(memory.pipeline, threadIdx.x / 32).run([](const Issuer::Load&, bool) {});
        stamp(op, Step::kIssued);
        break;
      case Pipeline::Role::kPrepare:
        verdict = queue_sums(
            op, params, pushers, for_others, memory, kNumTeams, [] { return Verdict::kAgree; },
            [&] { return agree(op); });
        break;
      case Pipeline::Role::kSum:
        consume<Summing>(
            memory.pipeline, [] { return true; },
            [](const Task& task, int, const auto& row, int thread, const auto& release) {
              if constexpr (kAddsOwnRows<K>)
                sum_own_rows_first<Summing>(task, row, thread, release);
              else
                sum_task<Summing>(task, row, thread, release);
            },
            [&](int progress_flag) { finish_progress_flag(op, params, memory, pushers, for_others, progress_flag); });
        stamp(op, Step::kSummed);
    }

  // Count this block in. The last one hands the slots back and completes the operation.
  if (!__syncthreads_and(verdict != Verdict::kAborted)) return;
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!last_block<CombineBlock>(&context.state->combine_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (!differs) count_bytes_pushed(op, params);
  complete<CombineBlock>(op, &Region::slots_free, &State::pushed_epoch, differs);
  stamp(op, Step::kComplete);
}

}  // namespace ep::cuda
