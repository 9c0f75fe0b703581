// Parameters of every kernel of one buffer.
#pragma once
#include "cuda/config.h"
#include "cuda/device/stamps.h"
#include "cuda/region.h"
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

// Addresses of the rail peers.
struct WireData {
  ptrdiff_t distance[kMaxNodes];  // [bytes] from this rank's region to its rail peer's on each node, where it is mapped
  int pe[kMaxNodes];              // the rail peer's PE on each node (NVSHMEM wire)
  uint32_t
      mapped;  // a bit per node, also for the own one: the rail peer's region is mapped here, and this rank's there
};

// Written by the host once per buffer, except wait_ns; a parameter of each launch, read by all threads.
struct Context {
  Config config;
  int node, local;                               // of this rank
  int num_ranks, num_local_experts, max_copies;  // copies of Config's results, as below: kernels need no division
  int node_factor, rank_words;                   // as in Config, as are the next
  int item_ints, table_ints, counts_ints, max_token_chunks, max_sum_chunks;
  int max_far_chunks, max_pushed_chunks, window_slots;
  uint32_t row_bytes, slot_stride;
  uint64_t timeout_ns;  // limit of a single wait for peers
  Peers peers;
  WireData wire;
  Region own;          // this rank's region
  StateArrays arrays;  // this rank's device memory; arrays.state is also `state`
  State* state;
  ReportArrays reports;  // pinned host memory; reports.report is also `report`
  Report* report;
  int64_t* wait_ns;  // of the launch, as in DispatchArgs
#ifdef EP_STAMPS
  uint64_t* stamps;    // of the launch, for `stamp` (stamps.h); or null
  int stamped_blocks;  // blocks of an operation in `stamps`
#endif

  // [host] [thread] Return the index of node `n` in an array by node that has no entry for `self`, or for the own node.
  EP_HOST_DEVICE int index_without(int n, int self) const { return n - (n > self); }
  EP_HOST_DEVICE int other_node_idx(int n) const { return index_without(n, node); }
  // [host] [thread] Return this rank's rail peer on node `n`.
  EP_HOST_DEVICE int rail_peer(int n) const { return n * config.ranks_per_node + local; }

  // [host] [thread] Return this rank's array for its rail peer on node `n`: local_rail_buffer(n, &RailArrays::sums).
  // The array holds data to send, or received data.
  template <class T>
  EP_HOST_DEVICE T* local_rail_buffer(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + other_node_idx(n) * own.rail_bytes);
  }
  // [thread] Return the rail peer's array for this rank, as the address of a put: the address of the same place in the
  // own region.
  template <class T>
  EP_HOST_DEVICE T* remote_rail_buffer(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + index_without(node, n) * own.rail_bytes);
  }

  // [thread] Return whether the rail peer's region on node `n` is mapped here. Then rows and sums go directly there,
  // without staging on this side.
  EP_HOST_DEVICE bool maps(int n) const { return wire.mapped >> n & 1; }
  // [host] Return whether that is so on all other nodes, or there is none.
  bool maps_all() const { return wire.mapped == config.all_nodes(); }
};

}  // namespace ep::cuda
