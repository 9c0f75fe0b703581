// Runs the waits of csrc/cuda/sync/wait.cuh on the host. Each waiting warp is a thread, and its lanes are fibers: they
// switch where a warp synchronises. Time is real.
//
//   waits NUM_NODES RANKS_PER_NODE LIMIT_MS STEP...
//     wait:RANK:AT_MS:PHASE:ABOUT[/RAISER],...   a warp of a rank begins to wait for flags about ranks, a lane each
//     raise:RANK:AT_MS:ABOUT                     the flag about a rank rises at RANK
//     word:RANK:AT_MS:PHASE:ABOUT[:PAUSE_MS]     a thread of a rank begins to wait for a tagged word of another rank;
//                                                it pauses behind each look at the word
//     send:RANK:AT_MS:ABOUT                      the word of a rank arrives at RANK
//     leave:RANK:AT_MS[:NAMED]                   the host of a rank aborts it, as Aborts.run does, and names NAMED
//
// Prints a line for each rank: the late ranks in its report and the milliseconds waited, or "-" without a report. Then
// a line with the result of each wait, 1 or 0.
#include <ucontext.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#define __CUDACC__
#define __device__
#define __host__
#define __noinline__
#define __forceinline__ inline

namespace {

thread_local struct ThreadIdx {
  unsigned x = 0;
} threadIdx;

// A warp, in the thread that runs it.
struct Warp {
  static constexpr size_t kStack = 1 << 16;
  std::array<ucontext_t, 32> lanes{};
  std::array<bool, 32> ended{};
  std::vector<char> stacks = std::vector<char>(32 * kStack);
  ucontext_t caller{};
  std::function<void()> body;
  std::array<std::array<uint64_t, 32>, 2> values{};
  int arrived = 0, rounds = 0;
  uint64_t meeting = 0;

  static Warp*& current() {
    static thread_local Warp* warp = nullptr;
    return warp;
  }

  void run(std::function<void()> function) {
    current() = this;
    body = std::move(function);
    for (int i = 0; i < 32; ++i) {
      getcontext(&lanes[i]);
      lanes[i].uc_stack.ss_sp = stacks.data() + i * kStack;
      lanes[i].uc_stack.ss_size = kStack;
      makecontext(&lanes[i], enter, 0);
    }
    swapcontext(&caller, &lanes[0]);
  }

  static void enter() {
    Warp& warp = *current();
    warp.body();
    warp.ended[threadIdx.x] = true;
    warp.switch_lane();
  }

  int next_after(unsigned lane) const {
    for (unsigned i = 1; i <= 32; ++i)
      if (!ended[(lane + i) % 32]) return static_cast<int>((lane + i) % 32);
    return -1;
  }

  // Let the next lane run, or after the last one the caller.
  void switch_lane() {
    const unsigned own = threadIdx.x;
    const int next = next_after(own);
    if (next < 0) setcontext(&caller);
    if (next == 0 && ++rounds % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));  // for others
    threadIdx.x = next;
    swapcontext(&lanes[own], &lanes[next]);
    threadIdx.x = own;
  }

  // Bring a value, and return those of all lanes once all have come.
  std::array<uint64_t, 32> meet(uint64_t value) {
    const uint64_t own = meeting;
    values[own % 2][threadIdx.x] = value;
    if (++arrived == 32) {
      arrived = 0;
      ++meeting;
    } else {
      while (meeting == own) switch_lane();
    }
    return values[own % 2];
  }
};

std::array<uint64_t, 32> meet(uint64_t value) { return Warp::current()->meet(value); }

uint32_t __ballot_sync(uint32_t, bool mine) {
  uint32_t bits = 0;
  int lane = 0;
  for (const uint64_t value : meet(mine)) bits |= static_cast<uint32_t>(value != 0) << lane++;
  return bits;
}
bool __any_sync(uint32_t, bool mine) { return __ballot_sync(~0u, mine) != 0; }
uint32_t __reduce_or_sync(uint32_t, uint32_t mine) {
  uint32_t bits = 0;
  for (const uint64_t value : meet(mine)) bits |= static_cast<uint32_t>(value);
  return bits;
}
template <class T>
T __shfl_sync(uint32_t, T mine, int lane) {
  return static_cast<T>(meet(static_cast<uint64_t>(mine))[lane]);
}
template <class T>
T __shfl_up_sync(uint32_t, T mine, int distance) {
  const int lane = static_cast<int>(threadIdx.x);
  return static_cast<T>(meet(static_cast<uint64_t>(mine))[lane < distance ? lane : lane - distance]);
}
void __syncwarp() { meet(0); }
void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T>
T atomicExch(T* at, T value) {
  return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}
template <class T, class V>
T atomicAdd(T* at, V value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}

uint64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

}  // namespace

namespace ep::ptx {
inline uint64_t load_acquire(const uint64_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_relaxed(uint64_t* at, uint64_t value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
inline void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void fence_before_bulk() {}
inline uint64_t nanoseconds() { return now_ns(); }
}  // namespace ep::ptx

#include "cuda/op.cuh"

namespace ep::cuda {
// Stores at the rail peer, whose memory is mapped.
struct Wire {
  const Context& context;

  void signal(int node, uint64_t* there, uint64_t value) const {
    ptx::fence_system();
    ptx::store_relaxed(reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(there) + context.wire.distance[node]),
                       value);
  }
};
}  // namespace ep::cuda

#include "cuda/sync/wait.cuh"

using namespace ep::cuda;
using namespace ep::cuda;

namespace {

struct Rank {
  std::vector<uint64_t> memory;
  Context context{};
  State state{};
  std::vector<char> reports;
};

// Make the ranks, each with a region of its own, as Engine::Engine does.
std::vector<std::unique_ptr<Rank>> make_ranks(int num_nodes, int ranks_per_node, int limit_ms) {
  std::vector<std::unique_ptr<Rank>> ranks;
  Config config;
  config.num_nodes = num_nodes;
  config.ranks_per_node = ranks_per_node;
  config.num_experts = config.num_ranks();
  ep::Cursor size;
  carve_report(size, config);
  for (int rank = 0; rank < config.num_ranks(); ++rank) {
    ranks.push_back(std::make_unique<Rank>());
    ranks.back()->memory.resize(flag_bytes(config) / sizeof(uint64_t) + 8);
    ranks.back()->reports.resize(size.size());
  }
  for (int rank = 0; rank < config.num_ranks(); ++rank) {
    Context& context = ranks[rank]->context;
    config.rank = rank;
    context.config = config;
    context.node = config.node_of(rank);
    context.local = config.local_of(rank);
    context.num_ranks = config.num_ranks();
    context.node_factor = config.node_factor();
    context.rank_words = config.rank_words();
    context.timeout_ns = limit_ms * uint64_t{1000000};
    context.state = &ranks[rank]->state;
    ep::Cursor of_report(ranks[rank]->reports.data());
    context.reports = carve_report(of_report, config);
    context.report = context.reports.report;
    const auto base = [&](int r) { return reinterpret_cast<char*>(ranks[r]->memory.data()); };
    for (int local = 0; local < ranks_per_node; ++local)
      context.peers.distance[local] = base(context.node * ranks_per_node + local) - base(rank);
    for (int node = 0; node < num_nodes; ++node)
      context.wire.distance[node] = base(context.rail_peer(node)) - base(rank);
    ep::Cursor c(base(rank));
    context.own = carve_region(c, config);
  }
  return ranks;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

struct Awaited {
  int rank = -1, raiser = -1;
};

bool wait_in_warp(Rank& rank, Phase phase, const std::vector<Awaited>& awaited) {
  std::atomic<bool> all{true};
  Warp warp;
  warp.run([&] {
    const Op<Kernels::kSeveralNodes> op{rank.context, Operation::kCombine, 1, 0, 1};
    const unsigned lane = threadIdx.x;
    const Awaited mine = lane < awaited.size() ? awaited[lane] : Awaited{};
    const uint64_t* flag = mine.rank < 0 ? nullptr : rank.context.own.listed + mine.rank;
    if (!wait_until(op, phase, flag, op.epoch, mine.rank, mine.raiser)) all = false;
  });
  return all;
}

bool wait_for_word(Rank& rank, Phase phase, int about, int pause_ms) {
  const Op<Kernels::kSeveralNodes> op{rank.context, Operation::kCombine, 1, 0, 1};
  const Tagged* const word = rank.context.own.called + about;
  const uint64_t since = ep::ptx::nanoseconds();
  while (ep::ptx::load_acquire(&word->epoch) < op.epoch) {
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    if (is_too_late(op, phase, about, word, 1, since)) return false;
  }
  return true;
}

}  // namespace

int main(int num_words, char** words) {
  const auto ranks = make_ranks(std::atoi(words[1]), std::atoi(words[2]), std::atoi(words[3]));
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  std::vector<char> results(num_words, 2);  // by word; 2: no wait
  for (int i = 4; i < num_words; ++i)
    threads.emplace_back([&, i] {
      const auto parts = split(words[i], ':');
      Rank& rank = *ranks[std::stoi(parts[1])];
      std::this_thread::sleep_until(begin + std::chrono::milliseconds(std::stoi(parts[2])));
      if (parts[0] == "raise") {
        ep::ptx::store_relaxed(rank.context.own.listed + std::stoi(parts[3]), 1);
      } else if (parts[0] == "send") {
        ep::ptx::store_relaxed(&rank.context.own.called[std::stoi(parts[3])].epoch, 1);
      } else if (parts[0] == "word") {
        const int pause_ms = parts.size() > 5 ? std::stoi(parts[5]) : 0;
        results[i] = wait_for_word(rank, static_cast<Phase>(std::stoi(parts[3])), std::stoi(parts[4]), pause_ms);
      } else if (parts[0] == "leave") {
        const int own = rank.context.config.rank;
        const int named = parts.size() > 3 ? std::stoi(parts[3]) : own, num_words = rank.context.rank_words;
        for (const auto& peer : ranks)
          for (int word = num_words - 1; word >= 0; --word)
            ep::ptx::store_relaxed(peer->context.own.aborted + own * num_words + word,
                                   RankSet::bit(named, word) | (word == 0));
      } else {
        std::vector<Awaited> awaited;
        for (const std::string& word : split(parts[4], ',')) {
          const auto names = split(word, '/');
          awaited.push_back({std::stoi(names[0]), std::stoi(names.back())});
        }
        results[i] = wait_in_warp(rank, static_cast<Phase>(std::stoi(parts[3])), awaited);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& rank : ranks) {
    const Report& report = *rank->context.report;
    if (report.aborted == 0) {
      std::puts("-");
      continue;
    }
    for (int r = 0; r < rank->context.num_ranks; ++r)
      if (rank->context.reports.late[(r + 1) / 64] >> (r + 1) % 64 & 1) std::printf("%d ", r);
    std::printf("after %u\n", report.waited_ms);
  }
  for (const char result : results)
    if (result != 2) std::printf("%d ", result);
  std::puts("");
}
