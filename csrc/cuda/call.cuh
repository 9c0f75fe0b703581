// The agreement that begins every operation: each rank writes what it was given to all ranks, and each compares.
#pragma once
#include "cuda/mistake.cuh"
#include "cuda/team.cuh"

namespace ep::cuda {

// [team, one block] Write this rank's Call to every rank and raise `called`; one thread per rank does both. Counts that
// the team has written to `heads` before its last barrier are covered by the flag. A Call may be overwritten without a
// flag: a rank begins operation e + 1 after every rank has begun e, and so has finished e - 1, whose Call has the same
// place.
template <class Team>
__device__ void announce(const Op& op, const Call& call) {
  const Context& context = op.context;
  if (Team::thread() < context.config.ranks_per_node) {
    Call* mine = context.own.calls + op.epoch % 2 * op.num_ranks() + op.rank();
    *context.peers.at(mine, Team::thread()) = call;
  }
  raise_at_all<Team>(op, &Region::called);
}

enum class Verdict { kAgree, kDiffer, kAborted };

// [warp] Lane r holds rank r's value; lanes past the last rank repeat its value. Find the first rank whose value is not
// rank 0's.
__device__ inline Difference compare(int field, int32_t value) {
  const int first = __shfl_sync(~0u, value, 0);
  const uint32_t others = __ballot_sync(~0u, value != first);
  if (others == 0) return {};
  const int rank = __ffs(others) - 1;
  return {true, field, rank, __shfl_sync(~0u, value, rank), first};
}

// [warp] Read the Call of the lane's rank; lanes past the last rank read the last rank's. `called` has arrived.
__device__ inline const Call* call_of_lane(const Op& op) {
  const int rank = min(static_cast<int>(threadIdx.x) % 32, op.num_ranks() - 1);
  return op.context.own.calls + op.epoch % 2 * op.num_ranks() + rank;
}

// [warp] Wait for every rank's Call and compare them. All ranks reach the same verdict. After kDiffer every rank has
// received all partial sums that are on their way to it, and none reads anything else. If `keeps`, a difference is kept
// as the operation's mistake.
__device__ __noinline__ inline Verdict agree(Op op, bool keeps = true) {
  const Context& context = op.context;
  const Phase phase = op.operation == Operation::kDispatch ? Phase::kCounts : Phase::kSums;
  if (!wait_for_ranks(op, phase, context.own.called, op.epoch)) return Verdict::kAborted;
  const Call* call = call_of_lane(op);
  Difference found{};
  int32_t values[kNumFields];
#pragma unroll
  for (int field = 0; field < kNumFields; ++field) values[field] = __ldcg(&call->fields[field]);
#pragma unroll
  for (int field = 0; field < kNumFields; ++field)
    if (!found.found) found = compare(field, values[field]);
  if (!found.found) return Verdict::kAgree;
  const int lane = threadIdx.x % 32, chunks = lane < op.num_ranks() ? __ldcg(&call->num_chunks) : 0;
  if (keeps && op.block == 0 && lane == 0 && claim_mistake(context, Mistake::kDiffer)) {
    int32_t* detail = context.state->facts.detail;
    detail[0] = found.field;
    detail[1] = found.rank;
    detail[2] = found.theirs;
    detail[3] = found.first;
  }
  // Several ranks write one token's weights: a late store must not meet another rank's next combine.
  return pushed_flags(context).wait(op, Phase::kSums, chunks - 1) ? Verdict::kDiffer : Verdict::kAborted;
}

// [team, last block] End an operation after a difference: peers may have begun the other operation, so both kinds of
// memory are handed back.
template <class Team>
__device__ void release_after_difference(const Op& op) {
  raise_at_all<Team>(op, &Region::consumed);
  raise_at_all<Team>(op, &Region::slots_free);
  if (Team::thread() == 0) op.context.state->staged_epoch = op.context.state->pushed_epoch = op.epoch;
}

}  // namespace ep::cuda
