// The Calls of an operation: ranks compare them, and refuse the operation where they differ.
#pragma once
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace ep::cpu {

// One operation as its caller gave it. Every rank writes one and compares the others with it.
struct Call {
  enum Field { kOperation, kHandle, kTokensToNode, kLayout, kAlignment, kWeights, kRowBytes, kScales, kNumFields };
  // As ep_dispatcher/checks.py names them (AGREED).
  static constexpr const char* kNames[kNumFields] = {"operation",        "handle",           "max_tokens_to_node",
                                                     "layout",           "expert_alignment", "topk_weights",
                                                     "x: bytes per row", "x: scales per row"};
  static constexpr int64_t kDispatch = 0, kCombine = 1, kWeightedCombine = 2;  // values of kOperation

  int64_t rank;
  // kHandle: 0 for a new plan, else the epoch of the plan's dispatch. kTokensToNode: 0 for none, or with a handle
  int64_t given[kNumFields];

  // Return the first differing field, or kNumFields.
  int differs_from(const Call& other) const {
    int field = 0;
    while (field < kNumFields && given[field] == other.given[field]) ++field;
    return field;
  }
  // Return true when both ranks send the same kinds of messages in the same order.
  bool in_step_with(const Call& other) const {
    return given[kOperation] == other.given[kOperation] && (given[kHandle] == 0) == (other.given[kHandle] == 0);
  }
};

// Thrown by a rank that refuses an operation. Carries facts for ep_dispatcher/checks.py to word; `kind` is a function
// there.
//
//   disagreement      field, facts {rank, theirs, other rank, ours}
//   too_few_rows      facts {needed, given} of each rank
//   too_many_to_node  facts {most tokens for another node, max_tokens_to_node} of each rank
//   too_many_rows     facts {alignment, rank, needed}
//   too_many_choices  facts {rank, choices}
struct Refused : std::exception {
  Refused(std::string kind, std::vector<int64_t> facts, std::string field = "")
      : kind(std::move(kind)), field(std::move(field)), facts(std::move(facts)) {}
  const char* what() const noexcept override { return kind.c_str(); }

  std::string kind, field;
  std::vector<int64_t> facts;
  bool by_all = true;  // every rank refuses, after the same steps; false: only the ranks of this node do
};

}  // namespace ep::cpu
