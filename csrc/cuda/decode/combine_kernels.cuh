// The combine kernels of decode layout. The combine weights of all tokens travel first, and the pushes multiply by
// them. decode_combine_kernel does the same steps as combine_kernel otherwise. With very few tokens few_kernel takes
// its place, in which partial sums are tagged words (few.cuh).
//
// With few tokens most of the time goes to code that runs once. So steps run at the same time in different warps.
#pragma once
#include "cuda/combine/blocks.cuh"
#include "cuda/decode/combine_weights.cuh"
#include "cuda/decode/excluded.cuh"
#include "cuda/decode/few.cuh"
#include "cuda/decode/rail_weights.cuh"

namespace ep::cuda {

// [warp] Announce this combine, once slots are free. No rank pushes after a difference, so the Call promises no chunk.
// `covers` as in announce.
template <Kernels K>
__device__ inline void announce_decode_combine(const Op<K>& op, const DecodeCombineParams& params, bool covers) {
  Call call{};
  const auto set = [&](Field field, int32_t value) { call.set(field, value); };
  set(Field::kOperation, static_cast<int32_t>(Operation::kCombine));
  set(Field::kPlan, params.plan.head->made);
  set(Field::kNumTokens, params.args.num_tokens);
  announce(op, call, covers);
  stamp(op, Step::kSent);
}

// [warp] Compare the Calls before the first sum, and post the verdict for the other warps. Called in one summing warp.
// Before pushes wait for the combine weights of other nodes too.
template <Kernels K>
__device__ inline void agree_first(const Op<K>& op, const DecodeCombineParams& params,
                                   const DecodeCombineMemory& memory) {
  Verdict verdict = agree(op);
  stamp(op, Step::kAgreed);
  if (params.pushes() && verdict == Verdict::kAgree && params.plan.head->usable && !wait_for_combine_weights(op))
    verdict = Verdict::kAborted;
  memory.verdict.post(verdict);
}

// Launched by Engine::decode_combine: all blocks are resident at the same time, because they wait for each other. The
// second of two launches may have more: its blocks wait only for peers. The last block to arrive completes the
// operation. After an abort there is none, and the operation never completes.
// waits: slots_free (free slots)
template <Kernels K, class Summing>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    decode_combine_kernel(const __grid_constant__ Context context, const __grid_constant__ DecodeCombineParams params) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kNumTeams = Pipeline::kSummingWarps / Summing::kWarps;
  const Op<K> op{context,
                 Operation::kCombine,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x) - params.rail_blocks,
                 !params.pushes()};
  stamp(op, Step::kCombine);
  // These loads overlap: combine weights, State::aborted, the plan's sizes, `slots_free`. The last one is an acquire,
  // so loads after it would wait for it.
  const bool gives_weights = op.block == 0 && params.pushes();  // this block announces, too
  const bool sends_weights = gives_weights && sends_tagged_weights(op),
             stores_weights = gives_weights && !sends_weights;
  CombineWeightCopy combine_weights(op, params, gives_weights);
  const bool aborted = has_aborted(context);
  const PlanSizes sizes = *params.plan.head;
  const bool sees_free =
      !params.pushes() || poll_once(op, context.own.slots_free, context.state->pushed_epoch, threadIdx.x);
  const Part pushers{op.block, num_push_blocks(op, params, sizes, 0)};
  if (sends_weights && !aborted) combine_weights.send(op);
  // Leave after an abort: all threads of the block, or none.
  const bool is_free = !__syncthreads_or(aborted || !sees_free);
  if (!is_free && __syncthreads_or(aborted)) return;
  const bool pushes = params.pushes() && pushers.has_block(), is_rail = op.is_rail();
  // Choose the blocks for tokens of other nodes: those without pushes, or all where all push.
  const int first = pushers.num_blocks < op.num_blocks ? pushers.num_blocks : 0;
  const Part for_others{op.block - first, op.num_blocks - first};
  DecodeCombineMemory memory = params.memory.in(shared);

  // Wait for free slots before the first push, if they were not free at first sight, and announce. Combine weights
  // without tags come first. Meanwhile the other warps initialise shared memory.
  bool ok = true;
  if (stores_weights && is_free) combine_weights.store(op);
  if (threadIdx.x < 32) {
    if (pushes && !is_free)
      ok = wait_for_node(op, Phase::kFreeSlots, context.own.slots_free, context.state->pushed_epoch);
    if (params.pushes()) stamp(op, Step::kFree);
    // With masks a rank whose Call is here counts as present: then its combine weights must be on their way for good.
    if (ok && sends_weights) announce_decode_combine(op, params, has_masks(op));
  } else {
    if (threadIdx.x == 32) ptx::barrier_init(memory.verdict.barrier, 1);
    // An issuing warp arrives for the rows of a task, and for its combine weights.
    init_memory(op, params, memory, kNumTeams, 2);
  }
  if (!__syncthreads_and(ok)) return;
  if (stores_weights) {
    if (!is_free) {
      combine_weights.store(op);
      __syncthreads();
    }
    if (threadIdx.x < 32) announce_decode_combine(op, params, true);
  }

  // Push and reduce the rows, each warp in its role.
  Verdict verdict = Verdict::kAgree;
  if (is_rail) {
    verdict = run_rail(op, params, memory.pipeline.smem_stages);
  } else
    switch (Pipeline::role()) {
      case Pipeline::Role::kIssue: {
        Issuer issuer(memory.pipeline, threadIdx.x / 32);
        issuer.run(
            [&](const Issuer::Load& load, bool has_task) { load_combine_weights(op, memory, load, issuer, has_task); });
        stamp(op, Step::kIssued);
        break;
      }
      case Pipeline::Role::kPrepare:
        verdict = queue_sums(
            op, params, pushers, for_others, memory, kNumTeams,
            [&] { return pushers.has_block() ? Verdict::kAgree : memory.verdict.wait_in_warp(); },
            [&] { return memory.verdict.wait_in_warp(); });
        break;
      case Pipeline::Role::kSum:
        if (threadIdx.x / 32 == Pipeline::kThreads / 32 - 1) agree_first(op, params, memory);
        consume<Summing>(
            memory.pipeline, [&] { return memory.verdict.wait_in_warp() == Verdict::kAgree; },
            [&](const Task& task, int place, const auto& row, int thread, const auto& release) {
              if (task.weights_from < 0) return sum_task<Summing>(task, row, thread, release);
              auto* const to = reinterpret_cast<uint4*>(task.to);
              const int num_vectors = task.bytes / 16;
              sum_rows<Summing>(row, memory.weights.of_task(place), task.num_rows, num_vectors, to, thread, release);
            },
            [&](int progress_flag) { finish_progress_flag(op, params, memory, pushers, for_others, progress_flag); });
        // load_combine_weight may have aborted this rank meanwhile. All combine weights are loaded before the last
        // task, so its verdict is known here.
        verdict = memory.verdict.wait();
        stamp(op, Step::kSummed);
    }

  // Complete the operation as combine_kernel does.
  if (!__syncthreads_and(verdict != Verdict::kAborted)) return;
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!params.reduces()) return;
  if (!last_block<CombineBlock>(&context.state->combine_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (was_masked_by_a_peer<CombineBlock>(op)) return;
  if (!differs) count_bytes_pushed(op, params);
  complete<CombineBlock>(op, &Region::slots_free, &State::pushed_epoch, differs);
  stamp(op, Step::kComplete);
}

// [thread] Bring the plan's items and tables to the L2 cache, as with few tokens each of them is waited for.
__device__ inline void prefetch_plan(const DecodeCombineParams& params) {
  const uint32_t at = (blockIdx.x * Pipeline::kThreads + threadIdx.x) * 128;
  if (at < params.prefetched_bytes) ptx::prefetch(reinterpret_cast<const char*>(params.plan.head) + at);
}

// The combine kernel of few tokens (few.cuh), launched in its place. The first warp compares the Calls.
template <Kernels K, class T>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    few_kernel(const __grid_constant__ Context context, const __grid_constant__ DecodeCombineParams params) {
  const Op<K> op{context,
                 Operation::kCombine,
                 context.state->epoch + 1,
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x),
                 !params.pushes()};
  stamp(op, Step::kCombine);
  prefetch_plan(params);
  // Send the combine weights in block 0. Announce in block 1.
  const bool sends = op.block == 0 && params.pushes();
  CombineWeightCopy combine_weights(op, params, sends);
  const bool aborted = has_aborted(context);
  if (sends && !aborted) combine_weights.send(op);
  __shared__ uint64_t barrier;
  __shared__ Verdict posted;
  const PostedVerdict verdict{&posted, &barrier};
  if (threadIdx.x == 0) {
    ptx::barrier_init(&barrier, 1);
    ptx::fence_barrier_init();
  }
  if (__syncthreads_or(aborted)) return;
  bool ok = true;
  constexpr int kWarps = CombineBlock::kWarps - 1;
  const int warp = threadIdx.x / 32 - 1;
  if (warp < 0) {
    if (params.pushes() && op.block == min(1, op.num_blocks - 1)) announce_decode_combine(op, params, false);
    verdict.post(agree(op));
    stamp(op, Step::kAgreed);
  } else {
    // Warps without a push reduce first, if the others are few: they take units in the opposite order.
    const int num = op.num_blocks * kWarps, n = op.block + op.num_blocks * warp;
    const int parts = (context.row_bytes + kPartBytes - 1) / kPartBytes, num_vectors = context.row_bytes / 16;
    if (params.pushes()) push_tagged_sums<T>(op, params, verdict, {n, num, parts, num_vectors});
    if (params.reduces()) ok = reduce_tagged_sums<T>(op, params, verdict, {num - 1 - n, num, parts, num_vectors});
    stamp(op, Step::kSummed);
  }
  // Complete the operation as the combine kernel does.
  const Verdict last = verdict.wait();
  if (!__syncthreads_and(ok && last != Verdict::kAborted)) return;
  stamp(op, Step::kArrived);
  if (!params.reduces()) return;
  if (!last_block<CombineBlock>(&context.state->combine_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (last != Verdict::kDiffer) count_bytes_pushed(op, params);
  complete<CombineBlock>(op, &Region::slots_free, &State::pushed_epoch, last == Verdict::kDiffer);
  stamp(op, Step::kComplete);
}

}  // namespace ep::cuda
