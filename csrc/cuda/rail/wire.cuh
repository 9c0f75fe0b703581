// The wire between nodes: from a rank to its rail peers. Remote addresses are symmetric: pass the local address of the
// same object, because all regions have the same layout. Only rail blocks put (rail.cuh), but any thread may signal an
// abort. Long puts are those of long_puts.cuh.
//
//   maps       [thread] return whether this rank maps the rail peer's region; the peer then maps this rank's too
//   at         [thread] return a remote address as this rank maps it
//   put        [warp] store data at the peer, later and in any order; to mapped memory addresses and bytes
//              are multiples of 16
//   stores     [thread] return the peer wire, for mapped rail peers
//   signal     [thread] raise a flag at the peer, after all puts made by this thread, and by threads it has waited for
//   arrived    [thread] make the data covered by a flag visible to this thread; it has seen the flag by load_acquire
//   quiet      [thread] wait until all puts of this rank, by any block, are complete: they have read their source, and
//              their data has arrived
//
//   has_messages  [thread] return whether messages of the host bring data and flags to a node (messages.h). Then a put
//              does nothing, because a message has the whole array, and `signal` says that this array is ready
//
// Memory of a mapped rail peer may also be stored to without a put; `signal` covers these stores too.
//
// The kernels are compiled into two modules: for the NVSHMEM wire, and for the peer and the NCCL wire.
#pragma once
#include "cuda/op.cuh"
#ifdef EP_WIRE_NVSHMEM
#include "cuda/rail/wire_nvshmem.cuh"
#else
#include "cuda/rail/wire_nccl.cuh"
#endif

namespace ep::cuda {

#ifdef EP_WIRE_NVSHMEM
using Wire = NvshmemWire;
#else
using Wire = NcclWire;
#endif

// [thread] Return whether messages bring everything to other nodes.
template <Kernels K>
__device__ inline bool has_messages(const Op<K>& op) {
  return op.num_nodes() > 1 && Wire{op.context}.has_messages(op.context.node == 0);
}

}  // namespace ep::cuda
