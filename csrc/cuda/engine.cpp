#include "cuda/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "cuda/rail/messages.h"

namespace ep::cuda {
namespace {

constexpr bool finds_nodes() {
  Config config;
  for (; config.ranks_per_node <= kMaxLocal; ++config.ranks_per_node)
    for (int rank = 0; rank < kMaxRanks; ++rank)
      if (rank * config.node_factor() >> Config::kNodeShift != rank / config.ranks_per_node) return false;
  return true;
}
static_assert(finds_nodes());

}  // namespace

size_t state_bytes(const Config& config, int num_sms) {
  Cursor c;
  carve_state(c, config, num_sms);
  return c.size();
}

Engine::Engine(const Config& config, const std::vector<char*>& regions, const std::vector<char*>& rail,
               const std::vector<int>& rail_pes, char* state, char* report, double timeout_s, int num_sms)
    : context_{} {
  // Sizes, and this rank's place.
  context_.config = config;
  context_.node = config.node_of(config.rank);
  context_.local = config.local_of(config.rank);
  context_.num_ranks = config.num_ranks();
  context_.num_local_experts = config.num_local_experts();
  context_.max_copies = config.max_copies();
  context_.node_factor = config.node_factor();
  context_.rank_words = config.rank_words();
  context_.item_ints = config.item_ints();
  context_.table_ints = config.table_ints();
  context_.counts_ints = Counts::ints(config);
  context_.max_token_chunks = config.max_token_chunks();
  context_.max_sum_chunks = config.max_sum_chunks();
  context_.max_far_chunks = config.max_far_chunks();
  context_.max_pushed_chunks = config.max_pushed_chunks();
  context_.window_slots = config.window_slots();
  context_.row_bytes = static_cast<uint32_t>(config.row_bytes());
  context_.slot_stride = static_cast<uint32_t>(config.slot_stride());
  context_.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  // This rank's own memory, for its kernels alone.
  Cursor of_state(state);
  context_.arrays = carve_state(of_state, config, num_sms);
  context_.state = context_.arrays.state;
  Cursor of_report(report);
  context_.reports = carve_report(of_report, config);
  context_.report = context_.reports.report;
  // Regions: all are laid out alike, so a peer's array is at a fixed distance from this rank's.
  const char* own = regions[context_.local];
  for (size_t local = 0; local < regions.size(); ++local) context_.peers.distance[local] = regions[local] - own;
  for (size_t node = 0; node < rail.size(); ++node) {
    if (rail[node] == nullptr) continue;
    context_.wire.distance[node] = rail[node] - own;
    context_.wire.mapped |= 1u << node;
  }
  std::copy(rail_pes.begin(), rail_pes.end(), context_.wire.pe);
  Cursor of_region(const_cast<char*>(own));
  context_.own = carve_region(of_region, config);
}

void Engine::send_by(std::shared_ptr<NcclComm> comm) {
  messages_ = std::make_shared<Messages>(context_, std::move(comm));
}

bool Engine::has_captured_messages() const { return messages_ && messages_->has_captured(); }

const MessageRows& Engine::limited_rows(int32_t most) {
  MessageRows& rows = limited_rows_;
  rows.known = 1;
  rows.limit = most;
  rows.packed = context_.config.all_nodes() & ~(1u << context_.node);
  for (int node = 0; node < context_.config.num_nodes; ++node)
    if (node != context_.node) rows.to[node] = rows.from[node] = most;
  return rows;
}

uint64_t Engine::message_bytes() const { return messages_ ? messages_->bytes() : 0; }

void Engine::dispatch(const DispatchArgs& args, int32_t* plan, Launch part, cudaStream_t stream) const {
  if (messages_) messages_->follow(stream);
  if (args.wait_ns)
    launch_dispatch<Kernels::kTimed>(args, plan, part, stream);
  else if (context_.config.num_nodes > 1)
    launch_dispatch<Kernels::kSeveralNodes>(args, plan, part, stream);
  else if (context_.config.plans_directly && args.topk_idx)
    launch_dispatch<Kernels::kDirect>(args, plan, part, stream);
  else
    launch_dispatch<Kernels::kOneNode>(args, plan, part, stream);
  if (messages_) messages_->dispatch(args, part, stream);
}

void Engine::combine(const CombineArgs& args, int32_t* plan, cudaStream_t stream) const {
  if (messages_) messages_->follow(stream);
  if (args.wait_ns)
    launch_combine<Kernels::kTimed>(args, plan, stream);
  else if (context_.config.num_nodes == 1)
    launch_combine<Kernels::kOneNode>(args, plan, stream);
  else
    launch_combine<Kernels::kSeveralNodes>(args, plan, stream);
  if (messages_) messages_->combine(args, stream);
}

void Engine::decode_dispatch(const DecodeDispatchArgs& args, int32_t* plan, DecodeLaunch part,
                             cudaStream_t stream) const {
  const Config& config = context_.config;
  if (messages_) messages_->follow(stream);
  if (args.wait_ns || config.masks)
    launch_decode_dispatch<Kernels::kDecodeExtras>(args, plan, part, stream);
  else if (config.num_nodes > 1)
    launch_decode_dispatch<Kernels::kDecodeSeveralNodes>(args, plan, part, stream);
  else if (config.plans_directly && args.topk_idx && part != DecodeLaunch::kReceive)
    launch_decode_dispatch<Kernels::kDecodeDirect>(args, plan, part, stream);
  else
    launch_decode_dispatch<Kernels::kDecode>(args, plan, part, stream);
  if (messages_) messages_->decode_dispatch(args, part, stream);
}

void Engine::decode_combine(const DecodeCombineArgs& args, int32_t* plan, DecodeLaunch part,
                            cudaStream_t stream) const {
  if (messages_) messages_->follow(stream);
  if (args.wait_ns || context_.config.masks)
    launch_decode_combine<Kernels::kDecodeExtras>(args, plan, part, stream);
  else if (context_.config.num_nodes > 1)
    launch_decode_combine<Kernels::kDecodeSeveralNodes>(args, plan, part, stream);
  else
    launch_decode_combine<Kernels::kDecode>(args, plan, part, stream);
  if (messages_) messages_->decode_combine(args, part, stream);
}

int64_t Engine::wait_for_counts(double slice_s) const {
  const auto* report = static_cast<const volatile Report*>(context_.report);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(slice_s);
  for (int turn = 0; report->counted != ticket_; ++turn) {
    if (report->aborted != 0 || report->out_of_step != 0) return -1;
    if (turn % 1024 == 0 && std::chrono::steady_clock::now() > end) return -2;
    if (turn > 1 << 16) std::this_thread::yield();
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return report->num_rows;
}

}  // namespace ep::cuda
