// From a routing to a plan: a source lists its rows by receiver, a receiver places its rows by prefix sums.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cpu/engine.h"

namespace ep::cpu {
namespace {

struct Choice {
  int32_t expert, k;
};

// Write the choices of one token in ascending order of experts, without -1 entries. Return how many there are.
int sorted_choices(const int64_t* topk_idx, int num_topk, Choice* choices) {
  int n = 0;
  for (int k = 0; k < num_topk; ++k) {
    const int32_t expert = static_cast<int32_t>(topk_idx[k]);
    if (expert < 0) continue;
    int i = n++;
    for (; i > 0 && choices[i - 1].expert > expert; --i) choices[i] = choices[i - 1];
    choices[i] = {expert, k};
  }
  return n;
}

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

std::optional<BadEntry> find_bad_entry(const int64_t* topk_idx, int num_tokens, int num_topk, int num_experts) {
  for (int t = 0; t < num_tokens; ++t) {
    const int64_t* row = topk_idx + static_cast<size_t>(t) * num_topk;
    for (int k = 0; k < num_topk; ++k) {
      if (row[k] == -1) continue;
      if (row[k] < -1 || row[k] >= num_experts) return BadEntry{t, k, row[k], false};
      if (std::find(row, row + k, row[k]) != row + k) return BadEntry{t, k, row[k], true};
    }
  }
  return std::nullopt;
}

void Engine::route(const RouteArgs& args, const DispatchArgs& payload) {
  // Announce this dispatch. Peers read counts and lists: wait until they have read the last ones.
  bytes_per_row_.clear();
  for (const Rows& rows : payload.rows) bytes_per_row_.push_back(rows.bytes_per_row);
  has_weights_ = payload.topk_weights != nullptr;
  const int64_t tokens_to_node = args.layout == Layout::kDecode ? 0 : max_tokens_to_node;
  announce(call_of(Call::kDispatch, 0, static_cast<int64_t>(args.layout), args.expert_alignment, tokens_to_node));
  wait_for(&Region::consumed, 0, "free staging", staged_epoch_);
  staged_epoch_ = epoch_;

  // Count tokens by expert, rank and node.
  const int num_nodes = config_.num_nodes, per_node = config_.ranks_per_node;
  const Counts& counts = counts_[config_.rank];
  *counts.start = {};
  counts.start->call = own_call_;
  counts.start->max_recv_rows = args.max_recv_rows;
  counts.start->num_tokens = args.num_tokens;
  std::fill_n(counts.node_tokens, num_nodes, 0);
  std::fill_n(counts.rank_tokens, config_.num_ranks(), 0);
  std::fill_n(counts.expert_tokens, config_.num_experts, 0);

  std::vector<Choice> choices(config_.num_topk);
  std::vector<int> last_token_to_rank(config_.num_ranks(), -1), last_token_to_node(num_nodes, -1);
  for (int t = 0; t < args.num_tokens; ++t) {
    for (int k = 0; k < config_.num_topk; ++k) {
      const int64_t expert = args.topk_idx[static_cast<size_t>(t) * config_.num_topk + k];
      if (expert < 0) continue;
      const int rank = static_cast<int>(expert) / num_experts_local();
      counts.expert_tokens[expert]++;
      if (std::exchange(last_token_to_rank[rank], t) != t) counts.rank_tokens[rank]++;
      if (std::exchange(last_token_to_node[node_of_[rank]], t) != t) counts.node_tokens[node_of_[rank]]++;
    }
  }
  counts.node_tokens[node()] = args.num_tokens;  // its payload is the staging, with all tokens
  const std::vector<char>& own_counts = counts_memory_[config_.rank];
  std::copy(own_counts.begin(), own_counts.end(), incoming_counts(node()).data);  // for the other ranks

  // Lay out the lists of every node: the counts are their sizes.
  struct Cursors {  // where the next entries of one node's lists go
    Lists lists;
    int32_t num_rows = 0, num_slots = 0;
    std::vector<int32_t> num_items, num_copies;
  };
  std::vector<Cursors> to(num_nodes);
  for (int m = 0; m < num_nodes; ++m) {
    Cursor c(m == node() ? own().inbox[m].lists : message_memory(lists_out_, m, max_lists_bytes(config_)));
    to[m].lists = carve_lists(c, config_, counts, m);
    to[m].num_items.assign(per_node, 0);
    to[m].num_copies.assign(per_node, 0);
    to[m].lists.slot_begin[0] = 0;
  }

  // Fill the lists.
  for (int t = 0; t < args.num_tokens; ++t) {
    const int64_t* row = args.topk_idx + static_cast<size_t>(t) * config_.num_topk;
    const int n = sorted_choices(row, config_.num_topk, choices.data());
    uint32_t local_ranks = 0;
    for (int i = 0; i < n;) {
      const int rank = choices[i].expert / num_experts_local(), local = local_of_[rank];
      Cursors& cursors = to[node_of_[rank]];
      Lists::OfRank& of = cursors.lists.of_rank[local];
      const int item = cursors.num_items[local]++;
      of.payload_row[item] = cursors.num_rows;
      of.slot[item] = config_.masks ? local * config_.max_tokens + t : cursors.num_slots++;
      local_ranks |= 1u << local % 32;
      of.copy_begin[item] = cursors.num_copies[local];
      for (; i < n && choices[i].expert / num_experts_local() == rank; ++i) {
        const int copy = cursors.num_copies[local]++;
        of.expert[copy] = choices[i].expert - rank * num_experts_local();
        of.k[copy] = choices[i].k;
      }
    }
    for (int m = 0; m < num_nodes; ++m) {
      Cursors& cursors = to[m];
      const bool goes_to_node = cursors.num_slots != cursors.lists.slot_begin[cursors.num_rows];
      if (config_.masks)
        cursors.lists.slot_begin[cursors.num_rows++] = static_cast<int32_t>(local_ranks);
      else if (m == node() || goes_to_node)
        cursors.lists.slot_begin[++cursors.num_rows] = cursors.num_slots;
    }
  }
  for (Cursors& cursors : to)
    for (int local = 0; local < per_node; ++local)
      cursors.lists.of_rank[local].copy_begin[cursors.num_items[local]] = cursors.num_copies[local];
  topk_idx_ = args.topk_idx;
  raise_flag(own().counted[node()], epoch_);
  raise_flag(own().listed[node()], epoch_);
}

Span Engine::own_counts() const { return incoming_counts(node()); }

Span Engine::incoming_counts(int node) const {
  char* data = reinterpret_cast<char*>(own().inbox[node].counts.start);
  Cursor c;
  carve_counts(c, config_);
  return {data, c.size()};
}

void Engine::counts_arrived(int node) { raise_flag(own().counted[node], epoch_); }

OutputSizes Engine::count() {
  compare_on_node("counts");
  for (int m = 0; m < config_.num_nodes; ++m) wait_for(&Region::counted, m, "counts");
  copy_counts();
  for (int source = 0; source < config_.num_ranks(); ++source) compare(counts_[source].start->call, source);
  agree();
  const Counts::Start& mine = *counts_[config_.rank].start;
  const int64_t alignment = mine.call.given[Call::kAlignment], layout = mine.call.given[Call::kLayout];
  const int experts = num_experts_local();
  std::vector<int64_t> needs;  // (rows needed, max_recv_rows) of each rank
  bool too_few = false, is_static = false;

  // Add up every rank's rows, not only this rank's: all ranks must refuse alike.
  new_head_ = {};
  for (int rank = 0; rank < config_.num_ranks(); ++rank) {
    int64_t items = 0, copies = 0, padded = 0;
    for (int source = 0; source < config_.num_ranks(); ++source) items += counts_[source].rank_tokens[rank];
    for (int e = rank * experts; e < (rank + 1) * experts; ++e) {
      int64_t tokens = 0;
      for (int source = 0; source < config_.num_ranks(); ++source) tokens += counts_[source].expert_tokens[e];
      copies += tokens;
      padded += round_up(tokens, alignment);
    }
    const int64_t needed = layout == static_cast<int64_t>(Layout::kExpert)   ? padded
                           : layout == static_cast<int64_t>(Layout::kDecode) ? config_.decode_rows()
                                                                             : items;
    const int64_t given = counts_[rank].start->max_recv_rows;
    if (needed > INT32_MAX) throw Refused("too_many_rows", {alignment, rank, needed});
    if (copies > INT32_MAX) throw Refused("too_many_choices", {rank, copies});
    too_few = too_few || (given >= 0 && needed > given);
    is_static = is_static || given >= 0;
    needs.insert(needs.end(), {needed, given});
    if (rank != config_.rank) continue;
    new_head_.num_items = static_cast<int32_t>(items);
    new_head_.num_copies = static_cast<int32_t>(copies);
    new_head_.num_rows = static_cast<int32_t>(given >= 0 ? given : needed);
  }
  if (too_few) throw Refused("too_few_rows", needs);
  if (is_static && mine.call.given[Call::kTokensToNode] > 0) check_tokens_to_nodes();

  // Fill the head of the new plan.
  new_head_.magic = PlanHead::kMagic;
  new_head_.plan_id = static_cast<int32_t>(epoch_);
  new_head_.buffer_uid = buffer_uid_;
  new_head_.layout = static_cast<int32_t>(layout);
  new_head_.expert_alignment = static_cast<int32_t>(alignment);
  new_head_.num_tokens = mine.num_tokens;
  for (int m = 0; m < config_.num_nodes; ++m)
    new_head_.num_reduced += counts_[rank_at(m, config_.local_rank)].node_tokens[node()];
  Cursor c;
  carve_plan(c, config_, &new_head_);
  return {new_head_.num_rows, static_cast<int64_t>(c.size() / sizeof(int32_t))};
}

// Messages of this engine have the rows that cross. It refuses a routing all the same, where the CUDA engine must: a
// host that does not wait for counts sends messages of this size.
void Engine::check_tokens_to_nodes() const {
  const int64_t most = own_call_.given[Call::kTokensToNode];
  std::vector<int64_t> tokens;  // (most tokens for another node, the limit) of each rank
  bool too_many = false;
  for (int source = 0; source < config_.num_ranks(); ++source) {
    int64_t found = 0;
    for (int m = 0; m < config_.num_nodes; ++m)
      if (m != node_of_[source]) found = std::max<int64_t>(found, counts_[source].node_tokens[m]);
    too_many = too_many || found > most;
    tokens.insert(tokens.end(), {found, most});
  }
  if (too_many) throw Refused("too_many_to_node", tokens);
}

void Engine::copy_counts() {
  for (int source = 0; source < config_.num_ranks(); ++source) {
    if (source == config_.rank) continue;
    if (is_masked(local_of_[source])) {
      clear_counts(source);
    } else {
      const char* from = reinterpret_cast<const char*>(inbox_holding(source).counts.start);
      std::copy_n(from, counts_memory_[source].size(), counts_memory_[source].data());
    }
  }
  check_not_masked("counts");  // before the checks: such copies may be mixed
  for (int source = 0; source < config_.num_ranks(); ++source)
    check_counts(config_, counts_[source], source, node_of_[source]);
}

void Engine::copy_lists() {
  for (int source = 0; source < config_.num_ranks(); ++source) {
    const bool masked = is_masked(local_of_[source]);
    if (masked) clear_counts(source);
    Cursor size;
    carve_lists(size, config_, counts_[source], node());
    const char* from = inbox_holding(source).lists;
    if (masked)
      lists_memory_[source].assign(size.size(), 0);
    else
      lists_memory_[source].assign(from, from + size.size());
  }
  check_not_masked("lists");
}

void Engine::clear_counts(int source) {
  std::fill(counts_memory_[source].begin(), counts_memory_[source].end(), 0);
  counts_[source].start->call = own_call_;
  counts_[source].start->call.rank = source;
  counts_[source].start->max_recv_rows = -1;
}

Span Engine::outgoing_lists(int node) {
  Cursor c;
  carve_lists(c, config_, counts_[config_.rank], node);
  return {lists_out_[node].get(), c.size()};
}

Span Engine::incoming_lists(int node) const { return {own().inbox[node].lists, max_lists_bytes(config_)}; }

void Engine::lists_arrived(int node) { raise_flag(own().listed[node], epoch_); }

void Engine::start_plan(int32_t* block, size_t elements) {
  Cursor c(block);
  plan_ = carve_plan(c, config_, &new_head_);
  if (c.size() > elements * sizeof(*block)) throw std::length_error("the memory of a plan is too small for it");
  plan_bytes_ = c.size();
  *plan_.head = new_head_;
  const int num_nodes = config_.num_nodes, experts = num_experts_local();
  // Copy the sizes of payloads.
  for (int source = 0; source < config_.num_ranks(); ++source)
    plan_.num_payload_rows[source] = counts_[source].node_tokens[node()];
  std::copy_n(counts_[config_.rank].node_tokens, num_nodes, plan_.num_sent_rows);
  plan_.num_sent_rows[node()] = 0;
  // Number the rows of each outgoing payload in the order of tokens.
  std::vector<int32_t> sent(num_nodes, 0);
  std::fill_n(plan_.sent_row, static_cast<size_t>(num_nodes) * new_head_.num_tokens, -1);
  for (int t = 0; t < new_head_.num_tokens; ++t) {
    for (int k = 0; k < config_.num_topk; ++k) {
      const int64_t expert = topk_idx_[static_cast<size_t>(t) * config_.num_topk + k];
      const int m = expert < 0 ? node() : node_of_[expert / experts];
      int32_t& row = plan_.sent_row[static_cast<size_t>(m) * new_head_.num_tokens + t];
      if (m != node() && row < 0) row = sent[m]++;
    }
  }
}

void Engine::finish_plan() {
  for (int m = 0; m < config_.num_nodes; ++m) wait_for(&Region::listed, m, "lists");
  if (config_.masks) copy_lists();
  // Find the first row of each local expert.
  const int num_ranks = config_.num_ranks(), experts = num_experts_local(), first = config_.rank * experts;
  std::vector<int32_t> next_row(experts);  // [experts] next row of each expert's group
  int64_t group_begin = 0;
  for (int e = 0; e < experts; ++e) {
    int32_t tokens = 0;
    for (int source = 0; source < num_ranks; ++source) tokens += counts_[source].expert_tokens[first + e];
    plan_.tokens_per_expert[e] = tokens;
    plan_.rows_per_expert[e] = static_cast<int32_t>(round_up(tokens, new_head_.expert_alignment));
    next_row[e] = static_cast<int32_t>(group_begin);
    group_begin += decodes(new_head_) ? config_.rows_per_group() : plan_.rows_per_expert[e];
  }

  // Join the lists of all sources, and give every copy its row.
  const bool expert_rows = has_expert_rows(new_head_);
  int32_t item = 0, copy = 0;
  std::vector<int32_t> copy_begin;
  std::vector<int32_t> rows_before(next_row);  // this source's
  for (int source = 0; source < num_ranks; ++source) {
    Cursor c(config_.masks ? lists_memory_[source].data() : inbox_holding(source).lists);
    const Lists lists = carve_lists(c, config_, counts_[source], node());
    const Lists::OfRank& of = lists.of_rank[config_.local_rank];
    plan_.item_begin[source] = item;
    std::copy_n(of.payload_row, of.num_items, plan_.payload_row + item);
    std::copy_n(of.slot, of.num_items, plan_.item_slot + item);
    std::copy_n(of.expert, of.num_copies, plan_.copy_expert + copy);
    std::copy_n(of.k, of.num_copies, plan_.copy_k + copy);
    copy_begin.assign(of.copy_begin, of.copy_begin + of.num_items + 1);
    const ReceivedList received{of.num_items,           of.num_copies,     plan_.payload_row + item,
                                plan_.item_slot + item, copy_begin.data(), plan_.copy_expert + copy,
                                plan_.copy_k + copy};
    check_list(config_, received, source, plan_.num_payload_rows[source]);
    for (int i = 0; i < of.num_items; ++i, ++item) {
      plan_.copy_begin[item] = copy;
      for (int n = copy_begin[i + 1] - copy_begin[i]; n > 0; --n, ++copy)
        plan_.output_row[copy] = expert_rows ? next_row[plan_.copy_expert[copy]]++ : item;
    }
    // Each expert has as many copies as its count says, so that its rows end where those of the next expert begin.
    for (int e = 0; e < experts && expert_rows; ++e) {
      const int32_t tokens = counts_[source].expert_tokens[first + e];
      check_number(source, "the copies in its list for expert", next_row[e] - rows_before[e], tokens, tokens,
                   first + e);
    }
    rows_before = next_row;
  }
  plan_.item_begin[num_ranks] = item;
  plan_.copy_begin[item] = copy;

  // Copy the slots to be reduced here by a combine: of own tokens, and of the rail peers' tokens.
  int32_t reduced = 0;
  for (int m = 0; m < config_.num_nodes; ++m) {
    const int source = rank_at(m, config_.local_rank);
    const int32_t rows = counts_[source].node_tokens[node()];
    int32_t* const slot_begin = plan_.slot_begin + reduced + m;
    plan_.reduced_begin[m] = reduced;
    Cursor c(own().inbox[m].lists);
    std::copy_n(carve_lists(c, config_, counts_[source], node()).slot_begin, rows + 1, slot_begin);
    check_slots(config_, slot_begin, source, rows, m == node());
    reduced += rows;
  }
  plan_.reduced_begin[config_.num_nodes] = reduced;
  plan_.head->checksum = checksum_of(plan_.head, plan_bytes_);
}

void Engine::counts_per_expert(int64_t* tokens, int64_t* rows) const {
  std::copy_n(plan_.tokens_per_expert, num_experts_local(), tokens);
  std::copy_n(plan_.rows_per_expert, num_experts_local(), rows);
}

void Engine::reuse(int64_t operation, const int32_t* block, const std::vector<size_t>& bytes_per_row,
                   bool has_weights) {
  plan_ = read_plan(config_, block);
  bytes_per_row_ = bytes_per_row;
  has_weights_ = has_weights;
  const PlanHead& head = *plan_.head;
  announce(call_of(operation, head.plan_id, head.layout, head.expert_alignment));
  if (!weighted_) return;
  // The payload of this combine has no rows, only the weights of this rank's tokens.
  bytes_per_row_.clear();
  has_weights_ = true;
}

}  // namespace ep::cpu
