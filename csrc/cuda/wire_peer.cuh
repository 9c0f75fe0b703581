// The peer wire: stores through NVLink, between virtual nodes of one host. It can be paced, for measurements. The
// pacing itself takes about 0.36 us per put, so a paced wire does not stand for a network card. Measured on 2 H200; to
// measure again, compare dispatches with EP_DISPATCHER_WIRE_GBPS unset and with more than NVLink's rate. The functions
// are those of wire.cuh.
#pragma once
#include "cuda/context.h"
#include "cuda/copy.cuh"
#include "cuda/ptx.cuh"

namespace ep::cuda {

struct PeerWire {
  const Context& context;

  // [warp] Copy vectors of 16 bytes, of any type. The copy has read its source when it returns.
  template <class T>
  __device__ void put(int node, T* there, const void* here, uint32_t bytes) const {
    pace(bytes);
    copy_words<uint4, 14>(at<uint4>(node, there), static_cast<const uint4*>(here), bytes);
  }

  // [warp] Copy words of 4 bytes.
  __device__ void put_words(int node, float* there, const float* here, uint32_t bytes) const {
    pace(bytes);
    copy_words<uint32_t, 1>(at<uint32_t>(node, there), reinterpret_cast<const uint32_t*>(here), bytes);
  }

  // [thread] Raise a flag there, after all stores of this thread and those seen by it.
  __device__ void signal(int node, uint64_t* flag_there, uint64_t value) const {
    ptx::fence_system();
    ptx::store_relaxed(at<uint64_t>(node, flag_there), value);
  }

  // [thread] Do nothing: a copy has read its source when it returns.
  __device__ void quiet() const {}

  // [thread] Do nothing: a thread with an acquiring load of the flag sees the data.
  __device__ void arrived(uint64_t*, uint64_t) const {}

 private:
  // [thread] Return the address in the region of the rail peer on `node`, as mapped here.
  template <class To, class T>
  __device__ To* at(int node, T* there) const {
    return reinterpret_cast<To*>(reinterpret_cast<char*>(there) + context.wire.distance[node]);
  }

  // [warp] Wait as long as a wire of the given rate would take for the bytes. All puts of the rank queue up for the
  // wire.
  __device__ void pace(uint32_t bytes) const {
    if (context.wire.ns_per_byte == 0) return;
    if (threadIdx.x % 32 == 0) {
      const auto takes = static_cast<uint64_t>(bytes * context.wire.ns_per_byte + 0.5f);
      auto* const free = reinterpret_cast<unsigned long long*>(&context.state->wire_free);
      unsigned long long begin, end, seen = __ldcg(free);
      do {
        begin = seen;
        end = max(begin, static_cast<unsigned long long>(ptx::nanoseconds())) + takes;
        seen = atomicCAS(free, begin, end);
      } while (seen != begin);
      while (ptx::nanoseconds() < end) __nanosleep(100);
    }
    __syncwarp();
  }
};

}  // namespace ep::cuda
