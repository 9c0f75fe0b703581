// The rail blocks of a rank. Their first warps are relays, one for each other node: a relay waits for data of the rail
// peer there, and raises ordinary flags for it on this node. All other warps are senders: they put this rank's data to
// its rail peers. There are enough rail blocks (Config::least_rail_blocks) to have at least one sender.
//
//   sender                                           relay for node m, on the receiving rank
//   `inbox_free` -> rail peers                       (senders wait for it)
//   Call (and counts) -> rail peers                  Counts, then Call -> ranks of the node
//   rows and metadata, chunk by chunk -> rail peers  `staged`
//   items and tables, between two chunks             `listed`
//   sums and weights, chunk by chunk -> rail peers   `sums_relayed`, for this rank alone
//
// Before all ranks agree, only `inbox_free`, Calls, counts, rows and metadata are sent.
#pragma once
#include "cuda/rail/long_puts.cuh"
#include "cuda/sync/call.cuh"

namespace ep::cuda {

// An array by token, at the rail peer and here.
struct TokenArray {
  void* remote;
  const void* local;
  size_t stride;   // [bytes] from one token to the next
  uint32_t bytes;  // of a token
};

// This warp, among all warps of all rail blocks. Warps with consecutive numbers are in different blocks, so the relays
// spread over the blocks.
template <Kernels K>
struct RailWarp {
  const Op<K>& op;
  const Context& context;
  const int lane, warp, num_warps;
  const int num_others, num_senders;

  // [warp] Find this warp's number. Called in all warps of rail blocks.
  __device__ explicit RailWarp(const Op<K>& op)
      : op(op),
        context(op.context),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32 * (gridDim.x - op.num_blocks) + op.block - op.num_blocks),
        num_warps(blockDim.x / 32 * (gridDim.x - op.num_blocks)),
        num_others(op.num_others()),
        num_senders(num_warps - num_others) {}

  // [warp] Return true in a relay, false in a sender.
  __device__ bool relays() const { return warp < num_others; }
  // [warp] Return the number of this sender, from 0.
  __device__ int sender() const { return warp - num_others; }
  // [thread] Return the i-th other node. Every node begins with a different one.
  __device__ int node(int i) const { return (context.node + 1 + i) % op.num_nodes(); }
  __device__ Wire wire() const { return Wire{context}; }
  // [thread] Return whether messages bring everything to other nodes.
  __device__ bool has_messages() const { return wire().has_messages(node(0)); }
  // [thread] Return the rows of all messages to (&MessageRows::to) or from a node. Where they are not known, messages
  // have all tokens that the buffer is for, so both sides go through all chunks.
  template <class Params>
  __device__ int message_rows(const Params& params, const int32_t (MessageRows::*rows)[kMaxNodes], int node) const {
    const MessageSizes& messages = params.args.messages;
    if (messages.limit > 0) return messages.limit;
    return messages.are_exact() ? (params.plan.head->message_rows.*rows)[node] : context.config.max_tokens;
  }
  // [thread] Return a wire flag to be raised at the rail peer on `node`, as an address in the own region: flags
  // [num_others, max_chunks]. Its index is that of this rank's node at the peer, where the peer's node has no entry.
  __device__ uint64_t* flag_at(int node, uint64_t* flags, int max_chunks = 1, int chunk = 0) const {
    return flags + static_cast<size_t>(context.index_without(context.node, node)) * max_chunks + chunk;
  }

  // [warp] Wait for a wire flag of the rail peer on `node`. Return false after an abort of this rank. Otherwise the
  // data covered by the flag may be read, by this warp. Called in relays, and in senders for `inbox_free`.
  __device__ bool wait_for_peer(Phase phase, int node, uint64_t* flags, int max_chunks = 1, int chunk = 0) const {
    uint64_t* const flag = flags + static_cast<size_t>(context.other_node_idx(node)) * max_chunks + chunk;
    if (!wait_for_one(op, phase, flag, op.epoch, context.rail_peer(node), context.rail_peer(node))) return false;
    if (lane == 0) wire().arrived(node, flag, op.epoch);
    __syncwarp();
    return true;
  }

  // [warp] Wait for a flag raised by other blocks of this rank; all lanes read it. Return false after an abort of this
  // rank. After true, all lanes may read the memory covered by the flag, also by bulk loads. The wait has no limit:
  // those blocks wait for peers with a limit, and abort this rank when it is over. A limit here could end first, and
  // would report this rank as late. Called in senders, and in relays for `listed`.
  __device__ bool wait_for_self(const uint64_t* flag) const {
    bool arrived;
    do arrived = ptx::load_acquire(flag) >= op.epoch;
    while (!arrived && !has_aborted(context));
    arrived = __all_sync(~0u, arrived);
    ptx::fence_before_bulk();
    return arrived;
  }

  // [warp] Raise flags [0, num) at every rank of the node. They cover all data seen or copied by this warp before.
  // Called in relays.
  __device__ void raise(uint64_t* local_flags, int num = 1) const {
    __syncwarp();
#pragma unroll 1
    for (int local = lane; local < op.ranks_per_node(); local += 32) {
      ptx::fence_system();
      for (int i = 0; i < num; ++i) ptx::store_relaxed(context.peers.at(local_flags + i, local), op.epoch);
    }
    __syncwarp();
  }

  // [warp] Return the long puts of this sender. All warps of a rail block share `bytes` of shared memory.
  __device__ LongPuts long_puts(char* shared, uint32_t bytes) const {
    const uint32_t of_warp = bytes / (blockDim.x / 32) / 128 * 128;
    return {context, shared + threadIdx.x / 32 * of_warp, of_warp};
  }

  // [warp] Count the bytes that this sender is about to put to a node. `bytes` has 64 bits, so that a caller thinks of
  // its product: 2^19 rows of 14 KiB do not fit into 32 bits.
  template <class Bytes>
  __device__ void count_bytes(uint64_t* counters, int node, Bytes bytes) const {
    static_assert(sizeof(Bytes) == sizeof(uint64_t));
    if (lane != 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(counters + node), static_cast<unsigned long long>(bytes));
  }

  // [warp] Put this sender's share of tokens [begin, end) to a node that is not mapped: of those with goes(token). A
  // put takes a sender as long for many rows as for one. So where rows lie side by side, a sender has 32 adjacent
  // tokens: a run of rows is one put, and so is the metadata from the first to the last token. Nobody reads that of
  // tokens in between. Elsewhere the senders take the tokens in turn.
  template <class Goes>
  __device__ void put_tokens(int node, int begin, int end, const TokenArray& rows, const TokenArray& metadata,
                             const Goes& goes) const {
    const bool joins = rows.stride == rows.bytes;
    const int step = joins ? 1 : num_senders;
    const auto put = [&](const TokenArray& array, int token, uint32_t num) {
      if (array.bytes == 0) return;
      const size_t offset = token * array.stride;
      count_bytes(context.arrays.bytes_sent, node, uint64_t{num} * array.bytes);
      wire().put(node, static_cast<char*>(array.remote) + offset, static_cast<const char*>(array.local) + offset,
                 num * array.bytes);
    };
    for (int first = begin + sender() * (joins ? 32 : 1); first < end; first += 32 * num_senders) {
      const int lane_token = first + lane * step;
      uint32_t lanes = __ballot_sync(~0u, lane_token < end && goes(lane_token));
      if (joins && lanes != 0) put(metadata, first + __ffs(lanes) - 1, 33 - __clz(lanes) - __ffs(lanes));
      while (lanes != 0) {
        const uint32_t lowest = lanes & -lanes, run = joins ? lanes & ~(lanes + lowest) : lowest;
        const int token = first + (__ffs(lanes) - 1) * step;
        put(rows, token, __popc(run));
        if (!joins) put(metadata, token, 1);
        lanes &= ~run;
      }
    }
  }

  // [warp] Count this sender in, after its puts to a node. The last of all senders resets the counter and raises the
  // wire flag at the rail peer: it covers the puts of all senders.
  __device__ void finish_sending(uint32_t* counter, int node, uint64_t* remote_flag) const {
    __syncwarp();
    if (lane == 0) {
      ptx::fence_system();
      if (atomicAdd(counter, 1u) == static_cast<uint32_t>(num_senders) - 1) {
        *counter = 0;
        ptx::fence_system();
        wire().signal(node, remote_flag, op.epoch);
      }
    }
    __syncwarp();
  }

  // [warp] Wait until the ranks of this node have read the rows and metadata of earlier operations. Then raise
  // `inbox_free` at the rail peers: theirs may come. The senders take the peers in turn. If a peer is in another kind
  // of operation, it may send rows all the same, but nobody reads them. `is_free` as in wait_for_free_staging. Return
  // false after an abort of this rank. Called in senders, once per operation.
  // waits: consumed (free staging)
  // raises: inbox_free
  __device__ bool hand_over_inbox(bool is_free) const {
    if (sender() >= num_others) return true;
    if (!is_free && !wait_for_node(op, Phase::kFreeStaging, context.own.consumed, context.state->staged_epoch))
      return false;
    for (int i = sender(); i < num_others; i += num_senders)
      if (lane == 0) wire().signal(node(i), flag_at(node(i), context.own.inbox_free), op.epoch);
    __syncwarp();
    return true;
  }

  // [warp] Raise a wire flag that covers the puts of this sender alone.
  __device__ void signal_alone(int node, uint64_t* remote_flag) const {
    __syncwarp();
    if (lane == 0) wire().signal(node, remote_flag, op.epoch);
  }

  static constexpr uint32_t kCallBytes = Call::kNumWords * sizeof(Tagged);

  // [thread] Return the Call of this operation in RailArrays::call.
  __device__ Tagged* arriving_call(Tagged* calls) const { return calls + op.epoch % 2 * Call::kNumWords; }

  // [warp] Put this rank's Call, and the counts of a new plan, to the rail peers; the senders take the peers in turn.
  // Wait until this rank has announced them, then signal `call_arrived` behind them. Return false after an abort of
  // this rank. Called in senders.
  // waits: called of this rank
  // raises: call_arrived
  __device__ bool send_call(bool has_counts) const {
    if (sender() >= num_others) return true;
    const Tagged* const call = call_at(op, op.rank());
    if (!wait_for_self(&call[min(lane, Call::kNumWords - 1)].epoch)) return false;
#pragma unroll 1
    for (int i = sender(); i < num_others; i += num_senders) {
      const uint32_t counts_bytes = has_counts ? context.counts_ints * sizeof(int32_t) : 0;
      int32_t* const counts = own_counts(op, op.rank()).data;
      count_bytes(context.arrays.lists_sent, node(i), uint64_t{counts_bytes} + kCallBytes);
      if (has_counts) wire().put(node(i), counts, counts, counts_bytes);
      wire().put(node(i), arriving_call(op.context.remote_rail_buffer(node(i), &RailArrays::call)), call, kCallBytes);
      signal_alone(node(i), flag_at(node(i), context.own.call_arrived));
    }
    return true;
  }

  // [warp] Wait for the Call of the rail peer on `node`, and for the counts of its new plan. Copy both to the ranks of
  // this node, the Call last: it covers the counts. Return false after an abort of this rank. Called in
  // a relay. If the peer makes no new plan, the copied counts are stale: the Calls differ, so no rank reads them.
  // waits: call_arrived (counts, or partial sums in a combine)
  // raises: called
  __device__ bool relay_call(int node, bool has_counts) const {
    if (!wait_for_peer(phase_of_calls(op), node, context.own.call_arrived)) return false;
    const int source = context.rail_peer(node);
#pragma unroll 1
    for (int local = 0; has_counts && local < op.ranks_per_node(); ++local) {
      if (local == context.local) continue;
      int32_t* const counts = own_counts(op, source).data;
      copy_words<uint4, 2>(reinterpret_cast<uint4*>(context.peers.at(counts, local)), reinterpret_cast<uint4*>(counts),
                           context.counts_ints * sizeof(int32_t));
    }
    __syncwarp();
    if (lane < Call::kNumWords) {  // a lane for each word
      const uint64_t data = __ldcg(&arriving_call(context.local_rail_buffer(node, &RailArrays::call))[lane].data);
      Tagged* const to = call_at(op, source) + lane;
      ptx::fence_system();
#pragma unroll 1
      for (int local = 0; local < op.ranks_per_node(); ++local)
        ptx::store_pair(context.peers.at(to, local), op.epoch, data);
    }
    __syncwarp();
    return true;
  }

  // [warp] Begin a dispatch with the rail peers: hand the inboxes over and exchange Calls. `is_free` as in
  // wait_for_free_staging. Return false after an abort of this rank.
  __device__ bool begin_dispatch(bool has_counts, bool is_free) const {
    return relays() ? relay_call(node(warp), has_counts) : hand_over_inbox(is_free) && send_call(has_counts);
  }

  // [warp] Begin a combine with the rail peers. Only a peer that differs, and is in a dispatch, needs the inboxes. So
  // the Call goes first: it does not wait for `consumed`, and a late rank delays no other one.
  __device__ bool begin_combine() const {
    return relays() ? relay_call(node(warp), false) : send_call(false) && hand_over_inbox(false);
  }
};

}  // namespace ep::cuda
