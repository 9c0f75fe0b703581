// Pulling: pull warps load rows from the inboxes of all ranks and store them in their final rows of the output. This
// rank's own rows come from the caller's tensor where DispatchParams::reads_own_rows allows it.
#pragma once
#include "cuda/device/records.cuh"
#include "cuda/plan/direct.cuh"

namespace ep::cuda::EP_KERNELS {

// Addresses of one item's row and scales. Found for a batch of items at a time.
struct alignas(16) Origin {
  const char *row, *scales;
  int32_t index;   // of the item in the plan; in rank layout its output row
  int32_t source;  // source rank of the item
  int32_t token;   // its token there
  int32_t chunk;   // chunk of its token, to be waited for; -1: the row need not be staged
};

// Shared memory of one pull warp.
struct PullMemory {
  char* ring;           // see Pieces
  Records records;      // items of this pull warp
  uint64_t* full;       // [kMaxPlaces] a round ends when the place's piece has landed
  Origin* origins;      // [2, Records::kBatch] of the items in `records`
  SourceOrder sources;  // order of pulls; unwritten with a direct plan

  // [host] [thread] Lay out the memory of all pull warps, or measure it. Return that of one pull warp.
  EP_HOST_DEVICE static PullMemory carve(Cursor& c, const BufferContext& context, const Pieces& pieces, int warp) {
    PullMemory memory;
    memory.ring = c.take<char>(PullWarps::kWarps * pieces.ring_bytes()) + warp * pieces.ring_bytes();
    memory.records = Records::carve(c, context.item_ints * 4, PullWarps::kWarps, warp);
    memory.full = c.take<uint64_t>(PullWarps::kWarps * Pieces::kMaxPlaces) + warp * Pieces::kMaxPlaces;
    memory.origins = c.take<Origin>(PullWarps::kWarps * 2 * Records::kBatch) + warp * 2 * Records::kBatch;
    memory.sources = SourceOrder::carve(c, context.config.num_ranks(), PullWarps::kWarps, warp);
    return memory;
  }
};

// [warp] Store a row's scales by columns, for each lane with a copy of the row: `at` as scale_at, or -1. `scales`: of
// the row, in shared memory. Bulk loads may overwrite them afterwards.
__device__ inline void store_columns(const DispatchParams& params, const float* scales, int64_t at) {
  const uint32_t copies = __ballot_sync(~0u, at >= 0);
  const int num_words = params.num_scale_words();
#pragma unroll 1
  for (int word = threadIdx.x % 32, begin = 0; begin < num_words; begin += 32, word += 32) {
    const uint32_t value = word < num_words ? params.scale_word(word, scales) : 0;
    auto* const to = reinterpret_cast<uint32_t*>(params.args.out_scales) + int64_t{word} * params.rows_per_group;
#pragma unroll 1
    for (uint32_t left = copies; left != 0; left &= left - 1) {
      const int64_t of_copy = __shfl_sync(~0u, at, __ffs(left) - 1);
      if (word < num_words) to[of_copy] = value;
    }
  }
  ptx::fence_shared_before_bulk();
}

// One pull warp. Bulk loads bring pieces to its ring, bulk stores take them to the output.
struct Puller {
  static constexpr int kBatch = Records::kBatch;

  const Op op;
  const DispatchParams& params;
  const Pieces& pieces;
  char* const shared;  // of the block
  const bool expert_layout;
  const int lane;
  const int first, step;  // this pull warp takes items first, first + step, ... of the order (position_of, write_batch)
  PullMemory memory;
  const int num_items, num;  // items in all, and of this pull warp
  PieceCursor load, store;   // next piece to load, and next piece to store
  int room;                  // places free to be loaded
  StagedFlags staged;

  // [warp] Create the mbarriers of this pull warp ahead of a direct plan, which lies elsewhere in shared memory.
  static __device__ void make_places(const Op& op, const DispatchParams& params, char* shared) {
    Cursor c(shared + params.rings_at);
    const PullMemory memory = PullMemory::carve(c, op.context, params.pulled, PullWarps::warp());
    if (threadIdx.x % 32 == 0) init_places(memory.full);
    __syncwarp();
  }

  // [warp] Create the mbarriers, if make_places has not, and find the items of this pull warp. The items have arrived,
  // and the plan is usable.
  __device__ Puller(const Op& op, const DispatchParams& params, char* shared)
      : op(op),
        params(params),
        pieces(params.pulled),
        shared(shared),
        expert_layout(params.args.layout != Layout::kRank),
        lane(threadIdx.x % 32),
        first(op.block + op.num_blocks * PullWarps::warp()),
        step(op.num_blocks * PullWarps::kWarps),
        memory(memory_of(op, params, shared)),
        num_items(plan_of_block(op, params, shared).head->num_items),
        num(first < num_items ? (num_items - 1 - first) / step + 1 : 0),
        room(pieces.num_places),
        staged(staged_flags(op, params, shared)) {
    if (params.is_direct()) {
      memory.records.num = num;  // they are written here, not loaded: they need no mbarriers
      return;
    }
    memory.records.begin(num);
    if (lane == 0) init_places(memory.full);
    __syncwarp();
  }

  // [warp] Find this pull warp's shared memory. Without a direct plan, fill in the order of the sources.
  static __device__ PullMemory memory_of(const Op& op, const DispatchParams& params, char* shared) {
    Cursor c(shared + params.rings_at);
    const PullMemory memory = PullMemory::carve(c, op.context, params.pulled, PullWarps::warp());
    if (params.is_direct()) return memory;
    const PlanHead& head = *plan_of_block(op, params, shared).head;
    memory.sources.fill(op.context, [&](int source) { return head.items_of(source); });
    return memory;
  }

  // [thread] Return the pull warp's n-th item, once it has landed, and its origin.
  __device__ Item item_at(int n) const {
    return {reinterpret_cast<int32_t*>(memory.records.at(n)), op.context.max_copies};
  }
  __device__ Origin& origin_of(int n) const { return memory.origins[n % (2 * kBatch)]; }

  // [thread] Return the position of the pull warp's n-th item.
  __device__ ItemOrder::Position position_of(int n) const {
    return ItemOrder(memory.sources, op.context).at(first + n * step, step);
  }

  // [warp] Find the next batch of items of a direct plan. Items have the order of the plan, but each rank begins with
  // its own tokens. So at any time different ranks read from different sources.
  __device__ void find_batch() {
    const DirectPlan plan = params.direct_plan.in(shared);
    memory.records.fill([&](int n) {
      if (n < 0) return;
      Origin& origin = origin_of(n);
      const int at = plan.head->item_begin()[op.rank()] + first + n * step;
      origin.index = at < num_items ? at : at - num_items;
      find_item(op, plan, origin.index, origin.source, origin.token);
    });
  }

  // [warp] Write a batch of items of a direct plan: items n and following. Their rows load meanwhile.
  __device__ void write_batch(int n) {
    n += lane;
    const bool has_item = lane < kBatch && n < num;
    write_items(op, params, shared, has_item ? origin_of(n).source : 0, has_item ? origin_of(n).token : -1,
                has_item ? item_at(n).data : nullptr);
  }

  // [warp] Start to load the next batch of items: of a new plan from the inboxes, otherwise from the plan. With a
  // direct plan find the items.
  __device__ void fetch_items() {
    if (params.is_direct()) return find_batch();
    const PlanHead& head = *params.plan.head;
    memory.records.fetch([&](int n) -> const int32_t* {
      const ItemOrder::Position position = position_of(n);
      Origin& origin = origin_of(n);
      origin.index = head.item_begin()[position.source] + position.number;
      origin.source = position.source;
      if (params.new_plan) return item_at_source(op.context, position.source, op.rank(), position.number);
      return params.plan.items + static_cast<size_t>(origin_of(n).index) * op.context.item_ints;
    });
  }

  // [warp] Find the origins of a batch: of items n and following. Its items have landed, or are found.
  __device__ void find_rows(int n) {
    n += lane;
    if (lane < kBatch && n < num) {
      const DispatchArgs& args = params.args;
      Origin& origin = origin_of(n);
      // An item of a peer may have any numbers. Here and in store_piece they are only kept in bounds: deliver_metadata
      // checks every item, and aborts this rank.
      const int token = params.is_direct()
                            ? origin.token
                            : static_cast<int>(min(static_cast<uint32_t>(item_at(n).token()),
                                                   static_cast<uint32_t>(op.context.config.max_tokens - 1)));
      const bool at_home = origin.source == op.rank() && params.reads_own_rows();
      origin.chunk = at_home ? -1 : token >> op.context.config.log_token_chunk;
      if (at_home) {
        origin.row = args.rows + static_cast<size_t>(token) * args.row_bytes;
        origin.scales = reinterpret_cast<const char*>(args.scales) + static_cast<size_t>(token) * args.scale_bytes;
      } else {
        origin.row = params.pushes && op.context.node_of(origin.source) == op.context.node
                         ? row_slot(op.context, op.context.local, origin.source, token)
                         : op.context.inbox_holding(origin.source, &Inbox::staging) +
                               static_cast<size_t>(token) * params.row_stride;
        origin.scales = metadata_of(op.context, params, origin.source, token);
      }
    }
    __syncwarp();
  }

  // [warp] Wait until an item's row is staged. Return false after an abort of this rank. After true, bulk loads may
  // read the row and its scales.
  __device__ bool wait_for_row(const Origin& origin) {
    if (origin.chunk <= staged.seen(origin.source)) return true;
    staged.look(op);
    if (origin.chunk <= staged.seen(origin.source)) return true;
    const bool ok = staged.wait(op, origin.source, origin.chunk);
    stamp(op, Step::kRows);
    return ok;
  }

  // [warp] Start loads while the ring has free places and the batch of the next item is fetched. Wait for items to land
  // and for rows to be staged. Return false after an abort of this rank; loads may then be under way.
  __device__ bool fill_ring() {
    for (; load.item < num && room > 0; load.advance(pieces), --room) {
      if (load.piece == 0) {
        if (!memory.records.wait(load.item)) break;
        if (load.item % kBatch == 0) find_rows(load.item);
        if (!wait_for_row(origin_of(load.item))) return false;
      }
      const Origin& origin = origin_of(load.item);
      if (lane == 0) load_piece(pieces, memory.ring, memory.full, load, origin.row, origin.scales);
    }
    return true;
  }

  // [thread] Return the copies of an item, and the output row of one of them, within their bounds.
  __device__ int num_copies_of(const Item& item) const {
    return static_cast<int>(min(static_cast<uint32_t>(item.num_copies()), static_cast<uint32_t>(item.max_copies)));
  }
  __device__ int row_of(const Item& item, int copy) const {
    return static_cast<int>(
        min(static_cast<uint32_t>(item.value(copy)), static_cast<uint32_t>(params.args.num_rows - 1)));
  }

  // [thread] Start to store one piece, and its scales, to every output row of its item. Its loads have landed.
  __device__ void store_piece() const {
    const DispatchArgs& args = params.args;
    const Item item = item_at(store.item);
    const char* from = pieces.place(memory.ring, store.ring.place);
    const char* scales = pieces.scale_place(memory.ring, store.ring.place);
    const uint32_t bytes = pieces.bytes_of(store.piece), scale_bytes = pieces.scale_bytes_of(store.piece);
    char* const to = args.out_rows + store.piece * pieces.bytes;
    const int num_rows = expert_layout ? num_copies_of(item) : 1;
#pragma unroll 1
    for (int copy = 0; copy < num_rows; ++copy) {
      const size_t row = expert_layout ? row_of(item, copy) : origin_of(store.item).index;
      ptx::bulk_store(to + row * args.row_bytes, from, bytes);
      if (scale_bytes > 0 && params.rows_per_group == 0)
        ptx::bulk_store(reinterpret_cast<char*>(args.out_scales) + row * scale_bytes, scales, scale_bytes);
    }
    ptx::bulk_commit();
  }

  // [warp] Store the scales that came with a piece to every output row of its item. Called in decode layout.
  __device__ void store_scales() const {
    if (pieces.scale_bytes_of(store.piece) == 0) return;
    const Item item = item_at(store.item);
    const auto* scales = reinterpret_cast<const float*>(pieces.scale_place(memory.ring, store.ring.place));
#pragma unroll 1
    for (int copy = lane, num = num_copies_of(item); copy - lane < num; copy += 32)
      store_columns(params, scales, copy < num ? params.scale_at(row_of(item, copy)) : -1);
  }

  // [warp] Pull all rows of this pull warp. Return false after an abort of this rank. Afterwards no load is under way,
  // and all rows of this pull warp are written, or after an abort some.
  __device__ bool run() {
    bool ok = true;
    // Prefetch two batches of items. Meanwhile look for staged rows; with a direct plan the items are here at once.
    fetch_items();
    fetch_items();
    if (!params.is_direct()) staged.look(op);
    stamp(op, Step::kFetched);
    while (store.item < num) {
      ok = fill_ring();
      if (!ok) break;
      if (params.is_direct() && store.piece == 0 && store.item % kBatch == 0) write_batch(store.item);
      // Wait for a piece and store it. One bulk store may stay under way: the place of the piece before is free again.
      ptx::barrier_wait(memory.full + store.ring.place, store.ring.parity);
      if (kStamps && store.item == 0) stamp(op, Step::kLanded);
      if (lane == 0) store_piece();
      if (params.rows_per_group > 0) store_scales();
      if (lane == 0) ptx::bulk_wait_read<1>();
      __syncwarp();
      // After each batch of items fetch another one.
      if (store.piece == 0 && store.item > 0 && store.item % kBatch == 0) fetch_items();
      if (store.item > 0 || store.piece > 0) ++room;
      store.advance(pieces);
    }
    // Finish: wait for all loads under way, and for all stores.
    if (!ok) drain();
    stamp(op, Step::kPulled);
    if (lane == 0) ptx::bulk_wait<0>();
    stamp(op, Step::kStored);
    return ok;
  }

  // [warp] Wait for all loads under way, after an abort: nothing may land in the shared memory of an ended block. This
  // wait needs no peer: a row was staged before its loads began.
  __device__ void drain() {
    for (; store.item < load.item || store.piece < load.piece; store.advance(pieces))
      ptx::barrier_wait(memory.full + store.ring.place, store.ring.parity);
    memory.records.drain();
  }
};

}  // namespace ep::cuda::EP_KERNELS
