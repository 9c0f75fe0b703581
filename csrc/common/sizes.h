// The sizes of a buffer, given by the host and the same on all ranks. Each engine's Config adds what it needs.
#pragma once
#include "common/cursor.h"
#include "common/types.h"

namespace ep {

struct Sizes {
  int num_nodes = 1;
  int ranks_per_node = 1;  // ranks with mutual access to memory
  int num_experts = 1;
  int num_topk = 1;
  int max_tokens = 1;  // tokens of one rank in one dispatch, at most
  int hidden = 1;      // elements of a row
  DType dtype = DType::kBFloat16;
  bool masks = false;  // late ranks are masked, and the others go on: in decode layout, on one node of at most 32 ranks

  EP_HOST_DEVICE int num_ranks() const { return num_nodes * ranks_per_node; }
  EP_HOST_DEVICE int num_local_experts() const { return num_experts / num_ranks(); }
  size_t row_bytes() const { return hidden * size_of(dtype); }
  size_t weights_bytes() const { return num_topk * sizeof(float); }
};

}  // namespace ep
