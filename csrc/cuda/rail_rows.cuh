// The rail's part of a dispatch: items, then rows and tails, chunk by chunk.
#pragma once
#include "cuda/dispatch.cuh"
#include "cuda/rail.cuh"

namespace ep::cuda {

struct DispatchRailWarp : RailWarp {
  using RailWarp::RailWarp;

  // [sender] Send this sender's share of `bytes`, piece by piece. `piece` counts the pieces of all arrays.
  __device__ uint64_t send_share(int node, int32_t* there, const int32_t* here, uint32_t bytes, int& piece) const {
    constexpr uint32_t kPiece = 8192;
    uint64_t sent = 0;
    for (uint32_t offset = 0; offset < bytes; offset += kPiece, ++piece) {
      if (piece % num_senders != sender()) continue;
      const uint32_t here_bytes = min(kPiece, bytes - offset);
      wire().put(node, there + offset / 4, here + offset / 4, here_bytes);
      sent += here_bytes;
    }
    return sent;
  }

  // [sender] Send the items and the table of a new plan.
  __device__ void send_items(const DispatchParams& params, bool usable) const {
    const Config& config = context.config;
    for (int i = 0; i < num_others; ++i) {
      const int to = node(i);
      uint64_t bytes = 0;
      int piece = 0;
      for (int local = 0; usable && local < op.ranks_per_node(); ++local) {
        const int num = __ldcg(&own_counts(op, op.rank()).num_items(to * op.ranks_per_node() + local));
        const size_t begin = static_cast<size_t>(local) * config.max_tokens * context.item_ints;
        bytes += send_share(to, context.inbox_for(context.node, &Inbox::items) + begin,
                            context.rail_to(to, &RailArrays::items_out) + begin, num * context.item_ints * 4, piece);
      }
      if (usable)
        bytes +=
            send_share(to, context.rail_from(to, &RailArrays::table_in), context.rail_to(to, &RailArrays::table_out),
                       params.args.num_tokens * context.table_ints * 4, piece);
      add_bytes(context.state->lists_sent, to, bytes);
      finish_sending(context.arrays.items_sent + context.other(to), to, flag_at(to, context.own.items_arrived));
    }
  }

  // [sender] Send this sender's rows and tails of tokens [begin, end) to a node. They have the same place there as
  // here.
  __device__ void send_tokens(const DispatchParams& params, int to, int begin, int end) const {
    char* const staging = context.inbox_for(context.node, &Inbox::staging);
    char* const tails = context.inbox_for(context.node, &Inbox::tails);
    uint64_t num = 0;
    for (int first = begin + sender(); first < end; first += 32 * num_senders) {
      const int lane_token = first + lane * num_senders;
      const bool goes = lane_token < end && (__ldcg(params.plan.sent_nodes + lane_token) >> to & 1);
      for (uint32_t lanes = __ballot_sync(~0u, goes); lanes != 0; lanes &= lanes - 1, ++num) {
        const size_t token = first + (__ffs(lanes) - 1) * num_senders;
        char* const row = staging + token * params.row_stride;
        wire().put(to, row, row, params.args.row_bytes);
        char* const tail = tails + token * params.tail_bytes;
        if (params.tail_bytes > 0) wire().put(to, tail, tail, params.tail_bytes);
      }
    }
    add_bytes(context.state->bytes_sent, to, num * (params.args.row_bytes + params.tail_bytes));
  }

  // [sender] Send all that other nodes need of a dispatch. Return false when this rank has aborted.
  __device__ bool send_rows(const DispatchParams& params) const {
    if (params.new_plan && !wait_for_self(context.own.listed + op.rank())) return false;
    const bool usable = params.plan.head->usable;
    if (params.new_plan) send_items(params, usable);
    const int max_chunks = context.max_token_chunks;
    for (int chunk = 0; usable && chunk < num_token_chunks(params.args.num_tokens); ++chunk) {
      const uint64_t* staged = context.own.staged + static_cast<size_t>(op.rank()) * max_chunks + chunk;
      if (!wait_for_self(staged)) return false;
      const int begin = chunk * kTokenChunk, end = min(params.args.num_tokens, begin + kTokenChunk);
      for (int i = 0; i < num_others; ++i) {
        send_tokens(params, node(i), begin, end);
        finish_sending(context.arrays.rows_sent + context.other(node(i)) * max_chunks + chunk, node(i),
                       flag_at(node(i), context.own.rows_arrived, max_chunks, chunk));
      }
    }
    return true;
  }

  // [relay] Pass on what arrives from a node: items, then chunks of rows. Return false when this rank has aborted.
  __device__ bool relay_rows(const DispatchParams& params, int node) const {
    const int source = context.rail_peer(node), max_chunks = context.max_token_chunks;
    if (params.new_plan) {
      if (!wait_for_peer(Phase::kLists, node, context.own.items_arrived)) return false;
      raise(context.own.listed + source);
      if (!wait_for_self(context.own.listed + op.rank())) return false;  // `usable` is written
    }
    if (!params.plan.head->usable) return true;
    const int num_chunks = num_token_chunks(__ldcg(&call_at(op, source)->num_tokens));
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (!wait_for_peer(Phase::kRows, node, context.own.rows_arrived, max_chunks, chunk)) return false;
      const int past = chunk == num_chunks - 1 ? max_chunks : chunk + 1;
      raise(context.own.staged + static_cast<size_t>(source) * max_chunks + chunk, past - chunk);
    }
    return true;
  }
};

// [rail blocks] Their part of a dispatch.
__device__ __noinline__ inline Verdict run_rail(Op op, const DispatchParams& params) {
  const DispatchRailWarp warp(op);
  if (params.stages && !warp.exchange_calls(params.new_plan)) return Verdict::kAborted;
  if (!params.pulls) return Verdict::kAgree;
  const Verdict verdict = agree(op, false);
  if (verdict != Verdict::kAgree) return verdict;
  const bool ok = warp.relays() ? warp.relay_rows(params, warp.node(warp.warp)) : warp.send_rows(params);
  return ok ? verdict : Verdict::kAborted;
}

}  // namespace ep::cuda
