// The NVSHMEM wire: the GPU itself starts puts, through a network card between hosts. Regions are in NVSHMEM's
// symmetric heap. The functions are those of wire.cuh.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/context.h"
#include "cuda/copy.cuh"
#include "cuda/ptx.cuh"

namespace ep::cuda {

struct NvshmemWire {
  const Context& context;

  // [warp] Start a put. It completes later.
  template <class T>
  __device__ void put(int node, T* there, const void* here, uint32_t bytes) const {
    nvshmemx_putmem_nbi_warp(there, here, bytes, context.wire.pe[node]);
  }

  // [warp] Start a put, with no need for multiples of 16 bytes.
  __device__ void put_words(int node, float* there, const float* here, uint32_t bytes) const {
    put(node, there, here, bytes);
  }

  // [thread] Do nothing: the network card has its own pace.
  __device__ uint32_t book(uint32_t) const { return 0; }
  __device__ void wait_to_cross(uint32_t) const {}

  // [thread] Raise a flag there, after the puts of all threads counted in before: the fence covers every queue of this
  // rank.
  __device__ void signal(int node, uint64_t* flag_there, uint64_t value) const {
    ptx::fence_system();
    nvshmem_fence();
    nvshmemx_signal_op(flag_there, value, NVSHMEM_SIGNAL_SET, context.wire.pe[node]);
  }

  // [thread] Make the data covered by the flag visible, through NVSHMEM's own wait. The flag has arrived: no real wait.
  __device__ void arrived(uint64_t* flag, uint64_t value) const {
    nvshmem_uint64_wait_until(flag, NVSHMEM_CMP_GE, value);  // returns at once
  }

  // [thread] Wait until all puts of this rank are complete at their targets, so they have read their source.
  __device__ void quiet() const { nvshmem_quiet(); }
};

}  // namespace ep::cuda
