// The NVSHMEM wire: puts that the GPU itself starts, through a network card between hosts. Regions lie in NVSHMEM's
// symmetric heap.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/context.h"
#include "cuda/copy.cuh"
#include "cuda/ptx.cuh"

namespace ep::cuda {

struct NvshmemWire {
  const Context& context;

  // [warp]
  template <class T>
  __device__ void put(int node, T* there, const void* here, uint32_t bytes) const {
    nvshmemx_putmem_nbi_warp(there, here, bytes, context.wire.pe[node]);
  }

  // [warp]
  __device__ void put_words(int node, float* there, const float* here, uint32_t bytes) const {
    put(node, there, here, bytes);
  }

  // [thread] The fence orders the puts of all threads that this one has waited for: it covers every queue of this rank.
  __device__ void signal(int node, uint64_t* flag_there, uint64_t value) const {
    ptx::fence_system();
    nvshmem_fence();
    nvshmemx_signal_op(flag_there, value, NVSHMEM_SIGNAL_SET, context.wire.pe[node]);
  }

  // [thread]
  __device__ void arrived(uint64_t* flag, uint64_t value) const {
    nvshmem_uint64_wait_until(flag, NVSHMEM_CMP_GE, value);  // does not wait any more
  }

  // [thread]
  __device__ void quiet() const { nvshmem_quiet(); }
};

}  // namespace ep::cuda
