// Books a wire from many threads, as senders do on the GPU (csrc/cuda/rail/pace.h), and checks the bookings.
//
//   pace THREADS BOOKINGS GB_PER_S BUSY [BYTES]
//
// BUSY 1: each thread books again when its bytes have crossed; 0: with pauses. BYTES: of each booking; else many sizes.
// Prints the bytes per second of the busy time, over the rate asked for; exit code 1 and a line for a broken rule.
#include "cuda/rail/pace.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace {

struct Free {
  std::atomic<uint64_t>& end;

  void raise_to(uint64_t value) {
    for (uint64_t seen = end; seen < value && !end.compare_exchange_weak(seen, value);) {
    }
  }
  uint64_t add(uint64_t value) { return end.fetch_add(value); }
};

struct Booking {
  uint64_t now, begin, end, bytes;
};

// A clock that all threads push on. It stands still for 1 us, as a GPU's may.
struct Clock {
  std::atomic<uint64_t> ns{1'800'000'000'000'000'000};  // about today

  uint64_t ticks() const { return ns / 1024 * 1024 * ep::cuda::kTicksPerNs; }
  void reach(uint64_t ticks) { Free{ns}.raise_to(ticks / ep::cuda::kTicksPerNs + 1); }
};

int fail(const char* rule) {
  std::printf("broken: %s\n", rule);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_threads = std::atoi(argv[1]), num = std::atoi(argv[2]);
  const double rate = std::atof(argv[3]) * 1e9;
  const bool busy = std::atoi(argv[4]) != 0;
  std::vector<uint32_t> sizes{32, 288, 2048, 7168, 14336, 32 * 14368};
  if (argc > 5) sizes = {static_cast<uint32_t>(std::atoi(argv[5]))};
  const auto ticks_per_byte = static_cast<float>(ep::cuda::kTicksPerNs * 1e9 / rate);
  std::atomic<uint64_t> free{0};
  Clock clock;
  std::vector<std::vector<Booking>> booked(num_threads);
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < num; ++i) {
        const uint64_t bytes = sizes[random() % sizes.size()], now = clock.ticks();
        const uint64_t takes = ep::cuda::ticks_of(bytes, ticks_per_byte);
        const uint64_t end = ep::cuda::book(Free{free}, now, takes);
        booked[t].push_back({now, end - takes, end, bytes});
        if (busy)
          clock.reach(end);
        else
          clock.ns += random() % 40000;
      }
    });
  for (std::thread& thread : threads) thread.join();

  std::vector<Booking> all;
  for (const auto& of_thread : booked) all.insert(all.end(), of_thread.begin(), of_thread.end());
  std::sort(all.begin(), all.end(), [](const Booking& a, const Booking& b) { return a.end < b.end; });
  std::set<uint64_t> nows;
  for (const Booking& b : all) nows.insert(b.now);
  uint64_t last = 0, idle = 0, bytes = 0;
  for (const Booking& b : all) {
    if (b.begin < last) return fail("two bookings overlap");
    if (b.begin < b.now) return fail("an idle wire saves up time");
    // After a pause the wire begins anew at the time of a booking: it never waits longer.
    if (b.begin > last && nows.count(b.begin) == 0) return fail("a busy wire loses time");
    if (last != 0) idle += b.begin - last;
    last = b.end;
    bytes += b.bytes;
  }
  if (last != free) return fail("the end of the last booking is not free");
  const uint64_t used = last - all.front().begin - idle;
  std::printf("%.5f idle %.3f\n", bytes / (used / (ep::cuda::kTicksPerNs * 1e9)) / rate,
              static_cast<double>(idle) / (last - all.front().begin));
  return 0;
}
