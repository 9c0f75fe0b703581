// Parameters of every kernel of one buffer.
#pragma once
#include "cuda/config.h"
#include "cuda/region.h"
#include "cuda/stamps.h"
#include "cuda/state.h"

namespace ep::cuda {

// Memory of the ranks of one node. All regions have the same layout, so a peer's array lies at a fixed distance from
// the own one.
struct Peers {
  ptrdiff_t distance[kMaxLocal];  // [bytes] from this rank's region to each region of the node

#ifdef __CUDACC__
  // [thread] Return the same array in the region of local rank `local`.
  template <class T>
  __device__ T* at(T* own, int local) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own) + distance[local]);
  }
#endif
};

// Addresses of the rail peers, and the pace of the peer wire.
struct WireData {
  ptrdiff_t distance[kMaxNodes];  // [bytes] from this rank's region to its rail peer's on each node, where it is mapped
  int pe[kMaxNodes];              // the rail peer's PE on each node (NVSHMEM wire)
  // A bit per node, also for the own one.
  uint32_t mapped;       // the rail peer's region is mapped here, and this rank's there
  uint32_t straight;     // rows and sums need no staging here: as `mapped`, but with a pace only the own node
  float ticks_per_byte;  // [1/8 ns] pace of the peer wire; 0: no pace
};

// Written by the host once per buffer, except wait_ns; a parameter of each launch, read by all threads.
struct Context {
  Config config;
  int node, local;                               // of this rank
  int num_ranks, num_local_experts, max_copies;  // copies of Config's results, as below: kernels need no division
  uint8_t nodes[kMaxRanks];                      // node of each rank
  int item_ints, table_ints, counts_ints, max_token_chunks, max_sum_chunks;  // as in Config
  int max_far_chunks, max_pushed_chunks, window_slots;                       // as in Config
  uint32_t row_bytes, slot_stride;
  uint64_t timeout_ns;  // limit of a single wait for peers
  Peers peers;
  WireData wire;
  Region own;          // this rank's region
  StateArrays arrays;  // this rank's device memory; arrays.state is also `state`
  State* state;
  Report* report;         // pinned host memory
  int64_t* wait_ns;       // of the launch, as in DispatchArgs
  int64_t* counted_rows;  // [num_local_experts] in pinned host memory: rows per expert, valid if Report::num_rows > 0
#ifdef EP_STAMPS
  uint64_t* stamps;    // of the launch, for `stamp` (stamps.h); or null
  int stamped_blocks;  // blocks of an operation in `stamps`
#endif

#ifdef __CUDACC__
  // [thread] Return an array of this rank's own inbox for `node`: inbox_for(node, &Inbox::staging). Its source is the
  // rail peer on `node`, or on the own node this rank.
  template <class T>
  __device__ T* inbox_for(int node, T* Inbox::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.inbox.*array) + node * own.inbox_bytes);
  }

  // [thread] Return an array of `source`'s inbox on this rank's node: inbox_of(source, &Inbox::staging). For a source
  // on another node this is the inbox of its rail peer here.
  template <class T>
  __device__ T* inbox_of(int source, T* Inbox::* array) const {
    return peers.at(inbox_for(node_of(source), array), local_of(source));
  }

  __device__ int node_of(int rank) const { return nodes[rank]; }
  __device__ int local_of(int rank) const { return rank - node_of(rank) * config.ranks_per_node; }

  // [thread] Return the index of node `n` in an array by other node: `of_node` (or the own node) has no entry there.
  __device__ int other(int of_node, int n) const { return n - (n > of_node); }
  __device__ int other(int n) const { return other(node, n); }

  // [thread] Return this rank's array for its rail peer on node `n`: rail_for(n, &RailArrays::sums). The array holds
  // data to send, or received data.
  template <class T>
  __device__ T* rail_for(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + other(n) * own.rail_bytes);
  }
  // [thread] Return the rail peer's array for this rank, as the address of a put: the address of the same place in the
  // own region.
  template <class T>
  __device__ T* rail_at_peer(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + other(n, node) * own.rail_bytes);
  }

  // [thread] Return whether the rail peer's region on node `n` is mapped here; and whether rows and sums go straight
  // there, without staging on this side.
  __device__ bool maps(int n) const { return wire.mapped >> n & 1; }
  __device__ bool is_straight(int n) const { return wire.straight >> n & 1; }

  // [thread] Return the raiser of flags about `rank` on this node: the rank itself, or its rail peer here as its relay.
  __device__ int raiser_of(int rank) const { return node * config.ranks_per_node + local_of(rank); }
  // [thread] Return this rank's rail peer on node `n`.
  __device__ int rail_peer(int n) const { return n * config.ranks_per_node + local; }
#endif
};

}  // namespace ep::cuda
