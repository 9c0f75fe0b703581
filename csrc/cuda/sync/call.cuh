// Agreement at the start of every operation: each rank writes its Call to all ranks, and each rank compares all Calls.
#pragma once
#include "cuda/device/team.cuh"
#include "cuda/engine.h"
#include "cuda/sync/error.cuh"

namespace ep::cuda {

// [thread] Return the Call of `rank` in this rank's memory, for this operation: [Call::kNumWords].
template <Kernels K>
__device__ inline Tagged* call_at(const Op<K>& op, int rank) {
  return op.context.own.called + (static_cast<int>(op.epoch % 2) * op.num_ranks() + rank) * Call::kNumWords;
}
// [thread] Return one word of it. `agree` has seen the Call. The word of an absent rank may be of an older operation.
template <Kernels K>
__device__ inline uint64_t word_of_call(const Op<K>& op, int rank, int word) {
  uint64_t epoch, data;
  ptx::load_pair(call_at(op, rank) + word, epoch, data);
  return data;
}
// [thread] Return a field of it, as word_of_call.
template <Kernels K>
__device__ inline int32_t field_of(const Op<K>& op, int rank, Field field) {
  const int which = static_cast<int>(field);
  return static_cast<int32_t>(word_of_call(op, rank, which / 2) >> 32 * (which % 2));
}

// [thread] Return the number of rows for tokens of the rail peer on `node`: for all of them unless they are packed.
// Called after `agree`, with the head of the plan.
template <Kernels K>
__device__ inline int rows_from(const Op<K>& op, const Plan& plan, int node) {
  const MessageRows& rows = plan.head->message_rows;
  return has_messages(op) && rows.known ? rows.from[node] : field_of(op, op.context.rail_peer(node), Field::kNumTokens);
}

// [thread] Return the counts of `source` in the memory of local rank `local`, for this operation.
template <Kernels K>
__device__ inline Counts counts_at(const Op<K>& op, int local, int source) {
  const int index = static_cast<int>(op.epoch % 2) * op.num_ranks() + source;
  return {op.context.peers.at(op.context.own.counts + index * op.context.counts_ints, local)};
}
// [thread] Return the counts of `source` in this rank's memory.
template <Kernels K>
__device__ inline Counts own_counts(const Op<K>& op, int source) {
  return counts_at(op, op.context.local, source);
}

// [warp] Write this rank's Call to every rank of the node, in one warp of one block. Wait for nothing. All that this
// rank did in earlier operations comes before this kernel, so it comes before the Call. With `covers` the Call also
// covers what this warp did before in this operation, and what it has seen by a barrier: counts for example. This takes
// a fence: about 1 us, and 10 us and more while other warps of this multiprocessor store to peers (H200).
//
// A Call overwrites that of operation e - 2 without a wait. This rank has completed e - 1, so all ranks have begun
// e - 1, and completed e - 2. The same holds for counts, choices and combine weights.
// raises: called
template <Kernels K>
__device__ inline void announce(const Op<K>& op, const Call& call, bool covers) {
  const Context& context = op.context;
  if (covers && static_cast<int>(threadIdx.x) % 32 < op.ranks_per_node()) ptx::fence_system();
#pragma unroll 1
  for (int local = threadIdx.x % 32; local < op.ranks_per_node(); local += 32) {
    Tagged* const to = context.peers.at(call_at(op, op.rank()), local);
#pragma unroll
    for (int i = 0; i < Call::kNumWords; ++i) ptx::store_pair(to + i, op.epoch, call.word(i));
  }
}

// The result of `agree`: all Calls are equal; some differ; this rank has aborted. Steps that compare nothing return
// kAgree.
enum class Verdict { kAgree, kDiffer, kAborted };

// [thread] Return the phase of a wait for Calls.
template <Kernels K>
__device__ inline Phase phase_of_calls(const Op<K>& op) {
  return op.operation == Operation::kCombine ? Phase::kSums : Phase::kCounts;
}

// [warp] Wait for the Calls of all ranks. Return as wait_until. A lane waits for one word. If all words need several
// waits, wait for one word of each rank first: each wait has the limit anew, and names only late ranks of its own.
// waits: called (counts, or partial sums in a combine)
template <Kernels K>
__device__ inline bool wait_for_calls(const Op<K>& op) {
  constexpr int kTogether = 32 / Call::kNumWords;  // ranks
  const int lane = threadIdx.x % 32;
  const auto wait = [&](int rank, int word) {
    rank = min(rank, op.num_ranks() - 1);
    const uint64_t* const flag = &call_at(op, rank)[word].epoch;
    return wait_until(op, phase_of_calls(op), flag, op.epoch, rank, op.raiser_of(rank));
  };
  // Wait for one word of each rank.
#pragma unroll 1
  for (int first = 0; op.num_ranks() > kTogether && first < op.num_ranks(); first += 32)
    if (!wait(first + lane, Call::kNumWords - 1)) return false;
  // Wait for all words.
#pragma unroll 1
  for (int first = 0; first < op.num_ranks(); first += kTogether)
    if (!wait(first + lane / Call::kNumWords, lane % Call::kNumWords)) return false;
  return true;
}

// [warp] Compare the Calls of all ranks, after wait_for_calls. Find the first field that differs, and the first rank
// that differs there. Without a difference find the first rank whose numbers are out of range: the field is then
// kNumCompared. A lane compares one word of one rank at a time: this code runs once, so short code is fast code.
template <Kernels K>
__device__ inline Difference find_difference(const Op<K>& op) {
  constexpr int kTogether = 32 / Call::kNumWords;  // ranks
  const int lane = threadIdx.x % 32, which = lane % Call::kNumWords;
  const auto load = [&](int rank) { return word_of_call(op, rank, which); };
  // Tokens and chunks of a rank are indices later. They are the two fields of the last word.
  static_assert(static_cast<int>(Field::kNumTokens) == 2 * Call::kNumWords - 2 &&
                static_cast<int>(Field::kNumChunks) == 2 * Call::kNumWords - 1);
  const auto is_wrong = [&](uint64_t word) {
    return which == Call::kNumWords - 1 &&
           (static_cast<uint32_t>(word) > static_cast<uint32_t>(op.context.config.max_tokens) ||
            static_cast<uint32_t>(word >> 32) > static_cast<uint32_t>(op.context.max_pushed_chunks));
  };
  const uint32_t absent = absent_ranks(op);
  const int first_rank = absent == 0 ? 0 : __ffs(~absent) - 1;
  const uint64_t of_first = load(first_rank);
  int first = INT32_MAX;  // field * kMaxRanks + rank of the lane's first difference
#pragma unroll 2
  for (int begin = 0; begin < op.num_ranks(); begin += kTogether) {
    const int rank = min(begin + lane / Call::kNumWords, op.num_ranks() - 1);
    const uint64_t word = load(rank), differs = word ^ of_first;
    if (absent != 0 && (absent >> rank & 1)) continue;
    if (is_wrong(word)) first = min(first, kNumCompared * kMaxRanks + rank);
    if (differs == 0) continue;
    const int field = 2 * which + (static_cast<uint32_t>(differs) == 0);
    if (field < kNumCompared) first = min(first, field * kMaxRanks + rank);
  }
  first = __reduce_min_sync(~0u, first);
  if (first == INT32_MAX) return {};
  const int rank = first % kMaxRanks, field = first / kMaxRanks;
  const auto value_of = [&](int of) { return field_of(op, of, static_cast<Field>(field)); };
  return {true, field, rank, value_of(rank), first_rank, value_of(first_rank)};
}

// [warp] Wait for every rank's Call and compare them. Return the same verdict on all ranks, except kAborted. With
// `keeps`, block 0 keeps a difference as the operation's error.
// After kAgree every rank has begun this operation: memory of earlier operations is free, on every node.
// After kDiffer all partial sums pushed to this rank have arrived. Only early rows and metadata may still arrive. No
// rank reads any of it. Without `drains` return before the partial sums have arrived: a pushing warp has to raise flags
// of its own pushes first.
// waits: pushed (partial sums) after a difference
// reports: kDiffer, kWrongCall
template <Kernels K>
__device__ inline Verdict compare_calls(Op<K> op, bool keeps, bool drains) {
  const Context& context = op.context;
  if (op.is_second && context.state->agreed == op.epoch) return Verdict::kAgree;
  const auto wait = [&] { return wait_for_calls(op); };
  if (has_masks(op) ? !decide(op, phase_of_calls(op), wait) : !wait()) return Verdict::kAborted;
  const Difference found = find_difference(op);
  if (!found.found) {
    if (!op.is_second && op.block == 0 && threadIdx.x % 32 == 0) context.state->agreed = op.epoch;
    return Verdict::kAgree;
  }
  if (found.field == kNumCompared) {
    if (threadIdx.x % 32 == 0) abort_because_of(op, Phase::kWrongCall, found.rank, 0);
    __syncwarp();
    return Verdict::kAborted;
  }
  if (!drains) return Verdict::kDiffer;
  // Keep the difference.
  const int lane = threadIdx.x % 32;
  if (keeps && op.block == 0 && lane == 0 && try_record_error(context, Error::kDiffer)) {
    int32_t* detail = context.state->facts.detail;
    detail[0] = found.field;
    detail[1] = found.rank;
    detail[2] = found.theirs;
    detail[3] = found.first;
    context.state->facts.value = found.first_rank;
  }
  // Wait for the pushes promised by the Calls: once this operation is complete here, no peer may still push.
#pragma unroll 1
  for (int first = 0; first < op.ranks_per_node(); first += 32) {
    const int local = first + lane, rank = op.first_local_rank() + local;
    const int chunks = local < op.ranks_per_node() ? field_of(op, rank, Field::kNumChunks) : 0;
    const uint64_t* const flag = context.own.pushed + local * context.max_pushed_chunks + chunks - 1;
    if (!wait_until(op, Phase::kSums, chunks > 0 ? flag : nullptr, op.epoch, rank, rank)) return Verdict::kAborted;
  }
  return Verdict::kDiffer;
}
template <Kernels K>
__device__ __noinline__ inline Verdict compare_calls_in_one_copy(Op<K> op, bool keeps, bool drains) {
  return compare_calls(op, keeps, drains);
}

// [warp] Agree on an operation: compare_calls. With several nodes many kinds of warps do, so there is one copy of the
// code: later warps find it in the caches.
template <Kernels K>
__device__ inline Verdict agree(Op<K> op, bool keeps = true, bool drains = true) {
  if constexpr (has_several_nodes(K))
    return compare_calls_in_one_copy(op, keeps, drains);
  else
    return compare_calls(op, keeps, drains);
}

// [block] Hand memory back to the peers and complete the operation. Called in the last block, after all blocks have
// arrived. Raise `released` (consumed or slots_free) on the node, and set `released_epoch`; null: this rank has read
// neither. After a difference peers may be in another operation, so raise both flags; and with `both` this rank has
// read both. Afterwards State::epoch is this operation's. Wait for own puts, not for peers.
// raises: consumed, slots_free
// reports: out_of_step
//
// The flags say that this rank has read memory of its peers, or its own slots. All these loads have ended: their values
// were used, or their mbarriers have counted the bytes. Nothing that a peer stores after it sees the flag can change
// them any more. So with one node the flags need no fence of the system, which takes 0.6 us even with nothing to order
// (H200). With several nodes puts have read memory too; there the fence stays.
template <class Block, Kernels K>
__device__ void complete(const Op<K>& op, uint64_t* Region::* released, uint64_t State::* released_epoch, bool differs,
                         bool both = false) {
  const Context& context = op.context;
  State* state = context.state;
  const bool one_node = op.num_nodes() == 1;
  // Wait until all puts have read their source: a flag below lets peers overwrite it.
  if (!one_node) {
    if (Block::thread() == 0) Wire{context}.quiet();
    Block::sync();
  }
  // Raise the flags. The error is read meanwhile.
  const int32_t error = recorded_error(context);
  const auto raise = [&](uint64_t* flag, uint64_t* other_flag) {
    if (!one_node) {
      team_raises<Block>(op, flag, other_flag);
    } else if (Block::thread() == 0) {
      raise_on_node(context, flag, op.epoch);
      if (other_flag) raise_on_node(context, other_flag, op.epoch);
    }
  };
  if (differs || both)
    raise(context.own.consumed + context.local, context.own.slots_free + context.local);
  else if (released != nullptr)
    raise(context.own.*released + context.local, nullptr);
  if (!one_node) Block::sync();
  if (Block::thread() != 0) return;
  // Finish the state for the next operation.
  if (differs || both)
    state->staged_epoch = state->pushed_epoch = op.epoch;
  else if (released_epoch != nullptr)
    state->*released_epoch = op.epoch;
  publish_error(context, error);
  // Ranks that differ may have different messages under way. So no later kernel of this rank does anything. The host is
  // told even if the difference itself is not published, because there is an earlier error.
  if (differs && has_messages(op)) {
    state->aborted = 1;
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&context.report->out_of_step) = 1;
  }
  state->next_index = 0;
  state->epoch = op.epoch;
}

}  // namespace ep::cuda
