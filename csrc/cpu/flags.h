// Flags in shared memory, and the one function for all waits: wait_until.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/process.h"

namespace ep::cpu {

// The epoch of the last raise; reset only by Engine::unmask. A flag fills a cache line, so flags do not slow each
// other.
struct alignas(64) Flag {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> num_sleepers;
  // Time of the last raise for an epoch of each parity: a peer can be one epoch ahead. CLOCK_MONOTONIC is the same in
  // all processes.
  std::atomic<int64_t> raised_ns[2];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Return true when `seen` is `expected` or later; epochs may wrap around.
inline bool reached(uint32_t seen, uint32_t expected) { return static_cast<int32_t>(seen - expected) >= 0; }

// Store the epoch, after all earlier writes of this thread, and wake all ranks asleep on the flag.
void raise_flag(Flag& flag, uint32_t epoch);

// Reason of an abort: the value of the flag `aborted`. An aborted rank raises no other flag.
enum AbortReason : uint32_t {
  kWaitedInVain = 1,  // it waited in vain for others, and names them
  kLeft = 2,          // it destroyed the buffer, or failed by itself
};

// A peer's flag to wait for.
struct Awaited {
  Flag* flag;
  const Flag* aborted;     // of the peer: 0, or an AbortReason
  const Flag* masks_me;    // of the peer: not 0 once it has masked this rank; or null
  const Process* process;  // of the peer
  int rank;
  int64_t* waited_ns;  // added to: the time from the start of the wait until the flag was raised
};

// Thrown where peers did not arrive in time, or cannot arrive any more.
struct PeerLate : std::runtime_error {
  PeerLate(const std::string& phase, std::vector<int> ranks, std::vector<int> gone);
  std::string phase;
  std::vector<int> ranks;
  std::vector<int> gone;  // those of `ranks` with kLeft, or whose process has ended
};

// Thrown by a rank that another one has masked: its operation may have read memory that others have overwritten.
struct MaskedByPeer : std::runtime_error {
  explicit MaskedByPeer(const std::string& phase)
      : std::runtime_error("masked in phase '" + phase + "'"), phase(phase) {}
  std::string phase;
};

// Thrown in a waiting thread after another thread has called Engine::stop.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

// Limits of a wait.
struct WaitLimits {
  int64_t deadline_ns;               // CLOCK_MONOTONIC
  int spin_us;                       // spin this long, then sleep
  const std::atomic<bool>* stopped;  // set by another thread: throw Interrupted
  void (*on_look)();                 // called every 20 ms, or null; an exception of it ends the wait
};

// Return when every flag has reached `epoch`. Throw PeerLate at the deadline, or once an awaited peer cannot arrive or
// has masked this rank.
void wait_until(const std::vector<Awaited>& awaited, uint32_t epoch, const WaitLimits& limits, const char* phase);

// Return the time of CLOCK_MONOTONIC.
int64_t now_ns();

}  // namespace ep::cpu
