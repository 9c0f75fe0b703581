#include "cpu/flags.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace ep::cpu {
namespace {

// A waiting rank checks this often for aborted and dead peers, the deadline, and signals.
constexpr int64_t kLookNs = 20'000'000;

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// Sleep until the flag is raised or `ns` have passed. No wake-up is lost: the sleeper counts itself in before the
// kernel reads the flag again, and raise_flag reads the count after its store. Both are sequentially consistent.
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
  flag.raised_ns[epoch % 2].store(now_ns(), std::memory_order_relaxed);
  flag.epoch.store(epoch);  // releases all earlier writes
  if (flag.num_sleepers.load() != 0) futex(&flag.epoch, FUTEX_WAKE, INT_MAX, nullptr);
}

PeerLate::PeerLate(const std::string& phase, std::vector<int> ranks, std::vector<int> gone)
    : std::runtime_error("late in phase '" + phase + "'"),
      phase(phase),
      ranks(std::move(ranks)),
      gone(std::move(gone)) {}

namespace {

// Add the time from `begin` until the flag was raised. The flag holds this time, so it does not matter in which order
// flags are read.
void add_wait(const Awaited& peer, uint32_t epoch, int64_t begin) {
  const int64_t raised = peer.flag->raised_ns[epoch % 2].load(std::memory_order_relaxed);
  if (raised > begin) *peer.waited_ns += std::min(raised, now_ns()) - begin;
}

// Throw PeerLate if a missing peer cannot arrive any more, or if the time is up.
void check_peers(const std::vector<Awaited>& awaited, uint32_t epoch, bool over, const char* phase) {
  std::vector<int> late, gone;
  for (const Awaited& peer : awaited) {
    const uint32_t aborted = peer.aborted->epoch.load();
    const bool is_gone = aborted == kLeft || (aborted == 0 && peer.process->is_gone());
    // The peer may have raised its flag before it aborted or died: read the flag last.
    const bool masks_me = peer.masks_me && peer.masks_me->epoch.load() != 0;
    if ((!over && !aborted && !is_gone && !masks_me) || reached(peer.flag->epoch.load(), epoch)) continue;
    late.push_back(peer.rank);
    if (is_gone) gone.push_back(peer.rank);
  }
  if (!late.empty()) throw PeerLate(phase, std::move(late), std::move(gone));
}

}  // namespace

void wait_until(const std::vector<Awaited>& awaited, uint32_t epoch, const WaitLimits& limits, const char* phase) {
  const int64_t begin = now_ns(), spin_end = begin + limits.spin_us * int64_t{1000};
  int64_t next_look = begin + kLookNs;
  std::vector<Awaited> missing;
  for (const Awaited& a : awaited)
    if (!reached(a.flag->epoch.load(), epoch)) missing.push_back(a);
  for (const Awaited& a : missing) {
    for (;;) {
      const uint32_t seen = a.flag->epoch.load();
      if (reached(seen, epoch)) break;
      if (limits.stopped->load()) throw Interrupted();
      const int64_t now = now_ns();
      const bool over = now >= limits.deadline_ns;
      // Check the peers: every kLookNs, when the time is up, or after the peer's abort.
      if (now >= next_look) {
        next_look = now + kLookNs;
        if (limits.on_look) limits.on_look();
        check_peers(awaited, epoch, over, phase);
        continue;
      }
      if (over || a.aborted->epoch.load() != 0) {
        check_peers(awaited, epoch, over, phase);
        continue;
      }
      // Wait.
      if (now < spin_end)
        sched_yield();  // ranks outnumber cores: leave the core to the awaited rank
      else
        sleep_on(*a.flag, seen, std::min(next_look, limits.deadline_ns) - now);
    }
    add_wait(a, epoch, begin);
  }
}

}  // namespace ep::cpu
