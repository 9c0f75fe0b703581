// Dispatch: plan, stage, pull; rail blocks send to other nodes. One launch does all of it. If the host needs the counts
// to make the outputs, a first launch plans and stages, and a second one pulls.
#include "cuda/device/launch.h"
#include "cuda/dispatch/deliver.cuh"
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/dispatch/place.cuh"
#include "cuda/dispatch/stage.cuh"
#include "cuda/plan/plan.cuh"
#include "cuda/rail/rail_rows.cuh"

namespace ep::cuda {
using namespace EP_KERNELS;

namespace {

constexpr uint32_t kMaxPiece = 8192;    // [bytes] most of a row in one bulk copy
constexpr uint32_t kMaxScales = kLine;  // [bytes] of a row: more scales are delivered by the stage warps
// Places of a pull warp's ring for float8 rows that are staged as they are: more loads under way disturb the staging.
// Measured on 2 H200 with 4096 x 7168: 3 places 260 us, 2 places 252 us; 8192 x 2048: 186 and 237 us; quantised rows of
// 4096 x 7168: 402 and 429 us. To measure again: benchmarks/compare_builds.py --operations "dispatch FP8" "dispatch,
// quantize".
constexpr uint32_t pair_places(uint32_t row_bytes) { return row_bytes > 4096 ? 2 : 3; }

// [team] Copy the counts of an old plan to the caller. Called by the pull warps of block 0.
__device__ void repeat_counts(const Op& op, const DispatchParams& params) {
  const Plan& plan = params.plan;
  for (int e = threadIdx.x; e < op.context.num_local_experts; e += PullWarps::kThreads) {
    const bool usable = plan.head->usable;
    params.write_counts(e, usable ? plan.expert_rows[e] : 0,
                        usable ? plan.expert_begin[e + 1] - plan.expert_begin[e] : 0);
  }
}

// [team] Wait until all ranks have begun this dispatch (unless `agreed`) and until all lists of a new plan are in their
// inboxes. After kAgree all items and the head of the plan may be read, after kDiffer neither. Return kAborted after an
// abort of this rank. Called by the pull warps and by the stage warps of each block.
// waits: listed (lists)
template <class Team>
__device__ Verdict wait_for_items(const Op& op, const DispatchParams& params, bool agreed) {
  return first_warp_waits<Team>([&] {
    // The second of two launches keeps no difference if the first one made a plan: that one has kept it.
    const Verdict verdict = agreed ? Verdict::kAgree : agree(op, params.stages || !params.new_plan);
    if (verdict != Verdict::kAgree || !params.new_plan) return verdict;
    return wait_for_ranks(op, Phase::kLists, op.context.own.listed, op.epoch) ? verdict : Verdict::kAborted;
  });
}

// [team] Make a new plan, or announce the old one; then pull rows. Called by the pull warps of each block. Return
// kAborted after an abort of this rank, and kDiffer without a pull. After kAgree this block's rows are stored, unless
// the plan is unusable or another launch pulls. In all cases no load of the pull warps is under way. `is_free` as in
// wait_for_free_staging, kPushes as in make_direct_plan.
template <bool kPushes>
__device__ Verdict run_pull(const Op& op, const DispatchParams& params, char* shared, bool is_free) {
  // Plan, or announce. Each way announces only after its wait for free staging.
  const bool plans = params.plans() && op.block < params.plan_blocks;
  Verdict verdict = Verdict::kAgree;
  if (params.is_direct()) {
    const bool ok = announce_direct(op, params, is_free);
    if (params.pulls) Puller::make_places(op, params, shared);
    verdict = make_direct_plan<kPushes>(op, params, shared, ok);
    stamp(op, Step::kPlanned);
    if (kPushes && params.pulls)
      return verdict != Verdict::kAgree         ? verdict
             : place_direct(op, params, shared) ? Verdict::kAgree
                                                : Verdict::kAborted;
    if (params.has_hook() && verdict == Verdict::kAgree && params.direct_plan.in(shared).head->usable) {
      keep_direct_table<PullWarps>(op, params, params.direct_plan.in(shared));
      keep_items<PullWarps>(op, params, shared);
      stamp(op, Step::kKept);
    }
  } else if (plans) {
    if (!wait_for_free_staging<PullWarps>(op, params, is_free)) return Verdict::kAborted;
    verdict = make_plan(op, params, shared);
    stamp(op, Step::kPlanned);
  } else if (params.stages && !params.new_plan && op.block == 0) {
    repeat_counts(op, params);
    if (!wait_for_free_staging<PullWarps>(op, params, is_free)) return Verdict::kAborted;
    if (PullWarps::warp() == 0) announce(op, call_of(params), false);
    stamp(op, Step::kSent);
  }
  // Pull.
  if (verdict != Verdict::kAgree || kPushes || !params.pulls) return verdict;
  if (!params.is_direct()) verdict = wait_for_items<PullWarps>(op, params, plans);
  stamp(op, Step::kListed);
  if (verdict != Verdict::kAgree || !plan_of_block(op, params, shared).head->usable) return verdict;
  return Puller(op, params, shared).run() ? Verdict::kAgree : Verdict::kAborted;
}

// [team] Stage this rank's rows and metadata, then deliver received metadata and clear rows without a token. Called by
// the stage warps of each block. Return kAborted after an abort of this rank. Otherwise this block's share is written:
// zeros if the ranks differ or the plan is unusable. `is_free` as in wait_for_free_staging, kMayQuantize as in stage.
template <bool kMayQuantize, bool kPushes>
__device__ Verdict run_stage(const Op& op, const DispatchParams& params, char* shared, bool is_free) {
  // Stage.
  if (params.stages) {
    if (!wait_for_free_staging<StageWarps>(op, params, is_free)) {
      // The pull warps arrive at the barrier of a direct plan also after an abort.
      if (params.is_direct() && params.pulls) wait_for_direct_plan(params, shared);
      return Verdict::kAborted;
    }
    stamp(op, Step::kFree);
    stage<kMayQuantize>(op, params, reinterpret_cast<uint32_t*>(shared + params.counters_at));
    stamp(op, Step::kStaged);
  }
  // Wait for the items. Without a usable plan, clear the output.
  if (!params.pulls) return Verdict::kAgree;
  const Verdict verdict =
      params.is_direct() ? wait_for_direct_plan(params, shared) : wait_for_items<StageWarps>(op, params, false);
  stamp(op, Step::kListed);
  if (verdict == Verdict::kAborted) return verdict;
  if (params.is_direct() && op.block == 0 && StageWarps::warp() == StageWarps::kWarps - 1)
    publish_plan(op, params, params.direct_plan.in(shared));
  if (verdict == Verdict::kDiffer || !plan_of_block(op, params, shared).head->usable) {
    clear_from<StageWarps>(op, params, 0);
    return verdict;
  }
  // Deliver, and clear.
  if (params.is_direct())
    keep_direct_table<StageWarps>(op, params, params.direct_plan.in(shared));
  else if (params.new_plan)
    keep_tables(op, params);
  stamp(op, Step::kKept);
  // In decode layout there is no padding, and mostly no metadata but scales that come with the rows.
  if (kPushes && !params.args.out_weights && (params.args.scale_bytes == 0 || params.bulk_scales)) {
    keep_items<StageWarps>(op, params, shared);
    stamp(op, Step::kDelivered);
    return verdict;
  }
  if (!deliver_metadata<StageWarps>(op, params, shared)) return Verdict::kAborted;
  stamp(op, Step::kDelivered);
  clear_padding(op, params, shared);
  stamp(op, Step::kCleared);
  return verdict;
}

// [block] Count the bytes read by this rank, by rank of the inbox. The second warp does this, because the first one
// raises flags next. Called in the last block, once all ranks agree.
__device__ void count_bytes(const Op& op, const DispatchParams& params) {
  const Config& config = op.context.config;
  const int local = static_cast<int>(threadIdx.x) - 32;
  if (local < 0 || local >= config.ranks_per_node) return;
  const PlanHead& head = *params.plan.head;
  uint64_t num_items = 0;
#pragma unroll 1
  for (int source = local; source < op.num_ranks(); source += config.ranks_per_node) num_items += head.items_of(source);
  op.context.arrays.bytes_read[op.first_local_rank() + local] +=
      num_items * (params.args.row_bytes + params.metadata_bytes);
}

// Launched by Engine::dispatch: all blocks are resident at the same time. The rail blocks come last.
template <bool kMayQuantize, bool kPushes>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_kernel(const __grid_constant__ Context context, const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Op op{context,
              Operation::kDispatch,
              context.state->epoch + 1,
              static_cast<int>(blockIdx.x),
              static_cast<int>(gridDim.x) - params.rail_blocks,
              !params.stages};
  stamp(op, Step::kDispatch);
  // Bring the caller's rows to the L2 cache.
  for (uint32_t at = (blockIdx.x * kBlockThreads + threadIdx.x) * 128; at < params.prefetched_bytes;
       at += gridDim.x * kBlockThreads * 128)
    ptx::prefetch(params.args.rows + at);
  // Clear the caller's counts: they stay 0 after an early abort.
  if (params.stages && op.block == 0)
    for (int e = threadIdx.x; e < context.num_local_experts; e += kBlockThreads) params.write_counts(e, 0, 0);
  // Send the choices for a direct plan. Look whether staging is free: mostly it is, and nobody has to wait. These loads
  // overlap. Then do the work of this warp. All threads of the block begin, or none.
  const bool aborted = has_aborted(context);
  if (params.is_direct() && params.stages && op.block == 0) send_choices(op, params, aborted);
  const bool sees_free = PullWarps::has_thread() || !params.pushes
                             ? poll_once(op, context.own.consumed, context.state->staged_epoch, threadIdx.x)
                             : poll_once(op, context.own.slots_free, context.state->pushed_epoch, StageWarps::thread());
  const bool is_free = __syncthreads_and(!params.stages || sees_free);
  Verdict verdict = Verdict::kAborted;
  if (!__syncthreads_or(aborted))
    verdict = op.is_rail()              ? run_rail(op, params, shared, is_free)
              : PullWarps::has_thread() ? run_pull<kPushes>(op, params, shared, is_free)
                                        : run_stage<kMayQuantize, kPushes>(op, params, shared, is_free);
  // Complete the operation in the last block. After the first of two launches the operation goes on. An aborted block
  // does not count itself in: then no block is the last one.
  const bool ok = __syncthreads_and(verdict != Verdict::kAborted);
  const bool differs = __syncthreads_or(verdict == Verdict::kDiffer);
  stamp(op, Step::kArrived);
  if (!params.pulls) return;
  if (!ok) return clear_after_abort(op, params);
  if (!last_block<Block>(&context.state->pull_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  if (was_masked_by_a_peer<Block>(op)) return;
  if (!differs) count_bytes(op, params);
  complete<Block>(op, &Region::consumed, &State::staged_epoch, differs, params.pushes);
  stamp(op, Step::kComplete);
}

// The second launch of a dispatch with a hook, if rows were pushed: the dispatch kernel without what the first launch
// has done. Launched by Engine::dispatch; all blocks are resident at the same time.
template <bool kOnlyPlaces>
__global__ void __launch_bounds__(PlaceWarps::kThreads, 1)
    place_kernel(const __grid_constant__ Context context, const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(1024) char shared[];
  const Op op{context,
              Operation::kDispatch,
              context.state->epoch + 1,
              static_cast<int>(blockIdx.x),
              static_cast<int>(gridDim.x),
              true};
  stamp(op, Step::kDispatch);
  const bool aborted = has_aborted(context);
  Cursor c(shared);
  const auto [ring, full] = carve_place(c, params.pulled, threadIdx.x / 32);
  if (threadIdx.x % 32 == 0) init_places(full);
  // With a new plan the first launch has compared the Calls. Else one warp of the block does.
  __shared__ Verdict posted;
  if (threadIdx.x < 32) {
    const Verdict its = agree(op);
    if (threadIdx.x == 0) posted = its;
  }
  if (__syncthreads_or(aborted)) return;
  Verdict verdict = posted;
  stamp(op, Step::kListed);
  if (verdict == Verdict::kAgree && params.plan.head->usable && !place_planned(op, params, ring, full))
    verdict = Verdict::kAborted;
  // Complete the operation as the dispatch kernel does.
  if (!__syncthreads_and(verdict != Verdict::kAborted)) return;
  stamp(op, Step::kArrived);
  if (!last_block<PlaceWarps>(&context.state->pull_done, gridDim.x)) return;
  stamp(op, Step::kLast);
  const bool differs = verdict == Verdict::kDiffer;
  if (!differs) count_bytes(op, params);
  complete<PlaceWarps>(op, &Region::consumed, &State::staged_epoch, differs, true);
  stamp(op, Step::kComplete);
}

}  // namespace

template <>
void Engine::launch_dispatch<kKernels>(const DispatchArgs& args, int32_t* plan, bool stages, bool pulls,
                                       cudaStream_t stream) const {
  // Describe the launch.
  const Config& config = context_.config;
  DispatchParams params{};
  params.args = args;
  params.plan = read_plan(config, plan);
  params.stages = stages;
  params.pulls = pulls;
  params.new_plan = args.topk_idx != nullptr;
  if (config.plans_directly && params.has_hook() && !stages) params.new_plan = false;  // the first launch has made it
  params.direct = params.new_plan && config.plans_directly;
  params.pushes = args.layout == Layout::kDecode && config.ranks_per_node <= DispatchParams::kInbox;
  if (stages && config.plans_directly)
    params.prefetched_bytes = args.num_tokens * (args.quantizes ? context_.row_bytes : args.row_bytes);
  params.inverse = 0xffffffffu / config.num_local_experts() + 1;
  params.inverse_topk = 0xffffffffu / config.num_topk + 1;
  // Senders are the only readers of staged rows in decode layout. They read the caller's rows where they can.
  params.stages_rows = params.pushes ? config.num_nodes > 1 && (!is_direct() || args.quantizes)
                                     : config.ranks_per_node > 1 || !is_direct() || !params.reads_own_rows();
  params.row_targets = ~0u;
  if (params.pushes && params.reads_own_rows()) params.row_targets &= ~(1u << context_.local);
  if (!params.stages_rows) params.row_targets &= ~(1u << DispatchParams::kInbox);
  params.row_stride = static_cast<uint32_t>(row_stride(args.row_bytes));
  params.metadata_bytes = metadata_bytes(config, args);
  params.rows_per_group = args.layout == Layout::kDecode ? config.num_ranks() * config.max_tokens : 0;
  params.weights_at = static_cast<int>(round_up(args.scale_bytes, kVector) / sizeof(float));
  params.rail_blocks = args.rail_blocks;
  params.parts_of_row = args.quantizes ? RowPart::num_in_row(config.hidden / BFloat16::kElements) : 1;
  // Block 0 sends the choices and begins to stage late. If the others take no more turns without it, it stages nothing.
  const int blocks = args.num_blocks - args.rail_blocks;
  const auto turns = [&](int staging_blocks) {
    const int warps = staging_blocks * StageWarps::kWarps;
    return (int64_t{args.num_tokens} * params.parts_of_row + warps - 1) / warps;
  };
  params.first_staging_block = params.is_direct() && blocks > 1 && turns(blocks - 1) == turns(blocks);
  params.bulk_scales = args.scale_bytes > 0 && args.scale_bytes % kVector == 0 && args.scale_bytes <= kMaxScales;
  const uint32_t scale_bytes = params.bulk_scales ? args.scale_bytes : 0;
  const Context context{context_of(args.wait_ns, !stages)};
  // Only place rows, if all metadata are scales, and a lane has a word of an item.
  const bool only_places = config.plans_directly && params.has_hook() && !stages && params.pushes &&
                           context_.item_ints <= 32 && params.metadata_bytes == round_up(scale_bytes, kVector);
  const auto place = [&](auto one_node) {
    if constexpr (one_node.value) {
      params.pulled = make_pieces(args.row_bytes, scale_bytes, kUsableShared / PlaceWarps::kWarps - kVector * 4,
                                  kMaxPiece, Pieces::kMaxPlaces);
      Cursor c;
      carve_place(c, params.pulled, 0);
      launch(place_kernel<one_node.value>, args.num_blocks, PlaceWarps::kThreads, c.size(), stream, context, params);
    }
  };
  constexpr bool kMayPlace = kKernels == Kernels::kOneNode;
  if (kMayPlace && only_places) return place(std::bool_constant<kMayPlace>{});

  // Divide shared memory: a direct plan, the scratch of another plan and later the pull warps' rings, the stage warps'
  // counters, the chunks seen by each warp.
  params.seen_at = static_cast<uint32_t>(round_up(context_.max_token_chunks * sizeof(uint32_t), Cursor::kAlignment));
  const size_t counters = params.seen_at + kBlockWarps * config.num_ranks() * sizeof(int16_t);
  size_t room = kUsableShared - counters, shared = 0;
  if (params.is_direct()) {
    Cursor c;
    params.direct_plan = DirectPlan::carve(c, config);
    shared = round_up(c.size(), kLine);
    params.rings_at = static_cast<uint32_t>(shared);
  }
  if (params.plans()) {
    const auto scratch = [&] {
      Cursor c;
      Scratch::carve(c, config, params.plan_warps);
      return c.size();
    };
    params.plan_warps = PullWarps::kWarps;
    while (scratch() > room) --params.plan_warps;
    shared = scratch();
    const auto share = [](int num, int parts) { return (num + parts - 1) / parts; };
    const int batches = share(args.num_tokens, 32);
    params.plan_blocks = std::clamp(share(batches, params.plan_warps), 1, args.num_blocks - args.rail_blocks);
    params.batches_of_block = share(batches, params.plan_blocks);
    params.batches_of_warp = share(params.batches_of_block, params.plan_warps);
  }
  // Give the rings all memory left.
  if (params.pulls) {
    const auto memory = [&] {
      Cursor c;
      PullMemory::carve(c, context_, params.pulled, 0);
      return c.size();
    };
    const size_t rings = room - params.rings_at - memory();
    const uint32_t max_places =
        params.bulk_scales && !args.quantizes ? pair_places(args.row_bytes) : Pieces::kMaxPlaces;
    params.pulled = make_pieces(args.row_bytes, scale_bytes, rings / PullWarps::kWarps, kMaxPiece, max_places);
    shared = std::max(shared, params.rings_at + memory());
  }
  if (args.rail_blocks > 0) shared = room;  // for the senders' LongPuts
  params.counters_at = static_cast<uint32_t>(shared);
  // Few tokens wait for code. So with direct plans rows that are not quantised have a kernel without that of
  // quantising, and rows that are pushed one without that of pulls.
  const auto kernel = args.quantizes  ? params.pushes ? dispatch_kernel<true, kDirect> : dispatch_kernel<true, false>
                      : params.pushes ? dispatch_kernel<!kDirect, kDirect>
                                      : dispatch_kernel<!kDirect, false>;
  launch(kernel, args.num_blocks, kBlockThreads, shared + counters, stream, context, params);
}

}  // namespace ep::cuda
