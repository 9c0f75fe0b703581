// The peer wire: stores through NVLink, between virtual nodes of one host. The functions are those of wire.cuh. The
// NVSHMEM wire is this one too, for rail peers that NVLink reaches.
#pragma once
#include "cuda/context.h"
#include "cuda/device/copy.cuh"
#include "cuda/device/ptx.cuh"

namespace ep::cuda {

struct PeerWire {
  const Context& context;

  __device__ bool maps(int) const { return true; }

  // [thread] Return the address in the region of the rail peer on `node`, as this rank maps it.
  template <class T>
  __device__ T* at(int node, T* remote) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(remote) + context.wire.distance[node]);
  }

  // [warp] Copy vectors of 16 bytes, of any type. The copy has read its source when it returns.
  template <class T>
  __device__ void put(int node, T* remote, const void* local, uint32_t bytes) const {
    copy_words<uint4, 8>(reinterpret_cast<uint4*>(at(node, remote)), static_cast<const uint4*>(local), bytes);
  }

  // [warp] Copy `num` words from `local` of each lane with `has` set.
  __device__ void put_each(int node, bool has, float* remote, const float* local, int num) const {
    if (!has) return;
    float* const to = at(node, remote);
#pragma unroll 4
    for (int i = 0; i < num; ++i) to[i] = __ldcg(local + i);
  }

  // [thread] Raise a flag at the peer, after all stores of this thread and those seen by it.
  __device__ void signal(int node, uint64_t* remote_flag, uint64_t value) const {
    ptx::fence_system();
    ptx::store_relaxed(at(node, remote_flag), value);
  }

  // [thread] Do nothing: a copy has read its source when it returns, bulk copies when they are drained.
  __device__ void quiet() const {}

  // [thread] Do nothing: a thread with an acquiring load of the flag sees the data.
  __device__ void arrived(int, uint64_t*, uint64_t) const {}
};

}  // namespace ep::cuda
