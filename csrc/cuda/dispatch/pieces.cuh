// Rows in pieces: a warp brings them through a ring in its shared memory, by bulk copies.
#pragma once
#include <algorithm>

#include "cuda/config.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace ep::cuda {

constexpr uint32_t kMaxPiece = 8192;    // [bytes] most of a row in one bulk copy
constexpr uint32_t kMaxScales = kLine;  // [bytes] of a row: more scales are delivered by the stage warps

// Pieces of a row, and a pull warp's ring for them in shared memory. Each place of the ring holds one piece. The last
// piece of a row takes the row's scales along, if they can be copied in bulk.
struct Pieces {
  static constexpr uint32_t kMaxPlaces = 4;

  uint32_t bytes, num, last_bytes;  // of one piece; pieces per row; bytes of the last piece
  uint32_t scale_bytes;             // of a row; 0: no scales, or stage warps deliver them
  uint32_t num_places;

  // [host] [thread] Return the bytes of one place for scales, and of the whole ring.
  EP_HOST_DEVICE constexpr uint32_t scale_stride() const { return (scale_bytes + 127) / 128 * 128; }
  EP_HOST_DEVICE constexpr size_t ring_bytes() const {
    return static_cast<size_t>(num_places) * (bytes + scale_stride());
  }
  // [thread] Return the bytes of a piece, and of the scales with it.
  __device__ uint32_t bytes_of(uint32_t piece) const { return piece == num - 1 ? last_bytes : bytes; }
  __device__ uint32_t scale_bytes_of(uint32_t piece) const { return piece == num - 1 ? scale_bytes : 0; }
  // [thread] Return the memory of place `i`, for a piece and for scales.
  __device__ char* place(char* ring, uint32_t i) const { return ring + i * bytes; }
  __device__ char* scale_place(char* ring, uint32_t i) const { return ring + num_places * bytes + i * scale_stride(); }
};

// [host] Split a row into pieces of at most max_piece bytes, so that a ring of ring_bytes holds two or more, and at
// most max_places.
inline Pieces make_pieces(uint32_t row_bytes, uint32_t scale_bytes, size_t ring_bytes, uint32_t max_piece,
                          uint32_t max_places) {
  Pieces pieces{};
  pieces.scale_bytes = scale_bytes;
  max_piece = static_cast<uint32_t>(std::min<size_t>(max_piece, ring_bytes / 2 - pieces.scale_stride()));
  // Take whole lines where possible: otherwise the hardware splits each request.
  for (uint32_t num = (row_bytes + max_piece - 1) / max_piece; pieces.bytes == 0 || pieces.bytes > max_piece; ++num)
    pieces.bytes = static_cast<uint32_t>(row_stride((row_bytes + num - 1) / num));
  pieces.num = (row_bytes + pieces.bytes - 1) / pieces.bytes;
  pieces.last_bytes = row_bytes - (pieces.num - 1) * pieces.bytes;
  const size_t places = ring_bytes / (pieces.bytes + pieces.scale_stride());
  pieces.num_places = static_cast<uint32_t>(std::min<size_t>(places, max_places));
  return pieces;
}

// One end of a pull warp's ring: the next piece, its item, and its place.
struct PieceCursor {
  int item = 0;  // n-th item of the pull warp, from 0
  uint32_t piece = 0;
  RingPlace ring{};

  // [thread] Go to the next piece and the next place.
  __device__ __forceinline__ void advance(const Pieces& pieces) {
    if (++piece == pieces.num) piece = 0, ++item;
    ring.advance(pieces.num_places);
  }
};

// [thread] Start the load of one piece, and with the last piece of a row the load of its scales. The place is free.
// `full` of the place ends its round when both have landed.
__device__ inline void load_piece(const Pieces& pieces, char* ring, uint64_t* full, const PieceCursor& at,
                                  const char* row, const char* scales) {
  const uint32_t place = at.ring.place, bytes = pieces.bytes_of(at.piece);
  const uint32_t scale_bytes = pieces.scale_bytes_of(at.piece);
  ptx::barrier_arrive_expect(full + place, bytes + scale_bytes);
  ptx::bulk_load(pieces.place(ring, place), row + at.piece * pieces.bytes, bytes, full + place);
  if (scale_bytes > 0) ptx::bulk_load(pieces.scale_place(ring, place), scales, scale_bytes, full + place);
}

// [thread] Create the mbarriers of a pull warp's ring. Called by lane 0, before __syncwarp.
__device__ inline void init_places(uint64_t* full) {
  for (uint32_t i = 0; i < Pieces::kMaxPlaces; ++i) ptx::barrier_init(full + i, 1);
  ptx::fence_barrier_init();
}

// [host] Return whether the last piece of a row takes its scales along.
inline bool has_bulk_scales(uint32_t scale_bytes) {
  return scale_bytes > 0 && scale_bytes % kVector == 0 && scale_bytes <= kMaxScales;
}

}  // namespace ep::cuda
