// The planner of balanced experts, as both engines run it: which experts get a copy on another rank of their node for
// one microbatch, and which of their rows go there. Integers and written tie-breaks only, so every rank finds the same.
//
//   counts [source rank, expert]      choices of every rank; all ranks have this matrix
//   total [expert]                    their sum over the sources; an expert's rows
//   load [rank]                       rows of the rank's own experts
//   for threshold in start, start + step, ...:      each node on its own
//     while the fullest rank of the node has load > threshold:
//       its expert with most rows left gives some to the emptiest rank with a free slot, at least smallest_copy
//     the first threshold that every rank gets below is taken
//
// Physical experts: rank R has R * (m + r) + j, which for j < m is its own expert R * m + j, and else its slot j - m.
// (m = num_local_experts, r = num_slots.)
#pragma once
#include <cstdint>

#include "common/cursor.h"

namespace ep::balance {

constexpr int kMaxRanks = 512;
constexpr int kMaxLocal = 72;      // ranks of one node
constexpr int kMaxSlots = 8;       // slots of one rank
constexpr int kMaxExperts = 1024;  // logical ones

// Thresholds are this part of the mean load apart: their step costs less than 1 % of balance.
constexpr int kStepsOfMean = 128;
// The group counts as balanced while the fullest rank has less than this many percent of the mean load.
constexpr int kBalancedPercent = 105;

struct Sizes {
  int32_t num_ranks, ranks_per_node;
  int32_t num_local_experts;  // logical experts of one rank, its own
  int32_t num_slots;          // slots of one rank
  int32_t smallest_copy;      // rows of a copy, at least; not 0

  EP_HOST_DEVICE int num_nodes() const { return num_ranks / ranks_per_node; }
  EP_HOST_DEVICE int num_experts() const { return num_ranks * num_local_experts; }
  EP_HOST_DEVICE int num_physical() const { return num_ranks * (num_local_experts + num_slots); }
  EP_HOST_DEVICE int experts_of_node() const { return ranks_per_node * num_local_experts; }
  EP_HOST_DEVICE int slots_of_node() const { return ranks_per_node * num_slots; }
  EP_HOST_DEVICE int slots_of_all() const { return num_ranks * num_slots; }
};

// One copy, as the plan has it: int32 [num_ranks, num_slots] of these. Of the choices of an expert, numbered in the
// order of (source rank, source token), those from begin to end - 1 go to this slot.
struct Copy {
  int32_t expert;  // logical; -1: the slot is free, and begin and end are 0
  int32_t begin, end;
};

// ---- Planning. Inside a node ranks are numbered 0 to ranks_per_node - 1, experts by these: rank * m + j. ----

// What all thresholds of a node share.
struct Node {
  int32_t* rank;   // [ranks_per_node] rank in the group
  int64_t* load;   // [ranks_per_node] rows of the rank's own experts
  int64_t* total;  // [experts_of_node] rows of each expert
  int32_t* order;  // [experts_of_node] the experts of each rank in turn, those with most rows first
};

// The arrays of one attempt. On a GPU the attempts of a block lie side by side.
template <class T>
struct Strided {
  T* first;
  int stride;
  EP_HOST_DEVICE T& operator[](int i) const { return first[static_cast<int64_t>(i) * stride]; }
};

// An attempt to get every rank of a node below one threshold.
struct Attempt {
  Strided<int64_t> load;         // [ranks_per_node] rows of each rank
  Strided<int32_t> num_used;     // [ranks_per_node] slots in use
  Strided<int32_t> num_started;  // [ranks_per_node] own experts that have given rows: the first ones of `order`
  Strided<int32_t> copy_expert;  // [slots_of_node] expert in each slot in use
  Strided<int32_t> copy_rows;    // [slots_of_node] its rows there
  Strided<int32_t> started;      // [slots_of_node] the experts that have given rows, in the order of their first copy
  Strided<int32_t> left;         // [slots_of_node] rows that they have left at home

  // [host] [block] Lay out `stride` attempts side by side, and return the first.
  EP_HOST_DEVICE static Attempt carve(Cursor& c, const Sizes& sizes, int stride) {
    const size_t ranks = static_cast<size_t>(sizes.ranks_per_node) * stride;
    const size_t slots = static_cast<size_t>(sizes.slots_of_node()) * stride;
    Attempt a;
    a.load = {c.take<int64_t>(ranks), stride};
    a.num_used = {c.take<int32_t>(ranks), stride};
    a.num_started = {c.take<int32_t>(ranks), stride};
    a.copy_expert = {c.take<int32_t>(slots), stride};
    a.copy_rows = {c.take<int32_t>(slots), stride};
    a.started = {c.take<int32_t>(slots), stride};
    a.left = {c.take<int32_t>(slots), stride};
    return a;
  }

  // [thread] Return the attempt `i` places behind this one.
  EP_HOST_DEVICE Attempt at(int i) const {
    Attempt a = *this;
    a.load.first += i, a.num_used.first += i, a.num_started.first += i;
    a.copy_expert.first += i, a.copy_rows.first += i;
    a.started.first += i, a.left.first += i;
    return a;
  }
};

// [host] [block] Lay out a node, or measure it.
EP_HOST_DEVICE inline Node carve_node(Cursor& c, const Sizes& sizes) {
  Node node;
  node.rank = c.take<int32_t>(sizes.ranks_per_node);
  node.load = c.take<int64_t>(sizes.ranks_per_node);
  node.total = c.take<int64_t>(sizes.experts_of_node());
  node.order = c.take<int32_t>(sizes.experts_of_node());
  return node;
}

EP_HOST_DEVICE inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
EP_HOST_DEVICE inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
EP_HOST_DEVICE inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// [thread] Return one of the counts. Only a broken exchange has one below 0: it counts as 0, so that every sum is sane.
EP_HOST_DEVICE inline int64_t count_of(const int32_t* counts, int64_t row_stride, int source, int expert) {
  return larger(0, counts[source * row_stride + expert]);
}

// [thread] Put expert j of a rank into its place in `order`: most rows first, ties by lower number.
EP_HOST_DEVICE inline void put_in_order(const Sizes& sizes, const Node& node, int rank, int j) {
  const int first = rank * sizes.num_local_experts;
  const int64_t own = node.total[first + j];
  int place = 0;
  for (int other = 0; other < sizes.num_local_experts; ++other) {
    const int64_t rows = node.total[first + other];
    place += rows > own || (rows == own && other < j);
  }
  node.order[first + place] = first + j;
}

struct Thresholds {
  int64_t start, step;
};

// [thread] Return the thresholds to try for a node. In a balanced group the first one is above every load: no copies.
EP_HOST_DEVICE inline Thresholds thresholds_of(const Sizes& sizes, const Node& node, int64_t group_total,
                                               int64_t group_max) {
  int64_t node_total = 0, node_max = 0;
  for (int i = 0; i < sizes.ranks_per_node; ++i) {
    node_total += node.load[i];
    node_max = larger(node_max, node.load[i]);
  }
  const int64_t mean = divide_up(group_total, sizes.num_ranks);
  const int64_t step = larger(1, mean / kStepsOfMean);
  if (group_max * sizes.num_ranks * 100 < group_total * kBalancedPercent) return {node_max, step};
  return {larger(mean, divide_up(node_total, sizes.ranks_per_node)), step};
}

// [thread] Return the fullest rank of a node; ties by lower number in the group.
EP_HOST_DEVICE inline int fullest_rank(const Sizes& sizes, const Node& node, const Attempt& a) {
  int best = 0;
  for (int i = 1; i < sizes.ranks_per_node; ++i) {
    const int64_t more = a.load[i] - a.load[best];
    if (more > 0 || (more == 0 && node.rank[i] < node.rank[best])) best = i;
  }
  return best;
}

// [thread] Return the emptiest rank of a node that has a free slot, or -1; ties by lower number in the group.
EP_HOST_DEVICE inline int emptiest_rank(const Sizes& sizes, const Node& node, const Attempt& a) {
  int best = -1;
  for (int i = 0; i < sizes.ranks_per_node; ++i) {
    if (a.num_used[i] == sizes.num_slots) continue;
    const int64_t less = best < 0 ? 1 : a.load[best] - a.load[i];
    if (less > 0 || (less == 0 && node.rank[i] < node.rank[best])) best = i;
  }
  return best;
}

struct Giver {
  int32_t expert;  // in the node; -1: the rank has none
  int64_t left;    // its rows at home
  int entry;       // in `started`; num_started: it has given no rows yet
};

// [thread] Return a rank's own expert with most rows left at home, ties by lower number. It is the first of `order`
// that has given no rows yet, or one that has.
EP_HOST_DEVICE inline Giver largest_expert(const Sizes& sizes, const Node& node, const Attempt& a, int rank,
                                           int num_started) {
  const int first = rank * sizes.num_local_experts, behind = first + sizes.num_local_experts;
  Giver best{-1, -1, num_started};
  if (a.num_started[rank] < sizes.num_local_experts) {
    best.expert = node.order[first + a.num_started[rank]];
    best.left = node.total[best.expert];
  }
  for (int entry = 0; entry < num_started; ++entry) {
    const int32_t expert = a.started[entry], left = a.left[entry];
    if (expert < first || expert >= behind) continue;
    if (left > best.left || (left == best.left && expert < best.expert)) best = {expert, left, entry};
  }
  return best;
}

// [thread] Hand out copies until no rank of the node has more rows than the threshold. Return whether that was
// possible.
//
// A slot serves most when the expert with most rows goes to the rank with most room, so no other pair is tried: if this
// one allows fewer rows than a copy has to have, so does every other. Nor can an expert come to the same rank twice. It
// is chosen again only if its last copy has filled up that rank, and a rank that is filled up gets no more.
EP_HOST_DEVICE inline bool hand_out(const Sizes& sizes, const Node& node, const Attempt& a, int64_t threshold) {
  for (int i = 0; i < sizes.ranks_per_node; ++i) {
    a.load[i] = node.load[i];
    a.num_used[i] = 0;
    a.num_started[i] = 0;
  }
  int num_started = 0;
  for (;;) {  // each round takes a slot
    const int home = fullest_rank(sizes, node, a);
    const int64_t excess = a.load[home] - threshold;
    if (excess <= 0) return true;
    const int target = emptiest_rank(sizes, node, a);
    if (target < 0) return false;
    const Giver giver = largest_expert(sizes, node, a, home, num_started);
    const int64_t room = threshold - a.load[target];
    const int64_t rows = smaller(room, smaller(giver.left, larger(excess, sizes.smallest_copy)));
    if (rows < sizes.smallest_copy) return false;
    if (giver.entry == num_started) {
      a.started[num_started++] = giver.expert;
      ++a.num_started[home];
    }
    a.left[giver.entry] = static_cast<int32_t>(giver.left - rows);
    const int slot = target * sizes.num_slots + a.num_used[target]++;
    a.copy_expert[slot] = giver.expert;
    a.copy_rows[slot] = static_cast<int32_t>(rows);
    a.load[home] -= rows;
    a.load[target] += rows;
  }
}

// [thread] Return what the plan says of a slot of a rank of the node. The home keeps the first choices of an expert,
// and the copies follow by ascending rank, at most one on each.
EP_HOST_DEVICE inline Copy copy_in(const Sizes& sizes, const Node& node, const Attempt& a, int rank, int slot) {
  if (slot >= a.num_used[rank]) return {-1, 0, 0};
  const int own = rank * sizes.num_slots + slot, expert = a.copy_expert[own];
  int64_t from_here_on = 0;  // rows of this copy and of those behind it
  for (int other = 0; other < sizes.ranks_per_node; ++other) {
    if (node.rank[other] < node.rank[rank]) continue;
    for (int i = other * sizes.num_slots; i < other * sizes.num_slots + a.num_used[other]; ++i)
      if (a.copy_expert[i] == expert) from_here_on += a.copy_rows[i];
  }
  const int32_t begin = static_cast<int32_t>(node.total[expert] - from_here_on);
  const int home = expert / sizes.num_local_experts;
  return {node.rank[home] * sizes.num_local_experts + expert % sizes.num_local_experts, begin,
          begin + a.copy_rows[own]};
}

// ---- Physical numbers ----

// [thread] Return the physical expert of a slot; slots are numbered rank * r + slot.
EP_HOST_DEVICE inline int64_t physical_of_slot(const Sizes& sizes, int slot) {
  const int rank = slot / sizes.num_slots;
  return static_cast<int64_t>(rank) * (sizes.num_local_experts + sizes.num_slots) + sizes.num_local_experts +
         slot % sizes.num_slots;
}

// [thread] Return the physical expert of a choice that goes to its home. -1, for none, stays, and a number that is no
// expert's becomes one that is no physical expert's, so that the dispatch refuses it.
EP_HOST_DEVICE inline int64_t physical_at_home(const Sizes& sizes, int64_t expert) {
  if (expert < 0) return expert;
  if (expert >= sizes.num_experts()) {
    const int64_t more = sizes.num_physical() - sizes.num_experts();
    return expert > INT64_MAX - more ? INT64_MAX : expert + more;
  }
  const int64_t rank = expert / sizes.num_local_experts;
  return expert + rank * sizes.num_slots;
}

// [thread] Return whether some of a source's choices go to a copy. They are numbered from `first` on.
EP_HOST_DEVICE inline bool serves(const Copy& copy, int64_t first, int64_t num_choices) {
  return first < copy.end && first + num_choices > copy.begin;
}

}  // namespace ep::balance
