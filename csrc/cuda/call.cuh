// The agreement that begins every operation: each rank writes what it was given to all ranks, and each compares.
#pragma once
#include "cuda/mistake.cuh"
#include "cuda/team.cuh"

namespace ep::cuda {

// [thread] Find the Call of a rank, as it lies in this rank's memory.
__device__ inline Call* call_at(const Op& op, int rank) {
  return op.context.own.calls + static_cast<int>(op.epoch % 2) * op.num_ranks() + rank;
}

// [thread] Find the head of `source`, as it lies at a rank of this node.
__device__ inline Counts counts_at(const Op& op, int local, int source) {
  const int index = static_cast<int>(op.epoch % 2) * op.num_ranks() + source;
  return {op.context.peers.at(op.context.own.counts + index * op.context.counts_ints, local)};
}
__device__ inline Counts own_counts(const Op& op, int source) { return counts_at(op, op.context.local, source); }

// [team, one block] Write this rank's Call to every rank of the node and raise `called`; one thread per rank does both.
// Counts that the team has written to `counts` before its last barrier are covered by the flag. The rail sends the Call
// to other nodes. A Call may be overwritten without a flag: a rank begins operation e + 1 after every rank has begun e,
// and so has finished e - 1, whose Call has the same place. The same holds for counts.
template <class Team>
__device__ void announce(const Op& op, const Call& call) {
  const Context& context = op.context;
  if (Team::thread() < op.ranks_per_node()) *context.peers.at(call_at(op, op.rank()), Team::thread()) = call;
  team_raises<Team>(op, context.own.called + op.rank());
}

enum class Verdict { kAgree, kDiffer, kAborted };

// [warp] Lane i holds the value of rank `first_rank` + i; lanes past the last rank repeat its value. Find the first
// rank whose value is not rank 0's.
__device__ inline Difference compare(int field, int32_t value, int32_t of_rank_0, int first_rank) {
  const uint32_t differing = __ballot_sync(~0u, value != of_rank_0);
  if (differing == 0) return {};
  const int lane = __ffs(differing) - 1;
  return {true, field, first_rank + lane, __shfl_sync(~0u, value, lane), of_rank_0};
}

// [warp] Read the Call of the lane's rank; lanes past the last rank read the last rank's. `called` has arrived.
__device__ inline const Call* call_of_lane(const Op& op, int first_rank) {
  return call_at(op, min(first_rank + static_cast<int>(threadIdx.x) % 32, op.num_ranks() - 1));
}

// [warp] Compare the Calls of all ranks. Of several differences, return that of the first field.
__device__ inline Difference find_difference(const Op& op) {
  Difference found{};
#pragma unroll 1
  for (int first = 0; first < op.num_ranks(); first += 32) {
    const Call* call = call_of_lane(op, first);
    int32_t values[kNumFields], of_rank_0[kNumFields];
#pragma unroll
    for (int field = 0; field < kNumFields; ++field) {
      values[field] = __ldcg(&call->fields[field]);
      of_rank_0[field] = first == 0 ? __shfl_sync(~0u, values[field], 0) : __ldcg(&call_at(op, 0)->fields[field]);
    }
#pragma unroll
    for (int field = 0; field < kNumFields; ++field)
      if (!found.found || field < found.field) {
        const Difference here = compare(field, values[field], of_rank_0[field], first);
        if (here.found) found = here;
      }
  }
  return found;
}

// [warp] Wait for every rank's Call and compare them. All ranks reach the same verdict. After kDiffer every rank has
// received all partial sums that are on their way to it, and none reads anything else. If `keeps`, a difference is kept
// as the operation's mistake.
__device__ __noinline__ inline Verdict agree(Op op, bool keeps = true) {
  const Context& context = op.context;
  const Phase phase = op.operation == Operation::kDispatch ? Phase::kCounts : Phase::kSums;
  if (!wait_for_ranks(op, phase, context.own.called, op.epoch)) return Verdict::kAborted;
  const Difference found = find_difference(op);
  if (!found.found) return Verdict::kAgree;
  const int lane = threadIdx.x % 32, local_rank = op.first_local_rank() + lane;
  const int chunks = lane < op.ranks_per_node() ? __ldcg(&call_at(op, local_rank)->num_chunks) : 0;
  if (keeps && op.block == 0 && lane == 0 && claim_mistake(context, Mistake::kDiffer)) {
    int32_t* detail = context.state->facts.detail;
    detail[0] = found.field;
    detail[1] = found.rank;
    detail[2] = found.theirs;
    detail[3] = found.first;
  }
  // Once the operation is complete here, no peer may store anything of it here any more.
  ChunkFlags pushed =
      chunk_flags(context.own.pushed, context.max_item_chunks, op.ranks_per_node(), op.first_local_rank());
  return pushed.wait(op, Phase::kSums, chunks - 1) ? Verdict::kDiffer : Verdict::kAborted;
}

// [block, the last one] Hand the memory that `released` stands for back to the peers, and complete the operation.
// `released_epoch` remembers when. After a difference peers may have begun the other operation: all memory is handed
// back.
template <class Block>
__device__ void complete(const Op& op, uint64_t* Region::* released, uint64_t State::* released_epoch, bool differs) {
  const Context& context = op.context;
  State* state = context.state;
  if (context.config.num_nodes > 1) {  // peers may overwrite the source of a put once a flag below is raised
    if (Block::thread() == 0) Wire{context}.quiet();
    Block::sync();
  }
  if (differs) {
    team_raises<Block>(op, context.own.consumed + context.local);
    team_raises<Block>(op, context.own.slots_free + context.local);
  } else {
    team_raises<Block>(op, context.own.*released + context.local);
  }
  Block::sync();
  if (Block::thread() != 0) return;
  if (differs)
    state->staged_epoch = state->pushed_epoch = op.epoch;
  else
    state->*released_epoch = op.epoch;
  publish_mistake(context);
  state->next_token = 0;
  state->epoch = op.epoch;
}

}  // namespace ep::cuda
