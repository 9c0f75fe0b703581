// One operation under way, as every step of a kernel knows it.
#pragma once
#include "cuda/context.h"

namespace ep::cuda {

// One operation under way, passed to every step. It knows which build of the kernels runs it, so that a kernel for one
// node has no code for several. A __noinline__ function takes it by value: a reference would keep it in memory.
template <Kernels K>
struct Op {
  const Context& context;
  Operation operation;
  uint64_t epoch;
  int block, num_blocks;  // this block; number of blocks without the rail blocks. In these, block >= num_blocks
  bool is_second;         // of two launches

  __device__ int rank() const { return context.config.rank; }
  __device__ int num_ranks() const { return context.num_ranks; }
  __device__ int ranks_per_node() const { return context.config.ranks_per_node; }
  __device__ int num_nodes() const { return is_for_one_node(K) ? 1 : context.config.num_nodes; }
  __device__ int num_others() const { return num_nodes() - 1; }  // other nodes
  __device__ int num_far_chunks() const { return is_for_one_node(K) ? 0 : context.max_far_chunks; }
  // First rank of this node.
  __device__ int first_local_rank() const {
    return is_for_one_node(K) ? 0 : context.node * context.config.ranks_per_node;
  }
  // Whether this block is a rail block.
  __device__ bool is_rail() const { return !is_for_one_node(K) && block >= num_blocks; }

  __device__ int node_of(int rank) const {
    return is_for_one_node(K) ? 0 : rank * context.node_factor >> Config::kNodeShift;
  }
  __device__ int local_of(int rank) const { return rank - node_of(rank) * context.config.ranks_per_node; }
  // [thread] Return the raiser of flags about `rank` on this node: the rank itself, or its rail peer here as its relay.
  __device__ int raiser_of(int rank) const {
    return is_for_one_node(K) ? rank : context.node * context.config.ranks_per_node + local_of(rank);
  }

  // [thread] Return an array of this rank's own inbox for `node`: my_inbox(node, &Inbox::staging). Its source is the
  // rail peer on `node`, or on the own node this rank.
  template <class T>
  __device__ T* my_inbox(int node, T* Inbox::* array) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(context.own.inbox.*array) +
                                (is_for_one_node(K) ? 0 : node * context.own.inbox_bytes));
  }
  // [thread] Return an array of `source`'s inbox on this rank's node: inbox_holding(source, &Inbox::staging). For a
  // source on another node this is the inbox of its rail peer here.
  template <class T>
  __device__ T* inbox_holding(int source, T* Inbox::* array) const {
    return context.peers.at(my_inbox(node_of(source), array), local_of(source));
  }
};

}  // namespace ep::cuda
