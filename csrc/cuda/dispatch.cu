// Dispatch: plan, stage, pull. One launch does it all, or two when the host needs the counts to make the outputs.
#include "cuda/deliver.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/launch.h"
#include "cuda/plan.cuh"
#include "cuda/pull.cuh"
#include "cuda/stage.cuh"

namespace ep::cuda {
namespace {

constexpr uint32_t kMostPiece = 8192;    // bytes of a row that travel at once
constexpr uint32_t kMostScales = kLine;  // bytes of a row's scales that travel with its last piece
// Bytes of shared memory for the rings of the helpers, beside the plan and beside the rings of the movers, at least.
constexpr size_t kLeastStaging = 64 * kLine, kLateStaging = 32 * kLine;

// The counts of a routing that was planned before.
__device__ void repeat_counts(const Context& context, const DispatchCall& call) {
  for (int e = threadIdx.x; e < context.sizes.num_local_experts(); e += Movers::kThreads) {
    call.dispatch.out_tokens_per_expert[e] = call.plan.expert_rows[e];
    call.dispatch.out_rows_per_expert[e] = call.plan.expert_begin[e + 1] - call.plan.expert_begin[e];
  }
}

template <class Team>
__device__ bool wait_for_free_staging(const Context& context, uint64_t epoch) {
  return team_waits<Team>(context, kDispatch, Phase::kFreeStaging, epoch, context.own().consumed,
                          context.state->staged_epoch);
}

// What comes before rows can be pulled; false when this rank has given up.
__device__ bool prepare(const Context& context, const DispatchCall& call, char* shared, uint64_t epoch) {
  const bool moves = Movers::has_thread();
  if (moves && !call.new_plan && blockIdx.x == 0) {
    repeat_counts(context, call);
    if (!wait_for_free_staging<Movers>(context, epoch)) return false;
    if (Movers::thread() < context.sizes.num_ranks) tell_given(context, call, Movers::thread());
    raise_at_all<Movers>(context, &Region::headed, epoch);
    raise_at_all<Movers>(context, &Region::listed, epoch);  // for a rank that plans, and finds that this one does not
  }
  if (moves && call.plans() && static_cast<int>(blockIdx.x) < call.plan_blocks)
    return wait_for_free_staging<Movers>(context, epoch) && make_plan(context, call, shared, epoch);
  if (!moves && call.stages) {
    if (!wait_for_free_staging<Helpers>(context, epoch)) return false;
    stage(context, call, shared, epoch, true);
  }
  return true;
}

// By the whole block, until all ranks have listed and have staged early tokens; false when this rank has given up.
__device__ bool wait_for_rows(const Context& context, const DispatchCall& call, uint64_t epoch) {
  const Region& own = context.own();
  if (call.new_plan && !team_waits<Block>(context, kDispatch, Phase::kItems, epoch, own.listed, epoch)) return false;
  return team_waits<Block>(context, kDispatch, Phase::kRows, epoch, own.staged, 2 * epoch - 1);
}

__device__ bool help(const Context& context, const DispatchCall& call, char* shared, uint64_t epoch) {
  const uint64_t *headed = context.own().headed, *staged = context.own().staged;
  if (!call.new_plan && blockIdx.x == 0) {
    if (!team_waits<Helpers>(context, kDispatch, Phase::kCounts, epoch, headed, epoch)) return false;
    if (Helpers::thread() < 32) {  // a difference does not keep rows from being pulled, of which nothing is of use then
      const Difference found = compare_calls(head_of_lane(context));
      if (Helpers::thread() == 0 && found.found) context.state->difference = found;
    }
  }
  if (call.stages) stage(context, call, shared, epoch, false);
  if (call.tail_bytes > 0 && !team_waits<Helpers>(context, kDispatch, Phase::kRows, epoch, staged, 2 * epoch))
    return false;
  deliver_tails(context, call);
  clear_rows(context, call);
  return true;
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_kernel(const __grid_constant__ Context context, const __grid_constant__ DispatchCall call) {
  extern __shared__ __align__(1024) char shared[];
  State* state = context.state;
  const uint64_t epoch = state->epoch + 1;
  if (call.stages && blockIdx.x == 0)  // what stays if this rank gives up before it knows better
    for (int e = threadIdx.x; e < context.sizes.num_local_experts(); e += kBlockThreads)
      call.dispatch.out_tokens_per_expert[e] = call.dispatch.out_rows_per_expert[e] = 0;
  bool ok = !__syncthreads_or(has_failed(context));  // here and below: all threads or none
  if (ok) ok = __syncthreads_and(prepare(context, call, shared, epoch));
  if (!call.pulls) return;
  ok = ok && wait_for_rows(context, call, epoch);
  if (ok) {
    const bool done =
        Movers::has_thread() ? pull_rows(context, call, shared, epoch) : help(context, call, shared, epoch);
    ok = __syncthreads_and(done);
  }
  if (!ok) return clear_all(context, call);
  if (!last_block<Block>(&state->pull_done, gridDim.x)) return;
  const int source = threadIdx.x;
  if (source < context.sizes.num_ranks) {
    const int32_t* begin = call.plan.head->item_begin;
    state->bytes_read[source] +=
        static_cast<uint64_t>(begin[source + 1] - begin[source]) * (call.dispatch.row_bytes + call.tail_bytes);
  }
  raise_at_all<Block>(context, &Region::consumed, epoch);
  if (threadIdx.x == 0) {
    report_kept_difference(context);
    state->epoch = epoch;
    state->staged_epoch = epoch;
  }
}

}  // namespace

void Engine::dispatch(const DispatchArgs& args, int32_t* plan, bool stages, bool pulls, cudaStream_t stream) const {
  const Sizes& sizes = context_.sizes;
  DispatchCall call{};
  call.dispatch = args;
  call.plan = read_plan(sizes, plan);
  call.stages = stages;
  call.pulls = pulls;
  call.new_plan = args.topk_idx != nullptr;
  call.row_stride = static_cast<uint32_t>(row_stride(args.row_bytes));
  call.tail_bytes = tail_bytes(sizes, args);
  call.bulk_scales = args.scale_bytes > 0 && args.scale_bytes % kVector == 0 && args.scale_bytes <= kMostScales;
  const uint32_t scale_bytes = call.bulk_scales ? args.scale_bytes : 0;
  const size_t room = kMaxShared - 1024;
  size_t shared = 0;
  if (call.plans()) {
    const auto scratch = [&] { return round_up(carve_scratch(nullptr, sizes, call.plan_warps, nullptr), kLine); };
    call.plan_warps = Movers::kWarps;
    while (scratch() > room - kLeastStaging) --call.plan_warps;
    shared = call.early_at = scratch();
    const int tokens_of_block = 32 * call.plan_warps;
    call.plan_blocks = std::clamp((args.num_tokens + tokens_of_block - 1) / tokens_of_block, 1, num_sms_);
  }
  const bool copies = call.stages && !args.quantizes && sizes.num_ranks > 1;
  if (copies) {
    call.early = make_pieces(args.row_bytes, scale_bytes, (room - shared) / Helpers::kWarps, kMostPiece);
    shared += Helpers::kWarps * call.early.ring_bytes();
  }
  if (call.pulls) {
    const size_t fixed = round_up(Movers::kWarps * Pull::fixed_bytes(context_.item_ints), 128);
    const size_t rings = room - fixed - (copies ? kLateStaging : 0);
    call.pulled = make_pieces(args.row_bytes, scale_bytes, rings / Movers::kWarps, kMostPiece);
    call.late_at = static_cast<uint32_t>(Movers::kWarps * call.pulled.ring_bytes() + fixed);
    if (copies)
      call.late = make_pieces(args.row_bytes, scale_bytes, (room - call.late_at) / Helpers::kWarps, kMostPiece);
    shared = std::max(shared, call.late_at + Helpers::kWarps * call.late.ring_bytes());
  }
  launch(dispatch_kernel, num_sms_, kBlockThreads, shared, stream, context_, call);
}

}  // namespace ep::cuda
