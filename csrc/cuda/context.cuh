// Parameters of every kernel of one buffer, as kernels read them.
#pragma once
#include "cuda/context.h"

namespace ep::cuda::EP_KERNELS {

struct Context : BufferContext {
  // Sizes known to the compiler in kernels for one node.
  __device__ int num_nodes() const { return kOneNode ? 1 : config.num_nodes; }
  __device__ int num_others() const { return num_nodes() - 1; }  // other nodes
  // Kernels for several nodes only have no code for factors as tagged words.
  __device__ bool plans_directly() const { return (kOneNode || kExtras) && config.plans_directly; }
  __device__ int num_far_chunks() const { return kOneNode ? 0 : max_far_chunks; }

  // [thread] Return an array of this rank's own inbox for `node`: inbox_for(node, &Inbox::staging). Its source is the
  // rail peer on `node`, or on the own node this rank.
  template <class T>
  __device__ T* inbox_for(int node, T* Inbox::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own.inbox.*array) + (kOneNode ? 0 : node * own.inbox_bytes));
  }

  // [thread] Return an array of `source`'s inbox on this rank's node: inbox_of(source, &Inbox::staging). For a source
  // on another node this is the inbox of its rail peer here.
  template <class T>
  __device__ T* inbox_of(int source, T* Inbox::* array) const {
    return peers.at(inbox_for(node_of(source), array), local_of(source));
  }

  __device__ int node_of(int rank) const { return kOneNode ? 0 : nodes[rank]; }
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

  // [thread] Return whether the rail peer's region on node `n` is mapped here; and whether rows and sums go directly
  // there, without staging on this side.
  __device__ bool maps(int n) const { return wire.mapped >> n & 1; }
  __device__ bool is_direct(int n) const { return maps(n) && !wire.is_paced(); }

  // [thread] Return the raiser of flags about `rank` on this node: the rank itself, or its rail peer here as its relay.
  __device__ int raiser_of(int rank) const { return kOneNode ? rank : node * config.ranks_per_node + local_of(rank); }
  // [thread] Return this rank's rail peer on node `n`.
  __device__ int rail_peer(int n) const { return n * config.ranks_per_node + local; }
};

}  // namespace ep::cuda::EP_KERNELS
