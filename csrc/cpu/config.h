// The sizes of a buffer, and where this rank stands in it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/sizes.h"

namespace ep::cpu {

// One buffer: the same on every rank, except `rank`, `node` and `local_rank`.
struct Config : Sizes {
  int rank = 0;              // this rank in the group
  std::vector<int> rank_at;  // [num_nodes, ranks_per_node] the rank at (node, local rank), ascending in a node
  int node = 0;              // of this rank
  int local_rank = 0;        // of this rank, in its node
  int spin_us = 50;          // a waiting rank spins this long before it sleeps

  // Decode layout: return the rows of a local expert's group, and of the output.
  int rows_per_group() const { return num_ranks() * max_tokens; }
  int64_t decode_rows() const { return int64_t{num_local_experts()} * rows_per_group(); }
  // Return how many slots one token has on one rank of a node. With masks each rank of the node has its own: a masked
  // rank may still write there.
  int max_partials() const { return masks || ranks_per_node < num_topk ? ranks_per_node : num_topk; }
};

}  // namespace ep::cpu
