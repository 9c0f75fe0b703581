// Waits for peers. They go through wait_until: a wait ends after the limit, and reports the late ranks. Only the waits
// for choices and combine weights do not (count_choices, load_combine_weight): the wait for Calls or is_too_late ends
// them.
#pragma once
#include "cuda/context.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/rail/wire.cuh"

namespace ep::cuda::EP_KERNELS {

// One operation under way, passed to every step. A __noinline__ function takes it by value: a reference would keep it
// in memory.
struct Op {
  const Context& context;
  Operation operation;
  uint64_t epoch;
  int block, num_blocks;  // this block; number of blocks without the rail blocks. In these, block >= num_blocks
  bool is_second;         // of two launches

  __device__ int rank() const { return context.config.rank; }
  __device__ int num_ranks() const { return context.num_ranks; }
  __device__ int ranks_per_node() const { return context.config.ranks_per_node; }
  // First rank of this node.
  __device__ int first_local_rank() const { return kOneNode ? 0 : context.node * context.config.ranks_per_node; }
  // Whether this block is a rail block.
  __device__ bool is_rail() const { return !kOneNode && block >= num_blocks; }
};

// [thread] Return whether this rank has aborted: a kernel or its host has set State::aborted.
__device__ __forceinline__ bool has_aborted(const Context& context) {
  return *static_cast<volatile uint32_t*>(&context.state->aborted) != 0;
}

// [thread] Raise a flag at every rank of the node. The caller runs fence_system before.
__device__ inline void raise_on_node(const Context& context, uint64_t* local_flag, uint64_t value) {
  for (int local = 0; local < context.config.ranks_per_node; ++local)
    ptx::store_relaxed(context.peers.at(local_flag, local), value);
}

// [thread] Return the bit of one rank. A set of ranks has 64 bits.
__device__ inline uint64_t bit_of(int rank) { return uint64_t{1} << rank; }
static_assert(kMaxRanks <= 64);

// [warp] Return the bits of all lanes.
__device__ inline uint64_t bits_of_all(uint64_t bits) {
  const uint64_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(bits >> 32));
  return high << 32 | __reduce_or_sync(~0u, static_cast<uint32_t>(bits));
}

// [thread] Abort this rank: write the report and raise `aborted` at the node and at the rail peers. The value of this
// flag is `late`, a bit for each late rank. Only the first call on a rank does anything; after an abort by the host,
// none does. Other waits of this rank then end within 32 turns.
__device__ __noinline__ inline void abort_rank(Op op, Phase phase, uint64_t late, uint64_t waited_ns) {
  const Context& context = op.context;
  if (atomicExch(&context.state->aborted, 1u) != 0) return;
  Report* report = context.report;
  report->operation = static_cast<int32_t>(op.operation);
  report->phase = static_cast<int32_t>(phase);
  report->waited_ms = static_cast<uint32_t>(waited_ns / 1000000);
  report->epoch = op.epoch;
  for (int word = 0; word < kRankWords; ++word) report->late[word] = static_cast<uint32_t>(late >> 32 * word);
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&report->aborted) = 1;
  uint64_t* const aborted = context.own.aborted + context.config.rank;
  raise_on_node(context, aborted, late);
  for (int node = 0; node < context.num_nodes(); ++node)
    if (node != context.node) Wire{context}.signal(node, aborted, late);
}

// [thread] Return whether this buffer masks late ranks instead of aborting.
__device__ inline bool has_masks(const Context& context) { return kExtras && context.config.masks; }

// [thread] Return whether this rank has masked `rank`.
__device__ inline bool is_masked(const Context& context, int rank) {
  return has_masks(context) && static_cast<volatile int32_t*>(context.state->masked)[rank] != 0;
}

// [warp] Return a bit for each masked rank.
__device__ inline uint32_t masked_ranks(const Op& op) {
  const int lane = threadIdx.x % 32;
  return __ballot_sync(~0u, lane < op.num_ranks() && is_masked(op.context, lane));
}

// [thread] Mask a rank of the node: from now on no warp of this rank waits for it. Raise `excluded` at the masked rank
// first. It may be slow, not dead, and may read memory that this rank overwrites after this call. So it reads the flag
// after its last load.
__device__ inline void mask_rank(const Context& context, int rank) {
  ptx::store_relaxed(context.peers.at(context.own.excluded + context.config.rank, context.local_of(rank)), 1);
  ptx::fence_system();
  atomicExch(&context.state->masked[rank], 1);
}

// [warp] Return whether a rank that is not masked has masked this one. Called with masks, which have one node.
__device__ inline bool is_excluded(const Op& op) {
  const int lane = threadIdx.x % 32;
  ptx::fence_system();
  return __any_sync(~0u, lane < op.num_ranks() && !is_masked(op.context, lane) &&
                             ptx::load_acquire(op.context.own.excluded + lane) != 0);
}

// [warp] With masks: abort this rank if another one has masked it. Return whether it has.
__device__ inline bool aborts_if_excluded(const Op& op, Phase phase) {
  if (!has_masks(op.context) || !is_excluded(op)) return false;
  if (threadIdx.x % 32 == 0) abort_rank(op, phase, bit_of(op.rank()), 0);
  return true;
}

// [thread] Return whether this warp adds its waits to Context::wait_ns. One warp at a time does. In a dispatch it is
// the first pull warp of block 0, which plans. In a combine it is a warp of the last block, which mostly reduces from
// the start: warp 0 waits for free slots, then a summing or the preparing warp for Calls, then the preparing warp for
// sums.
__device__ inline bool measures_waits(const Op& op) {
  if (!kExtras || op.context.wait_ns == nullptr) return false;
  return op.operation == Operation::kDispatch ? op.block == 0 && threadIdx.x < 32 : op.block == op.num_blocks - 1;
}

// Raisers that hand memory back, send sums between nodes, or relay, have to wait themselves first. A wait for such a
// flag may begin before the raiser's wait. So its limit is longer: the raiser's wait ends first, and names the late
// rank.
constexpr uint64_t kPatienceNs = 1'000'000'000;

// [thread] Return the limit of a single wait. With masks it is the same for all waits: docs/protocol.md says why.
__device__ inline uint64_t limit_ns(const Context& context, Phase phase, bool is_relayed) {
  const bool hangs_on_waits =
      is_relayed || phase == Phase::kFreeStaging || phase == Phase::kFreeSlots || phase == Phase::kNodeSums;
  return context.timeout_ns + (hangs_on_waits && !has_masks(context) ? kPatienceNs : 0);
}

// [warp] Return the ranks to blame, once some lane's limit is over or some lane's raiser has aborted. 0: no flag is
// missing. `waits`: the lane's flag, about `rank`, is missing; `is_over`: for too long. Lanes that may still wait blame
// nobody: their ranks may be slow, not late. If raisers name only this rank, it may be waiting itself: then the ranks
// of its waiting lanes are late.
__device__ inline uint64_t find_late_ranks(const Op& op, bool waits, bool is_over, int rank, int raiser) {
  const uint64_t others = ~bit_of(op.rank());
  const uint64_t named = waits ? ptx::load_acquire(op.context.own.aborted + raiser) : 0;  // by the raiser; 0: no abort
  uint64_t late = bits_of_all(named != 0 ? named : is_over ? bit_of(rank) : 0);
  if ((late & others) == 0) late |= bits_of_all(waits && named == 0 ? bit_of(rank) : 0);
  return (late & others) != 0 ? late & others : late;
}

// [warp] Wait until each lane's flag is at least `expected`. Lanes without a flag pass null. Return the same in all
// lanes. After true, all lanes may read the memory covered by any lane's flag, by bulk loads only after
// fence_before_bulk. Return false after an abort of this rank, but true if all flags have arrived all the same. This
// warp aborts the rank when the wait exceeds the buffer's limit, or when a raiser has aborted without raising the flag.
// `rank`: the lane's flag is about it; `raiser`: it raises the flag.
__device__ __noinline__ inline bool wait_until(Op op, Phase phase, const uint64_t* flag, uint64_t expected, int rank,
                                               int raiser) {
  if (flag != nullptr && is_masked(op.context, rank)) flag = nullptr;
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
    bool hopeless = waits && ptx::load_acquire(context.own.aborted + raiser) != 0;
    const uint64_t waited = ptx::nanoseconds() - begin;
    if (hopeless) waits = ptx::load_acquire(flag) < expected;
    hopeless = hopeless && waits;
    const bool is_over = waits && waited > limit_ns(context, phase, rank != raiser);
    const bool over = __any_sync(~0u, is_over || hopeless);
    if (over && has_masks(context)) {
      // Mask late ranks, and go on. A rank that comes too late itself masks nobody.
      if (aborts_if_excluded(op, phase)) return false;
      const bool late = rank != op.rank() && (is_over || hopeless);
      if (late) mask_rank(context, rank);
      if (late && measures) atomicAdd(reinterpret_cast<unsigned long long*>(context.wait_ns + rank), waited);
      if (late) waits = false;
      if (__any_sync(~0u, late)) continue;
    }
    if (over) {
      // Abort. Without a late rank all flags have arrived by now.
      const uint64_t late = find_late_ranks(op, waits, is_over, rank, raiser);
      if (late != 0 && threadIdx.x % 32 == 0) abort_rank(op, phase, late, waited);
      __syncwarp();
      return late == 0;
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
// look at the clock after kAgree, so the wait for the Calls does not shorten the limit.
__device__ __noinline__ inline bool is_too_late(Op op, Phase phase, int rank, const Tagged* words, int num,
                                                uint64_t since) {
  const uint64_t waited = ptx::nanoseconds() - since;
  const uint64_t named = ptx::load_acquire(op.context.own.aborted + rank);
  if (named != 0 || waited > op.context.timeout_ns) {
    // The rank may have sent the words before it aborted: read them again, after `aborted`.
    int arrived = 0;
    while (arrived < num && ptx::load_acquire(&words[arrived].epoch) >= op.epoch) ++arrived;
    if (arrived == num) return false;
    // Abort. If the rank names only this one, it is late itself: its words are missing.
    const uint64_t others = named & ~bit_of(op.rank());
    abort_rank(op, phase, others != 0 ? others : bit_of(rank), waited);
  }
  return has_aborted(op.context);
}

// [warp] Wait for one flag about each rank: flags [num_ranks]. Return as wait_until.
__device__ inline bool wait_for_ranks(const Op& op, Phase phase, const uint64_t* flags, uint64_t expected) {
#pragma unroll 1
  for (int first = 0; first < op.num_ranks(); first += 32) {
    const int rank = min(first + static_cast<int>(threadIdx.x) % 32, op.num_ranks() - 1);
    if (!wait_until(op, phase, flags + rank, expected, rank, op.context.raiser_of(rank))) return false;
  }
  return true;
}

// [warp] Wait for one flag about each rank of the node: flags [ranks_per_node]. Return as wait_until.
__device__ inline bool wait_for_node(const Op& op, Phase phase, const uint64_t* flags, uint64_t expected) {
  const int local = threadIdx.x % 32, rank = op.first_local_rank() + local;
  return wait_until(op, phase, local < op.ranks_per_node() ? flags + local : nullptr, expected, rank, rank);
}

// [thread] Poll once, without waiting: return whether this thread's flag about a rank of the node has arrived, and true
// in threads without one. The load overlaps with others at kernel start. If all threads return true and have met at a
// barrier, no wait_for_node for these flags is needed. flags [ranks_per_node]. `local`: of the thread's flag, or any
// number.
__device__ inline bool poll_once(const Op& op, const uint64_t* flags, uint64_t expected, unsigned local) {
  return local >= static_cast<unsigned>(op.ranks_per_node()) || ptx::load_acquire(flags + local) >= expected;
}

// [warp] Wait for one flag about `rank`, read by lane 0 only. Return as wait_until.
__device__ inline bool wait_for_one(const Op& op, Phase phase, const uint64_t* flag, uint64_t expected, int rank,
                                    int raiser) {
  return wait_until(op, phase, threadIdx.x % 32 == 0 ? flag : nullptr, expected, rank, raiser);
}

// Chunk flags about up to 32 ranks, and the last chunks seen by one warp. Each lane has the flags about one rank, or
// none.
struct ChunkFlags {
  const uint64_t* flags;  // [max_chunks] flags about the lane's rank; null: none, and the lane waits only for chunk -1
  int rank, raiser;       // as in wait_until
  int last_seen = -1;     // last chunk seen by this warp; covers all earlier chunks

  // [warp] Wait for the flag of the lane's `chunk`; -1: do not wait. Return false after an abort of this rank. After
  // true, all lanes may read the chunks' memory, also by bulk loads.
  __device__ bool wait(const Op& op, Phase phase, int chunk) {
    const bool waits = chunk > last_seen;
    if (!__any_sync(~0u, waits)) return true;
    if (!wait_until(op, phase, waits ? flags + chunk : nullptr, op.epoch, rank, raiser)) return false;
    last_seen = max(last_seen, chunk);
    ptx::fence_before_bulk();
    return true;
  }
};

// [warp] Return the chunk flags about `num` ranks from first_rank on, one per lane: flags [num, max_chunks]. Each rank
// is its own raiser, unless the caller sets other raisers (Reducer).
__device__ inline ChunkFlags chunk_flags(const uint64_t* flags, int max_chunks, int num, int first_rank) {
  const int lane = threadIdx.x % 32;
  return {lane < num ? flags + static_cast<size_t>(lane) * max_chunks : nullptr, first_rank + lane, first_rank + lane};
}

// The last staged chunk of each rank seen by one warp, -1 for none. Lane i has rank i and rank 32 + i. (An array of two
// would lie in memory, not in registers.)
struct StagedFlags {
  int of_low = -1, of_high = -1;
  static_assert(kMaxRanks <= 64, "a lane looks after two ranks");

  // [warp] Return the last chunk of `rank` seen by this warp. `rank` is the same in all lanes.
  __device__ int seen(int rank) const { return __shfl_sync(~0u, rank < 32 ? of_low : of_high, rank % 32); }

  // [warp] Check all ranks for their last flag, without waiting. It rises with the last chunk of the rank's tokens:
  // once it is seen, all chunks of the rank count as seen and may be read, also by bulk loads.
  __device__ void look(const Op& op) {
    const int lane = threadIdx.x % 32;
    look_at(op, lane, of_low);
    if (op.num_ranks() > 32) look_at(op, 32 + lane, of_high);
    __syncwarp();
    ptx::fence_before_bulk();
  }

  // [warp] Wait for a chunk of `rank`, the same in all lanes. Return false after an abort of this rank. After true, all
  // lanes may read the chunk's memory, also by bulk loads.
  __device__ bool wait(const Op& op, int rank, int chunk) {
    const uint64_t* flag = flag_of(op, rank, chunk);
    if (!wait_for_one(op, Phase::kRows, flag, op.epoch, rank, op.context.raiser_of(rank))) return false;
    if (static_cast<int>(threadIdx.x) % 32 == rank % 32) {
      if (rank < 32)
        of_low = max(of_low, chunk);
      else
        of_high = max(of_high, chunk);
    }
    ptx::fence_before_bulk();
    return true;
  }

 private:
  // [thread] Return the flag of one chunk.
  static __device__ const uint64_t* flag_of(const Op& op, int rank, int chunk) {
    return op.context.own.staged + static_cast<size_t>(rank) * op.context.max_token_chunks + chunk;
  }
  // [thread] Set `seen` to the last chunk of `rank` if its flag has arrived.
  static __device__ void look_at(const Op& op, int rank, int& seen) {
    const int last = op.context.max_token_chunks - 1;
    if (rank < op.num_ranks() && seen < last && ptx::load_acquire(flag_of(op, rank, last)) >= op.epoch) seen = last;
  }
};

}  // namespace ep::cuda::EP_KERNELS
