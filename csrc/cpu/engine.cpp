#include "cpu/engine.h"

#include <algorithm>
#include <string>

namespace ep::cpu {
namespace {

size_t region_bytes(const Config& config) {
  Cursor c;
  carve_region(c, config);
  return c.size();
}

}  // namespace

Engine::Engine(Config config, int64_t buffer_uid, void (*on_look)())
    : config_(std::move(config)),
      buffer_uid_(buffer_uid),
      own_memory_(SharedMemory::create(region_bytes(config_))),
      node_of_(config_.num_ranks()),
      local_of_(config_.num_ranks()),
      lists_out_(config_.num_nodes),
      payload_out_(config_.num_nodes),
      weights_out_(config_.num_nodes),
      sums_in_(config_.num_nodes),
      on_look_(on_look),
      calls_(config_.num_ranks()) {
  for (int i = 0; i < config_.num_ranks(); ++i) {
    node_of_[config_.rank_at[i]] = i / config_.ranks_per_node;
    local_of_[config_.rank_at[i]] = i % config_.ranks_per_node;
  }
  traffic_.bytes_read.resize(config_.num_ranks());
  traffic_.bytes_written.resize(config_.num_ranks());
  waited_ns_.resize(config_.num_ranks());
  for (int source = 0; source < config_.num_ranks(); ++source) {
    Cursor size;
    carve_counts(size, config_);
    Cursor c(counts_memory_.emplace_back(size.size()).data());
    counts_.push_back(carve_counts(c, config_));
  }
  if (config_.masks) lists_memory_.resize(config_.num_ranks());
}

void Engine::attach(const std::vector<int>& pids, const std::vector<int>& fds) {
  std::vector<Region> regions;  // regions_ stays empty if a peer's memory is gone
  for (int local = 0; local < config_.ranks_per_node; ++local) {
    processes_.emplace_back(pids[local]);
    char* base = own_memory_.data();
    if (local != config_.local_rank) {
      try {
        peer_memory_.push_back(SharedMemory::attach(fds[local], own_memory_.size()));
      } catch (const std::runtime_error& error) {
        throw std::runtime_error("rank " + std::to_string(rank_at(node(), local)) + ": " + error.what());
      }
      base = peer_memory_.back().data();
    }
    Cursor c(base);
    regions.push_back(carve_region(c, config_));
  }
  regions_ = std::move(regions);
}

void Engine::close() {
  regions_.clear();
  peer_memory_.clear();
  own_memory_.unmap();
  for (auto* messages : {&lists_out_, &payload_out_, &weights_out_, &sums_in_}) messages->clear();
}

void Engine::give_back() {
  own_memory_.give_back(reinterpret_cast<char*>(own().inbox[0].counts.start) - own_memory_.data());
  for (auto* messages : {&lists_out_, &payload_out_, &weights_out_, &sums_in_})
    for (auto& message : *messages) message.reset();
}

uint32_t Engine::begin(double timeout_s, int num_threads) {
  timeout_ns_ = static_cast<int64_t>(timeout_s * 1e9);
  deadline_ns_ = now_ns() + timeout_ns_;
  num_threads_ = num_threads;
  std::fill(waited_ns_.begin(), waited_ns_.end(), 0);
  return ++epoch_;
}

void Engine::abort(AbortReason why) {
  if (!regions_.empty() && own().aborted->epoch.load() == 0) raise_flag(*own().aborted, why);
}

void Engine::wait_for(Flag* Region::* flags, int index, const char* phase, uint32_t epoch) {
  // Data of other nodes are relayed: the peer raises these flags for its rail peer.
  const bool is_relayed = flags == &Region::counted || flags == &Region::listed || flags == &Region::staged;
  const int node_about = is_relayed ? index : node();
  // Wait; with masks wait again after each masking of late ranks.
  for (bool waits = true; waits;) {
    std::vector<Awaited> awaited;
    for (int i = 1; i < config_.ranks_per_node; ++i) {  // every rank begins with a different peer
      const int local = (config_.local_rank + i) % config_.ranks_per_node;
      if (is_masked(local)) continue;
      const Region& peer = regions_[local];
      const int rank = config_.rank_at[node() * config_.ranks_per_node + local];
      const int about = config_.rank_at[node_about * config_.ranks_per_node + local];
      const Flag* masks_me = config_.masks ? peer.masked + config_.local_rank : nullptr;
      awaited.push_back({peer.*flags + index, peer.aborted, masks_me, &processes_[local], rank, &waited_ns_[about]});
    }
    const int64_t begin = now_ns();
    waits = false;
    try {
      wait_until(awaited, epoch, {deadline_ns_, config_.spin_us, &stopped_, on_look_}, phase);
    } catch (const PeerLate& late) {
      if (!config_.masks) throw;
      check_not_masked(phase);  // a rank that comes too late itself masks nobody
      waits = true;
      for (int rank : late.ranks) {
        waited_ns_[rank] += now_ns() - begin;
        mask(rank);
      }
      // The others wait for the same ranks, and began up to one limit later: give them time.
      deadline_ns_ = std::max(deadline_ns_, now_ns() + 2 * timeout_ns_);
    }
  }
  check_not_masked(phase);
}

// A masked rank may be slow, not dead. It may read memory that this rank overwrites from now on, without waiting for
// it. So the flag is raised before any later write, and the masked rank reads it after its loads. In memory of this
// rank it writes only slots of its own. Nobody reads these while it is masked.
void Engine::mask(int rank) {
  raise_flag(own().masked[local_of_[rank]], 1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

std::vector<int> Engine::masked() const {
  std::vector<int> masked(config_.num_ranks(), 0);
  for (int local = 0; local < config_.ranks_per_node; ++local)
    masked[config_.rank_at[node() * config_.ranks_per_node + local]] = is_masked(local);
  return masked;
}

void Engine::check_not_masked(const char* phase) const {
  if (!config_.masks) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int local = 0; local < config_.ranks_per_node; ++local)
    if (local != config_.local_rank && !is_masked(local) &&
        regions_[local].masked[config_.local_rank].epoch.load() != 0)
      throw MaskedByPeer(phase);
}

void Engine::unmask(uint32_t epoch) {
  for (int local = 0; local < config_.ranks_per_node; ++local) own().masked[local].epoch.store(0);
  own().aborted->epoch.store(0);
  epoch_ = staged_epoch_ = pushed_epoch_ = compared_epoch_ = epoch;
  // No operation is under way: nothing of an earlier epoch is waited for, and nothing is read any more.
  for (Flag* Region::* flags :
       {&Region::called, &Region::counted, &Region::listed, &Region::staged, &Region::pushed, &Region::consumed})
    raise_flag((own().*flags)[0], epoch);
}

void Engine::check_plan(const int32_t* block, size_t elements, int64_t num_tokens, int64_t num_rows) const {
  const auto* head = reinterpret_cast<const PlanHead*>(block);
  if (elements * sizeof(*block) < sizeof(PlanHead) || head->magic != PlanHead::kMagic ||
      head->buffer_uid != buffer_uid_)
    throw std::invalid_argument("handle: given a plan of another buffer, allowed: one that this buffer made");
  const auto is_count = [](int64_t number, int64_t most) { return 0 <= number && number <= most; };
  const int64_t most_items = static_cast<int64_t>(config_.num_ranks()) * config_.max_tokens;
  const int64_t most_tokens = static_cast<int64_t>(config_.num_nodes) * config_.max_tokens;
  Cursor end;
  if (head->num_tokens != num_tokens || head->num_rows != num_rows || !is_count(num_tokens, config_.max_tokens) ||
      !is_count(head->num_items, most_items) || !is_count(head->num_copies, most_items * config_.num_topk) ||
      !is_count(head->num_reduced, most_tokens) ||
      (carve_plan(end, config_, head), end.size() > elements * sizeof(*block)))
    throw std::invalid_argument("handle: given a plan of other sizes, allowed: the handle as its dispatch returned it");
  if (head->checksum != checksum_of(head, end.size()))
    throw std::invalid_argument(
        "handle: given a plan that was changed, allowed: the handle as its dispatch returned it");
}

Call Engine::call_of(int64_t operation, int64_t plan, int64_t layout, int64_t alignment, int64_t tokens_to_node) const {
  return {config_.rank,
          {operation, plan, tokens_to_node, layout, alignment, has_weights_, static_cast<int64_t>(bytes_per_row_[0]),
           bytes_per_row_.size() > 1 ? num_scales : 0}};
}

// Write this rank's Call for the peers of the node. The Call of two epochs ago may be overwritten: every peer has begun
// the last epoch, and so has compared the Calls of the epoch before.
void Engine::announce(const Call& call) {
  own_call_ = own().calls[epoch_ % 2] = call;
  raise_flag(own().called[0], epoch_);
  for (Call& seen : calls_) seen.rank = -1;
  other_call_ = calls_[call.rank] = call;
  disagrees_ = false;
  weighted_ = call.given[Call::kOperation] == Call::kWeightedCombine;
}

// Wait for the Calls of this node and compare them, once an epoch, before any wait for this epoch. With one node all
// ranks find the same difference here, and refuse. With several nodes ranks must keep sending the same messages: a
// difference in sizes is refused later, when all nodes have seen it. Ranks in different operations send different
// messages, so they refuse at once.
void Engine::compare_on_node(const char* phase) {
  if (compared_epoch_ == epoch_) return;
  wait_for(&Region::called, 0, phase);
  compared_epoch_ = epoch_;
  bool in_step = true;
  for (int local = 0; local < config_.ranks_per_node; ++local) {
    if (is_masked(local)) continue;
    const Call call = regions_[local].calls[epoch_ % 2];
    compare(call, rank_at(node(), local));
    in_step = in_step && call.in_step_with(own_call_);
  }
  if (config_.num_nodes == 1) return agree();
  if (in_step) return;
  try {
    agree();
  } catch (Refused& refused) {
    refused.by_all = false;
    throw;
  }
}

void Engine::compare(const Call& theirs, int rank) {
  check_call(theirs, rank);
  calls_[rank] = theirs;
  if (theirs.differs_from(own_call_) == Call::kNumFields) return;
  if (!disagrees_) other_call_ = theirs;
  disagrees_ = true;
}

// Compare the Calls in front of another node's payloads. They have arrived.
void Engine::compare_payloads(int node) {
  if (node == this->node()) return;
  for (int local = 0; local < config_.ranks_per_node; ++local) {
    Cursor c(regions_[local].inbox[node].payload);
    const Call sender = carve_calls(c)->sender;
    compare(sender, rank_at(node, local));
  }
}

// Compare with the lowest rank, not with this one: so all ranks that have seen the same Calls throw the same.
void Engine::agree() const {
  if (!disagrees_) return;
  check_not_masked("counts");  // the Calls may be later ones
  const Call* first = nullptr;
  for (const Call& call : calls_) {
    if (call.rank < 0) continue;
    if (!first) first = &call;
    const int field = call.differs_from(*first);
    if (field == Call::kNumFields) continue;
    throw Refused("disagreement", {call.rank, call.given[field], first->rank, first->given[field]},
                  Call::kNames[field]);
  }
  // A rank has given one Call here and another one there, which is not kept.
  const int field = other_call_.differs_from(own_call_);
  const int64_t own = own_call_.given[field];
  throw BadPeerData(static_cast<int>(other_call_.rank), Call::kNames[field], other_call_.given[field], own, own);
}

char* Engine::message_memory(std::vector<std::unique_ptr<char[]>>& of_node, int node, size_t bytes) {
  if (!of_node[node]) of_node[node].reset(new char[bytes]);  // not cleared: a page costs memory only when it is touched
  return of_node[node].get();
}

}  // namespace ep::cpu
