// The rail blocks of a combine in decode layout: they send and relay combine weights, and then sums.
#pragma once
#include "cuda/decode/combine_weights.cuh"
#include "cuda/rail/rail_sums.cuh"

namespace ep::cuda {

// [warp] Put the combine weights of this rank's tokens to the rail peers; the senders take the peers in turn. All
// ranks have begun this combine, so nobody there uses the memory any more. Called in senders, once all ranks agree.
// raises: rows_arrived
template <Kernels K>
__device__ inline void send_combine_weights(const CombineRailWarp<K, DecodeCombineParams>& warp,
                                            const DecodeCombineParams& params) {
  const Context& context = warp.context;
  float* const combine_weights = warp.op.my_inbox(context.node, &Inbox::weights);
  // Whole vectors: up to 12 bytes more go to the padding behind the array.
  const int num = params.args.num_tokens * context.config.num_topk;
  const auto bytes = static_cast<uint32_t>(round_up(num * sizeof(float), kVector));
  for (int i = warp.sender(); i < warp.num_others; i += warp.num_senders) {
    // There, the inbox for this rank's node is this rank's inbox. So the own address for context.node names it.
    const int node = warp.node(i);
    warp.count_bytes(context.arrays.lists_sent, node, uint64_t{bytes});
    warp.wire().put(node, combine_weights, combine_weights, bytes);
    warp.signal_alone(node, warp.flag_at(node, context.own.rows_arrived, context.max_token_chunks));
  }
}

// [warp] Wait for the combine weights of the rail peer on `node`, and raise its first `staged` flag at every rank of
// this node. Return false after an abort of this rank. Called in a relay, once all ranks agree.
// waits: rows_arrived (weights)
// raises: staged
template <Kernels K>
__device__ inline bool relay_combine_weights(const CombineRailWarp<K, DecodeCombineParams>& warp, int node) {
  const Context& context = warp.context;
  if (!warp.wait_for_peer(Phase::kWeights, node, context.own.rows_arrived, context.max_token_chunks)) return false;
  warp.raise(context.own.staged + static_cast<size_t>(context.rail_peer(node)) * context.max_token_chunks);
  return true;
}

// [warp] Do one rail warp's part of a combine: begin, agree, send or relay combine weights, then sums. Called in all
// warps of rail blocks. Return what `agree` found, or kAborted after an abort of this rank.
template <Kernels K>
__device__ __noinline__ inline Verdict run_rail(Op<K> op, const DecodeCombineParams& params, char* shared) {
  const CombineRailWarp<K, DecodeCombineParams> warp(op);
  if (params.pushes() && !warp.begin_combine()) return Verdict::kAborted;
  stamp(op, Step::kBegun);
  const Verdict verdict = agree(op, false);
  if (verdict != Verdict::kAgree || !sends_sums(warp, params)) return verdict;
  if (params.pushes()) {
    if (!warp.relays())
      send_combine_weights(warp, params);
    else if (!relay_combine_weights(warp, warp.node(warp.warp)))
      return Verdict::kAborted;
  }
  // With a hook sums are sent in the first launch, and relayed in the second one.
  bool ok = true;
  if (warp.relays() && params.reduces()) ok = warp.relay_sums(params, warp.node(warp.warp));
  if (!warp.relays() && params.pushes()) ok = warp.send_sums(params, shared);
  return ok ? verdict : Verdict::kAborted;
}

}  // namespace ep::cuda
