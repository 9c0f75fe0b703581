#include "cuda/engine.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace ep::cuda {

size_t state_bytes(const Sizes& sizes, int num_sms) {
  Cursor c;
  carve_state(c, sizes, num_sms);
  return c.size();
}

Engine::Engine(const Sizes& sizes, const std::vector<char*>& regions, char* state, char* report, double timeout_s,
               int num_sms)
    : context_{}, num_sms_(num_sms) {
  context_.sizes = sizes;
  context_.item_ints = sizes.item_ints();
  context_.sent_ints = sizes.sent_ints();
  context_.head_ints = head_ints(sizes);
  context_.max_chunks = sizes.max_chunks();
  context_.early_tokens = sizes.early_tokens();
  context_.row_bytes = static_cast<uint32_t>(sizes.row_bytes());
  context_.slot_stride = static_cast<uint32_t>(sizes.slot_stride());
  context_.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  Cursor c(state);
  context_.arrays = carve_state(c, sizes, num_sms);
  context_.state = context_.arrays.state;
  context_.report = reinterpret_cast<Report*>(report);
  for (size_t rank = 0; rank < regions.size(); ++rank) {
    Cursor of_rank(regions[rank]);
    context_.region[rank] = carve_region(of_rank, sizes);
  }
}

int64_t Engine::wait_for_counts(uint64_t ticket) const {
  const auto* report = static_cast<const volatile Report*>(context_.report);
  // The kernels give up by themselves; this limit is for a stream in which they cannot start.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::nanoseconds(2 * context_.timeout_ns + 5000000000);
  for (int turn = 0; report->counted != ticket; ++turn) {
    if (report->late != 0) return -1;
    if (turn % 1024 == 0 && std::chrono::steady_clock::now() > limit) return -1;
    if (turn > 1 << 16) std::this_thread::yield();
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return report->num_rows;
}

}  // namespace ep::cuda
