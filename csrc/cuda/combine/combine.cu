// Combine. Most blocks push: they sum the rows of every item and store the sum in a slot at the token's owner, or at
// the owner's rail peer here, chunk by chunk. The others reduce: they wait for chunks and sum the partial sums of each
// token. Tokens of other nodes come first, and rail blocks send their sums to the owners. A pushing block reduces too,
// after its last push. In decode layout the combine weights of all tokens travel first, and the pushes multiply by
// them.
//
// With few tokens most of the time goes to code that runs once. So steps run at the same time in different warps, and
// the kernels for one node are compiled without the code for several (config.h).
#include "cuda/combine/combine.cuh"
#include "cuda/combine/few.cuh"
#include "cuda/combine/push.cuh"
#include "cuda/combine/reduce.cuh"
#include "cuda/device/launch.h"
#include "cuda/rail/rail_sums.cuh"

namespace ep::cuda {
using namespace EP_KERNELS;

namespace {

using Block = Team<0, 0, Pipeline::kThreads>;

// [thread] Return the number of pushing blocks, from block 0 on: at least 1, if this launch pushes. Blocks are divided
// by the rows that pushing and reducing read and write: a rank with many received items pushes with nearly all blocks.
// Never use more blocks than saturate the links. All threads of a launch compute the same number.
__device__ int num_push_blocks(const Op& op, const CombineParams& params, const PlanSizes& sizes, int num_own) {
  if (!params.pushes) return 0;
  if (!params.reduces) return op.num_blocks;
  // Few blocks do both. With windows of slots 7 are few: doing both, a combine in expert layout took 1708 us instead of
  // 1850 (4096 tokens, hidden 7168, at 50 GB/s, one H200). 10 are not: doing both took 1366 us instead of 1273.
  const ProgressFlags progress_flags = progress_flags_of(op.context);
  if (op.num_blocks < (progress_flags.far == progress_flags.window ? 4 : 8)) return op.num_blocks;
  if (sizes.num_items == 0) return 1;  // it raises the flags promised by Field::kNumChunks, also without items
  // Few items: nobody can reduce before the last push, so all push first.
  if (op.context.num_nodes() == 1 && end_of_pushed(op, sizes) == 1) return op.num_blocks;
  // Rows of own items are read to push, or to reduce.
  const float rows_of_item = static_cast<float>(sizes.num_rows) / sizes.num_items;
  const float push = (sizes.num_items - num_own) * (rows_of_item + 1);
  // A sum from another node is written and read once more than one of the own node.
  const float tokens = static_cast<float>(params.args.num_tokens) * (1 + 2 * op.context.num_others());
  const float reduce = params.reduce_weight * (sizes.num_addends + num_own * (rows_of_item - 1) + tokens);
  const float most = params.saturating * (rows_of_item + 1);
  const int share = static_cast<int>(min(op.num_blocks * push / (push + reduce) + 0.5f, most));
  return min(max(share, 1), op.num_blocks - 1);
}

// [warp] Announce this combine. Called in warp 0 of block 0, once slots are free: this block pushes. `covers` as in
// announce.
__device__ void announce_combine(const Op& op, const CombineParams& params, bool covers) {
  const PlanHead& head = *params.plan.head;
  Call call{};
  const auto set = [&](Field field, int32_t value) { call.set(field, value); };
  set(Field::kOperation, static_cast<int32_t>(Operation::kCombine));
  set(Field::kPlan, head.made);
  set(Field::kWeights, params.args.topk_weights != nullptr);
  set(Field::kNumTokens, params.args.num_tokens);
  // With combine weights no rank pushes after a difference.
  set(Field::kNumChunks, params.shares_combine_weights() ? 0 : end_of_pushed(op, head));
  announce(op, call, covers);
  stamp(op, Step::kSent);
}

// [warp] Compare the Calls before the first sum, and post the verdict for the other warps. Called in one summing warp.
// With combine weights wait for those of other nodes too.
__device__ void agree_first(const Op& op, const CombineParams& params, const CombineMemory& memory) {
  Verdict verdict = agree(op);
  stamp(op, Step::kAgreed);
  if (params.shares_combine_weights() && verdict == Verdict::kAgree && params.plan.head->usable &&
      !wait_for_combine_weights(op))
    verdict = Verdict::kAborted;
  memory.verdict.post(verdict);
}

// [warp] Queue all sums of this block: its pushes, then the sums of its tokens. In between wait until all ranks agree.
// If the block makes sums for other nodes too, it makes the early ones between its pushes. The second of two launches
// makes only the sums of own tokens. Called in the preparing warp. Whatever the verdict, stop the other warps of the
// pipeline at the end. Return kAborted after an abort of this rank, else the verdict of `agree`.
__device__ Verdict prepare(const Op& op, const CombineParams& params, const Part& pushers, const Part& for_others,
                           CombineMemory& memory, int num_teams) {
  // Take the first items. This reads nothing of peers.
  Preparer preparer{memory.pipeline, num_teams};
  Pusher pusher(op, params, memory, pushers, for_others.has_block());
  if (pushers.has_block()) pusher.begin();
  Reducer reducer(op, params, memory, for_others);
  Verdict verdict = params.agrees_first() && !pushers.has_block() ? memory.verdict.wait_in_warp() : Verdict::kAgree;
  for (int until = 0; verdict == Verdict::kAgree && until != Pusher::kAllSums;) {
    until = Pusher::kAllSums;
    if (pushers.has_block()) verdict = pusher.run(preparer, until);
    const bool has_pushed = until == Pusher::kAllSums;
    stamp(op, Step::kQueued);
    if (verdict == Verdict::kAborted) break;
    if (has_pushed && params.agrees_first())
      verdict = memory.verdict.wait_in_warp();
    else if (has_pushed && params.reduces)
      verdict = agree(op);
    stamp(op, Step::kAgreed);
    if (verdict == Verdict::kAgree && !reducer.run(preparer, until)) verdict = Verdict::kAborted;
    stamp(op, Step::kReduced);
    pusher.skip_sums(reducer.next_chunk());
  }
  memory.items.drain();
  memory.tokens.drain();
  preparer.end();
  return verdict;
}

// [thread] Count this warp in for a progress flag, after its last store for this chunk and __syncwarp. The last warp of
// all blocks raises the chunk's flag: `pushed` on the node, or `summed` for this rank's senders. After the last node's
// sums of a chunk its slots are free: raise `freed` on the node. Called in summing warps. Skip progress flags counted
// by other blocks or by the first launch. `pushed` covers the weights of the block too: a barrier of the block has
// followed push_weights.
// raises: pushed, summed, freed
__device__ void finish_progress_flag(const Op& op, const CombineParams& params, const CombineMemory& memory,
                                     const Part& pushers, const Part& for_others, int progress_flag) {
  const Context& context = op.context;
  const ProgressFlags progress_flags = progress_flags_of(context);
  const auto arrivals = [](uint32_t* in_block, uint32_t* in_grid, const Part& part) {
    return ChunkArrivals{in_block, Pipeline::kSummingWarps, in_grid, static_cast<uint32_t>(part.num_blocks)};
  };
  const int chunk = progress_flags.at(progress_flag);
  if (chunk >= 0) {
    if (!pushers.has_block()) return;
    stamp(op, Step::kPushed);
    if (!arrivals(memory.pushed, context.arrays.pushed_done, pushers).arrive(chunk)) return;
    raise_on_node(context, context.own.pushed + context.local * context.max_pushed_chunks + chunk, op.epoch);
    stamp(op, Step::kRaised);
  } else if (params.pushes && for_others.has_block()) {
    const int n = ~chunk, far = n / progress_flags.others;
    const int flag = context.other_node_idx(node_of_sum(context, n)) * progress_flags.far + far;
    if (!arrivals(memory.summed, context.arrays.summed_done, for_others).arrive(flag)) return;
    ptx::store_relaxed(context.own.summed + flag, op.epoch);
    if ((n + 1) % progress_flags.others == 0)
      raise_on_node(context, context.own.freed + context.local * progress_flags.far + far, op.epoch);
  }
}

// [block] Count the bytes pushed by this rank, by rank of the inbox. The second warp does this, because the first one
// raises flags next. Called in the last block, once all ranks agree.
__device__ void count_bytes(const Op& op, const CombineParams& params) {
  const int local = static_cast<int>(threadIdx.x) - 32;
  if (local < 0 || local >= op.ranks_per_node()) return;
  const PlanHead& head = *params.plan.head;
  const uint32_t weights = params.args.topk_weights ? op.context.config.num_topk * sizeof(float) : 0;
  uint64_t num_items = 0;
#pragma unroll 1
  for (int source = local; source < op.num_ranks(); source += op.ranks_per_node()) num_items += head.items_of(source);
  op.context.arrays.bytes_written[op.first_local_rank() + local] += num_items * (op.context.row_bytes + weights);
}

// [thread] Bring the plan's items and tables to the L2 cache, as with few tokens each of them is waited for.
__device__ void prefetch_plan(const CombineParams& params) {
  const uint32_t at = (blockIdx.x * Pipeline::kThreads + threadIdx.x) * 128;
  if (at < params.prefetched_bytes) ptx::prefetch(reinterpret_cast<const char*>(params.plan.head) + at);
}

// Launched by Engine::combine: all blocks are resident at the same time, because they wait for each other. The second
// of two launches may have more: its blocks wait only for peers. The last block to arrive completes the operation.
// After an abort there is none, and the operation never completes.
// waits: slots_free (free slots)
template <class Summing>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    combine_kernel(const __grid_constant__ Context context, const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kNumTeams = Pipeline::kSummingWarps / Summing::kWarps;
  const Op op{context,
              Operation::kCombine,
              context.state->epoch + 1,
              static_cast<int>(blockIdx.x),
              static_cast<int>(gridDim.x) - params.rail_blocks,
              !params.pushes};
  stamp(op, Step::kCombine);
  // These loads overlap: combine weights, State::aborted, the plan's sizes, `slots_free`. The last one is an acquire,
  // so loads after it would wait for it.
  const bool sends_combine_weights = op.block == 0 && params.shares_combine_weights();
  const bool tags = context.plans_directly();  // combine weights are tagged words
  CombineWeightCopy combine_weights(op, params, sends_combine_weights);
  const bool aborted = has_aborted(context);
  const PlanSizes sizes = *params.plan.head;
  const int num_own = params.adds_own_rows() ? params.plan.head->items_of(op.rank()) : 0;
  const bool sees_free =
      !params.pushes || poll_once(op, context.own.slots_free, context.state->pushed_epoch, threadIdx.x);
  const Part pushers{op.block, num_push_blocks(op, params, sizes, num_own)};
  if (sends_combine_weights && tags && !aborted) combine_weights.send(op);
  // Leave after an abort: all threads of the block, or none.
  const bool is_free = !__syncthreads_or(aborted || !sees_free);
  if (!is_free && __syncthreads_or(aborted)) return;
  const bool pushes = params.pushes && pushers.has_block(), announces = op.block == 0 && params.pushes,
             is_rail = op.is_rail();
  // Choose the blocks for tokens of other nodes: those without pushes, or all where all push.
  const int first = pushers.num_blocks < op.num_blocks ? pushers.num_blocks : 0;
  const Part for_others{op.block - first, op.num_blocks - first};
  CombineMemory memory = params.memory.in(shared);

  // Wait for free slots before the first push, if they were not free at first sight, and announce. Combine weights
  // without tags come first. Meanwhile the other warps initialise shared memory.
  bool ok = true;
  const bool stores_combine_weights = sends_combine_weights && !tags;
  if (stores_combine_weights && is_free) combine_weights.store(op);
  if (threadIdx.x < 32) {
    if (pushes && !is_free)
      ok = wait_for_node(op, Phase::kFreeSlots, context.own.slots_free, context.state->pushed_epoch);
    if (params.pushes) stamp(op, Step::kFree);
    // With masks a rank whose Call is here counts as present: then its combine weights must be on their way for good.
    if (ok && announces && !stores_combine_weights)
      announce_combine(op, params, sends_combine_weights && has_masks(context));
  } else {
    if (threadIdx.x == 32) ptx::barrier_init(memory.verdict.barrier, 1);
    if (Pipeline::role() == Pipeline::Role::kPrepare)
      memory.sources.fill(op.context, [&](int source) { return params.plan.head->items_of(source); });
    constexpr int kStep = Pipeline::kThreads - 32;
    memory.pipeline.init(kNumTeams);
    for (int i = threadIdx.x - 32; i < context.max_pushed_chunks; i += kStep) memory.pushed[i] = 0;
    for (int i = threadIdx.x - 32; i < context.num_others() * context.num_far_chunks(); i += kStep)
      memory.summed[i] = 0;
  }
  if (!__syncthreads_and(ok)) return;
  if (stores_combine_weights) {
    if (!is_free) {
      combine_weights.store(op);
      __syncthreads();
    }
    if (threadIdx.x < 32) announce_combine(op, params, true);
  }

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
        Issuer(memory.pipeline, threadIdx.x / 32).run([&](const Task& task, int at) {
          return load_combine_weight(op, memory.verdict, task, at);
        });
        stamp(op, Step::kIssued);
        break;
      case Pipeline::Role::kPrepare:
        verdict = prepare(op, params, pushers, for_others, memory, kNumTeams);
        break;
      case Pipeline::Role::kSum:
        if (params.agrees_first() && threadIdx.x / 32 == Pipeline::kThreads / 32 - 1) agree_first(op, params, memory);
        consume<Summing>(
            memory.pipeline, [&] { return !params.agrees_first() || memory.verdict.wait_in_warp() == Verdict::kAgree; },
            [&](int progress_flag) { finish_progress_flag(op, params, memory, pushers, for_others, progress_flag); });
        // load_combine_weight may have aborted this rank meanwhile. All combine weights are loaded before the last
        // task, so its verdict is known here.
        if (params.agrees_first()) verdict = memory.verdict.wait();
        stamp(op, Step::kSummed);
    }

  // Count this block in. The last one hands the slots back and completes the operation.
  if (!__syncthreads_and(verdict != Verdict::kAborted)) return;
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!params.reduces) return;
  if (!last_block<Block>(&context.state->combine_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (was_masked_by_a_peer<Block>(op)) return;
  if (!differs) count_bytes(op, params);
  complete<Block>(op, &Region::slots_free, &State::pushed_epoch, differs);
  stamp(op, Step::kComplete);
}

// The combine kernel of few tokens (few.cuh), launched in its place. The first warp compares the Calls.
template <class T>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    few_kernel(const __grid_constant__ Context context, const __grid_constant__ CombineParams params) {
  const Op op{context,
              Operation::kCombine,
              context.state->epoch + 1,
              static_cast<int>(blockIdx.x),
              static_cast<int>(gridDim.x),
              !params.pushes};
  stamp(op, Step::kCombine);
  prefetch_plan(params);
  // Send the combine weights in block 0. Announce in block 1.
  const bool sends = op.block == 0 && params.pushes;
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
  constexpr int kWarps = Block::kWarps - 1;
  const int warp = threadIdx.x / 32 - 1;
  if (warp < 0) {
    if (params.pushes && op.block == min(1, op.num_blocks - 1)) announce_combine(op, params, false);
    verdict.post(agree(op));
    stamp(op, Step::kAgreed);
  } else {
    // Warps without a push reduce first, if the others are few: they take units in the opposite order.
    const int num = op.num_blocks * kWarps, n = op.block + op.num_blocks * warp;
    const int parts = (context.row_bytes + kPartBytes - 1) / kPartBytes, num_vectors = context.row_bytes / 16;
    if (params.pushes) push_tagged_sums<T>(op, params, verdict, {n, num, parts, num_vectors});
    if (params.reduces) ok = reduce_tagged_sums<T>(op, params, verdict, {num - 1 - n, num, parts, num_vectors});
    stamp(op, Step::kSummed);
  }
  // Complete the operation as the combine kernel does.
  const Verdict last = verdict.wait();
  if (!__syncthreads_and(ok && last != Verdict::kAborted)) return;
  stamp(op, Step::kArrived);
  if (!params.reduces) return;
  if (!last_block<Block>(&context.state->combine_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (last != Verdict::kDiffer) count_bytes(op, params);
  complete<Block>(op, &Region::slots_free, &State::pushed_epoch, last == Verdict::kDiffer);
  stamp(op, Step::kComplete);
}

}  // namespace

template <>
void Engine::launch_combine<kKernels>(const CombineArgs& args, int32_t* plan, bool pushes, bool reduces,
                                      cudaStream_t stream) const {
  const Config& config = context_.config;
  CombineParams params{};
  params.args = args;
  params.plan = read_plan(config, plan);
  // Direct sums cross without rail blocks, which only signal then.
  params.rail_blocks = is_direct() ? std::min(args.rail_blocks, config.least_rail_blocks()) : args.rail_blocks;
  // Share the tokens evenly: with few tokens every block takes one batch.
  const int blocks = args.num_blocks - params.rail_blocks;
  const auto share = [&](int shares) { return std::max(1, (args.num_tokens + shares - 1) / shares); };
  params.pushes = pushes;
  params.reduces = reduces;
  const Context context{context_of(args.wait_ns, !pushes)};
  const auto launch_few = [&](auto has, auto element) {
    if constexpr (has.value)
      launch(few_kernel<decltype(element)>, args.num_blocks, Pipeline::kThreads, 0, stream, context, params);
  };
  constexpr std::bool_constant<kKernels == Kernels::kOneNode || kExtras> kMayTag;
  if (kMayTag.value && config.tags_sums() && args.combine_weights) {
    // Plans of decode layout have room for all items.
    params.prefetched_bytes = static_cast<uint32_t>(plan_capacity(config, -1) * sizeof(int32_t));
    if (config.dtype == DType::kFloat32) return launch_few(kMayTag, Float32{});
    if (config.dtype == DType::kBFloat16) return launch_few(kMayTag, BFloat16{});
    return launch_few(kMayTag, Float16{});
  }
  const bool one_node = config.num_nodes == 1, is_long = context_.row_bytes > 8192;
  const bool halves_rows = is_long && one_node && !config.plans_directly;
  params.own_in_place = one_node && pushes && reduces && !args.combine_weights && !config.plans_directly;
  const int batches_of_block = share(blocks * (is_long && params.own_in_place ? 8 : Reducer::kBatch));
  params.own_batch = share(blocks * batches_of_block);
  // Choose the size of an smem stage: a row, or a piece of it. Use as few pieces as leave room for some tasks at once.
  // An addend stands for one expert of a token or more.
  const int copies = config.max_copies(), sums = config.ranks_per_node + config.num_others();
  const int max_addends = std::min(config.num_topk, one_node ? copies + sums - 1 : std::max(copies, sums));
  int num_smem_stages = 0;
  uint32_t smem_stage_bytes = 0;
  const auto carve = [&] {
    Cursor c;
    params.memory =
        CombineMemory::carve(c, context_, num_smem_stages, smem_stage_bytes, max_addends, args.combine_weights);
    return c.size();
  };
  const size_t room = kUsableShared - carve();
  const uint32_t row = context_.row_bytes;
  for (uint32_t pieces = halves_rows ? 2 : 1;; ++pieces) {
    smem_stage_bytes = static_cast<uint32_t>(row_stride((row + pieces - 1) / pieces));
    if (room / smem_stage_bytes >= max_addends + size_t{4}) break;
  }
  const int most_smem_stages = std::max<int>(Pipeline::kMaxSmemStages, max_addends);
  num_smem_stages = static_cast<int>(std::min<size_t>(room / smem_stage_bytes, most_smem_stages));
  const size_t shared = carve();
  // Tuned with 24 blocks: `saturating` on 4 H200, the rest on 2 (combine of 4096 x 7168: half rows by teams of two
  // warps 387 us, whole rows by four 418 us). A low reduce_weight makes more blocks push first, so that reducing blocks
  // wait less for peers; with 0.28 hidden 2048 took 245 us, without own rows and with 0.45 it took 283 us. To measure
  // again, change one value and run `python -m ep_dispatcher.bench --engine cuda`. Between nodes all this takes
  // longer: 2 nodes of 2, 4096 x 7168 755 us instead of 720.
  params.reduce_weight = one_node ? 0.28f : is_long ? 1.2f : 0.45f;
  params.saturating = !is_long ? 1000.0f : one_node ? 3.9f : 5.2f;

  const auto run = [&](auto summing) {
    launch(combine_kernel<decltype(summing)>, args.num_blocks, Pipeline::kThreads, shared, stream, context, params);
  };
  const auto run_with = [&](auto element) {
    using T = decltype(element);
    if constexpr (kAddsOwnRows)
      if (halves_rows) return run(Summing<T, 2, 7>{});  // a team takes 7168 bytes at once: half of 7168 elements
    if (is_long) return run(Summing<T, 4, 7>{});        // 14336 bytes
    run(Summing<T, 2, 4>{});                            // 4096 bytes: 2048 elements
  };
  if (config.dtype == DType::kFloat32) return run_with(Float32{});
  if (config.dtype == DType::kBFloat16) return run_with(BFloat16{});
  run_with(Float16{});
}

}  // namespace ep::cuda
