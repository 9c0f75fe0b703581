// The rail blocks of a combine: they send this node's sums of rail peers' tokens, with weights, chunk by chunk, and
// relay those sent to this rank.
#pragma once
#include "cuda/combine/combine.cuh"
#include "cuda/rail/rail.cuh"

namespace ep::cuda {

static_assert(kRailWarps <= Pipeline::kThreads / 32);

template <Kernels K, class Params>
struct CombineRailWarp : RailWarp<K> {
  using Base = RailWarp<K>;
  using Base::Base;
  using Base::context, Base::lane, Base::op, Base::warp, Base::num_others, Base::num_senders;
  using Base::count_bytes, Base::finish_sending, Base::flag_at, Base::has_messages, Base::long_puts, Base::message_rows;
  using Base::node, Base::put_tokens, Base::raise, Base::relays, Base::sender, Base::signal_alone;
  using Base::wait_for_peer, Base::wait_for_self, Base::wire;

  // [warp] Put this sender's share of sums and weights to the rail peer on a node: of its tokens [begin, end) with
  // experts on this node. Direct sums are only counted: they are there already. Weights go by whole tokens; the owner
  // reads only the columns with experts here. Called in senders, after `summed`.
  __device__ void send_sums_of(const Params& params, LongPuts& puts, int to, int begin, int end) const {
    const Config& config = context.config;
    const int32_t* table = params.plan.tables + static_cast<size_t>(to) * config.max_tokens * context.table_ints;
    const uint32_t weight_bytes = params.topk_weights() ? config.num_topk * sizeof(float) : 0;
    if (wire().has_messages(to)) {
      if (sender() == 0)
        count_bytes(context.arrays.bytes_sent, to,
                    static_cast<uint64_t>(end - begin) * (context.slot_stride + weight_bytes));
      return;
    }
    const auto goes_to = [&](int token) {
      bool goes = false;
      for (int local = 0; token < end && local < op.ranks_per_node(); ++local)
        goes |= __ldcg(table + static_cast<size_t>(token) * context.table_ints + local) >= 0;
      return goes;
    };
    if (!wire().maps(to) && !wire().has_messages(to))
      return put_tokens(to, begin, end,
                        {context.remote_rail_buffer(to, &RailArrays::sums), op.my_inbox(to, &Inbox::staging),
                         context.slot_stride, context.row_bytes},
                        {context.remote_rail_buffer(to, &RailArrays::weights), op.my_inbox(to, &Inbox::weights),
                         weight_bytes, weight_bytes},
                        goes_to);
    for (int first = begin + sender(); first < end; first += 32 * num_senders) {
      const int lane_token = first + lane * num_senders;
      const bool goes = goes_to(lane_token);
      uint32_t lanes = __ballot_sync(~0u, goes);
      if (lanes == 0) continue;
      // Count once for all, as for rows.
      count_bytes(context.arrays.bytes_sent, to,
                  static_cast<uint64_t>(__popc(lanes)) * (context.row_bytes + weight_bytes));
      for (; !context.maps(to) && lanes != 0; lanes &= lanes - 1) {
        const size_t offset = (first + (__ffs(lanes) - 1) * num_senders) * static_cast<size_t>(context.slot_stride);
        puts.put(to, {context.remote_rail_buffer(to, &RailArrays::sums) + offset,
                      op.my_inbox(to, &Inbox::staging) + offset, context.row_bytes});
      }
      if (weight_bytes > 0) {
        const size_t offset = static_cast<size_t>(lane_token) * config.num_topk;
        wire().stores().put_each(to, goes, context.remote_rail_buffer(to, &RailArrays::weights) + offset,
                                 op.my_inbox(to, &Inbox::weights) + offset, config.num_topk);
      }
    }
    puts.drain();
  }

  // [warp] Send the sums of all rail peers' tokens, chunk by chunk. Wait for each chunk until this rank has summed it.
  // Return false after an abort of this rank. Called in senders, once all ranks agree. With an unusable plan there are
  // no sums to wait for.
  // waits: summed of this rank
  // raises: sums_arrived
  __device__ bool send_sums(const Params& params, char* shared) const {
    LongPuts puts = long_puts(shared, params.memory.pipeline.num_smem_stages * params.memory.pipeline.smem_stage_bytes);
    const int max_chunks = context.max_sum_chunks;
    for (int chunk = 0; chunk < max_chunks; ++chunk)
      for (int i = 0; i < num_others; ++i) {
        const int to = node(i), length = context.config.sum_chunk(), begin = chunk * length;
        const int end = min(rows_from(op, params.plan, to), begin + length);
        const int message_end = min(message_rows(params, &MessageRows::from, to), begin + length);
        const bool has_tokens = begin < end && params.plan.head->usable;
        const bool has_message = wire().has_messages(to) && begin < message_end;
        if (!has_tokens && !has_message) continue;
        // Wait for the chunk of the window with the last of these tokens.
        const int summed = context.other_node_idx(to) * op.num_far_chunks() + (end - 1) / context.config.window_chunk;
        if (has_tokens && !wait_for_self(context.own.summed + summed)) return false;
        send_sums_of(params, puts, to, begin, has_message ? message_end : end);
        finish_sending(context.arrays.sums_sent + context.other_node_idx(to) * max_chunks + chunk, to,
                       flag_at(to, context.own.sums_arrived, max_chunks, chunk));
        if (chunk == 0) stamp(op, Step::kFirstSent);
      }
    stamp(op, Step::kAllSent);
    return true;
  }

  // [warp] Wait for each chunk of sums from the rail peer on `node`, and raise `sums_relayed`: at this rank alone,
  // because no other rank reads them. Return false after an abort of this rank. Called in a relay, once all ranks
  // agree.
  // waits: sums_arrived (sums between nodes)
  // raises: sums_relayed
  __device__ bool relay_sums(const Params& params, int node) const {
    const int max_chunks = context.max_sum_chunks;
    // Wait for messages without sums for this node too, as relay_rows.
    const int num_tokens = has_messages() ? max(message_rows(params, &MessageRows::to, node),
                                                message_rows(params, &MessageRows::from, node))
                                          : params.args.num_tokens;
    for (int chunk = 0; chunk << context.config.log_sum_chunk < num_tokens; ++chunk) {
      if (!wait_for_peer(Phase::kNodeSums, node, context.own.sums_arrived, max_chunks, chunk)) return false;
      if (lane == 0) {
        ptx::fence_system();
        ptx::store_relaxed(context.own.sums_relayed + context.other_node_idx(node) * max_chunks + chunk, op.epoch);
      }
    }
    stamp(op, Step::kRelayed);
    return true;
  }
};

// [thread] Return whether sums cross, once all ranks agree. With an unusable plan no rank sends anything, except for
// messages: the host does not know it, so they cross. Exact ones have no rows then.
template <Kernels K, class Params>
__device__ inline bool sends_sums(const CombineRailWarp<K, Params>& warp, const Params& params) {
  return params.plan.head->usable || (warp.has_messages() && !params.args.messages.are_exact());
}

// [warp] Do one rail warp's part of a combine: begin, agree, then send or relay sums. Called in all warps of rail
// blocks. Return what `agree` found, or kAborted after an abort of this rank.
template <Kernels K>
__device__ __noinline__ inline Verdict run_rail(Op<K> op, const CombineParams& params, char* shared) {
  const CombineRailWarp<K, CombineParams> warp(op);
  if (!warp.begin_combine()) return Verdict::kAborted;
  stamp(op, Step::kBegun);
  const Verdict verdict = agree(op, false);
  if (verdict != Verdict::kAgree || !sends_sums(warp, params)) return verdict;
  const bool ok = warp.relays() ? warp.relay_sums(params, warp.node(warp.warp)) : warp.send_sums(params, shared);
  return ok ? verdict : Verdict::kAborted;
}

}  // namespace ep::cuda
