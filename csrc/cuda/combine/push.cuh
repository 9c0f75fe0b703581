// Pushing: the partial sum of every item is stored in a slot of its source. Slots of a source on another node are at
// its rail peer on this node: they hold a window of its tokens.
#pragma once
#include "cuda/combine/combine.cuh"

namespace ep::cuda {

// [thread] Return the number of chunks pushed by this rank in a combine: all far chunks, then the own chunks with
// items. This rank raises the flags of all of them, also of empty ones: Field::kNumChunks promises it.
template <Kernels K>
__device__ inline int end_of_pushed(const Op<K>& op, const PlanSizes& sizes) {
  return op.num_far_chunks() + num_item_chunks(sizes.most_items);
}

// Items to be pushed for tokens of other nodes, chunk by chunk. Within a chunk they are ordered by source, beginning
// with the rail peer on the next node.
template <Kernels K>
struct FarItems {
  const Op<K> op;
  const Context& context;
  const Plan& plan;
  const SourceOrder sources;
  int *const ends, *const shifts;  // [num_ranks] by source: the end of its items among all of this chunk; the number of
                                   // an item there, minus its number in the source's list
  int later = 0;                   // of source `lane`: the end of the next chunk's items in its list
  const int lane, num_sources;     // sources on other nodes
  int chunk = -1;                  // this chunk
  int num_left = 0;                // items of later chunks

  // [warp] Begin before the first chunk. SourceOrder::fill has been called.
  __device__ FarItems(const Op<K>& op, const Plan& plan, const CombineMemory& memory)
      : op(op),
        context(op.context),
        plan(plan),
        sources(memory.sources),
        ends(memory.far_ends),
        shifts(memory.far_shifts),
        lane(threadIdx.x % 32),
        num_sources(is_for_one_node(K) ? 0 : context.num_ranks - context.config.ranks_per_node) {
    if (num_sources == 0) return;
#pragma unroll 1
    for (int i = lane; i < num_sources; i += 32) {
      ends[i] = shifts[i] = 0;
      num_left += items_of(i);
    }
    num_left = __reduce_add_sync(~0u, num_left);
    load_later(0);
  }

  // [warp] Go to the next chunk, and return the number of its items. There is one.
  __device__ int advance() {
    int num = 0;
    ++chunk;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i - lane < num_sources; i += 32) {
      const bool has = i < num_sources;
      const int end = !has ? 0 : i == lane ? later : first_of(i, chunk + 1);
      const int up_to = num + inclusive_sum(has ? end - (ends[i] - shifts[i]) : 0);
      if (has) {
        ends[i] = up_to;
        shifts[i] = up_to - end;
      }
      num = __shfl_sync(~0u, up_to, 31);
    }
    load_later(chunk + 1);
    num_left -= num;
    __syncwarp();
    return num;
  }

  // [thread] Return the n-th item of this chunk; there are more than n.
  __device__ SourceOrder::Position at(int n) const {
    int i = 0;
#pragma unroll 1
    while (ends[i] <= n) ++i;
    return {source(i), n - shifts[i]};
  }

 private:
  // [thread] Return the i-th source on other nodes.
  __device__ int source(int i) const { return sources.ranks[context.config.ranks_per_node + i]; }
  // [thread] Return the items of the i-th source.
  __device__ int items_of(int i) const { return sources.num_items[context.config.ranks_per_node + i]; }
  // [thread] Return the number of the first item of the i-th source in `chunk` or a later one. `chunk` > 0.
  __device__ int first_of(int i, int chunk) const {
    const int count = items_of(i);
    if (count == 0 || chunk >= op.num_far_chunks()) return count;
    return __ldg(plan.chunk_begin + static_cast<size_t>(chunk) * context.num_ranks + source(i));
  }
  // [warp] Start to load `later` of `chunk` for the next call. With more than 32 sources the others are loaded then.
  __device__ void load_later(int chunk) {
    if (lane < num_sources) later = first_of(lane, chunk + 1);
  }
};

constexpr int kAllSums = INT32_MAX;  // for Pusher::run and Reducer::run

// Pushes the items of one block, in the preparing warp. Items of far chunks come first, because their sums travel on;
// their slots hold a window of chunks. Items from the own node follow; SourceOrder::at keeps all links busy.
template <Kernels K, class Params>
struct Pusher {
  static constexpr int kBatch = Records::kBatch;

  // Items of one far chunk, or own items.
  struct Batch {
    int num;    // 0: there are no items
    int chunk;  // ProgressFlags::far for own items
  };

  const Op<K> op;
  const Context& context;
  const Params& params;
  const PlanHead& head;
  typename Params::Memory& memory;
  const Part part;
  const bool reduces;  // whether this block makes sums for other nodes between its pushes
  const int lane;
  int entered;  // last chunk that may be pushed
  int summed;   // far chunk whose pushes follow the sums made so far
  FarItems<K> far;
  int taken = 0, end = 0;  // this block's items of the far chunk, or all own ones: the first to be taken, and the end
  bool takes_own = false;  // whether all far chunks are taken
  bool agreed = false;     // whether all ranks are known to agree
  Batch batch{}, next{};   // to be queued, and behind it; from begin() on
  int num_queued = 0;      // records before those of `batch`

  // [warp] Prepare to push. SourceOrder::fill has been called.
  __device__ Pusher(const Op<K>& op, const Params& params, typename Params::Memory& memory, const Part& part,
                    bool reduces)
      : op(op),
        context(op.context),
        params(params),
        head(*params.plan.head),
        memory(memory),
        part(part),
        reduces(reduces),
        lane(threadIdx.x % 32),
        entered(progress_flags_of(op).window - 1),
        summed(entered + 1),
        far(op, params.plan, memory) {
    memory.items.begin();
  }

  // [thread] Return the index in the plan of an item.
  __device__ size_t index_of(const SourceOrder::Position& position) const {
    return static_cast<size_t>(head.item_begin()[position.source] + position.number);
  }

  // [warp] Take the next batch, and start to load it.
  __device__ Batch take() {
    const ProgressFlags progress_flags = progress_flags_of(op);
    while (taken == end && far.num_left > 0) {
      const int num = far.advance();
      // The blocks take equal shares, in turns: a chunk may have fewer items than there are blocks.
      const int share = (part.block + far.chunk) % part.num_blocks;
      taken = num * share / part.num_blocks;
      end = num * (share + 1) / part.num_blocks;
    }
    if (taken == end && !takes_own) {
      takes_own = true;
      taken = part.block;
      const int32_t* const begin_of_node = head.item_begin() + op.first_local_rank();
      end = begin_of_node[op.ranks_per_node()] - begin_of_node[0];
      if (adds_own_rows(op)) end -= head.items_of(op.rank());
    }
    if (taken >= end) return {0, progress_flags.far};
    const int first = taken, step = takes_own ? part.num_blocks : 1;
    const int num = min(kBatch, (end - 1 - first) / step + 1);
    memory.items.fetch(
        [&](int n) {
          const SourceOrder::Position position =
              takes_own ? memory.sources.at(first + lane * step, adds_own_rows(op), op.ranks_per_node(), step)
                        : far.at(first + lane);
          memory.positions[n % (2 * kBatch)] = position;
          return params.plan.items + index_of(position) * context.item_ints;
        },
        num);
    taken += num * step;
    return {num, takes_own ? progress_flags.far : far.chunk};
  }

  // [warp] Prepare to push a far chunk, or own items: wait until the ranks of the node have freed its slots. If this
  // block has to make sums before that, set `until` as run() does, and wait for nothing. After a difference nobody
  // reduces, so no slots become free: compare the Calls before the first wait. Return kAborted after an abort of this
  // rank.
  // waits: freed (free slots)
  __device__ Verdict enter(Preparer& preparer, int chunk, int& until) {
    const ProgressFlags progress_flags = progress_flags_of(op);
    if (chunk <= entered || progress_flags.far == progress_flags.window) return Verdict::kAgree;
    const bool waits = progress_flags.needs_slots(chunk);
    if (!waits && !reduces) return Verdict::kAgree;
    if (!agreed) {
      const Verdict verdict = agree_before_wait(op, memory);
      if (verdict != Verdict::kAgree) return verdict;
      agreed = true;
    }
    // Reach the earlier chunks before each wait: this block may have no tasks behind them to raise their flags.
    if (reduces && summed <= min(chunk, progress_flags.far - 1)) {
      preparer.reach(progress_flags.pushed(summed - 1) + 1, false);
      until = (++summed - progress_flags.window) * progress_flags.others;
      return Verdict::kAgree;
    }
    entered = chunk;
    if (!waits) return Verdict::kAgree;
    preparer.reach(progress_flags.pushed(chunk), false);
#pragma unroll 1
    for (int first = 0; first < op.ranks_per_node(); first += 32) {
      const int local = first + lane, owner = op.first_local_rank() + local;
      const uint64_t* flag = context.own.freed + local * progress_flags.far + chunk - progress_flags.window;
      if (local >= op.ranks_per_node()) flag = nullptr;
      if (!wait_until(op, Phase::kFreeSlots, flag, op.epoch, owner, owner)) return Verdict::kAborted;
    }
    return Verdict::kAgree;
  }

  // [warp] Take the first items, and start to load them. Wait for nothing. Keep one batch ahead of the tasks.
  __device__ void begin() {
    batch = take();
    next = batch.num > 0 ? take() : batch;
  }

  // [thread] Skip the sums before far chunk `chunk`, because this block has none.
  __device__ void skip_sums(int chunk) { summed = max(summed, chunk + progress_flags_of(op).window); }

  // [warp] Queue the sums of a batch; its items begin at record n.
  __device__ void queue(Preparer& preparer, const Batch& batch, int n) {
    memory.items.wait(n);
    stamp(op, Step::kFetched);
    const ProgressFlags progress_flags = progress_flags_of(op);
    // Lane i fills a task with the i-th item of the batch.
    Task task{};
    const Item item{reinterpret_cast<int32_t*>(memory.items.at(n + lane % kBatch)), context.max_copies};
    const SourceOrder::Position position = memory.positions[(n + lane) % (2 * kBatch)];
    const bool expert_layout = head.has_expert_layout(), is_own = batch.chunk == progress_flags.far;
    if (lane < batch.num) {
      const int owner = op.local_of(position.source);
      const size_t slot = is_own ? static_cast<size_t>(context.local) * context.config.max_tokens + position.number
                                 : window_slot(context, context.local, item.token());
      char* const slots =
          is_own ? context.own.slots : context.local_rail_buffer(op.node_of(position.source), &RailArrays::slots);
      task.to = context.peers.at(slots, owner) + slot * context.slot_stride;
      task.num_rows = static_cast<int8_t>(expert_layout ? item.num_copies() : 1);
      task.progress_flag =
          progress_flags.pushed(is_own ? progress_flags.far + position.number / kItemChunk : batch.chunk);
      if constexpr (Params::Memory::kHasWeights) task.weights_from = static_cast<int16_t>(position.source);
    }
    // Queue the tasks with their addends: the rows of y.
    const auto fill = [&](const char** addends, [[maybe_unused]] int place) {
#pragma unroll 1
      for (int j = 0; j < task.num_rows; ++j) {
        addends[j] = params.args.y + (expert_layout ? item.value(j) : index_of(position)) * context.row_bytes;
        if constexpr (Params::Memory::kHasWeights)
          memory.weights.index(place, j) = item.token() * context.config.num_topk + item.k(j);
      }
    };
    preparer.prepare_rows(task, batch.num, context.row_bytes, fill, [] { return true; });
  }

  // [warp] Queue the sums of this block's items. Where other sums have to come before, set `until` to a sum progress
  // flag and return: the caller queues the sums before it, and calls again. At the end set `until` to kAllSums. Called
  // after begin(), once slots are free. Wait for own loads, for room in the queue, for free slots of far chunks behind
  // the window. Return kDiffer if the rest is not pushed because the ranks differ; all promised flags rise all the
  // same. Return kAborted after an abort of this rank. Loads of items may be under way: at the end, call
  // Records::drain.
  __device__ Verdict run(Preparer& preparer, int& until) {
    until = kAllSums;
    Verdict verdict = Verdict::kAgree;
    while (true) {
      verdict = enter(preparer, batch.chunk, until);
      if (until != kAllSums) return verdict;
      if (batch.num == 0 || verdict != Verdict::kAgree) break;
      queue(preparer, batch, num_queued);
      num_queued += kBatch;
      batch = next;
      if (batch.num > 0) next = take();
    }
    // Reach all chunks, also those without items of this block: every pushing block counts itself in for each.
    if (verdict != Verdict::kAborted) preparer.reach(progress_flags_of(op).pushed(end_of_pushed(op, head)), false);
    return verdict;
  }
};

// [block] Write the weights of this part's items to the inboxes of their sources, once slots are free. Wait for
// nothing. A barrier of the block must follow, so that `pushed` covers the weights too.
template <Kernels K>
__device__ inline void push_weights(const Op<K>& op, const CombineParams& params, const Part& part) {
  const Context& context = op.context;
  const PlanHead& head = *params.plan.head;
  const int max_copies = context.max_copies, num_topk = context.config.num_topk;
  const bool expert_layout = head.has_expert_layout();
  int source = 0;
  for (int i = part.block * blockDim.x + threadIdx.x; i < head.num_items; i += part.num_blocks * blockDim.x) {
    while (i >= head.item_begin()[source + 1]) ++source;
    const Item item{params.plan.items + static_cast<size_t>(i) * context.item_ints, max_copies};
    float* to = op.inbox_holding(source, &Inbox::weights) + static_cast<size_t>(item.token()) * num_topk;
    for (int copy = 0; copy < item.num_copies(); ++copy) {
      const int k = item.k(copy);
      const size_t from = expert_layout ? item.value(copy) : static_cast<size_t>(i) * num_topk + k;
      to[k] = params.args.topk_weights[from];
    }
  }
}

}  // namespace ep::cuda
