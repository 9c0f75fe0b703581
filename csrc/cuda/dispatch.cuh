// One launch of the dispatch kernel: what it is given, and who does what in a block.
#pragma once
#include <algorithm>

#include "cuda/engine.h"
#include "cuda/wait.cuh"

namespace ep::cuda {

constexpr Operation kDispatch = Operation::kDispatch;

// First the movers plan while the helpers stage this rank's rows and their tails (scales and weights). Then the movers
// bring the rows, while the helpers bring the tails and clear the rows without a token.
constexpr int kBlockWarps = 16;
constexpr int kBlockThreads = 32 * kBlockWarps;
using Block = Team<0, 0, kBlockThreads>;
using Movers = Team<1, 0, kBlockThreads / 2>;
using Helpers = Team<2, kBlockThreads / 2, kBlockThreads / 2>;
static_assert(Movers::kWarps >= kMaxRanks, "a warp for every rank");

// How a warp moves rows: piece by piece, through a ring of places for them in shared memory.
struct Pieces {
  static constexpr uint32_t kMostPlaces = 4;

  uint32_t bytes, num, last_bytes;  // of a piece; pieces of a row; bytes of the last one
  uint32_t num_places;

  constexpr size_t ring_bytes() const { return static_cast<size_t>(num_places) * bytes; }
  __device__ uint32_t bytes_of(uint32_t piece) const { return piece == num - 1 ? last_bytes : bytes; }
};

// Pieces of at most `most` bytes, for rings of at most `room` bytes: of at least two places.
inline Pieces make_pieces(uint32_t row_bytes, size_t room, uint32_t most) {
  most = static_cast<uint32_t>(std::min<size_t>(most, room / 2));
  Pieces pieces{};
  // Whole lines where that is possible, in shared memory too: otherwise every request is split.
  for (uint32_t num = (row_bytes + most - 1) / most; pieces.bytes == 0 || pieces.bytes > most; ++num)
    pieces.bytes = static_cast<uint32_t>(row_stride((row_bytes + num - 1) / num));
  pieces.num = (row_bytes + pieces.bytes - 1) / pieces.bytes;
  pieces.last_bytes = row_bytes - (pieces.num - 1) * pieces.bytes;
  pieces.num_places = static_cast<uint32_t>(std::min<size_t>(room / pieces.bytes, Pieces::kMostPlaces));
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
  Pieces staged, pulled;        // how rows travel to the staging and from it
  uint32_t staged_at;           // bytes of shared memory before the rings of the helpers

  __host__ __device__ bool plans() const { return stages && new_plan; }
};

}  // namespace ep::cuda
