// What every kernel of one buffer is given.
#pragma once
#include "cuda/config.h"
#include "cuda/region.h"
#include "cuda/state.h"

namespace ep::cuda {

// The memory of the ranks of one node. All regions are carved alike, so a peer's array is one's own array at a fixed
// distance.
struct Peers {
  ptrdiff_t distance[kMaxLocal];  // [bytes] from this rank's region to that of each rank of its node

#ifdef __CUDACC__
  template <class T>
  __device__ T* at(T* own, int local) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own) + distance[local]);
  }
#endif
};

// Where a wire finds the rail peers, and how fast the peer wire is at most.
struct WireData {
  ptrdiff_t distance[kMaxNodes];  // [bytes] from this rank's region to that of its rail peer on each node (peer wire)
  int pe[kMaxNodes];              // number of the rail peer in NVSHMEM
  float ns_per_byte;              // 0: as fast as it can
};

struct Context {
  Config config;
  int node, local;                               // of this rank
  int num_ranks, num_local_experts, max_copies;  // of config, as the next ones: kernels need no division
  uint8_t nodes[kMaxRanks];                      // of the ranks
  int item_ints, table_ints, counts_ints, max_token_chunks, max_item_chunks, max_sum_chunks;
  uint32_t row_bytes, slot_stride;
  uint64_t timeout_ns;
  Peers peers;
  WireData wire;
  Region own;
  StateArrays arrays;
  State* state;
  Report* report;

#ifdef __CUDACC__
  // Find an array of this rank's own inbox for the rail peer on `node`: inbox_for(node, &Inbox::staging).
  template <class T>
  __device__ T* inbox_for(int node, T* Inbox::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.inbox.*array) + node * own.inbox_bytes);
  }

  // Find an array of `source`'s inbox on this rank's node: inbox_of(source, &Inbox::staging).
  template <class T>
  __device__ T* inbox_of(int source, T* Inbox::* array) const {
    return peers.at(inbox_for(node_of(source), array), local_of(source));
  }

  __device__ int node_of(int rank) const { return nodes[rank]; }
  __device__ int local_of(int rank) const { return rank - node_of(rank) * config.ranks_per_node; }

  // Number another node among those that are not this rank's own (or not `of_node`).
  __device__ int other(int of_node, int n) const { return n - (n > of_node); }
  __device__ int other(int n) const { return other(node, n); }

  // Find an array of the rail to a node: rail_to(node, &RailArrays::sums); or as the rail peer there has it for this
  // node.
  template <class T>
  __device__ T* rail_to(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + other(n) * own.rail_bytes);
  }
  template <class T>
  __device__ T* rail_from(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + other(n, node) * own.rail_bytes);
  }

  // Find who raises flags about a rank on this node: the rank itself, or its rail peer here, which relays.
  __device__ int relay_of(int rank) const { return node * config.ranks_per_node + local_of(rank); }
  __device__ int rail_peer(int n) const { return n * config.ranks_per_node + local; }
#endif
};

}  // namespace ep::cuda
