// One launch of the dispatch kernel: its parameters, and who does what in a block.
#pragma once
#include <algorithm>

#include "cuda/call.cuh"
#include "cuda/engine.h"
#include "cuda/warp.cuh"

namespace ep::cuda {

// The movers plan, and then bring rows to their final place. Meanwhile the helpers stage this rank's rows and their
// tails (scales and weights), bring the tails of received rows, and clear the rows without a token.
constexpr int kBlockWarps = 16;
constexpr int kBlockThreads = 32 * kBlockWarps;
using Block = Team<0, 0, kBlockThreads>;
using Movers = Team<1, 0, kBlockThreads / 2>;
using Helpers = Team<2, kBlockThreads / 2, kBlockThreads / 2>;

// How a warp moves rows: piece by piece, through a ring of places in shared memory. The last piece of a row brings its
// scales along, where they can be moved in bulk.
struct Pieces {
  static constexpr uint32_t kMaxPlaces = 4;

  uint32_t bytes, num, last_bytes;  // of a piece; pieces of a row; bytes of the last one
  uint32_t scale_bytes;             // of a row; 0 where there are none or they go another way
  uint32_t num_places;

  EP_HOST_DEVICE constexpr uint32_t scale_stride() const { return (scale_bytes + 127) / 128 * 128; }
  EP_HOST_DEVICE constexpr size_t ring_bytes() const {
    return static_cast<size_t>(num_places) * (bytes + scale_stride());
  }
  __device__ uint32_t bytes_of(uint32_t piece) const { return piece == num - 1 ? last_bytes : bytes; }
  __device__ uint32_t scale_bytes_of(uint32_t piece) const { return piece == num - 1 ? scale_bytes : 0; }
  __device__ char* place(char* ring, uint32_t i) const { return ring + i * bytes; }
  __device__ char* scale_place(char* ring, uint32_t i) const { return ring + num_places * bytes + i * scale_stride(); }
};

// [host] Split a row into pieces of at most max_piece bytes, so that a ring of ring_bytes holds two or more.
inline Pieces make_pieces(uint32_t row_bytes, uint32_t scale_bytes, size_t ring_bytes, uint32_t max_piece) {
  Pieces pieces{};
  pieces.scale_bytes = scale_bytes;
  max_piece = static_cast<uint32_t>(std::min<size_t>(max_piece, ring_bytes / 2 - pieces.scale_stride()));
  // Whole lines where that is possible, in shared memory too: otherwise every request is split.
  for (uint32_t num = (row_bytes + max_piece - 1) / max_piece; pieces.bytes == 0 || pieces.bytes > max_piece; ++num)
    pieces.bytes = static_cast<uint32_t>(row_stride((row_bytes + num - 1) / num));
  pieces.num = (row_bytes + pieces.bytes - 1) / pieces.bytes;
  pieces.last_bytes = row_bytes - (pieces.num - 1) * pieces.bytes;
  const size_t places = ring_bytes / (pieces.bytes + pieces.scale_stride());
  pieces.num_places = static_cast<uint32_t>(std::min<size_t>(places, Pieces::kMaxPlaces));
  return pieces;
}

// One end of a warp's ring: which piece of which row comes next, and where in the ring.
struct PieceCursor {
  int item = 0;  // of the warp, counted from 0
  uint32_t piece = 0;
  RingPlace ring{};

  __device__ __forceinline__ void advance(const Pieces& pieces) {
    if (++piece == pieces.num) piece = 0, ++item;
    ring.advance(pieces.num_places);
  }
};

// [thread] Start to load one piece of a row, and its scales with the last one. `full` completes when they have landed.
__device__ inline void load_piece(const Pieces& pieces, char* ring, uint64_t* full, const PieceCursor& at,
                                  const char* row, const char* scales) {
  const uint32_t place = at.ring.place, bytes = pieces.bytes_of(at.piece);
  const uint32_t scale_bytes = pieces.scale_bytes_of(at.piece);
  ptx::barrier_arrive_expect(full + place, bytes + scale_bytes);
  ptx::bulk_load(pieces.place(ring, place), row + at.piece * pieces.bytes, bytes, full + place);
  if (scale_bytes > 0) ptx::bulk_load(pieces.scale_place(ring, place), scales, scale_bytes, full + place);
}

// [thread] Make the barriers of a ring's places.
__device__ inline void init_places(uint64_t* full) {
  for (uint32_t i = 0; i < Pieces::kMaxPlaces; ++i) ptx::barrier_init(full + i, 1);
  ptx::fence_barrier_init();
}

struct DispatchParams {
  DispatchArgs args;
  Plan plan;
  // What this launch does. The two parts are launched apart when the host needs the counts in between.
  bool stages, pulls;
  bool new_plan;                // of this launch, or of the one before
  int rail_blocks;              // the last ones
  int plan_blocks, plan_warps;  // blocks that plan, and how many of their warps
  uint32_t row_stride;          // of the staging
  uint32_t tail_bytes;          // of a token
  Pieces pulled;                // how rows travel from the staging
  bool bulk_scales;             // scales travel with the last pieces
  uint32_t counters_at;         // [bytes] of shared memory before the counters of the helpers

  __host__ __device__ bool plans() const { return stages && new_plan; }
};

}  // namespace ep::cuda
