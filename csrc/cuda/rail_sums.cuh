// The rail blocks of a combine: they send this node's sums of rail peers' tokens, with weights, chunk by chunk, and
// relay those sent to this rank.
#pragma once
#include "cuda/combine.cuh"
#include "cuda/rail.cuh"

namespace ep::cuda {

struct CombineRailWarp : RailWarp {
  using RailWarp::RailWarp;

  // [warp] Put this sender's share of sums and weights to the rail peer on a node: of its tokens [begin, end) with
  // experts on this node. Weights go by whole tokens; the owner reads only the columns with experts here. Called in
  // senders, after `summed`.
  __device__ void send_sums_of(const CombineParams& params, int to, int begin, int end) const {
    const Config& config = context.config;
    const int32_t* table = params.plan.tables + static_cast<size_t>(to) * config.max_tokens * context.table_ints;
    const uint32_t weight_bytes = params.args.topk_weights ? config.num_topk * sizeof(float) : 0;
    uint64_t num = 0;
    for (int first = begin + sender(); first < end; first += 32 * num_senders) {
      const int lane_token = first + lane * num_senders;
      bool goes = false;
      for (int local = 0; lane_token < end && local < op.ranks_per_node(); ++local)
        goes |= __ldcg(table + static_cast<size_t>(lane_token) * context.table_ints + local) >= 0;
      for (uint32_t lanes = __ballot_sync(~0u, goes); lanes != 0; lanes &= lanes - 1, ++num) {
        const size_t token = first + (__ffs(lanes) - 1) * num_senders;
        wire().put(to, context.rail_at_peer(to, &RailArrays::sums) + token * context.slot_stride,
                   context.inbox_for(to, &Inbox::staging) + token * context.slot_stride, context.row_bytes);
        if (weight_bytes > 0)
          wire().put_words(to, context.rail_at_peer(to, &RailArrays::weights) + token * config.num_topk,
                           context.inbox_for(to, &Inbox::weights) + token * config.num_topk, weight_bytes);
      }
    }
    add_bytes(context.state->bytes_sent, to, num * (context.row_bytes + weight_bytes));
  }

  // [warp] Send the sums of all rail peers' tokens, chunk by chunk. Wait for each chunk until this rank has summed it.
  // Return false after an abort of this rank. Called in senders, once all ranks agree.
  __device__ bool send_sums(const CombineParams& params) const {
    const int max_chunks = context.max_sum_chunks;
    for (int chunk = 0; chunk < max_chunks; ++chunk)
      for (int i = 0; i < num_others; ++i) {
        const int to = node(i), begin = chunk * kSumChunk;
        const int end = min(__ldcg(&call_at(op, context.rail_peer(to))->num_tokens), begin + kSumChunk);
        if (begin >= end) continue;
        const int flag = context.other(to) * max_chunks + chunk;
        if (!wait_for_self(context.own.summed + flag)) return false;
        send_sums_of(params, to, begin, end);
        finish_sending(context.arrays.sums_sent + flag, to, flag_at(to, context.own.sums_arrived, max_chunks, chunk));
      }
    return true;
  }

  // [warp] Wait for each chunk of sums from the rail peer on `node`, and raise `sums_here`: at this rank alone, because
  // no other rank reads them. Return false after an abort of this rank. Called in a relay, once all ranks agree.
  __device__ bool relay_sums(const CombineParams& params, int node) const {
    const int max_chunks = context.max_sum_chunks;
    for (int chunk = 0; chunk * kSumChunk < params.args.num_tokens; ++chunk) {
      if (!wait_for_peer(Phase::kSums, node, context.own.sums_arrived, max_chunks, chunk)) return false;
      if (lane == 0) {
        ptx::fence_system();
        ptx::store_relaxed(context.own.sums_here + context.other(node) * max_chunks + chunk, op.epoch);
      }
    }
    return true;
  }
};

// [warp] Do one rail warp's part of a combine: exchange Calls, agree, then send or relay. Called in all warps of rail
// blocks. Return what `agree` found, or kAborted after an abort of this rank.
__device__ __noinline__ inline Verdict run_rail(Op op, const CombineParams& params) {
  const CombineRailWarp warp(op);
  if (!warp.exchange_calls(false)) return Verdict::kAborted;
  const Verdict verdict = agree(op, false);
  if (verdict != Verdict::kAgree || !params.plan.head->usable) return verdict;
  const bool ok = warp.relays() ? warp.relay_sums(params, warp.node(warp.warp)) : warp.send_sums(params);
  return ok ? verdict : Verdict::kAborted;
}

}  // namespace ep::cuda
