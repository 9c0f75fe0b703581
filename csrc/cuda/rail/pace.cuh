// The pace of the peer wire, which then stands for a network card of this rate. Only builds with EP_PACE (setup.py)
// have it, for measurements. In all others SenderPace is empty and costs nothing.
//
// A put is stored at once, but its flag rises later: when this put and all earlier ones of the rank would have crossed.
#pragma once
#include "cuda/context.cuh"
#include "cuda/device/ptx.cuh"
#ifdef EP_PACE
#include "cuda/rail/pace.h"
#endif

namespace ep::cuda::EP_KERNELS {

// A share of puts to be counted in for a wire flag (RailWarp::count_in).
struct SentShare {
  uint32_t* counter;  // null: there are no such puts
  int node;
  uint64_t* remote_flag;
};

#ifdef EP_PACE

// The pace of one sender. Lane 0 books and waits; all lanes hold the same share.
class SenderPace {
 public:
  __device__ explicit SenderPace(const Context& context) : context_(context) {}

  // [thread] Book the wire for the next puts, behind all earlier bookings of this rank. The booking is not ordered with
  // the puts, because it only counts their bytes.
  __device__ void book(uint32_t bytes) {
    if (!context_.wire.is_paced()) return;
    crossed_ = cuda::book(Free{context_}, ticks(), ticks_of(bytes, context_.wire.ticks_per_byte));
  }

  // [thread] Wait until all puts that were booked have crossed.
  __device__ void wait() {
    wait_for(crossed_);
    crossed_ = 0;
  }

  // [warp] Call `count_in` for the earlier share, then for `share` if it has crossed already. Otherwise keep it:
  // meanwhile this sender makes more puts, as with a network card.
  template <class CountIn>
  __device__ void finish(const SentShare& share, const CountIn& count_in) {
    flush(count_in);
    share_ = share;
    share_crossed_ = crossed_;
    crossed_ = 0;
    if (__all_sync(~0u, has_crossed(share_crossed_))) flush(count_in);
  }

  __device__ bool holds_share() const { return share_.counter != nullptr; }

  // [warp] Call `count_in` for a share that was kept, once it has crossed.
  template <class CountIn>
  __device__ void flush(const CountIn& count_in) {
    if (!holds_share()) return;
    if (threadIdx.x % 32 == 0) wait_for(share_crossed_);
    count_in(share_);
    share_.counter = nullptr;
  }

 private:
  static __device__ uint64_t ticks() { return ptx::nanoseconds() * kTicksPerNs; }
  static __device__ bool has_crossed(uint64_t crossed) { return crossed == 0 || ticks() >= crossed; }

  // [thread] Wait for this time, by the clock that `book` has read too. No peer can delay it. It ends early after an
  // abort of this rank. The clock may stand still for up to 1 us and then jump, so a wait is late by that much at most.
  __device__ void wait_for(uint64_t crossed) const {
    for (int turn = 1; !has_crossed(crossed); ++turn) {
      if (turn % 32 == 0 && *static_cast<volatile uint32_t*>(&context_.state->aborted) != 0) return;
      __nanosleep(100);
    }
  }

  // State::wire_free, as cuda::book takes it. Both functions are atomic on one address, so they stay in this order.
  struct Free {
    const Context& context;

    __device__ unsigned long long* address() const {
      return reinterpret_cast<unsigned long long*>(&context.state->wire_free);
    }
    __device__ void raise_to(uint64_t value) const { atomicMax(address(), static_cast<unsigned long long>(value)); }
    __device__ uint64_t add(uint64_t value) const {
      return atomicAdd(address(), static_cast<unsigned long long>(value));
    }
  };

  const Context& context_;
  uint64_t crossed_ = 0;        // when the puts since the last share will have crossed; in lane 0, 0 in the others
  SentShare share_ = {};        // kept
  uint64_t share_crossed_ = 0;  // when it will have crossed; in lane 0
};

#else

struct SenderPace {
  __device__ explicit SenderPace(const Context&) {}
  __device__ void book(uint32_t) {}
  __device__ void wait() {}
  template <class CountIn>
  __device__ void finish(const SentShare& share, const CountIn& count_in) {
    count_in(share);
  }
  __device__ bool holds_share() const { return false; }
  template <class CountIn>
  __device__ void flush(const CountIn&) {}
};

#endif

}  // namespace ep::cuda::EP_KERNELS
