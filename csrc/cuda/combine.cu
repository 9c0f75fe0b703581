// Combine: most blocks sum the rows of every item and push the sums to the sources of the tokens, chunk by chunk. The
// others reduce: they wait for the chunks that the next tokens need and sum the partial sums. All blocks reduce once
// they have pushed.
#include "cuda/combine.cuh"
#include "cuda/launch.h"
#include "cuda/push.cuh"
#include "cuda/reduce.cuh"

namespace ep::cuda {
namespace {

using Block = Team<0, 0, Pipeline::kThreads>;

// How many blocks, from the first, push before they reduce. Both jobs are weighed by the rows to read and to write, so
// that a rank that has received much pushes with nearly all blocks; but not with more than saturate the links.
__device__ int num_push_blocks(const Op& op, const CombineParams& params) {
  if (op.num_blocks < 4) return op.num_blocks;
  const PlanHead& head = *params.plan.head;
  if (head.num_items == 0) return 1;
  const float push = static_cast<float>(head.num_rows) + head.num_items;
  const float reduce = params.reduce_weight * (static_cast<float>(head.num_sent) + params.args.num_tokens);
  const float most = params.saturating * push / head.num_items;
  const int share = static_cast<int>(min(op.num_blocks * push / (push + reduce) + 0.5f, most));
  return min(max(share, 1), op.num_blocks - 1);
}

// [warp 0 of block 0] Announce this combine to every rank.
__device__ void announce_combine(const Op& op, const CombineParams& params) {
  const PlanHead& head = *params.plan.head;
  Call call{};
  const auto set = [&](Field field, int32_t value) { call.fields[static_cast<int>(field)] = value; };
  set(Field::kOperation, static_cast<int32_t>(Operation::kCombine));
  set(Field::kPlan, head.made);
  set(Field::kWeights, params.args.topk_weights != nullptr);
  call.num_chunks = num_chunks(Interleave(op.num_ranks(), op.rank(), head.item_begin).most());
  announce<Block>(op, call);
}

// [preparing warp] Push, then reduce.
__device__ Verdict prepare(const Op& op, const CombineParams& params, const Part& pushers, CombineMemory& memory,
                           int num_groups) {
  Preparer preparer{memory.pipeline, num_groups};
  if (pushers.block < pushers.num_blocks) push_items(op, params, pushers, memory, preparer);
  Verdict verdict = agree(op);
  if (verdict == Verdict::kAgree && !Reducer(op, params, memory.sent_items).run(preparer)) verdict = Verdict::kAborted;
  preparer.end();
  return verdict;
}

// [last block] Hand the memory back to the peers, and complete the operation.
__device__ void complete(const Op& op, const CombineParams& params, bool differs) {
  State* state = op.context.state;
  const int source = threadIdx.x;
  if (differs) {
    release_after_difference<Block>(op);
  } else {
    if (source < op.num_ranks()) {
      const int32_t* begin = params.plan.head->item_begin;
      const uint32_t weights = params.args.topk_weights ? op.context.config.num_topk * sizeof(float) : 0;
      state->bytes_written[source] +=
          static_cast<uint64_t>(begin[source + 1] - begin[source]) * (op.context.row_bytes + weights);
    }
    raise_at_all<Block>(op, &Region::slots_free);
    if (threadIdx.x == 0) state->pushed_epoch = op.epoch;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    publish_mistake(op.context);
    state->next_token = 0;
    state->epoch = op.epoch;
  }
}

template <class Summing>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    combine_kernel(const __grid_constant__ Context context, const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kNumGroups = Pipeline::kSummingWarps / Summing::kWarps;
  const Op op{context, Operation::kCombine, context.state->epoch + 1, static_cast<int>(blockIdx.x),
              static_cast<int>(gridDim.x)};
  if (__syncthreads_or(has_aborted(context))) return;  // all threads or none
  const Part pushers{op.block, num_push_blocks(op, params)};
  const bool pushes = pushers.block < pushers.num_blocks;
  Cursor c(shared);
  CombineMemory memory = CombineMemory::carve(c, params, context);

  // Wait until the slots are free, and announce.
  bool ok = true;
  if (threadIdx.x < 32) {
    memory.pipeline.init(kNumGroups);
    for (int i = threadIdx.x; i < context.max_item_chunks; i += 32) memory.arrivals[i] = 0;
    if (pushes) ok = wait_for_ranks(op, Phase::kFreeSlots, context.own.slots_free, context.state->pushed_epoch);
    if (ok && op.block == 0) announce_combine(op, params);
  }
  if (!__syncthreads_and(ok)) return;

  // Push the weights: the chunk flags cover them.
  if (pushes && params.args.topk_weights) {
    push_weights(op, params, pushers);
    __syncthreads();
  }

  // Push and reduce the rows.
  Verdict verdict = Verdict::kAgree;
  switch (Pipeline::role()) {
    case Pipeline::Role::kIssue:
      Issuer(memory.pipeline, threadIdx.x / 32).run();
      break;
    case Pipeline::Role::kPrepare:
      verdict = prepare(op, params, pushers, memory, kNumGroups);
      break;
    case Pipeline::Role::kSum:
      const ChunkArrivals arrivals{memory.arrivals, Pipeline::kSummingWarps, context.arrays.pushed_done,
                                   uint32_t(pushers.num_blocks),
                                   context.own.pushed + static_cast<size_t>(op.rank()) * context.max_item_chunks};
      consume<Summing>(memory.pipeline, [&](int chunk) { arrivals.arrive(op, chunk, chunk + 1); });
  }
  if (!__syncthreads_and(verdict != Verdict::kAborted)) return;
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  if (last_block<Block>(&context.state->combine_done, op.num_blocks)) complete(op, params, differs);
}

}  // namespace

void Engine::combine(const CombineArgs& args, int32_t* plan, cudaStream_t stream) const {
  const Config& config = context_.config;
  CombineParams params{};
  params.args = args;
  params.plan = read_plan(config, plan);
  params.max_addends = std::max(config.max_copies(), config.num_ranks());
  const auto memory = [&] {
    Cursor c;
    CombineMemory::carve(c, params, context_);
    return c.size();
  };
  // Give a bay a whole row, or a piece of it: as few pieces as leave room for some works at once.
  const size_t room = kUsableShared - memory();
  const uint32_t row = context_.row_bytes;
  for (uint32_t pieces = 1;; ++pieces) {
    params.bay_bytes = static_cast<uint32_t>(row_stride((row + pieces - 1) / pieces));
    if (room / params.bay_bytes >= params.max_addends + size_t{4}) break;
  }
  params.num_bays = static_cast<int>(std::min<size_t>(room / params.bay_bytes, Pipeline::kMaxBays));
  // Measured on 4 H200 with 24 blocks, as the shares of time in num_push_blocks; benchmark: 4096 tokens, top-8.
  const bool is_long = row > 8192;
  params.reduce_weight = is_long ? 1.2f : 0.45f;
  params.saturating = is_long ? 5.2f : 1000.0f;

  const auto run = [&](auto summing) {
    launch(combine_kernel<decltype(summing)>, num_sms_, Pipeline::kThreads, memory(), stream, context_, params);
  };
  const auto run_with = [&](auto element) {
    using T = decltype(element);
    if (config.ranks_per_sum < config.num_ranks()) return run(Summing<T, true, 4, 2>{});
    if (is_long) return run(Summing<T, false, 4, 7>{});
    run(Summing<T, false, 2, 4>{});
  };
  if (config.dtype == DType::kFloat32) return run_with(Float32{});
  if (config.dtype == DType::kBFloat16) return run_with(BFloat16{});
  run_with(Float16{});
}

}  // namespace ep::cuda
