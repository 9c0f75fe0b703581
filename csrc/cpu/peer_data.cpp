#include "cpu/peer_data.h"

#include <algorithm>

namespace ep::cpu {
namespace {

// Checks numbers of one rank.
struct Check {
  int rank;

  void operator()(const char* name, int64_t found, int64_t least, int64_t most, int64_t index = -1) const {
    check_number(rank, name, found, least, most, index);
  }

  // Check that every number is in [0, end). Only after a failure find out which one is not: so the loop stays fast.
  void all_below(const char* name, const int32_t* numbers, int count, int64_t end) const {
    uint32_t largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(numbers[i]));
    if (count == 0 || largest < end) return;
    for (int i = 0; i < count; ++i) (*this)(name, numbers[i], 0, end - 1, i);
  }

  // Check that the numbers are in [begin, end) and ascend, each by one of [least, most].
  void ascends(const char* name, const int32_t* numbers, int count, int64_t begin, int64_t end, uint32_t least = 1,
               uint32_t most = INT32_MAX) const {
    if (count == 0) return;
    (*this)(name, numbers[0], begin, end - 1, 0);
    bool is_wrong = false;
    for (int i = 1; i < count; ++i) {
      const uint32_t step = static_cast<uint32_t>(numbers[i]) - static_cast<uint32_t>(numbers[i - 1]);
      is_wrong |= (numbers[i] < numbers[i - 1]) | (step < least) | (step > most);
    }
    if (!is_wrong && numbers[count - 1] < end) return;
    for (int64_t i = 1; i < count; ++i) {
      const int64_t before = numbers[i - 1];
      (*this)(name, numbers[i], before + least, std::min<int64_t>(before + most, end - 1), i);
    }
  }
};

}  // namespace

BadPeerData::BadPeerData(int rank, const std::string& field, int64_t found, int64_t least, int64_t most)
    : std::runtime_error("data of rank " + std::to_string(rank) + " cannot be right: " + field + " is " +
                         std::to_string(found)),
      rank(rank),
      field(field),
      found(found),
      least(least),
      most(most) {}

void check_number(int rank, const char* name, int64_t found, int64_t least, int64_t most, int64_t index) {
  if (least <= found && found <= most) return;
  const std::string entry = index < 0 ? "" : "[" + std::to_string(index) + "]";
  throw BadPeerData(rank, name + entry, found, least, most);
}

void check_call(const Call& call, int rank) {
  const Check check{rank};
  check("the rank in its call", call.rank, rank, rank);
  check("the operation of its call", call.given[Call::kOperation], Call::kDispatch, Call::kWeightedCombine);
  check("the layout of its call", call.given[Call::kLayout], static_cast<int64_t>(Layout::kRank),
        static_cast<int64_t>(Layout::kDecode));
}

void check_counts(const Config& config, const Counts& counts, int source, int node) {
  const Check check{source};
  const int experts = config.num_local_experts(), num_topk = config.num_topk, per_node = config.ranks_per_node;
  const int64_t num_tokens = counts.start->num_tokens;
  check("num_tokens", num_tokens, 0, config.max_tokens);
  check("max_recv_rows", counts.start->max_recv_rows, -1, INT32_MAX);
  for (int m = 0; m < config.num_nodes; ++m) {
    const bool is_own = m == node;  // its payload for its own node has all of its tokens
    const int64_t tokens = counts.node_tokens[m];
    check("node_tokens", tokens, is_own ? num_tokens : 0, num_tokens, m);
    int64_t items = 0, copies = 0;
    for (int local = 0; local < per_node; ++local) {
      const int rank = config.rank_at[m * per_node + local];
      const int64_t to_rank = counts.rank_tokens[rank];
      check("rank_tokens", to_rank, 0, tokens, rank);
      int64_t choices = 0;
      for (int e = rank * experts; e < (rank + 1) * experts; ++e) {
        check("expert_tokens", counts.expert_tokens[e], 0, to_rank, e);
        choices += counts.expert_tokens[e];
      }
      check("the sum of expert_tokens of rank", choices, to_rank, to_rank * std::min(num_topk, experts), rank);
      items += to_rank;
      copies += choices;
    }
    check("the sum of rank_tokens of node", items, is_own ? 0 : tokens, tokens * std::min(num_topk, per_node), m);
    check("the sum of expert_tokens of node", copies, items, tokens * num_topk, m);
  }
}

void check_list(const Config& config, const ReceivedList& list, int source, int num_rows) {
  const Check check{source};
  const int experts = config.num_local_experts();
  check.ascends("payload_row", list.payload_row, list.num_items, 0, num_rows);
  // With masks each rank of the node has slots of its own.
  const int64_t first_slot = config.masks ? int64_t{config.local_rank} * config.max_tokens : 0;
  const int64_t num_slots = config.masks ? config.max_tokens : int64_t{num_rows} * config.max_partials();
  check.ascends("slot", list.slot, list.num_items, first_slot, first_slot + num_slots);
  check("copy_begin", list.copy_begin[0], 0, 0, 0);
  check.ascends("copy_begin", list.copy_begin, list.num_items + 1, 0, int64_t{list.num_copies} + 1, 1,
                std::min(config.num_topk, experts));
  check("copy_begin", list.copy_begin[list.num_items], list.num_copies, list.num_copies, list.num_items);
  check.all_below("expert", list.expert, list.num_copies, experts);
  check.all_below("k", list.k, list.num_copies, config.num_topk);
}

void check_slots(const Config& config, const int32_t* slot_begin, int source, int num_rows, bool own) {
  const Check check{source};
  if (config.masks) {
    check.all_below("slot_begin", slot_begin, num_rows, int64_t{1} << config.ranks_per_node);
    return;
  }
  const int64_t num_slots = int64_t{num_rows} * config.max_partials();
  check("slot_begin", slot_begin[0], 0, 0, 0);
  check.ascends("slot_begin", slot_begin, num_rows + 1, 0, num_slots + 1, own ? 0 : 1, config.max_partials());
}

}  // namespace ep::cpu
