// What the steps of dispatch and combine take: plain sizes and pointers, no Python, no PyTorch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ep {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum class Layout : int32_t { kRank = 0, kExpert = 1 };

inline size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// One buffer: the same on every rank but for `rank`.
struct Config {
  int rank = 0;              // this rank in the group
  std::vector<int> rank_at;  // [num_nodes, ranks_per_node]: the rank at (node, local rank), ascending in a node
  int num_nodes = 1;
  int ranks_per_node = 1;
  int node = 0;        // of this rank
  int local_rank = 0;  // of this rank, in its node
  int num_experts = 1;
  int num_topk = 1;
  int max_tokens = 1;  // tokens a rank may bring to one dispatch
  int hidden = 1;      // elements of a row
  DType dtype = DType::kBFloat16;
  int spin_us = 50;  // a waiting rank spins this long before it sleeps

  int num_ranks() const { return num_nodes * ranks_per_node; }
  int num_local_experts() const { return num_experts / num_ranks(); }
  size_t row_bytes() const { return hidden * size_of(dtype); }
  size_t weights_bytes() const { return num_topk * sizeof(float); }
  // Partial sums of one token that can meet on one rank of a node.
  int max_partials() const { return ranks_per_node < num_topk ? ranks_per_node : num_topk; }
};

// One array of rows that travels: [num_rows, bytes_per_row] bytes.
struct Rows {
  const char* data = nullptr;
  size_t bytes_per_row = 0;
};

// A new plan from a routing.
struct RouteArgs {
  const int64_t* topk_idx = nullptr;  // [num_tokens, num_topk], checked
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

}  // namespace ep
