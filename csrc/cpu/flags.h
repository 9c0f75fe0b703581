// Flags in shared memory that count epochs upward, and the one place where a rank waits for others.
#pragma once
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ep {

// The last epoch that has reached this point; never reset. One cache line, so that flags do not disturb each other.
struct alignas(64) Flag {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> num_sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// True when `seen` is `expected` or later; epochs may wrap around.
inline bool reached(uint32_t seen, uint32_t expected) { return static_cast<int32_t>(seen - expected) >= 0; }

void raise_flag(Flag& flag, uint32_t epoch);

struct Awaited {
  Flag* flag;
  const Flag* gave_up;  // the peer's own flag of failure: once set, there is no use in waiting for the peer
  int rank;
};

// A peer did not arrive in time, or arrived and gave up.
struct PeerLate : std::runtime_error {
  PeerLate(const std::string& phase, std::vector<int> ranks);
  std::string phase;
  std::vector<int> ranks;
};

// Returns when every flag has reached `epoch`; throws PeerLate at the deadline (CLOCK_MONOTONIC, nanoseconds).
void wait_until(const std::vector<Awaited>& awaited, uint32_t epoch, int64_t deadline_ns, int spin_us,
                const char* phase);

int64_t now_ns();

}  // namespace ep
