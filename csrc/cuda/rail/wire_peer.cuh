// The peer wire: stores through NVLink, between virtual nodes of one host. The functions are those of wire.cuh. The
// NVSHMEM wire is this one too, for rail peers that NVLink reaches.
//
// It can be paced, and then stands for a network card of this rate. A put is stored at once, but its flag rises later:
// when this put and all earlier ones of the rank would have crossed (pace.h).
#pragma once
#include "cuda/context.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/rail/pace.h"

namespace ep::cuda::EP_KERNELS {

struct PeerWire {
  const Context& context;

  __device__ bool maps(int) const { return true; }

  // [thread] Return the address in the region of the rail peer on `node`, as mapped here.
  template <class T>
  __device__ T* at(int node, T* there) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(there) + context.wire.distance[node]);
  }

  // [warp] Copy vectors of 16 bytes, of any type. The copy has read its source when it returns.
  template <class T>
  __device__ void put(int node, T* there, const void* here, uint32_t bytes) const {
    copy_words<uint4, 8>(reinterpret_cast<uint4*>(at(node, there)), static_cast<const uint4*>(here), bytes);
  }

  // [warp] Copy `num` words from `here` of each lane with `has` set.
  __device__ void put_each(int node, bool has, float* there, const float* here, int num) const {
    if (!has) return;
    float* const to = at(node, there);
#pragma unroll 4
    for (int i = 0; i < num; ++i) to[i] = __ldcg(here + i);
  }

  // [thread] Book the time of the next puts. The booking is not ordered with the puts: it only counts their bytes.
  __device__ uint32_t book(uint32_t bytes) const {
    if (context.wire.ticks_per_byte == 0) return 0;
    return short_time(cuda::book(Free{context}, ticks(), ticks_of(bytes, context.wire.ticks_per_byte)));
  }

  // [thread] Return whether the time has come.
  __device__ bool has_crossed(uint32_t crossed) const { return crossed == 0 || has_come(crossed, ticks()); }

  // [thread] Wait for the time to come, by the clock of this GPU that `book` has read too. No peer can delay it, and no
  // flag is missed: nobody signals it. It ends early after an abort of this rank. The clock may stand still for up to
  // 1 us and then jump: a wait is late by that much at most, and a booking on an idle wire early.
  __device__ void wait_to_cross(uint32_t crossed) const {
    for (int turn = 1; !has_crossed(crossed); ++turn) {
      if (turn % 32 == 0 && *static_cast<volatile uint32_t*>(&context.state->aborted) != 0) return;
      __nanosleep(100);
    }
  }

  // [thread] Raise a flag there, after all stores of this thread and those seen by it.
  __device__ void signal(int node, uint64_t* flag_there, uint64_t value) const {
    ptx::fence_system();
    ptx::store_relaxed(at(node, flag_there), value);
  }

  // [thread] Do nothing: a copy has read its source when it returns, bulk copies when they are drained.
  __device__ void quiet() const {}

  // [thread] Do nothing: a thread with an acquiring load of the flag sees the data.
  __device__ void arrived(int, uint64_t*, uint64_t) const {}

 private:
  // [thread] Return the time, as `book` takes it.
  static __device__ uint64_t ticks() { return ptx::nanoseconds() * kTicksPerNs; }

  // State::wire_free, as `book` takes it.
  struct Free {
    const Context& context;

    __device__ unsigned long long* address() const {
      return reinterpret_cast<unsigned long long*>(&context.state->wire_free);
    }
    // [thread] Both are atomic on one address, so they stay in this order.
    __device__ void raise_to(uint64_t value) const { atomicMax(address(), static_cast<unsigned long long>(value)); }
    __device__ uint64_t add(uint64_t value) const {
      return atomicAdd(address(), static_cast<unsigned long long>(value));
    }
  };
};

}  // namespace ep::cuda::EP_KERNELS
