// The CPU engine of one rank: the steps of dispatch and combine inside a node. Python calls them in the order below,
// and moves the messages between nodes. A step in brackets is there only with several nodes. A step may wait for peers
// of the node; it then throws PeerLate at the deadline of the operation. A step that reads what other ranks have
// written checks it, and throws BadPeerData.
//
//   dispatch  begin, route, [own_counts], stage, [counts_arrived], count, start_plan, [outgoing_lists, pack_payload,
//             lists_arrived], finish_plan, prepare_output, pull own node, [payload_arrived, pull] per other node,
//             agree, finish
//   dispatch  with a given plan: begin, reuse, stage, [pack_payload], prepare_output, pull own node,
//             [payload_arrived, pull] per other node, agree, finish
//   combine   begin, reuse, [push and reduce] per other node, push own node, sum, finish
//   combine   of decode layout, which multiplies by weights: begin, reuse, stage (the weights), compare_on_node,
//             [pack_payload, payload_arrived], [push and reduce] per other node, push own node, sum, finish
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cpu/args.h"
#include "cpu/call.h"
#include "cpu/config.h"
#include "cpu/peer_data.h"
#include "cpu/plan.h"
#include "cpu/process.h"
#include "cpu/region.h"
#include "cpu/shared_memory.h"

namespace ep::cpu {

// An invalid entry of a routing: topk_idx[token, k] is out of range, or stands in its row twice.
struct BadEntry {
  int token, k;
  int64_t expert;
  bool repeated;
};
// Return the first invalid entry of topk_idx [num_tokens, num_topk], or none.
std::optional<BadEntry> find_bad_entry(const int64_t* topk_idx, int num_tokens, int num_topk, int num_experts);

// Memory of a message.
struct Span {
  char* data;
  size_t size;
};

// Sizes of a dispatch's outputs, known once all ranks have counted.
struct OutputSizes {
  int64_t num_rows;
  int64_t plan_elements;  // int32
};

struct PeerTraffic {
  std::vector<int64_t> bytes_read;     // [num_ranks] rows, scales and weights read from a rank's memory
  std::vector<int64_t> bytes_written;  // [num_ranks] partial sums and weights written to a rank's memory
};

class Engine {
 public:
  // Allocate this rank's shared memory. While the rank waits it calls `on_look` every 20 ms, unless null; an exception
  // of on_look ends the operation.
  Engine(Config config, int64_t buffer_uid, void (*on_look)() = nullptr);

  const Config& config() const { return config_; }
  uint32_t epoch() const { return epoch_; }
  const PeerTraffic& traffic() const { return traffic_; }
  // Return [num_ranks]: how long this operation has waited for flags about each rank.
  const std::vector<int64_t>& waited_ns() const { return waited_ns_; }

  // Return the descriptor of this rank's shared memory. The ranks of a node pass theirs to each other.
  int fd() const { return own_memory_.fd(); }
  // Map the shared memory of all ranks of the node. Both arrays are [ranks_per_node]: processes, and descriptors that
  // this process has got from them (its own entries are not read).
  void attach(const std::vector<int>& pids, const std::vector<int>& fds);
  // Close the descriptor, once all peers have attached.
  void close_fd() { own_memory_.close_fd(); }
  // Free all memory. No step may follow.
  void close();
  // Give the memory of rows, sums and lists back. Addresses, flags and Calls stay. To be called while every rank is
  // between two operations: each operation writes all that it reads there.
  void give_back();

  // Begin the next operation. Return its epoch.
  uint32_t begin(double timeout_s, int num_threads);
  // Signal the peers of the node not to wait for this rank. The first reason stays.
  void abort(AbortReason why);
  // [any thread] Make this rank throw Interrupted where it waits, now or later.
  void stop() { stopped_ = true; }
  // Mask a rank of the node: from now on it counts as absent, and nobody waits for it. A wait masks late ranks itself.
  void mask(int rank);
  // Return [num_ranks]: 1 for each masked rank.
  std::vector<int> masked() const;
  // Throw MaskedByPeer if a rank that is not masked has masked this one.
  void check_not_masked(const char* phase) const;
  // Unmask all ranks, and count epochs on from `epoch`, no smaller than that of any rank. All ranks of the node do this
  // between two operations, and begin none before all have done it.
  void unmask(uint32_t epoch);
  // Throw std::invalid_argument when another buffer made the plan, when its sizes are not those of the handle (this
  // rank's tokens, and rows of the output), or when somebody has changed it. elements: int32 that its memory holds.
  void check_plan(const int32_t* plan, size_t elements, int64_t num_tokens, int64_t num_rows) const;

  // ---- dispatch
  int64_t num_scales = 0;  // of a row; set by the caller before a dispatch, and compared between ranks
  // The most tokens of a rank for another node in a new plan with max_recv_rows on any rank; 0: any number. Set by the
  // caller, and compared. Decode layout has no such limit.
  int64_t max_tokens_to_node = 0;
  // Announce a dispatch with a new plan. Wait for free staging. Write this rank's counts and lists, for all nodes.
  void route(const RouteArgs& args, const DispatchArgs& payload);
  // Announce an operation with the plan of a handle.
  void reuse(int64_t operation, const int32_t* plan, const std::vector<size_t>& bytes_per_row, bool has_weights);
  // Wait for free staging, then copy this rank's rows and weights there.
  void stage(const DispatchArgs& args);
  // Return the message with this rank's Call and counts, for its rail peers.
  Span own_counts() const;
  // Return room for the message with the counts of the rail peer on `node`.
  Span incoming_counts(int node) const;
  // Signal this node: the message is complete.
  void counts_arrived(int node);
  // Wait for all Calls and counts, and compare. Throw Refused where ranks differ, or max_recv_rows or
  // max_tokens_to_node is too small.
  OutputSizes count();
  // Return the lists for the rail peer on `node`.
  Span outgoing_lists(int node);
  // Return room for the lists of the rail peer on `node`.
  Span incoming_lists(int node) const;
  // Signal this node: the message is complete.
  void lists_arrived(int node);
  // Begin the plan, whose memory has room for `elements` int32: write the part for pack_payload.
  void start_plan(int32_t* plan, size_t elements);
  // Wait for all lists, then write the rest of the plan.
  void finish_plan();
  // Write the plan's tokens per local expert, and its rows per local expert (with padding).
  void counts_per_expert(int64_t* tokens, int64_t* rows) const;
  // Return the payload for the rail peer on `node`: Calls, rows, scales and weights.
  Span pack_payload(int node, const DispatchArgs& args);
  // Return room for the payload of the rail peer on `node`.
  Span incoming_payload(int node) const;
  // Signal this node: the message is complete.
  void payload_arrived(int node);
  // Clear all output rows and entries without a token.
  void prepare_output(const PullArgs& args);
  // Wait for the payloads of a node's sources, and copy their rows into place. Copy nothing once Calls differ.
  void pull(int node, const PullArgs& args);
  // Throw Refused if Calls differ. To be called after the last pull.
  void agree() const;
  // Wait for the Calls of this node and compare them. Throw Refused if its ranks are in different operations, or differ
  // at all with one node.
  void compare_on_node(const char* phase);

  // ---- combine
  // Wait for free slots. Sum each token's local experts, for the tokens of a node's ranks, into the token's slot.
  void push(int node, const CombineArgs& args);
  // Wait for the partial sums of the rail peer's tokens, and sum them. Return the message for the peer.
  Span reduce(int node, bool has_weights);
  // Return room for the sums sent by the rail peer on `node`.
  Span incoming_sums(int node);
  // Wait for the partial sums of this rank's own tokens. Sum them with those of other nodes. Throw Refused where ranks
  // differ. The messages of other nodes must have arrived.
  void sum(const CombineArgs& args);

  // End the operation. Signal this node: this rank has read all it needs, and memory may be overwritten.
  void finish();

 private:
  // Wait until every peer of the node has raised its flag `flags`[index].
  void wait_for(Flag* Region::* flags, int index, const char* phase, uint32_t epoch);
  void wait_for(Flag* Region::* flags, int index, const char* phase) { wait_for(flags, index, phase, epoch_); }
  // Return this rank's Call of the operation under way.
  Call call_of(int64_t operation, int64_t plan, int64_t layout, int64_t alignment, int64_t tokens_to_node = 0) const;
  void announce(const Call& call);
  // Check and record the Call of `rank`, and whether it differs from this rank's.
  void compare(const Call& theirs, int rank);
  void compare_payloads(int node);
  // Throw Refused if a rank has more tokens for another node than max_tokens_to_node. Called once all counts are there.
  void check_tokens_to_nodes() const;

  int rank_at(int node, int local) const { return config_.rank_at[node * config_.ranks_per_node + local]; }
  const Region& own() const { return regions_[config_.local_rank]; }
  const Inbox& inbox_holding(int source) const { return regions_[local_of_[source]].inbox[node_of_[source]]; }
  int node() const { return config_.node; }
  int num_experts_local() const { return config_.num_local_experts(); }
  // Return whether this rank has masked local rank `local`.
  bool is_masked(int local) const { return config_.masks && own().masked[local].epoch.load() != 0; }
  // Copy the counts of all other sources, and check the copies; with masks copy their lists later. A rank that has
  // masked this one may overwrite its own at any time: then throw MaskedByPeer.
  void copy_counts();
  void copy_lists();
  // Take all tokens from the counts of a masked source.
  void clear_counts(int source);
  // Return the memory of a message, allocated when first used.
  char* message_memory(std::vector<std::unique_ptr<char[]>>& of_node, int node, size_t bytes);
  // Return a view of the rows of `source` on this node.
  Payload payload_of(int source) const;

  Config config_;
  int64_t buffer_uid_;
  SharedMemory own_memory_;
  std::vector<SharedMemory> peer_memory_;
  std::vector<Region> regions_;          // [ranks_per_node]
  std::vector<Process> processes_;       // [ranks_per_node]
  std::vector<int> node_of_, local_of_;  // [num_ranks]
  // [num_nodes] Messages, by rail peer.
  std::vector<std::unique_ptr<char[]>> lists_out_, payload_out_, weights_out_, sums_in_;
  PeerTraffic traffic_;
  void (*on_look_)();
  std::atomic<bool> stopped_{false};

  // [num_ranks] Counts of the dispatch under way: of this rank, and copies of those of the others. Without tokens for a
  // masked rank. With masks also copies of the lists.
  std::vector<Counts> counts_;
  std::vector<std::vector<char>> counts_memory_, lists_memory_;

  // The operation under way.
  uint32_t epoch_ = 0;
  std::vector<int64_t> waited_ns_;  // [num_ranks]
  uint32_t staged_epoch_ = 0;       // last operation that wrote staging
  uint32_t pushed_epoch_ = 0;       // last operation that wrote slots
  uint32_t compared_epoch_ = 0;     // last operation whose Calls on this node were compared
  int64_t deadline_ns_ = 0, timeout_ns_ = 0;
  int num_threads_ = 1;
  Plan plan_{};
  size_t plan_bytes_ = 0;  // of a new plan
  PlanHead new_head_{};    // of the plan to come; written by count, read by start_plan
  const int64_t* topk_idx_ = nullptr;
  std::vector<size_t> bytes_per_row_;
  bool has_weights_ = false;
  bool weighted_ = false;    // a combine of decode layout
  Call own_call_{};          // of this rank; its peers read a copy
  std::vector<Call> calls_;  // [num_ranks] Calls of this epoch; Call::rank is -1 for one not seen yet
  Call other_call_{};        // the first Call seen to differ from this rank's; until then this rank's own
  bool disagrees_ = false;
};

}  // namespace ep::cpu
