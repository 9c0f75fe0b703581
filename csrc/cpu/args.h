// Arguments of the steps of dispatch and combine: plain sizes and pointers, no Python, no PyTorch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace ep::cpu {

// One array of rows: [num_rows, bytes_per_row] bytes.
struct Rows {
  const char* data = nullptr;
  size_t bytes_per_row = 0;
};

// A new plan from a routing.
struct RouteArgs {
  const int64_t* topk_idx = nullptr;  // [num_tokens, num_topk], checked by the caller
  int num_tokens = 0;
  Layout layout = Layout::kExpert;
  int expert_alignment = 1;
  int max_recv_rows = -1;  // -1: as many rows as are received
};

struct DispatchArgs {
  std::vector<Rows> rows;               // one or two (rows, scales), each [num_tokens, bytes_per_row]
  const float* topk_weights = nullptr;  // [num_tokens, num_topk] or null
  int num_tokens = 0;
};

struct PullArgs {
  std::vector<char*> out;           // as DispatchArgs::rows, each [num_rows, bytes_per_row]
  float* out_weights = nullptr;     // expert layout [num_rows]; rank layout [num_rows, num_topk]; or null
  int64_t* out_topk_idx = nullptr;  // rank layout [num_rows, num_topk]; or null
};

struct CombineArgs {
  const char* y = nullptr;              // [num_rows, row_bytes]
  const float* topk_weights = nullptr;  // as PullArgs::out_weights, or null
  char* out = nullptr;                  // [num_tokens, row_bytes]
  float* out_weights = nullptr;         // [num_tokens, num_topk], or null
};

}  // namespace ep::cpu
