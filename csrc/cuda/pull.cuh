// The rows of a dispatch, by the movers: from the staging of all ranks (this rank's own rows, unless they are
// quantised, from where the caller has them) straight into their final place.
#pragma once
#include "cuda/deliver.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/item.cuh"

namespace ep::cuda {

// Where an item's row comes from, worked out for a batch of items at a time.
struct alignas(16) Source {
  const char *row, *scales;
  int32_t number;  // of the item, among all: its row in rank layout
  int16_t rank;
  bool is_late;  // it is perhaps not staged yet
};

// In shared memory, of one mover.
struct Pull {
  char* ring;
  char* records;    // Records
  uint64_t* full;   // [kMostPlaces] of the ring: the piece is there
  Source* sources;  // [2, kBatch]

  static constexpr size_t fixed_bytes(int item_ints) {
    return Records::shared_bytes(item_ints * 4) + Pieces::kMostPlaces * sizeof(uint64_t) +
           2 * Records::kBatch * sizeof(Source);
  }

  __device__ Pull(const Context& context, const DispatchCall& call, char* shared, int warp) {
    const size_t bytes = call.pulled.ring_bytes();
    ring = shared + warp * bytes;
    records = shared + Movers::kWarps * bytes + warp * fixed_bytes(context.item_ints);
    full = reinterpret_cast<uint64_t*>(records + Records::shared_bytes(context.item_ints * 4));
    sources = reinterpret_cast<Source*>(full + Pieces::kMostPlaces);
  }
};

// The items of one mover: pieces come to its ring by bulk loads and leave it by bulk stores. False when this rank has
// given up.
__device__ inline bool pull_rows(const Context& context, const DispatchCall& call, char* shared, uint64_t epoch) {
  const Plan& plan = call.plan;
  const DispatchArgs& out = call.dispatch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = context.sizes.rank;
  const int item_ints = context.item_ints, max_copies = context.sizes.max_copies();
  const Pieces& pieces = call.pulled;
  const bool expert_layout = plan.head->has_expert_layout();

  const Interleave order(context.sizes.num_ranks, rank, plan.head->item_begin);
  const int total = plan.head->num_items, step = gridDim.x * Movers::kWarps;
  const int first = blockIdx.x + gridDim.x * warp;
  const int num = first < total ? (total - 1 - first) / step + 1 : 0;

  const Pull memory(context, call, shared, warp);
  Records records(memory.records, item_ints * 4, num);
  uint64_t* const full = memory.full;
  if (lane == 0) {
    for (int i = 0; i < 2; ++i) ptx::barrier_init(records.barriers + i, 1);
    for (uint32_t i = 0; i < Pieces::kMostPlaces; ++i) ptx::barrier_init(full + i, 1);
    ptx::fence_barrier_init();
  }
  __syncwarp();
  const auto source_of = [&](int n) -> Source& { return memory.sources[n % (2 * Records::kBatch)]; };
  const auto where = [&](int n) -> const int32_t* {
    const Interleave::Place place = order.at(first + n * step, step);
    Source& source = source_of(n);
    source.number = plan.head->item_begin[place.rank] + place.number;
    source.rank = static_cast<int16_t>(place.rank);
    if (!call.new_plan) return plan.items + static_cast<size_t>(source.number) * item_ints;
    return item_at_source(context, place.rank, rank, place.number);
  };
  const auto item_at = [&](int n) { return Item{reinterpret_cast<int32_t*>(records.at(n)), max_copies}; };
  const auto find_rows = [&](int begin) {  // of a batch whose records have come
    const int n = begin + lane;
    if (lane < Records::kBatch && n < num) {
      Source& source = source_of(n);
      const size_t token = item_at(n).token();
      const bool at_home = source.rank == rank && !out.quantizes;  // then it need not be staged
      source.is_late = !at_home && item_at(n).token() >= context.early_tokens;
      const Region& region = context.region[source.rank];
      source.row = at_home ? out.rows + token * out.row_bytes : region.staging + token * call.row_stride;
      source.scales = at_home ? reinterpret_cast<const char*>(out.scales) + token * out.scale_bytes
                              : region.tails + token * call.tail_bytes;
    }
    __syncwarp();
  };
  records.fetch(where);
  records.fetch(where);

  struct Cursor {
    int n;
    uint32_t piece, place, parity;
  } load{}, store{};
  const auto advance = [&](Cursor& c) {
    if (++c.piece == pieces.num) c.piece = 0, ++c.n;
    if (++c.place == pieces.num_places) c.place = 0, c.parity ^= 1;
  };
  const auto wait_for_late = [&](int source) {
    const uint64_t* flag = lane == source ? context.own().staged + source : nullptr;
    if (!wait_until(context, kDispatch, Phase::kRows, epoch, flag, 2 * epoch, lane)) return false;
    ptx::fence_before_bulk();
    return true;
  };
  int room = pieces.num_places;
  uint32_t staged = 0;  // bit mask of the ranks known to have staged all tokens
  bool ok = true;
  while (store.n < num) {
    for (; load.n < num && room > 0; advance(load), --room) {
      if (load.piece == 0) {
        if (!records.wait(load.n)) break;
        if (load.n % Records::kBatch == 0) find_rows(load.n);
        const Source& source = source_of(load.n);
        if (source.is_late && !(staged >> source.rank & 1)) {
          ok = wait_for_late(source.rank);
          if (!ok) break;
          staged |= 1u << source.rank;
        }
      }
      if (lane == 0) {
        const Source& source = source_of(load.n);
        load_piece(pieces, memory.ring, load.place, full + load.place, load.piece, source.row, source.scales);
      }
    }
    if (!ok) break;
    if (store.piece == 0 && store.n > 0 && store.n % Records::kBatch == 0) records.fetch(where);
    ptx::barrier_wait(full + store.place, store.parity);
    if (lane == 0) {
      const Item item = item_at(store.n);
      const char *from = pieces.place(memory.ring, store.place), *scales = pieces.scale_place(memory.ring, store.place);
      const uint32_t bytes = pieces.bytes_of(store.piece), scale_bytes = pieces.scale_bytes_of(store.piece);
      char* const to = out.out_rows + store.piece * pieces.bytes;
      const int num_rows = expert_layout ? item.num_copies() : 1;
#pragma unroll 1
      for (int copy = 0; copy < num_rows; ++copy) {
        const size_t row = expert_layout ? item.value(copy) : source_of(store.n).number;
        ptx::bulk_store(to + row * out.row_bytes, from, bytes);
        if (scale_bytes > 0)
          ptx::bulk_store(reinterpret_cast<char*>(out.out_scales) + row * scale_bytes, scales, scale_bytes);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<1>();
    }
    __syncwarp();
    if (store.n > 0 || store.piece > 0) ++room;  // the piece before this one
    advance(store);
  }
  if (!ok) {  // nothing may come any more when the block ends
    for (; store.n < load.n || store.piece < load.piece; advance(store))
      ptx::barrier_wait(full + store.place, store.parity);
    records.drain();
  }
  if (lane == 0) ptx::bulk_wait<0>();
  return ok;
}

}  // namespace ep::cuda
