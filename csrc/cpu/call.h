// What the ranks of a group have to do alike in one epoch, and how a rank says that they did not.
#pragma once
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace ep::cpu {

// One operation as its caller gave it. Every rank writes one, and compares those of all others with it.
struct Call {
  enum Field { kOperation, kHandle, kLayout, kAlignment, kWeights, kRowBytes, kScaleBytes, kNumFields };
  // As ep_dispatcher/checks.py names them (AGREED).
  static constexpr const char* kNames[kNumFields] = {
      "operation", "handle", "layout", "expert_alignment", "topk_weights", "x: bytes per row", "x: bytes of scales"};
  static constexpr int64_t kDispatch = 0, kCombine = 1;  // values of kOperation

  int64_t rank;
  int64_t given[kNumFields];  // kHandle: epoch of the dispatch that made the plan, 0 for a new plan

  // Return the first field that differs, or kNumFields.
  int differs_from(const Call& other) const {
    int field = 0;
    while (field < kNumFields && given[field] == other.given[field]) ++field;
    return field;
  }
  // Whether both send the same kinds of messages in the same order.
  bool in_step_with(const Call& other) const {
    return given[kOperation] == other.given[kOperation] && (given[kHandle] == 0) == (other.given[kHandle] == 0);
  }
};

// Facts about an operation that a rank refuses, for ep_dispatcher/checks.py to word: `kind` is a function there.
//
//   disagreement      field, facts {rank, theirs, other rank, ours}
//   too_few_rows      facts {needed, given} of each rank
//   too_many_rows     facts {alignment, rank, needed}
//   too_many_choices  facts {rank, choices}
struct Refused : std::exception {
  Refused(std::string kind, std::vector<int64_t> facts, std::string field = "")
      : kind(std::move(kind)), field(std::move(field)), facts(std::move(facts)) {}
  const char* what() const noexcept override { return kind.c_str(); }

  std::string kind, field;
  std::vector<int64_t> facts;
  bool by_all = true;  // every rank refuses it and has taken the same steps; else only the ranks of this node do
};

}  // namespace ep::cpu
