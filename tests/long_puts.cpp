// Puts rows of many sizes with csrc/cuda/rail/long_puts.cuh on the host. Bulk copies are a model here: they move bytes
// at any time between their start and the wait for them.
//
//   long_puts SEED SHARED_BYTES PUTS
//
// Checks that every put has arrived unchanged when `drain` returns, that nothing else is written, and that no copy is
// under way then. Exit code 1 and a line for a broken rule.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#define __device__
#include "cuda/config.h"

namespace {

std::mt19937 random_bits;
bool by_chance(int one_in) { return random_bits() % one_in == 0; }

[[noreturn]] void fail(const char* rule) {
  std::printf("broken: %s\n", rule);
  std::exit(1);
}

struct ThreadIdx {
  unsigned x = 0;
} threadIdx;
void __syncwarp() {}
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}

// One mbarrier with one arrival a round.
struct Barrier {
  uint64_t* address;
  int64_t bytes = 0;  // awaited in this round
  bool arrived = false;
  int rounds = 0;  // ended
};
std::vector<Barrier> barriers;
Barrier& barrier_at(uint64_t* address) {
  for (Barrier& barrier : barriers)
    if (barrier.address == address) return barrier;
  fail("a barrier without init");
}

struct Load {
  void* to;
  const void* from;
  uint32_t bytes;
  uint64_t* barrier;
};
std::deque<Load> loads;

struct Store {
  char* to;
  const char* from;
  uint32_t bytes;
  int group;
  bool is_read = false;
  std::vector<char> data = {};
};
std::deque<Store> stores;  // not yet written
int num_groups = 0;        // committed

void land(size_t i) {
  const Load load = loads[i];
  loads.erase(loads.begin() + i);
  std::memcpy(load.to, load.from, load.bytes);
  Barrier& barrier = barrier_at(load.barrier);
  barrier.bytes -= load.bytes;
  if (barrier.bytes == 0 && barrier.arrived) barrier.arrived = false, ++barrier.rounds;
}
void read(Store& store) {
  if (!store.is_read) store.data.assign(store.from, store.from + store.bytes);
  store.is_read = true;
}
void write(size_t i) {
  read(stores[i]);
  std::memcpy(stores[i].to, stores[i].data.data(), stores[i].bytes);
  stores.erase(stores.begin() + i);
}
// Let some copies go on, in any order.
void pass_time() {
  while (!loads.empty() && by_chance(2)) land(random_bits() % loads.size());
  while (!stores.empty() && by_chance(4)) read(stores[random_bits() % stores.size()]);
  while (!stores.empty() && by_chance(4)) write(random_bits() % stores.size());
}

}  // namespace

namespace ep::ptx {

void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  if (arrivals != 1) fail("one thread arrives");
  barriers.push_back({barrier});
}
void fence_barrier_init() {}
void barrier_arrive_expect(uint64_t* address, uint32_t bytes) {
  Barrier& barrier = barrier_at(address);
  if (barrier.arrived) fail("a place is loaded before its last content has landed");
  barrier.arrived = true;
  barrier.bytes += bytes;
}
void barrier_wait(uint64_t* address, uint32_t parity) {
  for (pass_time(); barrier_at(address).rounds % 2 == static_cast<int>(parity); land(random_bits() % loads.size()))
    if (loads.empty()) fail("a wait for a round that never ends");
}
void check(const void* a, const void* b, uint32_t bytes) {
  if (bytes == 0 || (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | bytes) % 16 != 0)
    fail("bulk copies need multiples of 16 bytes");
}
void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  check(shared, global, bytes);
  loads.push_back({shared, global, bytes, barrier});
  pass_time();
}
void bulk_store(void* global, const void* shared, uint32_t bytes) {
  check(shared, global, bytes);
  stores.push_back({static_cast<char*>(global), static_cast<const char*>(shared), bytes, num_groups});
}
void bulk_commit() {
  ++num_groups;
  pass_time();
}
template <int kPending>
void bulk_wait_read() {
  for (Store& store : stores)
    if (store.group < num_groups - kPending) read(store);
}
template <int kPending>
void bulk_wait() {
  for (size_t i = 0; i < stores.size();) stores[i].group < num_groups - kPending ? write(i) : void(++i);
}

}  // namespace ep::ptx

namespace ep::cuda {

// A wire to one node, mapped at a distance.
struct Context {
  ptrdiff_t distance;
};
struct Wire {
  const Context& context;

  template <class T>
  T* at(int, T* there) const {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(there) + context.distance);
  }
};

}  // namespace ep::cuda

#include "cuda/rail/long_puts.cuh"

int main(int, char** argv) {
  using ep::cuda::LongPuts;
  random_bits.seed(std::atoi(argv[1]));
  const int shared_bytes = std::atoi(argv[2]), num_puts = std::atoi(argv[3]);
  constexpr size_t kMemory = 1 << 20;
  const auto allocate = [](size_t bytes) { return static_cast<char*>(std::aligned_alloc(1024, bytes)); };
  char *here = allocate(kMemory), *there = allocate(kMemory), *expected = allocate(kMemory);
  char* const shared = allocate((shared_bytes + 1023) / 1024 * 1024);
  for (size_t i = 0; i < kMemory; ++i) here[i] = static_cast<char>(random_bits());
  std::memset(there, 0, kMemory);
  std::memset(expected, 0, kMemory);
  const ep::cuda::Context context{there - here};
  LongPuts puts(context, shared, shared_bytes);
  size_t at = 0;  // the next array begins here
  for (int n = 0; n < num_puts; ++n) {
    const auto take = [&](uint32_t most) -> LongPuts::Array {
      const uint32_t bytes = by_chance(3) ? most : (1 + random_bits() % (most / 16)) * 16;
      if (at + bytes + 16 > kMemory) at = 0;
      const size_t begin = at;
      at += bytes + (by_chance(2) ? 16 : 0);  // some arrays are adjacent
      const size_t from = random_bits() % ((kMemory - bytes) / 16) * 16;
      return {here + begin, here + from, bytes};
    };
    const LongPuts::Array row = take(14336),
                          token_metadata = by_chance(3) ? LongPuts::Array{} : take(by_chance(4) ? 6000 : 256);
    for (const auto& array : {row, token_metadata})
      if (array.bytes > 0) std::memcpy(expected + (array.remote - here), array.local, array.bytes);
    puts.put(0, row, token_metadata);
    // Drain now and then, and before memory there is used again.
    if (!by_chance(16) && n + 1 < num_puts && at + 40000 < kMemory) continue;
    puts.drain();
    if (!loads.empty() || !stores.empty()) fail("a copy is under way after drain");
    if (std::memcmp(there, expected, kMemory) != 0) fail("other bytes have arrived");
  }
  std::printf("right\n");
}
