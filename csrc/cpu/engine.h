// The CPU engine of one rank: the steps of dispatch and combine that need no network. The caller (Python) runs
// them in order and moves the messages between nodes; every step that has to wait for peers of the node throws
// PeerLate at the deadline of the operation.
//
//   dispatch  begin, route, stage, [heads, counts_arrived], count, start_plan, [lists, pack_payload], lists_arrived,
//             finish_plan, prepare_output, pull own node, [payload_arrived, pull] per other node, agree, finish
//   dispatch  with a given plan: begin, reuse, stage, [pack_payload], prepare_output, pull own node,
//             [payload_arrived, pull] per other node, agree, finish
//   combine   begin, reuse, push and [reduce] per other node, push own node, [incoming_sums], sum, finish
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cpu/args.h"
#include "cpu/call.h"
#include "cpu/config.h"
#include "cpu/plan.h"
#include "cpu/process.h"
#include "cpu/region.h"
#include "cpu/shared_memory.h"

namespace ep::cpu {

// What is wrong with a routing: topk_idx[token, k] is out of range, or stands in the row twice.
struct BadEntry {
  int token, k;
  int64_t expert;
  bool repeated;
};
std::optional<BadEntry> find_bad_entry(const int64_t* topk_idx, int num_tokens, int num_topk, int num_experts);

struct Span {
  char* data;
  size_t size;
};

// The outcome of counting: how large the outputs are.
struct OutputSizes {
  int64_t num_rows;
  int64_t plan_elements;  // int32
};

struct PeerTraffic {
  std::vector<int64_t> bytes_read;     // [num_ranks] rows, scales and weights, by the rank whose memory they were in
  std::vector<int64_t> bytes_written;  // [num_ranks] partial sums and weights, by the rank whose memory they went to
};

class Engine {
 public:
  // `on_look` is called every 20 ms while this rank waits; what it throws ends the operation. It may be null.
  Engine(Config config, int64_t buffer_uid, void (*on_look)() = nullptr);

  const Config& config() const { return config_; }
  uint32_t epoch() const { return epoch_; }
  const PeerTraffic& traffic() const { return traffic_; }

  // Set-up: every rank gives its process and descriptor to the ranks of its node.
  int fd() const { return own_memory_.fd(); }
  void attach(const std::vector<int>& pids, const std::vector<int>& fds);  // [ranks_per_node]
  void close_fd() { own_memory_.close_fd(); }
  void close();  // gives all memory back; no step may follow

  uint32_t begin(double timeout_s, int num_threads);  // the next epoch
  void abort(AbortReason why);                        // the peers of the node wait for this rank no more
  void stop() { stopped_ = true; }                    // [any thread] whoever waits, now or later, throws Interrupted

  void check_plan(const int32_t* plan) const;  // throws std::invalid_argument when another buffer made it

  // Dispatch. A route makes a plan; reuse takes one from a handle.
  void route(const RouteArgs& args, const DispatchArgs& payload);
  void reuse(int64_t operation, const int32_t* plan, const std::vector<size_t>& bytes_per_row, bool has_weights);
  void stage(const DispatchArgs& args);
  Span own_counts() const;
  Span incoming_counts(int node) const;
  void counts_arrived(int node);
  OutputSizes count();  // throws Refused when the ranks do not agree, or max_recv_rows is too small
  Span outgoing_lists(int node);
  Span incoming_lists(int node) const;
  void lists_arrived(int node);
  void start_plan(int32_t* plan);  // [OutputSizes::plan_elements]; from here on the rows can be packed
  void finish_plan();
  std::pair<std::vector<int64_t>, std::vector<int64_t>> counts_per_expert() const;  // of the plan: true, padded
  Span pack_payload(int node, const DispatchArgs& args);
  Span incoming_payload(int node) const;
  void payload_arrived(int node);
  void prepare_output(const PullArgs& args);
  void pull(int node, const PullArgs& args);  // pulls nothing once ranks were found to disagree
  void agree() const;                         // after the last pull; throws Refused when ranks disagree

  // Combine.
  void push(int node, const CombineArgs& args);
  Span reduce(int node, bool has_weights);
  Span incoming_sums(int node);
  void sum(const CombineArgs& args);  // throws Refused when ranks disagree

  void finish();  // of either: this rank reads nothing more

 private:
  void wait_for(Flag* Region::* flags, int index, const char* phase, uint32_t epoch) const;
  void wait_for(Flag* Region::* flags, int index, const char* phase) const { wait_for(flags, index, phase, epoch_); }
  Call call_of(int64_t operation, int64_t plan, int64_t layout, int64_t alignment) const;
  void announce(const Call& call);
  void compare_on_node(const char* phase);
  void compare(const Call& theirs);

  const Call& own_call() const { return own().calls[epoch_ % 2]; }
  const Region& own() const { return regions_[config_.local_rank]; }
  const Inbox& inbox_of(int source) const { return regions_[local_of_[source]].inbox[node_of_[source]]; }
  int node() const { return config_.node; }
  int num_experts_local() const { return config_.num_local_experts(); }
  char* message_memory(std::vector<std::unique_ptr<char[]>>& of_node, int node, size_t bytes);
  Payload payload_of(int source) const;

  Config config_;
  int64_t buffer_uid_;
  SharedMemory own_memory_;
  std::vector<SharedMemory> peer_memory_;
  std::vector<Region> regions_;                                             // [ranks_per_node]
  std::vector<Process> processes_;                                          // [ranks_per_node]
  std::vector<int> node_of_, local_of_;                                     // [num_ranks]
  std::vector<std::unique_ptr<char[]>> lists_out_, payload_out_, sums_in_;  // [num_nodes] what crosses between nodes
  PeerTraffic traffic_;
  void (*on_look_)();
  std::atomic<bool> stopped_{false};

  // The operation under way.
  uint32_t epoch_ = 0, staged_epoch_ = 0, pushed_epoch_ = 0;  // the last operations that used staging and slots
  uint32_t compared_epoch_ = 0;                               // the last one whose calls on this node were compared
  int64_t deadline_ns_ = 0;
  int num_threads_ = 1;
  Plan plan_{};
  PlanHead new_head_{};
  const int64_t* topk_idx_ = nullptr;
  std::vector<size_t> bytes_per_row_;
  bool has_weights_ = false;
  std::vector<Call> calls_;  // [num_ranks] as far as they were seen; rank -1: not seen
  Call other_call_{};        // the first one that differs from this rank's, which it is while there is none
  bool disagrees_ = false;
};

}  // namespace ep::cpu
