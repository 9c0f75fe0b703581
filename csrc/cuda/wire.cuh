// The wire between nodes: what a rank sends to its rail peers. Addresses "there" are those of this rank's own region:
// the regions of all ranks are laid out alike. Only rail blocks send (rail.cuh), but an abort is signalled by anyone.
//
//   put      asynchronous, in any order; put_words where addresses and sizes are multiples of 4 bytes only, not of 16
//   signal   raises a flag there, behind all puts that the calling thread has made or has waited for
//   arrived  makes what a flag stands for visible, once the flag has been seen here
//   quiet    waits until these puts have read their source
//
// One module is compiled for each kind of wire, with the same kernels.
#pragma once
#ifdef EP_WIRE_NVSHMEM
#include "cuda/wire_nvshmem.cuh"
#else
#include "cuda/wire_peer.cuh"
#endif

namespace ep::cuda {

#ifdef EP_WIRE_NVSHMEM
using Wire = NvshmemWire;
#else
using Wire = PeerWire;
#endif

}  // namespace ep::cuda
