// The CUDA engine of one rank, called by Python. An operation launches one kernel on the given stream and does not wait
// for the device. A dispatch is one launch, or two where Python needs the counts to allocate the outputs: stage,
// [wait_for_counts], pull. Decode layout has operations of its own (decode/). With a hook (return_hook) they are two
// launches: the hook makes the second one.
#pragma once
#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "cuda/context.h"
#include "cuda/plan/plan.h"

namespace ep::cuda {

// NCCL wire: how many rows the messages of a launch have.
struct MessageSizes {
  const MessageRows* rows = nullptr;  // in host memory; null: for all tokens that the buffer is for
  int32_t limit = 0;                  // MessageRows::limit

  MessageSizes() = default;
  explicit MessageSizes(const MessageRows* given) : rows(given), limit(given ? given->limit : 0) {}
  // [host] [thread] Return whether rows are packed; whether messages have only the rows that cross.
  EP_HOST_DEVICE bool are_known() const { return rows != nullptr; }
  EP_HOST_DEVICE bool are_exact() const { return rows != nullptr && limit == 0; }
};

// What every dispatch has, in training and in decode layout. All addresses are of device memory.
struct RowArgs {
  const int64_t* topk_idx = nullptr;  // [num_tokens, num_topk]; null: use the plan of a handle
  const char* rows = nullptr;         // [num_tokens, row_bytes]; with `quantizes` bfloat16 [num_tokens, 2 * row_bytes]
  const float* scales = nullptr;      // [num_tokens, scale_bytes / 4] or null; with `quantizes` null
  bool quantizes = false;             // turn bfloat16 rows into float8 with scales while staging
  bool powers_of_two = false;         // with `quantizes`, float32 scales: round them up to powers of two
  uint32_t row_bytes = 0, scale_bytes = 0;  // of one output row, and of its scales (0: none), which move as words
  uint32_t scale_size = 4;                  // of one scale: 4 (float32), or 1 (e8m0 of MXFP8, four in a word)
  int32_t num_tokens = 0;

  Layout layout = Layout::kExpert;  // of the plan, new or old
  int32_t expert_alignment = 1;     // of the plan, new or old
  int32_t num_rows = -1;            // rows of the output; -1: unknown until counted
  int32_t label = 0;                // the caller's number, for the error of rows that do not fit

  char* out_rows = nullptr;  // [num_rows, row_bytes]
  float* out_scales = nullptr;
  int64_t* wait_ns = nullptr;  // [num_ranks] time waited for each rank, added to; or null
  int32_t num_blocks = 0;      // of a launch: at most the num_sms of state_bytes()
  int32_t rail_blocks = 0;     // the last ones of them, for the rail; 0 with one node
  // The most tokens of a rank for another node in a new plan, if any host does not wait for the counts; 0: any number
  int32_t max_tokens_to_node = 0;
  MessageSizes messages;
};

// One dispatch in expert or rank layout. out_scales is [num_rows, scale_bytes / 4].
struct DispatchArgs : RowArgs {
  const float* topk_weights = nullptr;  // [num_tokens, num_topk] or null
  // Value for Report::counted once the rows are counted, in both launches of a counted dispatch; 0: they are not
  // counted.
  uint64_t ticket = 0;
  float* out_weights = nullptr;              // expert layout [num_rows]; rank layout [num_rows, num_topk]; or null
  int64_t* out_topk_idx = nullptr;           // rank layout [num_rows, num_topk]; expert layout null
  int64_t* out_tokens_per_expert = nullptr;  // [num_local_experts], as the next
  int64_t* out_rows_per_expert = nullptr;
};

// One dispatch in decode layout, which has no weights and no padding, and whose host waits for no counts.
// out_scales is [num_local_experts, scale_bytes / 4, rows_per_group], or with packs_scales int32
// [num_local_experts, scale_bytes / 16, rows_per_group]: four exponents, the first one in the low byte.
struct DecodeDispatchArgs : RowArgs {
  DecodeDispatchArgs() { layout = Layout::kDecode; }

  int32_t* out_counts = nullptr;  // [num_local_experts] tokens of each expert
  bool packs_scales = false;
};

// [host] Return the bytes of a staged token's scales and weights, each padded to 16 bytes.
inline uint32_t metadata_bytes(const Config& config, const DispatchArgs& args) {
  const size_t weights = args.topk_weights ? round_up(config.weights_bytes(), kVector) : 0;
  return static_cast<uint32_t>(round_up(args.scale_bytes, kVector) + weights);
}
inline uint32_t metadata_bytes(const Config&, const DecodeDispatchArgs& args) {
  return static_cast<uint32_t>(round_up(args.scale_bytes, kVector));
}

// What every combine has. All addresses are of device memory.
struct SumArgs {
  const char* y = nullptr;  // [num_rows, row_bytes]
  char* out = nullptr;      // [num_tokens, row_bytes]
  int32_t num_tokens = 0;
  int64_t* wait_ns = nullptr;  // as in RowArgs, as are the next three
  int32_t num_blocks = 0;
  int32_t rail_blocks = 0;
  MessageSizes messages;
};

// One combine with a plan of expert or rank layout.
struct CombineArgs : SumArgs {
  const float* topk_weights = nullptr;  // as DispatchArgs::out_weights, or null
  float* out_weights = nullptr;         // [num_tokens, num_topk], or null
};

// One combine with a plan of decode layout.
struct DecodeCombineArgs : SumArgs {
  const float* combine_weights = nullptr;  // [num_tokens, num_topk] weights of own tokens
};

// One gather of counts, on one node. All addresses are of device memory.
struct GatherArgs {
  const void* topk_idx = nullptr;  // [num_choices] int32 or int64
  int index_bytes = 8;             // of an element of topk_idx: 4 or 8
  int64_t num_choices = 0;
  int num_experts = 0;        // logical ones, at most balance::kMaxExperts; 0: the operation is a barrier
  int32_t* counts = nullptr;  // [num_ranks, num_experts] choices of each rank
  int64_t* wait_ns = nullptr;
  int32_t num_blocks = 0;  // at most, and at most the num_sms of state_bytes()
};

// The launches of a dispatch: one, or two where the host needs the counts to make the outputs.
enum class Launch {
  kWhole,
  kPlanAndStage,  // the first of two
  kPull           // the second of two
};
// The launches of an operation in decode layout: one, or with a hook two. All tensors of the caller are read in the
// first one, and all its outputs are written in the second one.
enum class DecodeLaunch { kWhole, kSend, kReceive };

// A routing that is compared with the routing of a plan. All addresses are in device memory.
struct RoutingComparison {
  const int64_t* planned = nullptr;  // [num_tokens, num_topk]; the plan was made from it
  const int64_t* given = nullptr;    // [num_tokens, num_topk]
  int32_t num_tokens = 0;
  int32_t where[2] = {};  // two numbers of the caller's, for the error
};

class Messages;
class NcclComm;

class Engine {
 public:
  // [host] Keep addresses and sizes for the kernels.
  //   regions     [ranks_per_node] region of every rank of the node, as mapped here
  //   rail        [num_nodes] region of the rail peer on every node, as mapped here; null where it is not
  //   rail_pes    [num_nodes] its number in NVSHMEM; not needed where all are mapped
  //   state       state_bytes() of device memory, zeroed
  //   report      report_bytes() of pinned memory, zeroed
  //   num_sms     the most blocks of a launch
  Engine(const Config& config, const std::vector<char*>& regions, const std::vector<char*>& rail,
         const std::vector<int>& rail_pes, char* state, char* report, double timeout_s, int num_sms);

  // [host] Send to other nodes by messages, before the first launch. `comm`: of this rank's rail; its ranks are the
  // nodes. It must be connected. Wait as the constructor of Messages.
  void send_by(std::shared_ptr<NcclComm> comm);
  bool sends_messages() const { return messages_ != nullptr; }
  // [host] Return how many rows messages have with a plan of this max_tokens_to_node, if this host did not wait for
  // counts. Valid until the next call.
  const MessageRows& limited_rows(int32_t most);
  bool has_captured_messages() const;
  // [host] Return the bytes of all messages enqueued so far; 0 without messages.
  uint64_t message_bytes() const;

  // [host] Launch a dispatch, or a part of it. `plan` is written if there is a topk_idx, else read. Two launches of one
  // dispatch get the same arguments, except that only the second one has the outputs and num_rows.
  void dispatch(const DispatchArgs& args, int32_t* plan, Launch part, cudaStream_t stream) const;
  // [host] Launch a combine with the plan of a dispatch.
  void combine(const CombineArgs& args, int32_t* plan, cudaStream_t stream) const;
  // [host] The same in decode layout. Two launches of one operation get the same arguments.
  void decode_dispatch(const DecodeDispatchArgs& args, int32_t* plan, DecodeLaunch part, cudaStream_t stream) const;
  void decode_combine(const DecodeCombineArgs& args, int32_t* plan, DecodeLaunch part, cudaStream_t stream) const;
  // [host] Launch a gather of counts, or a barrier (balance/gather.cu).
  void gather_counts(const GatherArgs& args, cudaStream_t stream) const;

  // Blocks of a launch: all of them, and the last ones of these, which serve the wire between nodes.
  struct Blocks {
    int num_blocks = 0, rail_blocks = 0;
  };
  // [host] Choose the blocks of operations in one layout.
  void share_blocks(Layout layout, Blocks blocks) { blocks_[static_cast<int>(layout)] = blocks; }
  const Blocks& blocks(Layout layout) const { return blocks_[static_cast<int>(layout)]; }
  // [host] Let later operations of one kind add their waits to device memory, int64 [num_ranks]; null: to nothing.
  void measure_waits(Operation operation, int64_t* wait_ns) { wait_ns_[static_cast<int>(operation)] = wait_ns; }
  int64_t* wait_ns(Operation operation) const { return wait_ns_[static_cast<int>(operation)]; }
  // [host] Return the ticket of the next counted dispatch, or of the last one.
  uint64_t next_ticket() { return ++ticket_; }
  uint64_t ticket() const { return ticket_; }

  // [host] Launch a comparison. Of the entries that differ one becomes an error of the next operation.
  void compare_routing(const RoutingComparison& args, cudaStream_t stream) const;

  const Report& report() const { return *context_.report; }
  const ReportArrays& reports() const { return context_.reports; }
  // [host] Wait at most `slice_s` seconds until the rows of the last ticket are counted. Return their number, -1 after
  // an abort by a kernel of this rank or with ranks out of step, or -2 when the time is up. An abort by the host shows
  // as -2.
  int64_t wait_for_counts(double slice_s) const;
  // [host] Allow kernels to publish the next error.
  void clear_error() const { context_.report->error = 0; }
  const Config& config() const { return context_.config; }
  // [host] Let later launches write their stamps to device memory: [kStampedLaunches, kStampedOperations, num_blocks,
  // kStampedWarps, kNumSteps]. Only builds with stamps do. No launch may have more blocks.
  void stamp_into([[maybe_unused]] uint64_t* stamps, [[maybe_unused]] int num_blocks) {
#ifdef EP_STAMPS
    context_.stamps = stamps;
    context_.stamped_blocks = num_blocks;
#endif
  }

 private:
  // [host] Launch a kernel of these. Each function is instantiated in the file that compiles its kernels.
  template <Kernels>
  void launch_dispatch(const DispatchArgs& args, int32_t* plan, Launch part, cudaStream_t stream) const;
  template <Kernels>
  void launch_combine(const CombineArgs& args, int32_t* plan, cudaStream_t stream) const;
  template <Kernels>
  void launch_decode_dispatch(const DecodeDispatchArgs& args, int32_t* plan, DecodeLaunch part,
                              cudaStream_t stream) const;
  template <Kernels>
  void launch_decode_combine(const DecodeCombineArgs& args, int32_t* plan, DecodeLaunch part,
                             cudaStream_t stream) const;

  // [host] Return the context of one launch. `is_second`: of two of its operation.
  Context context_of(int64_t* wait_ns, [[maybe_unused]] bool is_second) const {
    Context context = context_;
    context.wait_ns = wait_ns;
#ifdef EP_STAMPS
    if (is_second && context.stamps)
      context.stamps += size_t{kStampedOperations} * context.stamped_blocks * kStampedWarps * kNumSteps;
#endif
    return context;
  }

  Context context_;
  std::shared_ptr<Messages> messages_;  // NCCL wire; else null
  Blocks blocks_[3];                    // by layout
  int64_t* wait_ns_[2] = {};            // by operation
  uint64_t ticket_ = 0;                 // of the last counted dispatch
  MessageRows limited_rows_ = {};
};

// [host] Return the bytes of pinned memory for the reports of one rank.
inline size_t report_bytes(const Config& config) {
  Cursor c;
  carve_report(c, config);
  return c.size();
}

// [host] Return the bytes of device memory for the state of one rank.
size_t state_bytes(const Config& config, int num_sms);

}  // namespace ep::cuda
