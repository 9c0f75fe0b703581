// Combine: most blocks sum the rows of every item and push the sums to the owners of the tokens, chunk by chunk; the
// others wait for the chunks that the next tokens need and sum the sums, and all blocks do once they have pushed.
#include <type_traits>

#include "cuda/engine.h"
#include "cuda/item.cuh"
#include "cuda/launch.h"
#include "cuda/pipeline.cuh"
#include "cuda/wait.cuh"

namespace ep::cuda {
namespace {

constexpr Operation kCombine = Operation::kCombine;

struct AllArgs {
  CombineArgs combine;
  Plan plan;
  uint32_t piece_bytes, num_pieces;  // of a row
  int num_slots;
  int num_push_blocks;  // blocks from 0 push before they reduce; the others only reduce
};

// A part of the blocks, and this block's number in it.
struct Part {
  int block, num_blocks;
};

__device__ Interleave order_of(const Context& context, const Plan& plan) {
  return {context.sizes.num_ranks, context.sizes.rank, plan.head->item_begin};
}

struct Shared {  // of the producing warp, behind the pipeline's
  char* records;
  Interleave::Place* places;  // [2, kBatch]
};

__device__ Records make_records(char* memory, int bytes, int num) {
  Records records(memory, bytes, num);
  __syncwarp();
  if (threadIdx.x == 0) {
    ptx::barrier_init(records.barriers, 1);
    ptx::barrier_init(records.barriers + 1, 1);
    ptx::fence_barrier_init();
  }
  __syncwarp();
  return records;
}

// Sums the rows of items and pushes them, by the producing warp.
__device__ void push_items(const Context& context, const AllArgs& args, const Part& part, const Shared& shared,
                           Producer& producer) {
  const Plan& plan = args.plan;
  const int lane = threadIdx.x % 32, item_ints = context.item_ints, max_copies = context.sizes.max_copies();
  const bool expert_layout = plan.head->layout == static_cast<int32_t>(Layout::kExpert);
  const Interleave order = order_of(context, plan);
  const int total = plan.head->num_items;
  const int num = part.block < total ? (total - 1 - part.block) / part.num_blocks + 1 : 0;
  const auto place_of = [&](int n) { return shared.places[n % (2 * Records::kBatch)]; };
  const auto where = [&](int n) {
    const Interleave::Place place = order.at(part.block + n * part.num_blocks, part.num_blocks);
    shared.places[n % (2 * Records::kBatch)] = place;
    return plan.items + static_cast<size_t>(plan.head->item_begin[place.rank] + place.number) * item_ints;
  };
  Records records = make_records(shared.records, item_ints * 4, num);
  records.fetch(where);
  records.fetch(where);
  const int num_chunks = (order.most() + kChunk - 1) / kChunk;
  int chunk = 0;
  // Of the batch's item whose number is that of the lane; worked out by all lanes at a time.
  char* to = nullptr;
  int num_rows = 0, its_chunk = 0;
  size_t own_row = 0;  // rank layout: its only row
  for (int n = 0; n < num; ++n) {
    const int in_batch = n % Records::kBatch;
    if (in_batch == 0) {
      if (n > 0) records.fetch(where);
      records.wait(n);
      if (lane < Records::kBatch && n + lane < num) {
        const Item item{reinterpret_cast<int32_t*>(records.at(n + lane)), max_copies};
        const Interleave::Place place = place_of(n + lane);
        to = context.region[place.rank].slots +
             (static_cast<size_t>(context.sizes.rank) * context.sizes.max_tokens + place.number) * context.slot_stride;
        num_rows = expert_layout ? item.num_copies() : 1;
        its_chunk = place.number / kChunk;
        own_row = plan.head->item_begin[place.rank] + place.number;
      }
    }
    Work work{};
    work.kind = Work::kSum;
    work.num_rows = static_cast<int8_t>(__shfl_sync(~0u, num_rows, in_batch));
    const int number = lane < work.num_rows ? lane : -1;
    const Item item{reinterpret_cast<int32_t*>(records.at(n)), max_copies};
    const size_t other_row = __shfl_sync(~0u, own_row, in_batch);
    const size_t row = expert_layout ? item.value(max(number, 0)) : other_row;
    const char* from = args.combine.y + row * context.row_bytes;
    char* const its_to = reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(to), in_batch));
    for (const int its = __shfl_sync(~0u, its_chunk, in_batch); chunk < its; ++chunk) producer.signal(chunk);
    for (uint32_t piece = 0; piece < args.num_pieces; ++piece) {
      const uint32_t offset = piece * args.piece_bytes;
      work.to = its_to + offset;
      work.bytes = min(args.piece_bytes, context.row_bytes - offset);
      producer.issue(work, number, from + offset);
    }
  }
  for (; chunk < num_chunks; ++chunk) producer.signal(chunk);
}

// The weights of some tokens whose partial sums have come, by a warp.
__device__ void take_weights(const Context& context, const AllArgs& args, int first_token, int num_tokens) {
  const int num_topk = context.sizes.num_topk, num = min(num_tokens, args.combine.num_tokens - first_token) * num_topk;
  for (int i = threadIdx.x % 32; i < num; i += 32) {
    const int64_t token = first_token + i / num_topk, entry = static_cast<int64_t>(first_token) * num_topk + i;
    const bool chosen = args.plan.sent_k[token] >> i % num_topk & 1;
    args.combine.out_weights[entry] = chosen ? __ldcg(context.own().weights + entry) : 0.0f;
  }
}

// Sums the partial sums of tokens, by the producing warp. Blocks take batches of tokens as they come to them. False
// when this rank has given up.
__device__ bool reduce_tokens(const Context& context, const AllArgs& args, const Shared& shared, uint64_t epoch,
                              Producer& producer) {
  constexpr int kBatch = Records::kBatch;
  const Plan& plan = args.plan;
  const Sizes& sizes = context.sizes;
  const int lane = threadIdx.x % 32, num_tokens = args.combine.num_tokens;
  const char* slots_of_rank =
      context.own().slots + static_cast<size_t>(lane) * sizes.max_tokens * context.slot_stride;  // lane: the rank
  uint32_t remote = 0;                                                                           // ranks of other nodes
  for (int rank = 0; rank < sizes.num_ranks; ++rank)
    if (rank / sizes.ranks_per_node != sizes.rank / sizes.ranks_per_node) remote |= 1u << rank;
  Records records = make_records(shared.records, context.sent_ints * 4, INT32_MAX);
  int begins[2];  // first tokens of the batch at work and of the next one
  const auto fetch = [&]() {
    int begin = 0;
    if (lane == 0) begin = static_cast<int>(atomicAdd(&context.state->next_token, kBatch));
    begin = __shfl_sync(~0u, begin, 0);
    if (begin < num_tokens)
      records.fetch([&](int n) { return plan.sent_item + static_cast<size_t>(begin + n % kBatch) * context.sent_ints; },
                    min(kBatch, num_tokens - begin));
    return begin;
  };
  begins[0] = fetch();
  begins[1] = begins[0] < num_tokens ? fetch() : num_tokens;
  int arrived = -1;  // the last chunk of the lane's rank that is known to have come
  for (int n = 0; begins[0] < num_tokens; ++n) {
    const int token = begins[0] + n % kBatch;
    records.wait(n);
    const int item = lane < sizes.num_ranks ? reinterpret_cast<const int32_t*>(records.at(n))[lane] : -1;
    const int chunk = item < 0 ? -1 : item / kChunk;
    if (!wait_for_chunks(context, kCombine, Phase::kSums, epoch, context.own().pushed, chunk, arrived)) {
      records.drain();
      return false;
    }
    const uint32_t present = __ballot_sync(~0u, item >= 0);
    Work work{};
    work.kind = Work::kSum;
    work.num_rows = static_cast<int8_t>(__popc(present));
    if (sizes.ranks_per_node < sizes.num_ranks) {
      int j = 0;
      for (int rank = 0; rank < sizes.num_ranks; ++rank) {
        if (!(present >> rank & 1)) continue;
        const int next_node = (rank / sizes.ranks_per_node + 1) * sizes.ranks_per_node;  // its first rank
        const uint32_t later = present & ~((2u << rank) - 1) & ((1u << next_node) - 1);
        if (remote >> rank & 1) {
          work.nodes.remote |= 1u << j;
          if (later == 0) work.nodes.last |= 1u << j;
        }
        ++j;
      }
    }
    const int number = item >= 0 ? __popc(present & ((1u << lane) - 1)) : -1;
    const char* from = slots_of_rank + static_cast<size_t>(max(item, 0)) * context.slot_stride;
    char* to = args.combine.out + static_cast<size_t>(token) * context.row_bytes;
    for (uint32_t piece = 0; piece < args.num_pieces; ++piece) {
      const uint32_t offset = piece * args.piece_bytes;
      work.to = to + offset;
      work.bytes = min(args.piece_bytes, context.row_bytes - offset);
      producer.issue(work, number, from + offset);
    }
    if (n % kBatch == kBatch - 1 || token == num_tokens - 1) {
      if (args.combine.out_weights) take_weights(context, args, begins[0], kBatch);
      if (token == num_tokens - 1) break;
      begins[0] = begins[1];
      begins[1] = begins[0] < num_tokens ? fetch() : num_tokens;
    }
  }
  return true;
}

// The weights of this rank's rows, to where their tokens came from.
__device__ void push_weights(const Context& context, const AllArgs& args, const Part& part) {
  const Plan& plan = args.plan;
  const int max_copies = context.sizes.max_copies(), num_topk = context.sizes.num_topk;
  const bool expert_layout = plan.head->layout == static_cast<int32_t>(Layout::kExpert);
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

template <class T, bool kNodes>
__global__ void __launch_bounds__(Pipeline::kThreads, 1)
    combine_kernel(const __grid_constant__ Context context, const __grid_constant__ AllArgs args) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ bool ok;
  State* state = context.state;
  const uint64_t epoch = state->epoch + 1;
  if (__syncthreads_or(has_failed(context))) return;  // all threads or none
  const int block = blockIdx.x, pushing = args.num_push_blocks;
  const bool pushes = block < pushing;
  const Part push{block, pushing};
  const Pipeline pipeline(memory, args.num_slots, args.piece_bytes);
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) pipeline.init();
    __syncwarp();
    const bool free = !pushes || wait_for_ranks(context, kCombine, Phase::kFreeSlots, epoch, context.own().slots_free,
                                                state->pushed_epoch);
    if (threadIdx.x == 0) ok = free;
  }
  __syncthreads();
  if (!ok) return;
  if (pushes && args.combine.topk_weights) {
    push_weights(context, args, push);
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    char* own = memory + static_cast<size_t>(args.num_slots) * args.piece_bytes + Pipeline::fixed_bytes();
    const Shared shared{own + 2 * Records::kBatch * sizeof(Interleave::Place),
                        reinterpret_cast<Interleave::Place*>(own)};
    Producer producer{pipeline};
    if (pushes) push_items(context, args, push, shared, producer);
    const Shared others{shared.records + Records::shared_bytes(context.item_ints * 4), nullptr};
    const bool done = reduce_tokens(context, args, others, epoch, producer);
    producer.stop();
    if (threadIdx.x == 0) ok = done;
  } else {
    const uint32_t warps = pushing * Pipeline::kGroups * Pipeline::kGroupWarps;
    consume<T, kNodes>(pipeline, [&](int chunk) { finish_chunk(context, &Region::pushed, chunk, warps, epoch); });
  }
  __syncthreads();
  if (!ok) return;
  if (!last_block(&state->combine_done, gridDim.x)) return;
  const int source = threadIdx.x;
  if (source < context.sizes.num_ranks) {
    const int32_t* begin = args.plan.head->item_begin;
    state->bytes_written[source] += static_cast<uint64_t>(begin[source + 1] - begin[source]) * context.row_bytes;
  }
  raise_at_all(context, &Region::slots_free, epoch);
  if (threadIdx.x == 0) {
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
  const size_t fixed = Pipeline::fixed_bytes() + 2 * Records::kBatch * sizeof(Interleave::Place) +
                       Records::shared_bytes(context_.item_ints * 4) + Records::shared_bytes(context_.sent_ints * 4);
  const size_t room = kMaxShared - 1024 - fixed;
  const size_t most_rows = std::max(sizes.max_copies(), sizes.num_ranks);
  const uint32_t row = context_.row_bytes;
  for (uint32_t pieces = 1;; ++pieces) {  // as few as leave room for some items at once
    all.piece_bytes = static_cast<uint32_t>(row_stride((row + pieces - 1) / pieces));
    if (room / all.piece_bytes >= most_rows + 4) break;
  }
  all.num_pieces = (row + all.piece_bytes - 1) / all.piece_bytes;
  all.num_slots = static_cast<int>(std::min<size_t>(room / all.piece_bytes, 64));
  all.num_push_blocks = num_sms_ < 4 ? num_sms_ : num_sms_ * 3 / 4;
  const size_t shared = static_cast<size_t>(all.num_slots) * all.piece_bytes + fixed;
  const auto run = [&](auto element, auto nodes) {
    launch(combine_kernel<decltype(element), nodes.value>, num_sms_, Pipeline::kThreads, shared, stream, context_, all);
  };
  const auto with_nodes = [&](auto element) {
    if (sizes.ranks_per_node < sizes.num_ranks)
      run(element, std::true_type{});
    else
      run(element, std::false_type{});
  };
  if (sizes.dtype == DType::kFloat32) return with_nodes(Float32{});
  if (sizes.dtype == DType::kBFloat16) return with_nodes(BFloat16{});
  with_nodes(Float16{});
}

}  // namespace ep::cuda
