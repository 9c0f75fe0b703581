// Flags in shared memory that count epochs upward, and the one place where a rank waits for others.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/process.h"

namespace ep::cpu {

// The last epoch that has reached this point; never reset. One cache line, so that flags do not disturb each other.
struct alignas(64) Flag {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> num_sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// True when `seen` is `expected` or later; epochs may wrap around.
inline bool reached(uint32_t seen, uint32_t expected) { return static_cast<int32_t>(seen - expected) >= 0; }

void raise_flag(Flag& flag, uint32_t epoch);

// Why a rank will not arrive any more, as its flag `aborted` has it.
enum AbortReason : uint32_t {
  kWaitedInVain = 1,  // it waited in vain for others, and says for whom
  kLeft = 2,          // it destroyed the buffer, or failed by itself
};

struct Awaited {
  Flag* flag;
  const Flag* aborted;     // of the peer: 0, or a AbortReason
  const Process* process;  // of the peer
  int rank;
};

// Peers that did not arrive in time, or will not arrive.
struct PeerLate : std::runtime_error {
  PeerLate(const std::string& phase, std::vector<int> ranks, std::vector<int> gone);
  std::string phase;
  std::vector<int> ranks;
  std::vector<int> gone;  // those of them that left or whose process has ended
};

// Another thread wants this one to leave its operation.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

// How a rank waits.
struct WaitOptions {
  int64_t deadline_ns;               // CLOCK_MONOTONIC
  int spin_us;                       // then it sleeps
  const std::atomic<bool>* stopped;  // set by another thread: throw Interrupted
  void (*on_look)();                 // called every 20 ms; what it throws ends the wait; or null
};

// Return when every flag has reached `epoch`. Throw PeerLate at the deadline, or once an awaited peer cannot arrive.
void wait_until(const std::vector<Awaited>& awaited, uint32_t epoch, const WaitOptions& options, const char* phase);

int64_t now_ns();

}  // namespace ep::cpu
