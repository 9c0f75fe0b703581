// Parameters of every kernel of one buffer, as kernels read them.
#pragma once
#include "cuda/context.h"

namespace ep::cuda::EP_KERNELS {

struct Context : BufferContext {
  // Sizes known to the compiler in kernels for one node.
  __device__ int num_nodes() const { return kOneNode ? 1 : config.num_nodes; }
  __device__ int num_others() const { return num_nodes() - 1; }  // other nodes
  // Kernels for several nodes only have no code for combine weights as tagged words.
  __device__ bool plans_directly() const { return (kOneNode || kExtras) && config.plans_directly; }
  __device__ int num_far_chunks() const { return kOneNode ? 0 : max_far_chunks; }

  // [thread] Return an array of this rank's own inbox for `node`: my_inbox(node, &Inbox::staging). Its source is the
  // rail peer on `node`, or on the own node this rank.
  template <class T>
  __device__ T* my_inbox(int node, T* Inbox::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.inbox.*array) + (kOneNode ? 0 : node * own.inbox_bytes));
  }

  // [thread] Return an array of `source`'s inbox on this rank's node: inbox_holding(source, &Inbox::staging). For a
  // source on another node this is the inbox of its rail peer here.
  template <class T>
  __device__ T* inbox_holding(int source, T* Inbox::* array) const {
    return peers.at(my_inbox(node_of(source), array), local_of(source));
  }

  __device__ int node_of(int rank) const { return kOneNode ? 0 : rank * node_factor >> Config::kNodeShift; }
  __device__ int local_of(int rank) const { return rank - node_of(rank) * config.ranks_per_node; }

  // [thread] Return the index of node `n` in an array by node that has no entry for `self`, or for the own node.
  __device__ int index_without(int n, int self) const { return n - (n > self); }
  __device__ int other_node_idx(int n) const { return index_without(n, node); }

  // [thread] Return this rank's array for its rail peer on node `n`: local_rail_buffer(n, &RailArrays::sums). The array
  // holds data to send, or received data.
  template <class T>
  __device__ T* local_rail_buffer(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + other_node_idx(n) * own.rail_bytes);
  }
  // [thread] Return the rail peer's array for this rank, as the address of a put: the address of the same place in the
  // own region.
  template <class T>
  __device__ T* remote_rail_buffer(int n, T* RailArrays::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.rail.*array) + index_without(node, n) * own.rail_bytes);
  }

  // [thread] Return whether the rail peer's region on node `n` is mapped here. Then rows and sums go directly there,
  // without staging on this side.
  __device__ bool maps(int n) const { return wire.mapped >> n & 1; }

  // [thread] Return the raiser of flags about `rank` on this node: the rank itself, or its rail peer here as its relay.
  __device__ int raiser_of(int rank) const { return kOneNode ? rank : node * config.ranks_per_node + local_of(rank); }
  // [thread] Return this rank's rail peer on node `n`.
  __device__ int rail_peer(int n) const { return n * config.ranks_per_node + local; }
};

}  // namespace ep::cuda::EP_KERNELS
