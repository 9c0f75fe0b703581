// The pace of a wire: the time that bytes take to cross, one after the other. Compiled for the host too, for a test.
#pragma once
#include <cstdint>

#include "common/cursor.h"

namespace ep::cuda {

// Times are in eighths of a nanosecond: in whole ones, rounding would change the rate of short rows by a few per cent.
// From 2043 on the timer's nanoseconds since 1970 overflow 64 bits in this unit.
constexpr uint64_t kTicksPerNs = 8;

// [host] [thread] Return the ticks that `bytes` take.
EP_HOST_DEVICE inline uint64_t ticks_of(uint64_t bytes, float ticks_per_byte) {
  return static_cast<uint64_t>(static_cast<float>(bytes) * ticks_per_byte + 0.5f);
}

// [host] [thread] Book a wire for `takes` ticks, behind all earlier bookings. Return the end of this booking. `free` is
// the end of the last one: `raise_to(value)` makes it at least `value`, `add(value)` returns the value before. Both are
// atomic, and any number of threads may book at once. No thread retries, and none waits for another one.
//
// Two bookings never overlap: `add` hands out adjacent times, and in between `free` only grows. A booking never begins
// before `now`: this thread has raised `free` before it adds. So an idle wire saves up no time. A busy wire loses none:
// raise_to changes nothing if `free` is past `now`.
template <class Free>
EP_HOST_DEVICE inline uint64_t book(Free&& free, uint64_t now, uint64_t takes) {
  free.raise_to(now);
  return free.add(takes) + takes;
}

}  // namespace ep::cuda
