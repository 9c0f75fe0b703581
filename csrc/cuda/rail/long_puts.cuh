// Long puts of one sender to mapped memory of a rail peer, or for a message to own memory: rows and sums. They are bulk
// copies through shared memory, with several under way at once. A copy through registers waits for the loads of a row
// before it stores them.
#pragma once
#include "cuda/rail/wire.cuh"

namespace ep::cuda {

// Lane 0 makes the bulk copies. A rail block has no other use for its shared memory.
struct LongPuts {
  // A row of 7168 or 14336 bytes goes in 2 or 4 pieces, with 16 senders a block. Not tuned.
  static constexpr int kPlaces = 3;
  static constexpr uint32_t kHeader = 128;  // [bytes] before the places

  // A remote array, and its local source. Addresses and bytes are multiples of 16.
  struct Array {
    char* remote;  // as in wire.cuh
    const char* local;
    uint32_t bytes;
  };
  // The content of a place: a piece of an array, and a whole short one behind it.
  struct Piece {
    char *to, *to_short;  // remote addresses, as this rank maps them
    uint32_t bytes, short_bytes;
  };

  const Wire wire;
  uint64_t* full;        // [kPlaces] a round ends when the content of the place has landed
  Piece* pieces;         // [kPlaces]
  char* places;          // [kPlaces, place_bytes]
  uint32_t place_bytes;  // a multiple of 16
  int loaded = 0, stored = 0;
  static_assert(kPlaces * (sizeof(uint64_t) + sizeof(Piece)) <= kHeader);

  // [warp] Create the mbarriers in `shared`: this warp's memory, aligned to 128. It has room for places of 16 bytes and
  // more: a dispatch gives all that a block has, a combine the memory of its smem stages.
  __device__ LongPuts(const Context& context, char* shared, uint32_t bytes)
      : wire{context},
        full(reinterpret_cast<uint64_t*>(shared)),
        pieces(reinterpret_cast<Piece*>(full + kPlaces)),
        places(shared + kHeader),
        place_bytes((bytes - kHeader) / kPlaces / kVector * kVector) {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kPlaces; ++i) ptx::barrier_init(full + i, 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
  }

  // [warp] Put an array piece by piece, and a short one beside it (0 bytes: none): with the last piece, or alone if it
  // finds no room there. The sources must not change until `drain`. Before this, lane 0 has seen that the sources are
  // written and the remote memory is free, and has then run fence_before_bulk.
  __device__ void put(int node, const Array& array, Array beside = {}) {
    if (threadIdx.x % 32 != 0) return;
    const uint32_t num = (array.bytes + place_bytes - 1) / place_bytes;
    const auto bytes = min(place_bytes, static_cast<uint32_t>(round_up((array.bytes + num - 1) / num, 128)));
    for (uint32_t offset = 0; offset < array.bytes; offset += bytes) {
      const uint32_t rest = array.bytes - offset;
      const bool fits = rest <= bytes && rest + beside.bytes <= place_bytes;
      load(node, {array.remote + offset, array.local + offset, min(bytes, rest)}, fits ? beside : Array{});
      if (fits) beside.bytes = 0;
    }
    for (uint32_t offset = 0; offset < beside.bytes; offset += place_bytes)
      load(node, {beside.remote + offset, beside.local + offset, min(place_bytes, beside.bytes - offset)}, {});
  }

  // [warp] Wait until all bulk copies have left shared memory. They need not have arrived: a flag may follow only
  // behind a fence of the system.
  __device__ void drain() {
    if (threadIdx.x % 32 == 0) {
      while (stored < loaded) store_next();
      ptx::bulk_wait<0>();
    }
    __syncwarp();
  }

 private:
  // [thread] Start to load a piece, and a short array behind it, once their place is free.
  __device__ void load(int node, const Array& piece, const Array& beside) {
    // Keep all places but one loading. The newest store may still read its place; older ones have read theirs.
    if (loaded - stored == kPlaces - 1) store_next();
    ptx::bulk_wait_read<1>();
    const int n = loaded++ % kPlaces;
    char* const place = places + n * place_bytes;
    pieces[n] = {wire.at(node, piece.remote), wire.at(node, beside.remote), piece.bytes, beside.bytes};
    ptx::barrier_arrive_expect(full + n, piece.bytes + beside.bytes);
    ptx::bulk_load(place, piece.local, piece.bytes, full + n);
    if (beside.bytes > 0) ptx::bulk_load(place + piece.bytes, beside.local, beside.bytes, full + n);
  }

  // [thread] Wait for the oldest place not yet stored, and start to store it at the peer.
  __device__ void store_next() {
    const int n = stored % kPlaces;
    const char* const place = places + n * place_bytes;
    ptx::barrier_wait(full + n, stored / kPlaces % 2);
    ++stored;
    const Piece piece = pieces[n];
    ptx::bulk_store(piece.to, place, piece.bytes);
    if (piece.short_bytes > 0) ptx::bulk_store(piece.to_short, place + piece.bytes, piece.short_bytes);
    ptx::bulk_commit();
  }
};

}  // namespace ep::cuda
