// The CUDA engine of one rank: what Python calls. Every function only launches kernels on the stream that it is given;
// none waits for the device.
//
//   dispatch  plan and stage, [Python waits for the counts and makes the outputs], pull: in one launch or in two
//   combine   combine
#pragma once
#include <cuda_runtime.h>

#include <vector>

#include "cuda/context.h"
#include "cuda/plan.h"

namespace ep::cuda {

struct DispatchArgs {
  const int64_t* topk_idx = nullptr;    // [num_tokens, num_topk]; null: the plan was made before
  const float* topk_weights = nullptr;  // [num_tokens, num_topk] or null
  const char* rows = nullptr;     // [num_tokens, row_bytes]; before they are quantised [num_tokens, 2 * row_bytes]
  const float* scales = nullptr;  // [num_tokens, scale_bytes] or null
  bool quantizes = false;         // bfloat16 rows to float8 with scales, while they are staged
  uint32_t row_bytes = 0, scale_bytes = 0;
  int32_t num_tokens = 0;

  Layout layout = Layout::kExpert;  // this and the next: of a new plan
  int32_t expert_alignment = 1;
  int32_t num_rows = -1;  // of the output; -1: not known before they are counted
  uint64_t ticket = 0;    // Report::counted of a new plan

  char* out_rows = nullptr;                  // [num_rows, row_bytes]
  float* out_scales = nullptr;               // [num_rows, scale_bytes]
  float* out_weights = nullptr;              // expert layout [num_rows]; rank layout [num_rows, num_topk]; or null
  int64_t* out_topk_idx = nullptr;           // rank layout [num_rows, num_topk]; or null
  int64_t* out_tokens_per_expert = nullptr;  // [num_local_experts]
  int64_t* out_rows_per_expert = nullptr;    // [num_local_experts]
};

// [bytes] of a staged token's scales and weights, each padded to 16 bytes.
inline uint32_t tail_bytes(const Config& config, const DispatchArgs& args) {
  const size_t weights = args.topk_weights ? round_up(config.weights_bytes(), kVector) : 0;
  return static_cast<uint32_t>(round_up(args.scale_bytes, kVector) + weights);
}

struct CombineArgs {
  const char* y = nullptr;              // [num_rows, row_bytes]
  const float* topk_weights = nullptr;  // as DispatchArgs::out_weights, or null
  char* out = nullptr;                  // [num_tokens, row_bytes]
  float* out_weights = nullptr;         // [num_tokens, num_topk], or null
  int32_t num_tokens = 0;
};

class Engine {
 public:
  // `regions`: the symmetric memory of every rank of the node, as this rank reaches it; `rail`: that of the rail peer
  // on every node, likewise, or `rail_pes`: its number in NVSHMEM; `wire_rate`: [bytes / s] that the peer wire brings
  // at most, 0 for all that it can; `state`: state_bytes() of device memory, 0; `report`: sizeof(Report) of pinned
  // memory, 0; `num_sms`: blocks of a launch, `rail_blocks` of them for the rail.
  Engine(const Config& config, const std::vector<char*>& regions, const std::vector<char*>& rail,
         const std::vector<int>& rail_pes, double wire_rate, char* state, char* report, double timeout_s, int num_sms,
         int rail_blocks);

  void dispatch(const DispatchArgs& args, int32_t* plan, bool stages, bool pulls, cudaStream_t stream) const;
  void combine(const CombineArgs& args, int32_t* plan, cudaStream_t stream) const;

  const Report& report() const { return *context_.report; }
  // Wait at most `slice_s` seconds until the rows of this ticket are counted. Return how many they are, -1 when a
  // kernel has aborted, -2 when the time is up.
  int64_t wait_for_counts(uint64_t ticket, double slice_s) const;
  void clear_mistake() const { context_.report->mistake = 0; }
  const Config& config() const { return context_.config; }

 private:
  Context context_;
  int num_sms_, rail_blocks_;
};

size_t state_bytes(const Config& config, int num_sms);

}  // namespace ep::cuda
