// What other ranks have written is checked before it is used: every Call, count and list, from shared memory and from
// messages between nodes. It is copied first, and the copy is checked, because a peer may change its memory at any
// time.
//
// A rank decides itself about its tokens, so another valid list of its items is no error. But no list makes a rank read
// or write outside of its buffers, or where the rows of other sources lie.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cpu/call.h"
#include "cpu/config.h"
#include "cpu/plan.h"
#include "cpu/region.h"

namespace ep::cpu {

// Thrown where data of a rank cannot be right: `field` is `found`, and allowed are `least` to `most`.
struct BadPeerData : std::runtime_error {
  BadPeerData(int rank, const std::string& field, int64_t found, int64_t least, int64_t most);
  int rank;
  std::string field;
  int64_t found, least, most;
};

// Check that a number from `rank`, which errors call `name`, or name[index], is in [least, most].
void check_number(int rank, const char* name, int64_t found, int64_t least, int64_t most, int64_t index = -1);

// Check that a Call is one of `rank`, and can be an operation.
void check_call(const Call& call, int rank);

// Check the counts of `source`, which is on `node`. Afterwards its lists for any node, and the rows for it, fit into
// their memory: a rank gets at most the source's tokens, each of them with at least one expert and at most num_topk.
void check_counts(const Config& config, const Counts& counts, int source, int node);

// One list of `source` for this rank, with the number of its items and copies as its checked counts say. The arrays are
// private copies.
struct ReceivedList {
  int num_items, num_copies;
  const int32_t* payload_row;  // [num_items]
  const int32_t* slot;         // [num_items]
  const int32_t* copy_begin;   // [num_items + 1]
  const int32_t* expert;       // [num_copies]
  const int32_t* k;            // [num_copies]
};

// Check a list of `source`, whose payload for this node has `num_rows` rows.
void check_list(const Config& config, const ReceivedList& list, int source, int num_rows);

// Check a private copy of Lists::slot_begin [num_rows + 1] of `source`. own: whether it is of this rank's own tokens.
void check_slots(const Config& config, const int32_t* slot_begin, int source, int num_rows, bool own);

}  // namespace ep::cpu
