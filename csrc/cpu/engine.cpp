#include "cpu/engine.h"

#include "common/text.h"

namespace ep {
namespace {

size_t region_bytes(const Config& config) {
  Cursor c;
  carve_region(c, config);
  return c.size();
}

}  // namespace

Engine::Engine(Config config, int64_t buffer_uid)
    : config_(std::move(config)),
      buffer_uid_(buffer_uid),
      own_memory_(SharedMemory::create(region_bytes(config_))),
      node_of_(config_.num_ranks()),
      local_of_(config_.num_ranks()),
      lists_out_(config_.num_nodes),
      payload_out_(config_.num_nodes),
      sums_in_(config_.num_nodes) {
  for (int i = 0; i < config_.num_ranks(); ++i) {
    node_of_[config_.rank_at[i]] = i / config_.ranks_per_node;
    local_of_[config_.rank_at[i]] = i % config_.ranks_per_node;
  }
  traffic_.bytes_read.resize(config_.num_ranks());
  traffic_.bytes_written.resize(config_.num_ranks());
}

void Engine::attach(const std::vector<int>& pids, const std::vector<int>& fds) {
  regions_.clear();
  peer_memory_.clear();
  for (int local = 0; local < config_.ranks_per_node; ++local) {
    char* base = own_memory_.data();
    if (local != config_.local_rank) {
      peer_memory_.push_back(SharedMemory::attach(pids[local], fds[local], own_memory_.size()));
      base = peer_memory_.back().data();
    }
    Cursor c(base);
    regions_.push_back(carve_region(c, config_));
  }
}

void Engine::close() {
  regions_.clear();
  peer_memory_.clear();
  own_memory_.unmap();
  for (auto* scratch : {&lists_out_, &payload_out_, &sums_in_}) scratch->clear();
}

uint32_t Engine::begin(double timeout_s, int num_threads) {
  deadline_ns_ = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  num_threads_ = num_threads;
  return ++epoch_;
}

void Engine::give_up() {
  if (!regions_.empty()) raise_flag(*own().gave_up, 1);
}

void Engine::wait_for(Flag* Region::* flags, int index, const char* phase, uint32_t epoch) const {
  std::vector<Awaited> awaited;
  for (int i = 1; i < config_.ranks_per_node; ++i) {  // every rank starts at a different peer
    const int local = (config_.local_rank + i) % config_.ranks_per_node;
    const Region& peer = regions_[local];
    awaited.push_back({peer.*flags + index, peer.gave_up, config_.rank_at[node() * config_.ranks_per_node + local]});
  }
  wait_until(awaited, epoch, deadline_ns_, config_.spin_us, phase);
}

void Engine::check_plan(const int32_t* block) const {
  const Plan plan = read_plan(config_, block);
  if (plan.fixed->magic != Plan::kMagic || plan.fixed->buffer_uid != buffer_uid_)
    throw std::invalid_argument("handle: given a plan of another buffer, allowed: one that this buffer made");
}

void Engine::announce(uint32_t plan_id, const std::vector<size_t>& bytes_per_row, bool has_weights) {
  bytes_per_row_ = bytes_per_row;
  has_weights_ = has_weights;
  const uint64_t bytes_of_scales = bytes_per_row.size() > 1 ? bytes_per_row[1] : 0;
  other_operation_ = {config_.rank, plan_id, has_weights, {bytes_per_row[0], bytes_of_scales}};
  own().operation[epoch_ % 2] = other_operation_;
  disagreement_.clear();
}

// Keeps the first disagreement and goes on: every rank takes all steps, so that none waits in vain for another.
void Engine::compare(const Operation& theirs) {
  if (!disagreement_.empty()) return;
  const Operation& mine = own_operation();
  if (theirs.plan_id != mine.plan_id)
    disagreement_ = text("handle: rank ", theirs.rank, " gave the plan of epoch ", theirs.plan_id, ", rank ", mine.rank,
                         " that of epoch ", mine.plan_id, "; all ranks must use handles of the same dispatch");
  else if (theirs.has_weights != mine.has_weights)
    disagreement_ = text("topk_weights: rank ", (mine.has_weights ? mine : theirs).rank, " gave them, rank ",
                         (mine.has_weights ? theirs : mine).rank, " gave None; all ranks must do the same");
  else if (theirs.bytes_per_row[0] != mine.bytes_per_row[0] || theirs.bytes_per_row[1] != mine.bytes_per_row[1])
    disagreement_ = text("x: rank ", theirs.rank, " gave rows of ", theirs.bytes_per_row[0], " + ",
                         theirs.bytes_per_row[1], " bytes (row + scales), rank ", mine.rank, " of ",
                         mine.bytes_per_row[0], " + ", mine.bytes_per_row[1], "; all ranks must do the same");
  else
    return;
  other_operation_ = theirs;
}

// With all ranks of one node; those of another one stand in front of their rows.
void Engine::compare_with_node(int node) {
  for (const Region& peer : regions_) {
    Cursor c(peer.from_node[node].payload);
    compare(node == this->node() ? peer.operation[epoch_ % 2] : carve_heading(c)->sender);
  }
}

void Engine::agree() const {
  if (!disagreement_.empty()) throw RefusedByAll(disagreement_);
}

char* Engine::scratch(std::vector<std::unique_ptr<char[]>>& of_node, int node, size_t bytes) {
  if (!of_node[node]) of_node[node].reset(new char[bytes]);  // not cleared: pages are committed when touched
  return of_node[node].get();
}

}  // namespace ep
