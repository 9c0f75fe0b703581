// Dispatch, once the rows are staged: every rank brings the rows that it needs straight into their final place.
#include "cuda/engine.h"
#include "cuda/item.cuh"
#include "cuda/launch.h"
#include "cuda/wait.cuh"

namespace ep::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxStages = 4;
constexpr uint32_t kMaxPiece = 8192;  // bytes of a row that travel at once
constexpr Operation kDispatch = Operation::kDispatch;

struct AllArgs {
  DispatchArgs dispatch;
  Plan plan;
  uint32_t row_stride, tail_bytes;   // of the staging
  uint32_t piece_bytes, num_pieces;  // of a row; the last piece brings the tail along
  uint32_t stage_bytes, num_stages;
  bool new_plan;
};

__device__ void fill(char* to, size_t bytes, int thread, int num_threads) {
  uint4* vectors = reinterpret_cast<uint4*>(to);
  for (size_t v = thread; v < bytes / kVector; v += num_threads) vectors[v] = uint4{};
}

// A row without a token, written by a warp.
__device__ void clear_row(const Context& context, const AllArgs& args, int64_t row) {
  const DispatchArgs& out = args.dispatch;
  const int lane = threadIdx.x % 32, num_topk = context.sizes.num_topk, num_scales = out.scale_bytes / 4;
  fill(out.out_rows + row * out.row_bytes, out.row_bytes, lane, 32);
  for (int i = lane; i < num_scales; i += 32) out.out_scales[row * num_scales + i] = 0;
  if (out.layout == Layout::kExpert) {
    if (out.out_weights && lane == 0) out.out_weights[row] = 0;
  } else if (lane < num_topk) {
    if (out.out_weights) out.out_weights[row * num_topk + lane] = 0;
    if (out.out_topk_idx) out.out_topk_idx[row * num_topk + lane] = -1;
  }
}

// Padding of the groups, and the rows behind the last.
__device__ void clear_rows(const Context& context, const AllArgs& args) {
  const Plan& plan = args.plan;
  const int warp = threadIdx.x / 32 + kWarps * blockIdx.x, num_warps = kWarps * gridDim.x;
  if (plan.head->usable && plan.head->layout == static_cast<int32_t>(Layout::kExpert))
    for (int e = 0; e < context.sizes.num_local_experts(); ++e) {
      const int begin = plan.expert_begin[e] + plan.expert_rows[e], num = plan.expert_begin[e + 1] - begin;
      for (int i = (warp + e * kWarps) % num_warps; i < num; i += num_warps) clear_row(context, args, begin + i);
    }
  for (int row = plan.head->num_rows + warp; row < args.dispatch.num_rows; row += num_warps)
    clear_row(context, args, row);
}

// What a rank that has given up leaves: nothing that leads whoever reads it without knowing out of bounds.
__device__ void clear_all(const Context& context, const AllArgs& args) {
  const int warp = threadIdx.x / 32 + kWarps * blockIdx.x, num_warps = kWarps * gridDim.x;
  for (int64_t row = warp; row < args.dispatch.num_rows; row += num_warps) clear_row(context, args, row);
}

// Scales, weights and indices of an item whose last piece has come; `tail` is in shared memory.
__device__ void write_tail(const Context& context, const AllArgs& args, const Item& item, int64_t item_row,
                           const float* tail) {
  const DispatchArgs& out = args.dispatch;
  const int lane = threadIdx.x % 32, num_topk = context.sizes.num_topk, num_scales = out.scale_bytes / 4;
  const bool expert_layout = args.plan.head->layout == static_cast<int32_t>(Layout::kExpert);
  const int num_copies = item.num_copies();
  if (num_scales > 0) {
    for (int copy = 0; copy < (expert_layout ? num_copies : 1); ++copy) {
      const int64_t row = expert_layout ? item.value(copy) : item_row;
      for (int i = lane; i < num_scales; i += 32) out.out_scales[row * num_scales + i] = tail[i];
    }
    tail += (num_scales + 3) / 4 * 4;
  }
  if (expert_layout) {
    if (out.out_weights && lane < num_copies) out.out_weights[item.value(lane)] = tail[item.k(lane)];
  } else if (lane < num_topk) {
    int expert = -1;
    for (int copy = 0; copy < num_copies; ++copy)
      if (item.k(copy) == lane) expert = item.value(copy);
    if (out.out_weights) out.out_weights[item_row * num_topk + lane] = expert < 0 ? 0.0f : tail[lane];
    if (out.out_topk_idx) out.out_topk_idx[item_row * num_topk + lane] = expert;
  }
}

// The items of one warp: a ring of stages in shared memory, each filled by a bulk load and emptied by bulk stores.
__device__ void pull(const Context& context, const AllArgs& args, char* stages, char* shared) {
  const Plan& plan = args.plan;
  const DispatchArgs& out = args.dispatch;
  const int lane = threadIdx.x % 32, rank = context.sizes.rank, item_ints = context.item_ints;
  const int max_copies = context.sizes.max_copies(), num_stages = args.num_stages;
  const bool expert_layout = plan.head->layout == static_cast<int32_t>(Layout::kExpert);

  const Interleave order(context.sizes.num_ranks, rank, plan.head->item_begin);
  const int total = plan.head->num_items, step = gridDim.x * kWarps;
  const int first = blockIdx.x + gridDim.x * (threadIdx.x / 32);
  const int num = first < total ? (total - 1 - first) / step + 1 : 0;

  Records records(shared, item_ints * 4, num);
  uint64_t* full = records.barriers + 2;                                   // [num_stages]
  auto* places = reinterpret_cast<Interleave::Place*>(full + kMaxStages);  // [2, kBatch]
  char* tails = reinterpret_cast<char*>(places + 2 * Records::kBatch);     // [num_stages, tail_bytes]
  if (lane == 0) {
    for (int i = 0; i < 2 + num_stages; ++i) ptx::barrier_init(records.barriers + i, 1);
    ptx::fence_barrier_init();
  }
  __syncwarp();
  const auto row_of = [&](int n) {
    const Interleave::Place place = places[n % (2 * Records::kBatch)];
    return plan.head->item_begin[place.rank] + place.number;
  };
  const auto where = [&](int n) {
    const Interleave::Place place = order.at(first + n * step, step);
    places[n % (2 * Records::kBatch)] = place;
    if (!args.new_plan) return plan.items + static_cast<size_t>(row_of(n)) * item_ints;
    return context.region[place.rank].items +
           (static_cast<size_t>(rank) * context.sizes.max_tokens + place.number) * item_ints;
  };
  const auto keep = [&](int begin) {  // a batch of items in the plan
    const int n = begin + lane;
    if (!args.new_plan || lane >= Records::kBatch || n >= num) return;
    const auto* from = reinterpret_cast<const int4*>(records.at(n));
    auto* to = reinterpret_cast<int4*>(plan.items + static_cast<size_t>(row_of(n)) * item_ints);
    for (int i = 0; i < item_ints / 4; ++i) to[i] = from[i];
  };
  records.fetch(where);
  records.fetch(where);

  struct Cursor {
    int n, piece, stage, parity;
  } load{}, store{};
  const auto advance = [&](Cursor& c) {
    if (++c.piece == static_cast<int>(args.num_pieces)) c.piece = 0, ++c.n;
    if (++c.stage == num_stages) c.stage = 0, c.parity ^= 1;
  };
  const auto is_last = [&](const Cursor& c) { return c.piece == static_cast<int>(args.num_pieces) - 1; };
  const auto bytes_of = [&](const Cursor& c) {
    return min(args.piece_bytes, out.row_bytes - c.piece * args.piece_bytes);
  };
  int room = num_stages;
  while (store.n < num) {
    for (; load.n < num && room > 0; advance(load), --room) {
      if (load.piece == 0) {
        if (!records.wait(load.n)) break;
        if (load.n % Records::kBatch == 0) keep(load.n);
      }
      const Item item{reinterpret_cast<int32_t*>(records.at(load.n)), max_copies};
      const int source = places[load.n % (2 * Records::kBatch)].rank, token = item.token();
      if (lane == 0) {
        const Region& region = context.region[source];
        const char* from =
            region.staging + static_cast<size_t>(token) * args.row_stride + load.piece * args.piece_bytes;
        const uint32_t tail = is_last(load) ? args.tail_bytes : 0;
        uint64_t* barrier = full + load.stage;
        ptx::barrier_arrive_expect(barrier, bytes_of(load) + tail);
        ptx::bulk_load(stages + load.stage * args.stage_bytes, from, bytes_of(load), barrier);
        if (tail > 0)
          ptx::bulk_load(tails + load.stage * tail, region.tails + static_cast<size_t>(token) * tail, tail, barrier);
      }
    }
    if (store.piece == 0 && store.n > 0 && store.n % Records::kBatch == 0) records.fetch(where);
    ptx::barrier_wait(full + store.stage, store.parity);
    const Item item{reinterpret_cast<int32_t*>(records.at(store.n)), max_copies};
    const char* stage = stages + store.stage * args.stage_bytes;
    const uint32_t offset = store.piece * args.piece_bytes, bytes = bytes_of(store);
    const int64_t item_row = row_of(store.n);
    if (lane == 0) {
      const int num_rows = expert_layout ? item.num_copies() : 1;
      for (int copy = 0; copy < num_rows; ++copy) {
        const int64_t row = expert_layout ? item.value(copy) : item_row;
        ptx::bulk_store(out.out_rows + row * out.row_bytes + offset, stage, bytes);
      }
      ptx::bulk_commit();
    }
    if (is_last(store))
      write_tail(context, args, item, item_row, reinterpret_cast<const float*>(tails + store.stage * args.tail_bytes));
    if (lane == 0) ptx::bulk_wait_read<1>();
    __syncwarp();
    if (store.n > 0 || store.piece > 0) ++room;  // the stage before this one
    advance(store);
  }
  if (lane == 0) ptx::bulk_wait<0>();
}

constexpr size_t shared_bytes_of_warp(int item_ints, uint32_t tail_bytes) {  // beside the stages
  return Records::shared_bytes(item_ints * 4) + kMaxStages * (sizeof(uint64_t) + tail_bytes) +
         2 * Records::kBatch * sizeof(Interleave::Place);
}

__global__ void __launch_bounds__(kThreads, 1)
    pull_kernel(const __grid_constant__ Context context, const __grid_constant__ AllArgs args) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ bool arrived;
  State* state = context.state;
  const uint64_t epoch = state->epoch + 1;
  if (__syncthreads_or(has_failed(context))) return clear_all(context, args);  // all threads or none
  const int warp = threadIdx.x / 32;
  clear_rows(context, args);
  if (warp == 0) {
    bool ok = !args.new_plan || wait_for_ranks(context, kDispatch, Phase::kItems, epoch, context.own().listed, epoch);
    ok = ok && wait_for_ranks(context, kDispatch, Phase::kRows, epoch, context.own().staged, epoch);
    if (threadIdx.x == 0) arrived = ok;
  }
  __syncthreads();
  if (!arrived) return clear_all(context, args);
  ptx::fence_before_bulk();
  const size_t stages = static_cast<size_t>(args.num_stages) * args.stage_bytes;
  char* others = shared + kWarps * stages;
  pull(context, args, shared + warp * stages, others + warp * shared_bytes_of_warp(context.item_ints, args.tail_bytes));
  if (!last_block(&state->pull_done, gridDim.x)) return;
  const int source = threadIdx.x;
  if (source < context.sizes.num_ranks) {
    const int32_t* begin = args.plan.head->item_begin;
    state->bytes_read[source] +=
        static_cast<uint64_t>(begin[source + 1] - begin[source]) * (args.dispatch.row_bytes + args.tail_bytes);
  }
  raise_at_all(context, &Region::consumed, epoch);
  if (threadIdx.x == 0) {
    state->epoch = epoch;
    state->staged_epoch = epoch;
  }
}

}  // namespace

void Engine::pull(const DispatchArgs& args, int32_t* plan, cudaStream_t stream) const {
  const Sizes& sizes = context_.sizes;
  AllArgs all{};
  all.dispatch = args;
  all.plan = read_plan(sizes, plan);
  all.new_plan = args.topk_idx != nullptr;
  all.row_stride = static_cast<uint32_t>(row_stride(args.row_bytes));
  all.tail_bytes = tail_bytes(sizes, args);
  all.num_pieces = (args.row_bytes + kMaxPiece - 1) / kMaxPiece;
  // Whole lines, in shared memory too: otherwise every request is split.
  all.piece_bytes = static_cast<uint32_t>(row_stride((args.row_bytes + all.num_pieces - 1) / all.num_pieces));
  all.num_pieces = (args.row_bytes + all.piece_bytes - 1) / all.piece_bytes;
  all.stage_bytes = all.piece_bytes;
  const size_t others = kWarps * shared_bytes_of_warp(context_.item_ints, all.tail_bytes);
  const size_t stages = (kMaxShared - 1024 - others) / kWarps / all.stage_bytes;
  if (stages < 2) throw std::runtime_error("hidden: rows with so many scales do not fit into shared memory");
  all.num_stages = static_cast<uint32_t>(std::min<size_t>(stages, kMaxStages));
  launch(pull_kernel, num_sms_, kThreads, kWarps * all.num_stages * all.stage_bytes + others, stream, context_, all);
}

}  // namespace ep::cuda
