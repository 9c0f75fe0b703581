// One launch of the dispatch kernel: what it is given, and who does what in a block.
#pragma once
#include <algorithm>

#include "cuda/engine.h"
#include "cuda/wait.cuh"

namespace ep::cuda {

constexpr Operation kDispatch = Operation::kDispatch;

// First the movers plan while the helpers stage this rank's rows and their tails (scales and weights): of many tokens
// only the early ones. Then the movers bring the rows, while the helpers stage the rest, bring the tails and clear the
// rows without a token.
constexpr int kBlockWarps = 16;
constexpr int kBlockThreads = 32 * kBlockWarps;
using Block = Team<0, 0, kBlockThreads>;
using Movers = Team<1, 0, kBlockThreads / 2>;
using Helpers = Team<2, kBlockThreads / 2, kBlockThreads / 2>;
static_assert(Movers::kWarps >= kMaxRanks, "a warp for every rank");

// How a warp moves rows: piece by piece, through a ring of places for them in shared memory. The last piece of a row
// brings its scales along, where they can be moved in bulk.
struct Pieces {
  static constexpr uint32_t kMostPlaces = 4;

  uint32_t bytes, num, last_bytes;  // of a piece; pieces of a row; bytes of the last one
  uint32_t scale_bytes;             // of a row; 0 where there are none or they go another way
  uint32_t num_places;

  constexpr uint32_t scale_stride() const { return (scale_bytes + 127) / 128 * 128; }
  constexpr size_t ring_bytes() const { return static_cast<size_t>(num_places) * (bytes + scale_stride()); }
  __device__ uint32_t bytes_of(uint32_t piece) const { return piece == num - 1 ? last_bytes : bytes; }
  __device__ uint32_t scale_bytes_of(uint32_t piece) const { return piece == num - 1 ? scale_bytes : 0; }
  __device__ char* place(char* ring, uint32_t i) const { return ring + i * bytes; }
  __device__ char* scale_place(char* ring, uint32_t i) const { return ring + num_places * bytes + i * scale_stride(); }
};

// By one thread: a piece comes to a place of the ring; `full` is told.
__device__ inline void load_piece(const Pieces& pieces, char* ring, uint32_t place, uint64_t* full, uint32_t piece,
                                  const char* row, const char* scales) {
  const uint32_t bytes = pieces.bytes_of(piece), scale_bytes = pieces.scale_bytes_of(piece);
  ptx::barrier_arrive_expect(full, bytes + scale_bytes);
  ptx::bulk_load(pieces.place(ring, place), row + piece * pieces.bytes, bytes, full);
  if (scale_bytes > 0) ptx::bulk_load(pieces.scale_place(ring, place), scales, scale_bytes, full);
}

// Pieces of at most `most` bytes, for rings of at most `room` bytes: of at least two places.
inline Pieces make_pieces(uint32_t row_bytes, uint32_t scale_bytes, size_t room, uint32_t most) {
  Pieces pieces{};
  pieces.scale_bytes = scale_bytes;
  most = static_cast<uint32_t>(std::min<size_t>(most, room / 2 - pieces.scale_stride()));
  // Whole lines where that is possible, in shared memory too: otherwise every request is split.
  for (uint32_t num = (row_bytes + most - 1) / most; pieces.bytes == 0 || pieces.bytes > most; ++num)
    pieces.bytes = static_cast<uint32_t>(row_stride((row_bytes + num - 1) / num));
  pieces.num = (row_bytes + pieces.bytes - 1) / pieces.bytes;
  pieces.last_bytes = row_bytes - (pieces.num - 1) * pieces.bytes;
  const size_t places = room / (pieces.bytes + pieces.scale_stride());
  pieces.num_places = static_cast<uint32_t>(std::min<size_t>(places, Pieces::kMostPlaces));
  return pieces;
}

struct DispatchCall {
  DispatchArgs dispatch;
  Plan plan;
  // What this launch does. The two parts are launched apart when the host needs the counts in between.
  bool stages, pulls;
  bool new_plan;                // of this launch, or of the one before
  int plan_blocks, plan_warps;  // blocks that plan, and how many of their warps
  uint32_t row_stride;          // of the staging
  uint32_t tail_bytes;          // of a token
  Pieces early, late, pulled;   // how rows travel to the staging, in both parts, and from it
  uint32_t early_at, late_at;   // bytes of shared memory before the rings of the helpers
  bool bulk_scales;             // scales travel with the last pieces

  __host__ __device__ bool plans() const { return stages && new_plan; }
  // Tokens of this rank that are staged before rows are pulled.
  __device__ int early_tokens(const Context& context) const {
    return pulls ? min(dispatch.num_tokens, context.early_tokens) : dispatch.num_tokens;
  }
};

}  // namespace ep::cuda
