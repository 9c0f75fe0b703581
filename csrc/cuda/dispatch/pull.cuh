// Pulling: pull warps load rows from the inboxes of all ranks and store them in their final rows of the output. This
// rank's own rows come from the caller's tensor where `reads_own_rows` allows it.
#pragma once
#include "cuda/device/records.cuh"
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/plan/item.cuh"

namespace ep::cuda {

// Addresses of one item's row and scales. Found for a batch of items at a time.
struct alignas(16) Origin {
  const char *row, *scales;
  int32_t index;   // of the item in the plan; in rank layout its output row
  int32_t source;  // source rank of the item
  int32_t token;   // its token there
  int32_t chunk;   // chunk of its token, to be waited for; -1: the row need not be staged
};

// Items that a pull warp fetches at a time. Dealt out, every pull warp gets every n-th item. But items have 1 to
// max_copies copies, so one multiprocessor stores up to 4 % more rows than the mean, and all wait for it. Taken, a pull
// warp is dealt a few items, and then takes a few at a time from a counter. Long rows are taken: on 2 H200 a dispatch
// of 4096 x 7168 takes 0.96 of its time with dealt items, of 4096 x 2048 in bfloat16 1.00, in float8 1.06. With 16 at a
// time nothing is gained, as all wait for what one multiprocessor has taken last.
constexpr int kDealtItems = Records::kBatch, kTakenItems = 4;
constexpr uint32_t kTakenRowBytes = 4096;  // the shortest row whose items are taken

// Shared memory of one pull warp.
template <int kTogether>
struct PullMemory {
  using Items = RecordsOf<kTogether>;

  char* ring;           // see Pieces
  Items items;          // of this pull warp
  uint64_t* full;       // [kMaxPlaces] a round ends when the place's piece has landed
  Origin* origins;      // [2, Items::kBatch] of the items in `items`
  SourceOrder sources;  // order of pulls

  // [host] [thread] Lay out the memory of all pull warps, or measure it. Return that of one pull warp.
  EP_HOST_DEVICE static PullMemory carve(Cursor& c, const Context& context, const Pieces& pieces, int warp) {
    PullMemory memory;
    memory.ring = c.take<char>(PullWarps::kWarps * pieces.ring_bytes()) + warp * pieces.ring_bytes();
    memory.items = Items::carve(c, context.item_ints * 4, PullWarps::kWarps, warp);
    memory.full = c.take<uint64_t>(PullWarps::kWarps * Pieces::kMaxPlaces) + warp * Pieces::kMaxPlaces;
    memory.origins = c.take<Origin>(PullWarps::kWarps * 2 * Items::kBatch) + warp * 2 * Items::kBatch;
    memory.sources = SourceOrder::carve(c, context.config.num_ranks(), PullWarps::kWarps, warp);
    return memory;
  }
};

// One pull warp. Bulk loads bring pieces to its ring, bulk stores take them to the output. `Params` says where a row
// and its metadata lie (row_of, metadata_of), and how its scales are stored.
template <Kernels K, class Params, int kBatch>
struct Puller {
  const Op<K> op;
  const Params& params;
  const Pieces& pieces;
  const bool expert_layout;
  const int lane;
  PullMemory<kBatch> memory;
  const int num_items;      // in all
  int num = 0;              // items that this pull warp has taken
  PieceCursor load, store;  // next piece to load, and next piece to store
  int room;                 // places free to be loaded
  StagedFlags staged;

  // [warp] Create the mbarriers. The items have arrived, and the plan is usable.
  __device__ Puller(const Op<K>& op, const Params& params, char* shared)
      : op(op),
        params(params),
        pieces(params.pulled),
        expert_layout(params.args.layout != Layout::kRank),
        lane(threadIdx.x % 32),
        memory(memory_of(op, params, shared)),
        num_items(params.plan.head->num_items),
        room(pieces.num_places),
        staged(staged_flags(op, params, shared)) {
    memory.items.begin();
    if (lane == 0) init_places(memory.full);
    __syncwarp();
  }

  // [warp] Find this pull warp's shared memory, and fill in the order of the sources.
  static __device__ PullMemory<kBatch> memory_of(const Op<K>& op, const Params& params, char* shared) {
    Cursor c(shared);
    const auto memory = PullMemory<kBatch>::carve(c, op.context, params.pulled, PullWarps::warp());
    const PlanHead& head = *params.plan.head;
    memory.sources.fill(op, [&](int source) { return head.items_of(source); });
    return memory;
  }

  // [thread] Return the pull warp's n-th item, once it has landed, and its origin.
  __device__ Item item_at(int n) const {
    return {reinterpret_cast<int32_t*>(memory.items.at(n)), op.context.max_copies};
  }
  __device__ Origin& origin_of(int n) const { return memory.origins[n % (2 * kBatch)]; }

  // [warp] Start to load the next batch of items, dealt out or taken: of a new plan from the inboxes, otherwise from
  // the plan. `complete` resets the counter, when all blocks have arrived.
  __device__ void fetch_items() {
    const PlanHead& head = *params.plan.head;
    const int num_warps = op.num_blocks * PullWarps::kWarps, num_dealt = kBatch * num_warps;
    int first = op.block + op.num_blocks * PullWarps::warp() + memory.items.fetched * num_dealt, step = num_warps;
    if (kBatch == kTakenItems && memory.items.fetched > 0) {
      if (num_items <= num_dealt) return;
      if (lane == 0) first = num_dealt + static_cast<int>(atomicAdd(&op.context.state->next_index, kBatch));
      first = __shfl_sync(~0u, first, 0), step = 1;
    }
    const int count = first < num_items ? min(kBatch, (num_items - 1 - first) / step + 1) : 0;
    num += count;
    const auto where = [&](int n) -> const int32_t* {
      // The order turns by num_warps for all items alike: with two steps some items would come twice.
      const int index = first + n % kBatch * step;
      const ItemOrder::Position position = ItemOrder(memory.sources, op.context).at(index, num_warps);
      Origin& origin = origin_of(n);
      origin.index = head.item_begin()[position.source] + position.number;
      origin.source = position.source;
      if (params.new_plan()) return item_at_source(op, position.source, op.rank(), position.number);
      return params.plan.items + static_cast<size_t>(origin_of(n).index) * op.context.item_ints;
    };
    memory.items.fetch(where, count);
  }

  // [warp] Find the origins of a batch: of items n and following. Its items have landed.
  __device__ void find_rows(int n) {
    n += lane;
    if (lane < kBatch && n < num) {
      const RowArgs& args = params.args;
      Origin& origin = origin_of(n);
      // An item of a peer may have any numbers. Here and in store_piece they are only kept in bounds: deliver_metadata
      // checks every item, and aborts this rank.
      const int token = static_cast<int>(
          min(static_cast<uint32_t>(item_at(n).token()), static_cast<uint32_t>(op.context.config.max_tokens - 1)));
      const bool at_home = origin.source == op.rank() && params.reads_own_rows();
      origin.chunk = at_home ? -1 : token >> op.context.config.log_token_chunk;
      if (at_home) {
        origin.row = args.rows + static_cast<size_t>(token) * args.row_bytes;
        origin.scales = reinterpret_cast<const char*>(args.scales) + static_cast<size_t>(token) * args.scale_bytes;
      } else {
        origin.row = row_of(op, params, origin.source, token);
        origin.scales = metadata_of(op, params, origin.source, token);
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
        if (!memory.items.wait(load.item)) break;
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
  __device__ int out_row_of(const Item& item, int copy) const {
    return static_cast<int>(
        min(static_cast<uint32_t>(item.value(copy)), static_cast<uint32_t>(params.args.num_rows - 1)));
  }

  // [thread] Start to store one piece, and its scales, to every output row of its item. Its loads have landed.
  __device__ void store_piece() const {
    const RowArgs& args = params.args;
    const Item item = item_at(store.item);
    const char* from = pieces.place(memory.ring, store.ring.place);
    const char* scales = pieces.scale_place(memory.ring, store.ring.place);
    const uint32_t bytes = pieces.bytes_of(store.piece), scale_bytes = pieces.scale_bytes_of(store.piece);
    char* const to = args.out_rows + store.piece * pieces.bytes;
    const int num_rows = expert_layout ? num_copies_of(item) : 1;
#pragma unroll 1
    for (int copy = 0; copy < num_rows; ++copy) {
      const size_t row = expert_layout ? out_row_of(item, copy) : origin_of(store.item).index;
      ptx::bulk_store(to + row * args.row_bytes, from, bytes);
      if (scale_bytes > 0 && !Params::kScalesByColumn)
        ptx::bulk_store(reinterpret_cast<char*>(args.out_scales) + row * scale_bytes, scales, scale_bytes);
    }
    ptx::bulk_commit();
  }

  // [warp] Store the scales that came with a piece to every output row of its item, by column.
  __device__ void store_scales() const {
    if (pieces.scale_bytes_of(store.piece) == 0) return;
    const Item item = item_at(store.item);
    const auto* scales = reinterpret_cast<const float*>(pieces.scale_place(memory.ring, store.ring.place));
#pragma unroll 1
    for (int copy = lane, num = num_copies_of(item); copy - lane < num; copy += 32)
      params.store_columns(scales, copy < num ? out_row_of(item, copy) : -1);
  }

  // [warp] Pull all rows of this pull warp. Return false after an abort of this rank. Afterwards no load is under way,
  // and all rows of this pull warp are written, or after an abort some.
  __device__ bool run() {
    bool ok = true;
    // Prefetch two batches of items. Meanwhile look for staged rows.
    fetch_items();
    fetch_items();
    staged.look(op);
    stamp(op, Step::kFetched);
    while (store.item < num) {
      ok = fill_ring();
      if (!ok) break;
      // Wait for a piece and store it. One bulk store may stay under way: the place of the piece before is free again.
      ptx::barrier_wait(memory.full + store.ring.place, store.ring.parity);
      if (kStamps && store.item == 0) stamp(op, Step::kLanded);
      if (lane == 0) store_piece();
      if constexpr (Params::kScalesByColumn) store_scales();
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
    memory.items.drain();
  }
};

}  // namespace ep::cuda
