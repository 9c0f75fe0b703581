// Combine: most blocks sum the rows of every item and push the sums to the owners of the tokens, chunk by chunk; the
// others wait for the chunks that the next tokens need and sum the sums, and all blocks do once they have pushed.
#include "cuda/agree.cuh"
#include "cuda/engine.h"
#include "cuda/item.cuh"
#include "cuda/launch.h"
#include "cuda/pipeline.cuh"
#include "cuda/wait.cuh"

namespace ep::cuda {
namespace {

constexpr Operation kCombine = Operation::kCombine;
using Block = Team<0, 0, Pipeline::kThreads>;

struct AllArgs {
  CombineArgs combine;
  Plan plan;
  uint32_t piece_bytes, num_pieces;  // of a row
  int num_slots, max_addends;        // of the pipeline
  float reduce_weight;               // of a row that is reduced, beside one that is pushed
  float saturating;                  // blocks that saturate the links if they push rows as they are
};

constexpr int num_chunks(int num_items) { return (num_items + kChunk - 1) / kChunk; }

// Called by one thread of `num_arrivals`, which comes after all that its warp did: the last tells every rank that the
// sums of the chunk are pushed.
__device__ void finish_chunk(const Context& context, int chunk, uint32_t num_arrivals, uint64_t epoch) {
  uint32_t* done = context.arrays.chunk_done + chunk;
  ptx::fence_system();
  if (atomicAdd(done, 1u) != num_arrivals - 1) return;
  *done = 0;
  ptx::fence_system();
  const size_t flag = static_cast<size_t>(context.sizes.rank) * context.max_chunks + chunk;
  for (int rank = 0; rank < context.sizes.num_ranks; ++rank)
    ptx::store_relaxed(context.region[rank].pushed + flag, epoch);
}

// Called by a whole warp, in which lane r knows of rank r: until the sums of this chunk of the lane's rank have come.
// `arrived` is the last chunk that the lane knows to have come. False when this rank has given up.
__device__ bool wait_for_chunks(const Context& context, uint64_t epoch, int chunk, int& arrived) {
  if (!__any_sync(~0u, chunk > arrived)) return true;
  const int lane = threadIdx.x % 32;
  const size_t flag = static_cast<size_t>(lane) * context.max_chunks + chunk;
  const uint64_t* pushed = chunk > arrived ? context.own().pushed + flag : nullptr;
  if (!wait_until(context, kCombine, Phase::kSums, epoch, pushed, epoch, lane)) return false;
  arrived = max(arrived, chunk);
  ptx::fence_before_bulk();
  return true;
}

// How many blocks, from the first, push before they reduce; the others only reduce. By the rows to read and to write
// for either, so that a rank that has received much pushes with nearly all; but not more than the links can take.
__device__ int num_push_blocks(const AllArgs& args) {
  const int blocks = static_cast<int>(gridDim.x);
  if (blocks < 4) return blocks;
  const PlanHead& head = *args.plan.head;
  const float push = static_cast<float>(head.num_rows) + head.num_items;
  const float reduce = args.reduce_weight * (static_cast<float>(head.num_sent) + args.combine.num_tokens);
  if (head.num_items == 0) return 1;
  const float most = args.saturating * push / head.num_items;
  return min(max(static_cast<int>(min(blocks * push / (push + reduce) + 0.5f, most)), 1), blocks - 1);
}

// A part of the blocks, and this block's number in it.
struct Part {
  int block, num_blocks;
};

struct Shared {  // of the preparing warp, behind the pipeline's
  char* records;
  Interleave::Place* places;  // [2, kBatch]
};

__device__ Records make_records(char* memory, int bytes, int num) {
  Records records(memory, bytes, num);
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    ptx::barrier_init(records.barriers, 1);
    ptx::barrier_init(records.barriers + 1, 1);
    ptx::fence_barrier_init();
  }
  __syncwarp();
  return records;
}

// Prepares works that the first `num` lanes give, piece by piece of their rows. A work's chunk counts once all pieces
// of the works before it have been prepared.
template <class Fill>
__device__ void prepare_pieces(const Context& context, const AllArgs& args, Work work, int num, Preparer& preparer,
                               const Fill& fill) {
  const int its_chunk = work.chunk;
  work.chunk = __shfl_sync(~0u, work.chunk, 0);
  for (uint32_t piece = 0; piece < args.num_pieces; ++piece) {
    const uint32_t offset = piece * args.piece_bytes;
    if (piece == args.num_pieces - 1) work.chunk = its_chunk;
    preparer.prepare(work, num, offset, min(args.piece_bytes, context.row_bytes - offset), fill);
  }
}

// The rows of items, to be summed and pushed; by the preparing warp.
__device__ void push_items(const Context& context, const AllArgs& args, const Part& part, const Shared& shared,
                           Preparer& preparer) {
  constexpr int kBatch = Records::kBatch;
  const Plan& plan = args.plan;
  const int lane = threadIdx.x % 32, item_ints = context.item_ints, max_copies = context.sizes.max_copies();
  const bool expert_layout = plan.head->has_expert_layout();
  const Interleave order{context.sizes.num_ranks, context.sizes.rank, plan.head->item_begin};
  const int total = plan.head->num_items;
  const int num = part.block < total ? (total - 1 - part.block) / part.num_blocks + 1 : 0;
  const auto row_of = [&](const Interleave::Place& place) {
    return static_cast<size_t>(plan.head->item_begin[place.rank] + place.number);
  };
  const auto where = [&](int n) {
    const Interleave::Place place = order.at(part.block + n * part.num_blocks, part.num_blocks);
    shared.places[n % (2 * kBatch)] = place;
    return plan.items + row_of(place) * item_ints;
  };
  Records records = make_records(shared.records, item_ints * 4, num);
  records.fetch(where);
  records.fetch(where);
  for (int first = 0; first < num; first += kBatch) {
    if (first > 0) records.fetch(where);
    records.wait(first);
    Work work{};
    const Item item{reinterpret_cast<int32_t*>(records.at(first + lane % kBatch)), max_copies};
    const Interleave::Place place = shared.places[(first + lane) % (2 * kBatch)];
    if (lane < kBatch && first + lane < num) {
      work.to =
          context.region[place.rank].slots +
          (static_cast<size_t>(context.sizes.rank) * context.sizes.max_tokens + place.number) * context.slot_stride;
      work.num_rows = static_cast<int8_t>(expert_layout ? item.num_copies() : 1);
      work.chunk = place.number / kChunk;
    }
    prepare_pieces(context, args, work, min(kBatch, num - first), preparer, [&](const char** addends) {
      for (int j = 0; j < work.num_rows; ++j)
        addends[j] = args.combine.y + (expert_layout ? item.value(j) : row_of(place)) * context.row_bytes;
    });
  }
  preparer.end_chunks(num_chunks(order.most()), false);
}

// The weights of some tokens whose partial sums have come, by a warp.
__device__ void take_weights(const Context& context, const AllArgs& args, int first_token, int num_tokens) {
  constexpr int kTogether = 4;
  const int num_topk = context.sizes.num_topk, num = num_tokens * num_topk;
  for (int begin = threadIdx.x % 32; begin < num; begin += 32 * kTogether) {
    float values[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = begin + 32 * u;
      if (i >= num) break;
      const int64_t entry = static_cast<int64_t>(first_token) * num_topk + i;
      const bool chosen = args.plan.sent_k[first_token + i / num_topk] >> i % num_topk & 1;
      values[u] = chosen ? __ldcg(context.own().weights + entry) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (begin + 32 * u < num)
        args.combine.out_weights[static_cast<int64_t>(first_token) * num_topk + begin + 32 * u] = values[u];
  }
}

// Tells all ranks what this rank was given, which have read what it told them before; by the first warp.
__device__ void tell_call(const Context& context, const AllArgs& args, uint64_t epoch) {
  const int rank = context.sizes.rank, peer = Block::thread();
  if (peer < context.sizes.num_ranks) {
    const PlanHead& head = *args.plan.head;
    const int most = Interleave(context.sizes.num_ranks, rank, head.item_begin).most();
    context.region[peer].calls[rank] = {head.made, args.combine.topk_weights != nullptr, num_chunks(most)};
  }
  raise_at_all<Block>(context, &Region::called, epoch);
}

enum class Go { kYes, kNo, kGaveUp };

// Called by a whole warp: whether the partial sums that come belong together. If not, all of them have come.
__device__ Go agree_on_call(const Context& context, uint64_t epoch) {
  const uint64_t* called = context.own().called;
  if (!wait_for_ranks(context, kCombine, Phase::kSums, epoch, called, epoch)) return Go::kGaveUp;
  const int lane = threadIdx.x % 32, last = context.sizes.num_ranks - 1;
  const CombineCall* call = context.own().calls + min(lane, last);
  const int plan = __ldcg(&call->plan), has_weights = __ldcg(&call->has_weights), chunks = __ldcg(&call->num_chunks);
  Difference found = compare(Given::kPlan, plan);
  if (!found.found) found = compare(Given::kWeights, has_weights);
  if (!found.found) return Go::kYes;
  if (blockIdx.x == 0 && lane == 0) context.state->difference = found;
  int arrived = -1;
  return wait_for_chunks(context, epoch, lane <= last ? chunks - 1 : -1, arrived) ? Go::kNo : Go::kGaveUp;
}

// The partial sums of tokens, to be summed; by the preparing warp. Blocks take batches of tokens as they come to them.
// False when this rank has given up.
__device__ bool reduce_tokens(const Context& context, const AllArgs& args, const Shared& shared, uint64_t epoch,
                              Preparer& preparer) {
  constexpr int kBatch = Records::kBatch;
  const Plan& plan = args.plan;
  const Sizes& sizes = context.sizes;
  const int lane = threadIdx.x % 32, num_tokens = args.combine.num_tokens;
  const Go go = agree_on_call(context, epoch);
  if (go != Go::kYes) return go == Go::kNo;
  const int batch = min(kBatch, num_tokens / static_cast<int>(2 * gridDim.x) + 1);  // tokens; few when there are few
  const auto node_of = [&](int rank) { return rank / sizes.ranks_per_node; };
  Records records = make_records(shared.records, context.sent_ints * 4, INT32_MAX);
  int begins[2];  // first tokens of the batch at work and of the next one
  const auto fetch = [&]() {
    int begin = 0;
    if (lane == 0) begin = static_cast<int>(atomicAdd(&context.state->next_token, batch));
    begin = __shfl_sync(~0u, begin, 0);
    if (begin < num_tokens)
      records.fetch([&](int n) { return plan.sent_item + static_cast<size_t>(begin + n % kBatch) * context.sent_ints; },
                    min(batch, num_tokens - begin));
    return begin;
  };
  begins[0] = fetch();
  begins[1] = begins[0] < num_tokens ? fetch() : num_tokens;
  int arrived = -1;  // the last chunk of the lane's rank that is known to have come
  for (int n = 0; begins[0] < num_tokens; n += kBatch) {
    const int begin = begins[0], num = min(batch, num_tokens - begin);
    records.wait(n);
    Work work{};
    work.to = args.combine.out + static_cast<size_t>(begin + lane) * context.row_bytes;
    const auto* items = reinterpret_cast<const int32_t*>(records.at(n + min(lane, num - 1)));
    int chunk = -1;      // of the lane's rank, the last one that one of the tokens needs
    int last_node = -1;  // of an addend
    for (int rank = 0; rank < sizes.num_ranks; ++rank) {
      const int item = lane < num ? items[rank] : -1;
      const int needed = __reduce_max_sync(~0u, item < 0 ? -1 : item / kChunk);
      if (lane == rank) chunk = needed;
      if (item < 0) continue;
      if (node_of(rank) != node_of(sizes.rank)) {
        const uint32_t bit = 1u << work.num_rows;
        work.nodes.remote |= bit;
        if (node_of(rank) == last_node) work.nodes.last &= ~(bit >> 1);
        work.nodes.last |= bit;
      }
      last_node = node_of(rank);
      ++work.num_rows;
    }
    if (!wait_for_chunks(context, epoch, chunk, arrived)) {
      records.drain();
      return false;
    }
    prepare_pieces(context, args, work, num, preparer, [&](const char** addends) {
      for (int rank = 0; rank < sizes.num_ranks; ++rank)
        if (items[rank] >= 0)
          *addends++ =
              context.own().slots + (static_cast<size_t>(rank) * sizes.max_tokens + items[rank]) * context.slot_stride;
    });
    if (args.combine.out_weights) take_weights(context, args, begin, num);
    if (begin + num == num_tokens) break;
    begins[0] = begins[1];
    begins[1] = begins[0] < num_tokens ? fetch() : num_tokens;
  }
  return true;
}

// The weights of this rank's rows, to where their tokens came from.
__device__ void push_weights(const Context& context, const AllArgs& args, const Part& part) {
  const Plan& plan = args.plan;
  const int max_copies = context.sizes.max_copies(), num_topk = context.sizes.num_topk;
  const bool expert_layout = plan.head->has_expert_layout();
  const int num_items = plan.head->num_items;
  int source = 0;
  for (int i = part.block * blockDim.x + threadIdx.x; i < num_items; i += part.num_blocks * blockDim.x) {
    while (i >= plan.head->item_begin[source + 1]) ++source;
    const Item item{plan.items + static_cast<size_t>(i) * context.item_ints, max_copies};
    float* to = context.region[source].weights + static_cast<size_t>(item.token()) * num_topk;
    for (int copy = 0; copy < item.num_copies(); ++copy) {
      const int k = item.k(copy);
      const size_t from = expert_layout ? item.value(copy) : static_cast<size_t>(i) * num_topk + k;
      to[k] = args.combine.topk_weights[from];
    }
  }
}

template <class Summing>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    combine_kernel(const __grid_constant__ Context context, const __grid_constant__ AllArgs args) {
  extern __shared__ __align__(1024) char memory[];
  State* state = context.state;
  const uint64_t epoch = state->epoch + 1;
  if (__syncthreads_or(has_failed(context))) return;  // all threads or none
  const int block = blockIdx.x, pushing = num_push_blocks(args);
  const bool pushes = block < pushing;
  const Part push{block, pushing};
  const Pipeline pipeline(memory, args.num_slots, args.piece_bytes, args.max_addends,
                          Pipeline::kSummingWarps / Summing::kWarps);
  bool ok = true;
  if (threadIdx.x < 32) {
    pipeline.init();
    ok = !pushes ||
         wait_for_ranks(context, kCombine, Phase::kFreeSlots, epoch, context.own().slots_free, state->pushed_epoch);
    if (ok && block == 0) tell_call(context, args, epoch);
  }
  if (!__syncthreads_and(ok)) return;
  if (pushes && args.combine.topk_weights) {
    push_weights(context, args, push);
    __syncthreads();
  }
  const int warp = threadIdx.x / 32;
  if (warp < Pipeline::kIssuingWarps) {
    issue(pipeline, warp);
  } else if (warp == Pipeline::kIssuingWarps) {
    char* own =
        memory + static_cast<size_t>(args.num_slots) * args.piece_bytes + Pipeline::fixed_bytes(args.max_addends);
    const Shared shared{own + 2 * Records::kBatch * sizeof(Interleave::Place),
                        reinterpret_cast<Interleave::Place*>(own)};
    const Shared others{shared.records + Records::shared_bytes(context.item_ints * 4), nullptr};
    Preparer preparer{pipeline};
    if (pushes) push_items(context, args, push, shared, preparer);
    ok = reduce_tokens(context, args, others, epoch, preparer);
    preparer.end_chunks(0, true);
    preparer.end();
  } else {
    const uint32_t warps = pushing * Pipeline::kSummingWarps;
    consume<Summing>(pipeline, [&](int chunk) { finish_chunk(context, chunk, warps, epoch); });
  }
  if (!__syncthreads_and(ok)) return;
  if (!last_block<Block>(&state->combine_done, gridDim.x)) return;
  const int source = threadIdx.x;
  if (source < context.sizes.num_ranks) {
    const int32_t* begin = args.plan.head->item_begin;
    state->bytes_written[source] += static_cast<uint64_t>(begin[source + 1] - begin[source]) * context.row_bytes;
  }
  raise_at_all<Block>(context, &Region::slots_free, epoch);
  if (threadIdx.x == 0) {
    report_kept_difference(context);
    state->next_token = 0;
    state->epoch = epoch;
    state->pushed_epoch = epoch;
  }
}

}  // namespace

void Engine::combine(const CombineArgs& args, int32_t* plan, cudaStream_t stream) const {
  const Sizes& sizes = context_.sizes;
  AllArgs all{};
  all.combine = args;
  all.plan = read_plan(sizes, plan);
  all.max_addends = std::max(sizes.max_copies(), sizes.num_ranks);
  const size_t fixed = Pipeline::fixed_bytes(all.max_addends) + 2 * Records::kBatch * sizeof(Interleave::Place) +
                       Records::shared_bytes(context_.item_ints * 4) + Records::shared_bytes(context_.sent_ints * 4);
  const size_t room = kMaxShared - 1024 - fixed;
  const uint32_t row = context_.row_bytes;
  for (uint32_t pieces = 1;; ++pieces) {  // as few as leave room for some items at once
    all.piece_bytes = static_cast<uint32_t>(row_stride((row + pieces - 1) / pieces));
    if (room / all.piece_bytes >= all.max_addends + size_t{4}) break;
  }
  all.num_pieces = (row + all.piece_bytes - 1) / all.piece_bytes;
  all.num_slots = static_cast<int>(std::min<size_t>(room / all.piece_bytes, Pipeline::kMaxSlots));
  const bool is_long = row > 8192;
  all.reduce_weight = is_long ? 1.2f : 0.45f;  // both as measured on 4 H200
  all.saturating = is_long ? 5.2f : 1000.0f;
  const size_t shared = static_cast<size_t>(all.num_slots) * all.piece_bytes + fixed;
  const auto run = [&](auto summing) {
    launch(combine_kernel<decltype(summing)>, num_sms_, Pipeline::kThreads, shared, stream, context_, all);
  };
  const auto run_with = [&](auto element) {
    using T = decltype(element);
    if (sizes.ranks_per_node < sizes.num_ranks) return run(Summing<T, true, 4, 2>{});
    if (is_long) return run(Summing<T, false, 4, 7>{});
    run(Summing<T, false, 2, 4>{});
  };
  if (sizes.dtype == DType::kFloat32) return run_with(Float32{});
  if (sizes.dtype == DType::kBFloat16) return run_with(BFloat16{});
  run_with(Float16{});
}

}  // namespace ep::cuda
