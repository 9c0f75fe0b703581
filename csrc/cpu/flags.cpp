#include "cpu/flags.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace ep {
namespace {

// A sleeper looks around at least this often: for a peer that gave up, and for the deadline.
constexpr int64_t kMaxSleepNs = 20'000'000;

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// Sleeps until the flag is raised or `ns` have passed. The count of sleepers is raised before the flag is read
// again by the kernel, and raise_flag() reads it after its store, both sequentially consistent: one of the two
// sees the other, so no wake-up is lost.
void sleep_on(Flag& flag, uint32_t seen, int64_t ns) {
  const timespec timeout{ns / 1'000'000'000, ns % 1'000'000'000};
  flag.num_sleepers.fetch_add(1);
  futex(&flag.epoch, FUTEX_WAIT, seen, &timeout);
  flag.num_sleepers.fetch_sub(1);
}

}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

void raise_flag(Flag& flag, uint32_t epoch) {
  flag.epoch.store(epoch);  // releases everything written before
  if (flag.num_sleepers.load() != 0) futex(&flag.epoch, FUTEX_WAKE, INT_MAX, nullptr);
}

PeerLate::PeerLate(const std::string& phase, std::vector<int> ranks)
    : std::runtime_error("late in phase '" + phase + "'"), phase(phase), ranks(std::move(ranks)) {}

void wait_until(const std::vector<Awaited>& awaited, uint32_t epoch, int64_t deadline_ns, int spin_us,
                const char* phase) {
  const int64_t spin_end = now_ns() + spin_us * int64_t{1000};
  for (const Awaited& a : awaited) {
    for (;;) {
      const uint32_t seen = a.flag->epoch.load();
      if (reached(seen, epoch)) break;
      const int64_t now = now_ns();
      const bool over = now >= deadline_ns;
      if (over || a.gave_up->epoch.load() != 0) {
        std::vector<int> late;  // a peer may have raised its flag before it gave up, so the flag is read after that
        for (const Awaited& other : awaited)
          if ((over || other.gave_up->epoch.load() != 0) && !reached(other.flag->epoch.load(), epoch))
            late.push_back(other.rank);
        if (!late.empty()) throw PeerLate(phase, std::move(late));
        continue;
      }
      if (now < spin_end)
        sched_yield();  // more ranks than cores is the rule here: give the core to whom we wait for
      else
        sleep_on(*a.flag, seen, std::min(kMaxSleepNs, deadline_ns - now));
    }
  }
}

}  // namespace ep
