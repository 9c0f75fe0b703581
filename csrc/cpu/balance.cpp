#include "cpu/balance.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace ep::cpu {
namespace {

using balance::Attempt, balance::Copy, balance::Node, balance::Sizes;

// Memory for the planning of one node after the other.
class Workspace {
 public:
  explicit Workspace(const Sizes& sizes) {
    carve(Cursor(), sizes);
    Cursor measured;
    balance::carve_node(measured, sizes);
    Attempt::carve(measured, sizes, 1);
    memory_.resize(measured.size() / sizeof(int64_t));
    carve(Cursor(memory_.data()), sizes);
  }

  Node node;
  Attempt attempt;

 private:
  void carve(Cursor c, const Sizes& sizes) {
    node = balance::carve_node(c, sizes);
    attempt = Attempt::carve(c, sizes, 1);
  }

  std::vector<int64_t> memory_;
};

// Return the rows of every expert.
std::vector<int64_t> totals_of(const Sizes& sizes, const int32_t* counts, int64_t row_stride) {
  std::vector<int64_t> totals(sizes.num_experts());
  for (int source = 0; source < sizes.num_ranks; ++source)
    for (int expert = 0; expert < sizes.num_experts(); ++expert)
      totals[expert] += balance::count_of(counts, row_stride, source, expert);
  return totals;
}

// Return the rows of every rank before there are copies.
std::vector<int64_t> loads_of(const Sizes& sizes, const std::vector<int64_t>& totals) {
  std::vector<int64_t> loads(sizes.num_ranks);
  for (int expert = 0; expert < sizes.num_experts(); ++expert)
    loads[expert / sizes.num_local_experts] += totals[expert];
  return loads;
}

// What a source knows of one expert.
struct Numbering {
  std::vector<int> slots;   // with copies that get some of its choices
  int64_t next = 0;         // number of its next token
  int64_t last_token = -1;  // that has chosen it
};

// Return what a source knows of every expert before its first token.
std::vector<Numbering> numberings_of(const Sizes& sizes, int rank, const int32_t* counts, int64_t row_stride,
                                     const Copy* copies) {
  std::vector<Numbering> all(sizes.num_experts());
  for (int source = 0; source < rank; ++source)
    for (int expert = 0; expert < sizes.num_experts(); ++expert)
      all[expert].next += balance::count_of(counts, row_stride, source, expert);
  for (int slot = 0; slot < sizes.slots_of_all(); ++slot) {
    const int expert = copies[slot].expert;
    if (expert < 0 || expert >= sizes.num_experts()) continue;
    const int64_t num_choices = balance::count_of(counts, row_stride, rank, expert);
    if (balance::serves(copies[slot], all[expert].next, num_choices)) all[expert].slots.push_back(slot);
  }
  return all;
}

}  // namespace

template <class Index>
void balance_count(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts) {
  std::fill_n(counts, num_experts, 0);
  for (int64_t i = 0; i < num_choices; ++i) {
    const int64_t expert = topk_idx[i];
    if (expert >= 0 && expert < num_experts) ++counts[expert];
  }
}

void balance_plan(const Sizes& sizes, const int32_t* rank_at, const int32_t* counts, int64_t row_stride, Copy* copies,
                  int32_t* rows) {
  const std::vector<int64_t> totals = totals_of(sizes, counts, row_stride), loads = loads_of(sizes, totals);
  int64_t group_total = 0, group_max = 0;
  for (int64_t load : loads) {
    group_total += load;
    group_max = std::max(group_max, load);
  }
  if (group_total > INT32_MAX)
    throw std::invalid_argument("counts add up to " + std::to_string(group_total) +
                                " rows, but at most 2^31 - 1 can be planned");
  Workspace workspace(sizes);
  const Node& node = workspace.node;
  const Attempt& attempt = workspace.attempt;
  const int m = sizes.num_local_experts;
  for (int number = 0; number < sizes.num_nodes(); ++number) {
    for (int i = 0; i < sizes.ranks_per_node; ++i) {
      node.rank[i] = rank_at[number * sizes.ranks_per_node + i];
      node.load[i] = loads[node.rank[i]];
      for (int j = 0; j < m; ++j) node.total[i * m + j] = totals[node.rank[i] * m + j];
      for (int j = 0; j < m; ++j) balance::put_in_order(sizes, node, i, j);
    }
    const balance::Thresholds thresholds = balance::thresholds_of(sizes, node, group_total, group_max);
    int64_t threshold = thresholds.start;
    while (!balance::hand_out(sizes, node, attempt, threshold)) threshold += thresholds.step;
    for (int i = 0; i < sizes.ranks_per_node; ++i) {
      const int rank = node.rank[i];
      rows[rank] = static_cast<int32_t>(node.load[i]);
      rows[sizes.num_ranks + rank] = static_cast<int32_t>(attempt.load[i]);
      for (int slot = 0; slot < sizes.num_slots; ++slot)
        copies[rank * sizes.num_slots + slot] = balance::copy_in(sizes, node, attempt, i, slot);
    }
  }
}

template <class Index>
void balance_rewrite(const Sizes& sizes, int rank, const Index* topk_idx, int64_t num_tokens, int num_topk,
                     const int32_t* counts, int64_t row_stride, const Copy* copies, int64_t* physical) {
  std::vector<Numbering> numberings = numberings_of(sizes, rank, counts, row_stride, copies);
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t i = token * num_topk; i < (token + 1) * num_topk; ++i) {
      const int64_t expert = topk_idx[i];
      physical[i] = balance::physical_at_home(sizes, expert);
      if (expert < 0 || expert >= sizes.num_experts()) continue;
      Numbering& numbering = numberings[expert];
      if (numbering.last_token != token) ++numbering.next;  // a repetition in one token has the same number
      numbering.last_token = token;
      const int64_t number = numbering.next - 1;
      for (int slot : numbering.slots)
        if (number >= copies[slot].begin && number < copies[slot].end)
          physical[i] = balance::physical_of_slot(sizes, slot);
    }
}

template void balance_count(const int32_t*, int64_t, int, int32_t*);
template void balance_count(const int64_t*, int64_t, int, int32_t*);
template void balance_rewrite(const Sizes&, int, const int32_t*, int64_t, int, const int32_t*, int64_t, const Copy*,
                              int64_t*);
template void balance_rewrite(const Sizes&, int, const int64_t*, int64_t, int, const int32_t*, int64_t, const Copy*,
                              int64_t*);

}  // namespace ep::cpu
