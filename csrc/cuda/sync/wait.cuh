// Waits for peers. They go through wait_until: a wait ends after the limit, and reports the late ranks. Only the waits
// for choices, combine weights and tagged sums do not (count_choices, load_combine_weight, take_tagged_sum): the wait
// for Calls or is_too_late ends them.
#pragma once
#include "cuda/decode/masks.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/op.cuh"
#include "cuda/rail/wire.cuh"

namespace ep::cuda {

// [thread] Return whether this rank has aborted: a kernel or its host has set State::aborted.
__device__ __forceinline__ bool has_aborted(const Context& context) {
  return *static_cast<volatile uint32_t*>(&context.state->aborted) != 0;
}

// [thread] Raise a flag at every rank of the node. The caller runs fence_system before.
__device__ inline void raise_on_node(const Context& context, uint64_t* local_flag, uint64_t value) {
  for (int local = 0; local < context.config.ranks_per_node; ++local)
    ptx::store_relaxed(context.peers.at(local_flag, local), value);
}

// A set of ranks, in Context::rank_words words. Rank r has bit r + 1. Bit 0 is set in the flag `aborted`, whose first
// word is then not 0.
struct RankSet {
  uint64_t words[kMaxRanks / 64 + 1] = {};

  // [thread] Return the bit of a rank, 0 if it is in another word.
  static __device__ uint64_t bit(int rank, int word) {
    return (rank + 1) / 64 == word ? uint64_t{1} << (rank + 1) % 64 : 0;
  }
};

// [warp] Return the bits of all lanes.
__device__ inline uint64_t bits_of_all(uint64_t bits) {
  const uint64_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(bits >> 32));
  return high << 32 | __reduce_or_sync(~0u, static_cast<uint32_t>(bits));
}

// [thread] Abort this rank: write the report and raise `aborted` at the node and at the rail peers, with the late
// ranks. Only the first call on a rank does anything; after an abort by the host, none does. Other waits of this rank
// then end within 32 turns.
// raises: aborted
template <Kernels K>
__device__ __noinline__ inline void abort_rank(Op<K> op, Phase phase, const RankSet& late, uint64_t waited_ns) {
  const Context& context = op.context;
  if (atomicExch(&context.state->aborted, 1u) != 0) return;
  Report* report = context.report;
  report->operation = static_cast<int32_t>(op.operation);
  report->phase = static_cast<int32_t>(phase);
  report->waited_ms = static_cast<uint32_t>(waited_ns / 1000000);
  report->epoch = op.epoch;
  for (int word = 0; word < context.rank_words; ++word) context.reports.late[word] = late.words[word];
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&report->aborted) = 1;
  // The first word comes last: it says that the others are there.
  for (int word = context.rank_words - 1; word >= 0; --word) {
    uint64_t* const aborted = context.own.aborted + context.config.rank * context.rank_words + word;
    const uint64_t names = late.words[word] | (word == 0);
    ptx::fence_system();
    raise_on_node(context, aborted, names);
    for (int node = 0; node < op.num_nodes(); ++node)
      if (node != context.node) Wire{context}.signal(node, aborted, names);
  }
}

// [thread] Abort this rank because of one late rank.
template <Kernels K>
__device__ __noinline__ inline void abort_because_of(Op<K> op, Phase phase, int rank, uint64_t waited_ns) {
  RankSet late;
  late.words[(rank + 1) / 64] = RankSet::bit(rank, (rank + 1) / 64);
  abort_rank(op, phase, late, waited_ns);
}

// [thread] Return the names in the flag `aborted` of a rank, as loaded. The first word is 0 without an abort.
template <Kernels K>
__device__ inline const uint64_t* names_by(const Op<K>& op, int rank) {
  return op.context.own.aborted + rank * op.context.rank_words;
}

// [thread] Return whether this warp adds its waits to Context::wait_ns. One warp at a time does. In a dispatch it is
// the first pull warp of block 0, which plans; in a gather of counts only one warp waits. In a combine it is a warp of
// the last block, which mostly reduces from the start: warp 0 waits for free slots, then a summing or the preparing
// warp for Calls, then the preparing warp for sums.
template <Kernels K>
__device__ inline bool measures_waits(const Op<K>& op) {
  if (!measures_waits(K) || op.context.wait_ns == nullptr) return false;
  return op.operation == Operation::kCombine ? op.block == op.num_blocks - 1 : op.block == 0 && threadIdx.x < 32;
}

// Raisers that hand memory back, send sums between nodes, or relay, have to wait themselves first. A wait for such a
// flag may begin before the raiser's wait. So its limit is longer: the raiser's wait ends first, and names the late
// rank.
constexpr uint64_t kPatienceNs = 1'000'000'000;

// [thread] Return the limit of a single wait. With masks it is the same for all waits (docs/protocol_faults.md).
template <Kernels K>
__device__ inline uint64_t limit_ns(const Op<K>& op, Phase phase, bool is_relayed) {
  const bool hangs_on_waits =
      is_relayed || phase == Phase::kFreeStaging || phase == Phase::kFreeSlots || phase == Phase::kNodeSums;
  return op.context.timeout_ns + (hangs_on_waits && !has_masks(op) ? kPatienceNs : 0);
}

// [warp] Abort this rank: some lane's limit is over, or some lane's raiser has aborted. Find the ranks to blame.
// `waits`: the lane's flag, about `rank`, is missing; `is_over`: for too long. Lanes that may still wait blame nobody:
// their ranks may be slow, not late. If raisers name only this rank, it may be waiting itself: then the ranks of its
// waiting lanes are late. This rank is blamed only if no other one is.
// reports: late
template <Kernels K>
__device__ __noinline__ inline void abort_for_late_ranks(Op<K> op, Phase phase, bool waits, bool is_over, int rank,
                                                         int raiser, uint64_t waited_ns) {
  uint64_t names = 0;  // by the raiser. Its kernel and its host may abort together, and so leave none
  for (int word = 0; waits && word < op.context.rank_words; ++word)
    names |= ptx::load_acquire(names_by(op, raiser) + word) & ~static_cast<uint64_t>(word == 0);
  const bool named = names != 0;
  RankSet late;
  const auto add = [&](auto&& bits_in) {  // those of all lanes; return whether there is another rank than this one
    uint64_t others = 0;
    for (int word = 0; word < op.context.rank_words; ++word) {
      late.words[word] |= bits_of_all(bits_in(word));
      others |= late.words[word] & ~RankSet::bit(op.rank(), word) & ~static_cast<uint64_t>(word == 0);
    }
    return others != 0;
  };
  const bool blames_others =
      add([&](int word) {
        return named ? ptx::load_acquire(names_by(op, raiser) + word) : is_over ? RankSet::bit(rank, word) : 0;
      }) ||
      add([&](int word) { return waits && !named ? RankSet::bit(rank, word) : 0; });
  if (blames_others) late.words[(op.rank() + 1) / 64] &= ~RankSet::bit(op.rank(), (op.rank() + 1) / 64);
  if (threadIdx.x % 32 == 0) abort_rank(op, phase, late, waited_ns);
}

// [warp] Wait until each lane's flag is at least `expected`. Lanes without a flag pass null. Return the same in all
// lanes. After true, all lanes may read the memory covered by any lane's flag, by bulk loads only after
// fence_before_bulk. Return false after an abort of this rank, but true if all flags have arrived all the same. This
// warp aborts the rank when the wait exceeds the buffer's limit, or when a raiser has aborted without raising the flag.
// `rank`: the lane's flag is about it; `raiser`: it raises the flag.
template <Kernels K>
__device__ __noinline__ inline bool wait_until(Op<K> op, Phase phase, const uint64_t* flag, uint64_t expected, int rank,
                                               int raiser) {
  if (flag != nullptr && is_masked(op, rank)) flag = nullptr;
  bool waits = flag != nullptr && ptx::load_acquire(flag) < expected;
  if (!__any_sync(~0u, waits)) {
    __syncwarp();  // order each lane's acquire before the other lanes' next accesses
    return true;
  }
  const Context& context = op.context;
  // Poll.
  const uint64_t begin = ptx::nanoseconds();
  bool measures = measures_waits(op);
  if (measures) {  // several lanes may wait for one rank, next to each other: measure the first
    const int rank_below = __shfl_up_sync(~0u, rank, 1);
    measures = (threadIdx.x % 32 == 0 || rank_below != rank) && rank != op.rank();
  }
  for (int turn = 1;; ++turn) {
    if (waits) {
      waits = ptx::load_acquire(flag) < expected;
      if (!waits && measures)
        atomicAdd(reinterpret_cast<unsigned long long*>(context.wait_ns + rank), ptx::nanoseconds() - begin);
    }
    if (!__any_sync(~0u, waits)) {
      __syncwarp();
      return true;
    }
    if (turn % 32 != 0) continue;
    // A raiser may have aborted after raising this flag: read the flag again, after `aborted`.
    bool hopeless = waits && ptx::load_acquire(names_by(op, raiser)) != 0;
    const uint64_t waited = ptx::nanoseconds() - begin;
    if (hopeless) waits = ptx::load_acquire(flag) < expected;
    hopeless = hopeless && waits;
    const bool is_over = waits && waited > limit_ns(op, phase, rank != raiser);
    const bool over = __any_sync(~0u, is_over || hopeless);
    if (over && has_masks(op)) {
      // Mask late ranks, and go on. A rank that is itself too late masks no rank.
      if (aborts_if_excluded(op, phase)) return false;
      const bool late = rank != op.rank() && (is_over || hopeless);
      if (late) mask_rank(op, rank);
      if (late && measures) atomicAdd(reinterpret_cast<unsigned long long*>(context.wait_ns + rank), waited);
      if (late) waits = false;
      if (__any_sync(~0u, late)) continue;
    }
    if (over) {
      abort_for_late_ranks(op, phase, waits, is_over, rank, raiser, waited);
      __syncwarp();
      return false;
    }
    // Leave after an abort by another warp, or by the host.
    if (__any_sync(~0u, has_aborted(context))) return false;
  }
}

// Looks at a tagged word between two looks at the clock. After kAgree a word is on its way.
constexpr uint32_t kPollsBetweenChecks = 1024;

// [thread] Return whether a wait for `num` tagged words of `rank` has to end: this rank has aborted, the limit is over,
// or the other rank has aborted. In the last two cases abort this rank, unless the words have arrived by now. Called
// after kAgree: the words are on their way, unless their rank has died behind its Call. `since`: the thread's first
// look at the clock after kAgree, so the wait for the Calls does not shorten the limit. Words of this rank itself have
// no limit: its other warps wait for peers.
// reports: late (tagged words are missing)
template <Kernels K>
__device__ __noinline__ inline bool is_too_late(Op<K> op, Phase phase, int rank, const Tagged* words, int num,
                                                uint64_t since) {
  if (rank == op.rank()) return has_aborted(op.context);
  const uint64_t waited = ptx::nanoseconds() - since;
  const bool named = ptx::load_acquire(names_by(op, rank)) != 0;  // the other rank names ranks
  if (named || waited > op.context.timeout_ns) {
    // The rank may have sent the words before it aborted: read them again, after `aborted`.
    int arrived = 0;
    while (arrived < num && ptx::load_acquire(&words[arrived].epoch) >= op.epoch) ++arrived;
    if (arrived == num) return false;
    // Abort. If the rank names only this one, whose words are late? A sum is sent after the Calls of all, so it may
    // have waited for this rank's. Other words do not wait for this rank.
    RankSet late;
    uint64_t others = 0, own = 0;
    for (int word = 0; named && word < op.context.rank_words; ++word) {
      const uint64_t names = ptx::load_acquire(names_by(op, rank) + word), bit = RankSet::bit(op.rank(), word);
      own |= names & bit;
      others |= late.words[word] = names & ~bit & ~static_cast<uint64_t>(word == 0);
    }
    if (others != 0)
      abort_rank(op, phase, late, waited);
    else
      abort_because_of(op, phase, phase == Phase::kSums && own != 0 ? op.rank() : rank, waited);
  }
  return has_aborted(op.context);
}

// [warp] Wait for one flag about each rank: flags [num_ranks]. Return as wait_until.
template <Kernels K>
__device__ inline bool wait_for_ranks(const Op<K>& op, Phase phase, const uint64_t* flags, uint64_t expected) {
#pragma unroll 1
  for (int first = 0; first < op.num_ranks(); first += 32) {
    const int rank = min(first + static_cast<int>(threadIdx.x) % 32, op.num_ranks() - 1);
    if (!wait_until(op, phase, flags + rank, expected, rank, op.raiser_of(rank))) return false;
  }
  return true;
}

// [warp] Wait for one flag about each rank of the node: flags [ranks_per_node]. Return as wait_until.
template <Kernels K>
__device__ inline bool wait_for_node(const Op<K>& op, Phase phase, const uint64_t* flags, uint64_t expected) {
#pragma unroll 1
  for (int first = 0; first < op.ranks_per_node(); first += 32) {
    const int local = first + static_cast<int>(threadIdx.x) % 32, rank = op.first_local_rank() + local;
    const uint64_t* const flag = local < op.ranks_per_node() ? flags + local : nullptr;
    if (!wait_until(op, phase, flag, expected, rank, rank)) return false;
  }
  return true;
}

// [thread] Poll once, without waiting: return whether this thread's flag about a rank of the node has arrived, and true
// in threads without one. The load overlaps with others at kernel start. If all threads return true and have met at a
// barrier, no wait_for_node for these flags is needed. flags [ranks_per_node]. `local`: of the thread's flag, or any
// number.
template <Kernels K>
__device__ inline bool poll_once(const Op<K>& op, const uint64_t* flags, uint64_t expected, unsigned local) {
  return local >= static_cast<unsigned>(op.ranks_per_node()) || ptx::load_acquire(flags + local) >= expected;
}

// [warp] Wait for one flag about `rank`, read by lane 0 only. Return as wait_until.
template <Kernels K>
__device__ inline bool wait_for_one(const Op<K>& op, Phase phase, const uint64_t* flag, uint64_t expected, int rank,
                                    int raiser) {
  return wait_until(op, phase, threadIdx.x % 32 == 0 ? flag : nullptr, expected, rank, raiser);
}

// [warp] Wait for a chunk flag in each lane: `flags` are those about the lane's `rank`, and `chunk` is the one to wait
// for; -1: none. `last_seen` is the last chunk seen by this lane, which covers all earlier ones. Return false after an
// abort of this rank. After true, all lanes may read the chunks' memory, also by bulk loads.
template <class Chunk, Kernels K>
__device__ inline bool wait_for_chunks(const Op<K>& op, Phase phase, const uint64_t* flags, int chunk, int rank,
                                       int raiser, Chunk& last_seen) {
  const bool waits = chunk >= 0 && chunk > last_seen;
  if (!__any_sync(~0u, waits)) return true;
  if (!wait_until(op, phase, waits ? flags + chunk : nullptr, op.epoch, rank, raiser)) return false;
  if (waits) last_seen = static_cast<Chunk>(chunk);
  ptx::fence_before_bulk();
  return true;
}

// The last staged chunk of each rank seen by one warp, -1 for none.
struct StagedFlags {
  int16_t* const last_seen;  // [num_ranks] in shared memory of this warp

  // [warp] Begin with no chunk seen.
  template <Kernels K>
  __device__ StagedFlags(const Op<K>& op, int16_t* last_seen) : last_seen(last_seen) {
#pragma unroll 1
    for (int rank = threadIdx.x % 32; rank < op.num_ranks(); rank += 32) last_seen[rank] = -1;
    __syncwarp();
  }

  // [thread] Return the last chunk of `rank` seen by this warp.
  __device__ int seen(int rank) const { return last_seen[rank]; }

  // [warp] Check all ranks for their last flag, without waiting. It rises with the last chunk of the rank's tokens:
  // once it is seen, all chunks of the rank count as seen and may be read, also by bulk loads.
  template <Kernels K>
  __device__ void look(const Op<K>& op) const {
    const int last = op.context.max_token_chunks - 1;
    __syncwarp();  // all lanes have read what `seen` returned before
#pragma unroll 1
    for (int rank = threadIdx.x % 32; rank < op.num_ranks(); rank += 32)
      if (last_seen[rank] < last && ptx::load_acquire(flag_of(op, rank, last)) >= op.epoch)
        last_seen[rank] = static_cast<int16_t>(last);
    __syncwarp();
    ptx::fence_before_bulk();
  }

  // [warp] Wait for a chunk of `rank`, the same in all lanes. Return false after an abort of this rank. After true, all
  // lanes may read the chunk's memory, also by bulk loads.
  // waits: staged (rows)
  template <Kernels K>
  __device__ bool wait(const Op<K>& op, int rank, int chunk) const {
    const uint64_t* flag = flag_of(op, rank, chunk);
    if (!wait_for_one(op, Phase::kRows, flag, op.epoch, rank, op.raiser_of(rank))) return false;
    if (threadIdx.x % 32 == 0 && last_seen[rank] < chunk) last_seen[rank] = static_cast<int16_t>(chunk);
    __syncwarp();
    ptx::fence_before_bulk();
    return true;
  }

 private:
  // [thread] Return the flag of one chunk.
  template <Kernels K>
  static __device__ const uint64_t* flag_of(const Op<K>& op, int rank, int chunk) {
    return op.context.own.staged + static_cast<size_t>(rank) * op.context.max_token_chunks + chunk;
  }
};

}  // namespace ep::cuda
