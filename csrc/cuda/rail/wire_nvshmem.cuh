// The NVSHMEM wire: the GPU itself starts puts, through a network card between hosts. Regions are in NVSHMEM's
// symmetric heap. Where NVLink reaches the rail peer, its region is mapped, and this wire is the peer wire. The
// functions are those of wire.cuh.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/context.h"
#include "cuda/rail/wire_peer.cuh"

namespace ep::cuda {

struct NvshmemWire {
  const Context& context;

  __device__ PeerWire stores() const { return PeerWire{context}; }
  __device__ bool maps(int node) const { return context.maps(node); }
  __device__ bool has_messages(int) const { return false; }
  template <class T>
  __device__ T* at(int node, T* remote) const {
    return stores().at(node, remote);
  }

  // [warp] Start a put. It completes later.
  template <class T>
  __device__ void put(int node, T* remote, const void* local, uint32_t bytes) const {
    if (maps(node)) return copy(at(node, remote), local, bytes);
    start_put(remote, local, bytes, context.wire.pe[node]);
  }

  // [thread] Raise a flag at the peer, after the puts of all threads counted in before: the fence covers every queue of
  // this rank.
  __device__ void signal(int node, uint64_t* remote_flag, uint64_t value) const {
    if (maps(node)) return stores().signal(node, remote_flag, value);
    ptx::fence_system();
#ifdef EP_TEST_NO_RAIL_FENCE  // docs/tests.md. Flags of rows and sums are the last arrays of flags
    if (remote_flag < context.own.rows_arrived)
#endif
      nvshmem_fence();
    nvshmemx_signal_op(remote_flag, value, NVSHMEM_SIGNAL_SET, context.wire.pe[node]);
  }

  // [thread] Make the data covered by the flag visible, through NVSHMEM's own wait. The flag has arrived: no real wait.
  __device__ void arrived(int node, uint64_t* flag, uint64_t value) const {
    if (!maps(node)) nvshmem_uint64_wait_until(flag, NVSHMEM_CMP_GE, value);  // returns at once
  }

  // [thread] Wait until all puts of this rank are complete at their targets, so they have read their source.
  __device__ void quiet() const {
    if (context.wire.mapped != context.config.all_nodes()) nvshmem_quiet();
  }

 private:
  // [warp] The two ways to put. They are not inlined: both take many registers, and so do the bulk copies around them.
  static __device__ __noinline__ void copy(void* to, const void* from, uint32_t bytes) {
    copy_words<uint4, 14>(static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes);
  }
  static __device__ __noinline__ void start_put(void* remote, const void* local, uint32_t bytes, int pe) {
    nvshmemx_putmem_nbi_warp(remote, local, bytes, pe);
  }
};

}  // namespace ep::cuda
