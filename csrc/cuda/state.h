// State of one rank's kernels between operations, and their reports to the host.
#pragma once
#include <iterator>

#include "cuda/config.h"

namespace ep::cuda {

// The purpose of a wait, and its words in a PeerTimeoutError. Those from kWrongCall on are no waits: a rank has sent
// numbers that would lead out of memory, and the rank that finds them aborts and names it.
enum class Phase : int32_t {
  kFreeStaging,
  kCounts,
  kLists,
  kRows,
  kFreeSlots,
  kSums,
  kWeights,
  kNodeSums,
  kWrongCall,    // a Call with more tokens or chunks than the buffer is for
  kWrongCounts,  // counts of a source beyond those that the buffer is for, or below 0
  kWrongLists,   // an item out of range, or tokens that do not ascend
  kWrongChoices  // a choice that is no expert
};
constexpr const char* kPhaseNames[] = {"free staging",
                                       "counts",
                                       "lists",
                                       "rows",
                                       "free slots",
                                       "partial sums",
                                       "weights",
                                       "sums between nodes",
                                       "arguments out of range",
                                       "counts out of range",
                                       "lists out of range",
                                       "experts out of range"};
static_assert(std::size(kPhaseNames) == static_cast<size_t>(Phase::kWrongChoices) + 1);

// Errors of the caller, as found by kernels, and their names for KernelReports.
enum class Error : int32_t {
  kNone,
  kBadEntry,      // an entry of topk_idx is no expert, or repeats one; it counts as -1
  kTooFewRows,    // a rank needs more rows than its max_recv_rows
  kTooManyRows,   // a rank would receive 2^31 rows or more
  kDiffer,        // the Calls of two ranks differ
  kOtherRouting,  // the routing of a recompute differs from its plan
  kTooManyToNode  // a rank has more tokens for another node than max_tokens_to_node
};
constexpr const char* kErrorNames[] = {"none",   "bad_entry",     "too_few_rows",    "too_many_rows",
                                       "differ", "other_routing", "too_many_to_node"};
static_assert(std::size(kErrorNames) == static_cast<size_t>(Error::kTooManyToNode) + 1);

// Facts of one error. Written by its finder (error.cuh), read by the host.
//
//   kBadEntry     detail: token, k, 1 if the expert is repeated; value: the entry
//   kTooFewRows   value: DispatchArgs::label; rows of rank r: those needed, and Field::kMaxRows
//   kTooManyRows  detail: expert_alignment; rows as above
//   kTooManyToNode value: DispatchArgs::label; rows of rank r: most tokens for another node, and the limit
//   kDiffer       detail: field, rank, theirs, that of another rank (call.h); value: this other rank, mostly 0
//   kOtherRouting detail: token, k, RoutingComparison::where; value: the entry given; first of the rows: that of the
//   plan
struct ErrorFacts {
  int32_t detail[4];
  int64_t value;
};
using ErrorRows = int64_t[2];  // of one rank; an array by rank belongs to the facts

// In device memory, all 0 at first. Written by kernels of this rank; the host also sets `aborted` and reads the byte
// counters. "0 between operations": the last to arrive resets the counter.
struct State {
  uint64_t epoch;         // last complete operation
  uint64_t staged_epoch;  // last operation with `consumed` raised at its end
  uint64_t pushed_epoch;  // last operation with `slots_free` raised at its end
  uint64_t agreed;        // last operation in which block 0 has found that all ranks agree
  uint32_t aborted;       // 1: this rank has aborted; kernels end early and do nothing
  uint32_t count_done, list_done, pull_done, combine_done;  // arrived blocks; 0 between operations
  uint32_t next_index;  // counts items of a dispatch, own tokens of a combine, as they are taken; 0 between operations
  uint64_t decided;     // last operation whose `absent` is final
  uint32_t absent;      // a bit for each rank that takes no part in the operation `decided`
  uint32_t error;       // Error of the operation under way, set by its first finder, or by a comparison of routings
                        // before it; else 0 between operations
  ErrorFacts facts;     // of `error`
};

// Counters and counts in device memory, all 0 at first. Written and read by this rank's blocks.
struct StateArrays {
  State* state;
  // Counters of bytes.
  uint64_t* bytes_read;     // [num_ranks] a row and the whole metadata per received item, by rank of the inbox
  uint64_t* bytes_written;  // [num_ranks] a sum and all weights per received item, by rank of the inbox
  uint64_t* bytes_sent;     // [num_nodes] rows, metadata, sums and weights sent, by node of the rail peer
  uint64_t* lists_sent;     // [num_nodes] Calls, counts, items and tables sent, by node of the rail peer
  int32_t* masked;  // [num_ranks] with Config::masks. 1: nobody waits for the rank. Set by kernels and by the host
  ErrorRows* error_rows;  // [num_ranks] of State::facts
  uint32_t* staged_done;  // [max_token_chunks] blocks with their tokens of the chunk staged; 0 between operations, as
                          // all counters here
  uint32_t* pushed_done;  // [max_pushed_chunks] blocks with their partial sums of the chunk stored
  uint32_t* summed_done;  // [num_others, max_far_chunks] blocks with their sums of the chunk stored
  uint32_t* items_sent;   // [num_others] senders with their share of items and table sent
  uint32_t* rows_sent;    // [num_others, max_token_chunks] senders with their share of the chunk sent
  uint32_t* sums_sent;    // [num_others, max_sum_chunks] senders with their share of the chunk sent
  int32_t* block_num_tokens;  // [num_blocks, num_experts] tokens counted by each planning block; after
                              // send_counts, by all before it. Unused with a single one
  int32_t* block_num_items;   // [num_blocks, num_ranks] the same of items
};

// [host] Lay out the device memory of one rank, or measure it. `num_blocks`: of a launch.
template <class C>
StateArrays carve_state(C& c, const Config& config, int num_blocks) {
  constexpr const char *kCounters = "counters", *kPerBlock = "counts by block";
  StateArrays arrays;
  c.take(arrays.state, kCounters, 1);
  c.take(arrays.bytes_read, kCounters, config.num_ranks());
  c.take(arrays.bytes_written, kCounters, config.num_ranks());
  c.take(arrays.bytes_sent, kCounters, config.num_nodes);
  c.take(arrays.lists_sent, kCounters, config.num_nodes);
  c.take(arrays.masked, kCounters, config.masks ? config.num_ranks() : 0);
  c.take(arrays.error_rows, kCounters, config.num_ranks());
  c.take(arrays.staged_done, kCounters, config.max_token_chunks());
  c.take(arrays.pushed_done, kCounters, config.max_pushed_chunks());
  const size_t others = config.num_others();
  c.take(arrays.summed_done, kCounters, others * config.max_far_chunks());
  c.take(arrays.items_sent, kCounters, others);
  c.take(arrays.rows_sent, kCounters, others * config.max_token_chunks());
  c.take(arrays.sums_sent, kCounters, others * config.max_sum_chunks());
  c.take(arrays.block_num_tokens, kPerBlock, static_cast<size_t>(num_blocks) * config.num_experts);
  c.take(arrays.block_num_items, kPerBlock, static_cast<size_t>(num_blocks) * config.num_ranks());
  return arrays;
}

// In pinned host memory, written by kernels, read by the host. The first field of each group is written last: once it
// is set, the group is valid.
struct Report {
  uint64_t counted;  // ticket of the last dispatch with counted rows
  int64_t num_rows;  // rows of this dispatch's output

  uint32_t aborted;  // 1: a kernel has aborted this rank; an abort by the host is not reported. With ReportArrays::late
  int32_t operation, phase;
  uint32_t waited_ms;
  uint64_t epoch;

  uint32_t out_of_step;  // 1: ranks that differ may have different messages under way; no later operation runs

  int32_t error;  // Error; the host sets it to 0 again. With ReportArrays::error_rows
  ErrorFacts facts;
};

struct ReportArrays {
  Report* report;
  uint64_t* late;             // [rank_words] RankSet of ranks waited for in vain, or named by a rank that has aborted
  ErrorRows* error_rows;      // [num_ranks] of Report::facts
  int64_t* counted_rows;      // [num_local_experts] rows per expert, valid if Report::num_rows > 0
  MessageRows* message_rows;  // NCCL wire: of the plan of Report::counted
};

// [host] Lay out the pinned memory of one rank, or measure it.
inline ReportArrays carve_report(Cursor& c, const Config& config) {
  ReportArrays reports;
  reports.report = c.take<Report>(1);
  reports.late = c.take<uint64_t>(config.rank_words());
  reports.error_rows = c.take<ErrorRows>(config.num_ranks());
  reports.counted_rows = c.take<int64_t>(config.num_local_experts());
  reports.message_rows = c.take<MessageRows>(1);
  return reports;
}

}  // namespace ep::cuda
