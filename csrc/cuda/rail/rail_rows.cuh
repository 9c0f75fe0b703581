// The rail blocks of a dispatch: they send and relay items, and rows and metadata, chunk by chunk.
#pragma once
#include "cuda/dispatch/dispatch.cuh"
#include "cuda/rail/rail.cuh"

namespace ep::cuda {

static_assert(kRailWarps <= DispatchBlock<Kernels::kSeveralNodes>::kWarps);

template <Kernels K, class Params>
struct DispatchRailWarp : RailWarp<K> {
  // The maximum number of chunks of rows sent before the items of a new plan. A sender that does not wait for its puts
  // to cross could post all rows first, but no rank there pulls a row before it has all items.
  static constexpr int kChunksAhead = 4;

  using Base = RailWarp<K>;
  using Base::Base;
  using Base::context, Base::lane, Base::op, Base::warp, Base::num_others, Base::num_senders;
  using Base::count_bytes, Base::finish_sending, Base::flag_at, Base::has_messages, Base::long_puts, Base::message_rows;
  using Base::node, Base::put_tokens, Base::raise, Base::relays, Base::sender, Base::signal_alone;
  using Base::wait_for_peer, Base::wait_for_self, Base::wire;

  // [warp] Put this sender's share of an array to the rail peer on `node`. Pieces of 8 KiB go to the senders in turn;
  // `piece` counts them over all arrays, the same in all senders.
  __device__ void send_share(int node, int32_t* remote, const int32_t* local, uint32_t bytes, int& piece) const {
    constexpr uint32_t kPiece = 8192;
    for (uint32_t offset = 0; offset < bytes; offset += kPiece, ++piece) {
      if (piece % num_senders != sender()) continue;
      const uint32_t piece_bytes = min(kPiece, bytes - offset);
      count_bytes(context.arrays.lists_sent, node, uint64_t{piece_bytes});
      wire().put(node, remote + offset / 4, local + offset / 4, piece_bytes);
    }
  }

  // [warp] Put the items and the table of a new plan to every rail peer, all senders together. `items_arrived` rises
  // there even without a usable plan. Called in senders, after `listed` of this rank.
  // raises: items_arrived
  __device__ void send_items(const Params& params, bool usable) const {
    const Config& config = context.config;
    for (int i = 0; i < num_others; ++i) {
      const int to = node(i);
      int piece = 0;
      if (has_messages() && sender() == 0) {
        const int ints = op.ranks_per_node() * context.item_ints + context.table_ints;  // of a row
        count_bytes(context.arrays.lists_sent, to,
                    static_cast<uint64_t>(message_rows(params, &MessageRows::to, to)) * ints * sizeof(int32_t));
      }
      const bool puts = usable && !has_messages();
      for (int local = 0; puts && local < op.ranks_per_node(); ++local) {
        const int num = __ldcg(&own_counts(op, op.rank()).num_items(to * op.ranks_per_node() + local));
        const size_t begin = static_cast<size_t>(local) * config.max_tokens * context.item_ints;
        // There, the inbox for this rank's node is this rank's inbox. So the own address for context.node names it.
        send_share(to, op.my_inbox(context.node, &Inbox::items) + begin,
                   context.local_rail_buffer(to, &RailArrays::items_out) + begin, num * context.item_ints * 4, piece);
      }
      if (puts)
        send_share(to, context.remote_rail_buffer(to, &RailArrays::table_in),
                   context.local_rail_buffer(to, &RailArrays::table_out),
                   params.args.num_tokens * context.table_ints * 4, piece);
      finish_sending(context.arrays.items_sent + context.other_node_idx(to), to,
                     flag_at(to, context.own.items_arrived));
    }
  }

  // [thread] Return whether rows go before all ranks agree. Not in the second launch of a counted dispatch: there the
  // ranks agree already. Not with one rail block, because rows under way delay the Calls: 4096 tokens, expert layout,
  // 8 blocks on H200 took 1495 us instead of 1455. Messages delay nothing: the Calls have one of their own before. Not
  // where the plan that this launch makes says how rows are packed.
  __device__ bool sends_early(const Params& params) const {
    return params.stages() && (params.rail_blocks > 1 || has_messages()) && !packs_by_new_plan(params);
  }

  // [thread] Return whether a plan that this launch makes packs rows: for messages of limited size.
  __device__ bool packs_by_new_plan(const Params& params) const {
    return params.new_plan() && params.stages() && params.args.messages.are_known();
  }
  // [thread] Return whether this rank's rows for a node are packed. A plan that this launch makes is listed then.
  __device__ bool packs(const Params& params, int node) const {
    return has_messages() && params.args.messages.are_known() && params.plan.head->message_rows.packed >> node & 1;
  }
  // [thread] Return the number of rows of tokens before `token`, in messages to a node.
  __device__ int rows_before(const Params& params, int node, int token) const {
    if (!packs(params, node) || token == 0) return token;
    return __ldcg(params.plan.sent_rows + static_cast<size_t>(node) * context.config.max_tokens + token - 1) + 1;
  }

  // [thread] Return whether a token has an expert on a node. Early rows of a new plan look at the choices themselves:
  // the pull warps may not have counted them yet.
  __device__ bool goes_to(const Params& params, int token, int node) const {
    if (!params.new_plan() || !sends_early(params)) return __ldcg(params.plan.sent_nodes + token) >> node & 1;
    const Config& config = context.config;
    const int64_t* const experts = params.args.topk_idx + static_cast<size_t>(token) * config.num_topk;
    const int of_node = context.num_local_experts * config.ranks_per_node;
    bool goes = false;
#pragma unroll 4
    for (int k = 0; k < config.num_topk; ++k) {
      const int64_t expert = __ldg(experts + k) - static_cast<int64_t>(node) * of_node;
      goes |= expert >= 0 && expert < of_node;
    }
    return goes;
  }

  // [warp] Put this sender's share of rows and metadata of tokens [begin, end) to a node: of tokens with experts there.
  // Row and metadata of a token have the same offset in the rail peer's inbox as in the own one. Rows that are not
  // staged come from the caller's tensor, if all nodes are mapped. Messages take both from the own inbox, or packed by
  // this. `is_last`: these are the last tokens. Called in senders, after `staged` of this rank.
  __device__ void send_tokens(const Params& params, LongPuts& puts, int to, int begin, int end, bool is_last) const {
    char* const staging = op.my_inbox(context.node, &Inbox::staging);
    const char* const rows = params.stages_rows ? staging : params.args.rows;
    const size_t stride = params.stages_rows ? params.row_stride : params.args.row_bytes;
    char* const metadata = op.my_inbox(context.node, &Inbox::metadata);
    const bool packs = this->packs(params, to);
    if (wire().has_messages(to)) {
      const uint32_t token_bytes = params.row_stride + params.metadata_bytes;
      const int end_row = is_last ? message_rows(params, &MessageRows::to, to) : rows_before(params, to, end);
      const int num_rows = end_row - rows_before(params, to, begin);
      if (sender() == 0) count_bytes(context.arrays.bytes_sent, to, static_cast<uint64_t>(num_rows) * token_bytes);
      if (!packs) return;
    }
    if (!wire().maps(to) && !wire().has_messages(to))
      return put_tokens(to, begin, end, {staging, staging, params.row_stride, params.args.row_bytes},
                        {metadata, metadata, params.metadata_bytes, params.metadata_bytes},
                        [&](int token) { return goes_to(params, token, to); });
    char* const to_rows = packs ? context.local_rail_buffer(to, &RailArrays::sums) : staging;
    char* const to_metadata = packs ? context.local_rail_buffer(to, &RailArrays::packed_metadata) : metadata;
    for (int first = begin + sender(); first < end; first += 32 * num_senders) {
      // Each lane looks at one token; the warp then puts the tokens with experts there, one by one.
      const int lane_token = first + lane * num_senders;
      const bool goes = lane_token < end && goes_to(params, lane_token, to);
      uint32_t lanes = __ballot_sync(~0u, goes);
      if (lanes == 0) continue;
      // Count once for all: an atomic access takes as long as a short put.
      if (!packs)
        count_bytes(context.arrays.bytes_sent, to,
                    static_cast<uint64_t>(__popc(lanes)) * (params.args.row_bytes + params.metadata_bytes));
      const int lane_row = goes ? rows_before(params, to, lane_token + 1) - 1 : 0;
      for (; lanes != 0; lanes &= lanes - 1) {
        const int from_lane = __ffs(lanes) - 1;
        const size_t token = first + from_lane * num_senders, row = __shfl_sync(~0u, lane_row, from_lane);
        puts.put(to, {to_rows + row * params.row_stride, rows + token * stride, params.args.row_bytes},
                 {to_metadata + row * params.metadata_bytes, metadata + token * params.metadata_bytes,
                  params.metadata_bytes});
      }
    }
    puts.drain();
  }

  // [thread] Return whether rows cross in this dispatch, on all ranks: not with an old plan that is unusable. The host
  // does not know that, so its messages cross all the same; exact ones have no rows then.
  __device__ bool sends_rows(const Params& params) const {
    return params.new_plan() || params.plan.head->usable || (has_messages() && !params.args.messages.are_exact());
  }
  // [thread] Return how many chunks this number of message rows makes.
  __device__ int chunks_of(int num_rows) const {
    return (num_rows + context.config.token_chunk() - 1) >> context.config.log_token_chunk;
  }

  // [warp] Send this rank's items, rows and metadata to all rail peers. A chunk of rows goes once this rank has staged
  // it, and the peer's inbox is free. A new plan is rarely made by then. So unless it packs the rows, they go first,
  // and the items follow when they are listed, behind at most kChunksAhead chunks; each sender decides for itself
  // behind how many. It is not known yet whether the ranks agree, or whether the new plan will be usable. So all rows
  // go; if not, nobody reads them. Return what `agree` found, or kAborted after an abort of this rank. Called in
  // senders.
  // waits: listed of this rank, staged of this rank, inbox_free (free staging)
  // raises: rows_arrived
  __device__ Verdict send_rows(const Params& params, char* shared) const {
    if (!sends_early(params) || !sends_rows(params)) {
      const Verdict verdict = agree(op, false);
      if (verdict != Verdict::kAgree || !sends_rows(params)) return verdict;
    }
    const uint64_t* const listed = context.own.listed + op.rank();
    if (packs_by_new_plan(params) && !wait_for_self(listed)) return Verdict::kAborted;
    bool has_items = params.new_plan();  // to be sent
    LongPuts puts = long_puts(shared, params.counters_at);
    const int max_chunks = context.max_token_chunks;
    const bool has_rows = !params.args.messages.are_known() || params.plan.head->usable;
    const int num_tokens = has_rows ? params.args.num_tokens : 0;
    const int end_chunk = context.config.num_token_chunks(num_tokens);
    for (int chunk = 0;; ++chunk) {
      const bool waits = chunk == end_chunk || chunk == kChunksAhead;
      if (has_items && (waits || __any_sync(~0u, ptx::load_acquire(listed) >= op.epoch))) {
        if (!wait_for_self(listed)) return Verdict::kAborted;
        send_items(params, params.plan.head->usable);
        stamp(op, Step::kItemsSent);
        has_items = false;
      }
      if (chunk == end_chunk) {
        stamp(op, Step::kAllSent);
        return agree(op, false);
      }
      const uint64_t* staged = context.own.staged + static_cast<size_t>(op.rank()) * max_chunks + chunk;
      if (!wait_for_self(staged)) return Verdict::kAborted;
      const int length = context.config.token_chunk(), begin = chunk * length;
      const int end = min(num_tokens, begin + length);
      for (int i = 0; i < num_others; ++i) {
        if (chunk == 0 && !wire().has_messages(node(i))) {  // a message waits for the own inbox: it is staged
          if (!wait_for_peer(Phase::kFreeStaging, node(i), context.own.inbox_free)) return Verdict::kAborted;
          ptx::fence_before_bulk();
        }
        const bool is_last = end == num_tokens;
        send_tokens(params, puts, node(i), begin, end, is_last);
        // Finish the chunks that are now complete: with packed rows none, or one or two. After the last token finish
        // all chunks of a message.
        int first = chunk, past = chunk + 1;
        if (has_messages()) {
          first = rows_before(params, node(i), begin) >> context.config.log_token_chunk;
          past = is_last ? chunks_of(message_rows(params, &MessageRows::to, node(i)))
                         : rows_before(params, node(i), end) >> context.config.log_token_chunk;
        }
        for (int done = first; done < past; ++done)
          finish_sending(context.arrays.rows_sent + context.other_node_idx(node(i)) * max_chunks + done, node(i),
                         flag_at(node(i), context.own.rows_arrived, max_chunks, done));
      }
      if (chunk == 0) stamp(op, Step::kFirstSent);
    }
  }

  // [warp] Wait for the items of the rail peer on `node`, then for each chunk of its rows. Raise `listed`, then
  // `staged`, at every rank of this node. If the new plan is unusable, raise only `listed`, but wait for the rows too:
  // once this operation is complete here, no peer may still store data here. Return what `agree` found, or kAborted
  // after an abort of this rank. Called in a relay. After a difference wait for no rows: they have arrived before all
  // ranks agree on the next operation.
  // waits: items_arrived (lists), listed of this rank, rows_arrived (rows)
  // raises: listed, staged
  __device__ Verdict relay_rows(const Params& params, int node) const {
    const Verdict verdict = agree(op, false);
    if (verdict != Verdict::kAgree || !sends_rows(params)) return verdict;
    const int source = context.rail_peer(node), max_chunks = context.max_token_chunks;
    if (params.new_plan()) {
      if (!wait_for_peer(Phase::kLists, node, context.own.items_arrived)) return Verdict::kAborted;
      raise(context.own.listed + source);
      if (!wait_for_self(context.own.listed + op.rank())) return Verdict::kAborted;  // then PlanHead::usable is written
    }
    const bool usable = params.plan.head->usable;
    // Wait for messages without rows for this node too: they cover rows for the peer, which have left then.
    int end_chunk = context.config.num_token_chunks(field_of(op, source, Field::kNumTokens)), num_waits = end_chunk;
    if (has_messages()) {
      end_chunk = chunks_of(message_rows(params, &MessageRows::from, node));
      num_waits = max(end_chunk, chunks_of(message_rows(params, &MessageRows::to, node)));
    }
    for (int chunk = 0; chunk < num_waits; ++chunk) {
      if (!wait_for_peer(Phase::kRows, node, context.own.rows_arrived, max_chunks, chunk)) return Verdict::kAborted;
      // The last chunk stands for all chunks without tokens too.
      const int past = chunk == end_chunk - 1 ? max_chunks : chunk + 1;
      if (usable && chunk < end_chunk)
        raise(context.own.staged + static_cast<size_t>(source) * max_chunks + chunk, past - chunk);
    }
    stamp(op, Step::kRelayed);
    return verdict;
  }
};

// [warp] Do one rail warp's part of a dispatch: begin, then send or relay. Called in all warps of rail blocks.
// `is_free` as in wait_for_free_staging. Return what `agree` found, or kAborted after an abort of this rank.
template <Kernels K, class Params>
__device__ __noinline__ inline Verdict run_rail(Op<K> op, const Params& params, char* shared, bool is_free) {
  const DispatchRailWarp<K, Params> warp(op);
  if (params.stages() && !warp.begin_dispatch(params.new_plan(), is_free)) return Verdict::kAborted;
  stamp(op, Step::kBegun);
  if (warp.relays()) return params.pulls() ? warp.relay_rows(params, warp.node(warp.warp)) : Verdict::kAgree;
  return params.sends() ? warp.send_rows(params, shared) : Verdict::kAgree;
}

}  // namespace ep::cuda
