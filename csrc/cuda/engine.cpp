#include "cuda/engine.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace ep::cuda {

size_t state_bytes(const Config& config, int num_sms) {
  Cursor c;
  carve_state(c, config, num_sms);
  return c.size();
}

Engine::Engine(const Config& config, const std::vector<char*>& regions, char* state, char* report, double timeout_s,
               int num_sms)
    : context_{}, num_sms_(num_sms) {
  context_.config = config;
  context_.item_ints = config.item_ints();
  context_.sent_ints = config.sent_ints();
  context_.head_ints = Head::ints(config);
  context_.max_token_chunks = config.max_token_chunks();
  context_.max_item_chunks = config.max_item_chunks();
  context_.row_bytes = static_cast<uint32_t>(config.row_bytes());
  context_.slot_stride = static_cast<uint32_t>(config.slot_stride());
  context_.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  Cursor of_state(state);
  context_.arrays = carve_state(of_state, config, num_sms);
  context_.state = context_.arrays.state;
  context_.report = reinterpret_cast<Report*>(report);
  const char* own = regions[config.local_of(config.rank)];
  for (size_t local = 0; local < regions.size(); ++local) context_.peers.distance[local] = regions[local] - own;
  Cursor of_region(const_cast<char*>(own));
  context_.own = carve_region(of_region, config);
}

int64_t Engine::wait_for_counts(uint64_t ticket, double slice_s) const {
  const auto* report = static_cast<const volatile Report*>(context_.report);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(slice_s);
  for (int turn = 0; report->counted != ticket; ++turn) {
    if (report->late != 0) return -1;
    if (turn % 1024 == 0 && std::chrono::steady_clock::now() > end) return -2;
    if (turn > 1 << 16) std::this_thread::yield();
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return report->num_rows;
}

}  // namespace ep::cuda
