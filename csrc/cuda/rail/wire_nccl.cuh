// The NCCL wire: the host sends and receives whole arrays, in messages of NCCL (messages.h). Kernels say when an array
// is ready, and wait for its arrival. To a mapped rail peer this is the peer wire. The functions are those of wire.cuh.
#pragma once
#include "cuda/rail/wire_peer.cuh"

namespace ep::cuda {

struct NcclWire {
  const Context& context;

  __device__ PeerWire stores() const { return PeerWire{context}; }
  __device__ bool maps(int node) const { return context.maps(node); }
  __device__ bool has_messages(int node) const { return !context.maps(node); }
  // [thread] As in PeerWire; without a mapped region the address is that of own memory.
  template <class T>
  __device__ T* at(int node, T* remote) const {
    return stores().at(node, remote);
  }
  template <class T>
  __device__ void put(int node, T* remote, const void* local, uint32_t bytes) const {
    if (maps(node)) stores().put(node, remote, local, bytes);
  }

  // [thread] Raise a flag at the peer. With messages, say that what it covers is ready: the message that brings it
  // there raises the flag. No message brings `aborted`.
  __device__ void signal(int node, uint64_t* remote_flag, uint64_t value) const {
    if (maps(node)) return stores().signal(node, remote_flag, value);
    const ptrdiff_t flag = remote_flag - context.own.inbox_free;
    if (flag < 0) return;
    ptx::fence_system();
    ptx::store_relaxed(context.own.ready + context.other_node_idx(node) * context.own.wire_flags + flag, value);
  }

  // [thread] Do nothing: an operation waits for the arrival of all its messages, and they have left by then.
  __device__ void quiet() const {}

  // [thread] Do nothing: the flag is raised by a kernel behind the message, in its stream.
  __device__ void arrived(int, uint64_t*, uint64_t) const {}
};

}  // namespace ep::cuda
