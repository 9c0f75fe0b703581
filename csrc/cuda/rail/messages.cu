#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/rail/messages.h"

namespace ep::cuda {
namespace {

// A message of rows or sums has at least so many bytes, if there are more: each one costs some microseconds for the
// kernel between two. Not tuned.
constexpr size_t kBytes = 8 << 20;

// [warp] Raise the flags of a message that has arrived, and wait until the next one is ready. The wait ends with this
// rank's abort; it needs no limit, because the operation's kernel has one. After an abort raise nothing: the message
// may not be here. NCCL sends the next one all the same, so its epoch tells the rail peers whether it is ready.
__global__ void between(const __grid_constant__ Between params) {
  const int lane = threadIdx.x;
  const auto* const state = static_cast<const volatile State*>(params.state);
  const uint64_t epoch = state->epoch + 1;
  if (lane < params.num_raisers && state->aborted == 0 && params.message_epochs[params.raisers[lane]] == epoch) {
    ptx::fence_system();
    for (int i = 0; i < params.num_flags; ++i) ptx::store_relaxed(params.raises[lane] + i, epoch);
  }
  if (params.num_waits == 0) return;
  bool ready = lane >= params.num_waits;
  for (int turn = 1; !ready; ++turn) {
    ready = ptx::load_acquire(params.waits[lane]) >= epoch;
    if (!ready && turn % 32 == 0 && state->aborted != 0) break;
  }
  ready = __all_sync(~0u, ready);
  if (lane == 0) params.message_epochs[params.node] = ready ? epoch : 0;
}

}  // namespace

Messages::Messages(const Context& context, std::shared_ptr<NcclComm> comm) : context_(context), comm_(std::move(comm)) {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
  // The highest priority: with CUDA_DEVICE_MAX_CONNECTIONS=1 streams of one priority share a queue. There this one
  // would wait for the kernel that waits for its messages.
  check(cudaStreamCreateWithPriority(&stream_.handle, cudaStreamNonBlocking, greatest), "stream");
  check(cudaEventCreateWithFlags(&before_.handle, cudaEventDisableTiming), "event");
  check(cudaEventCreateWithFlags(&after_.handle, cudaEventDisableTiming), "event");
  // Load the kernel now: later that could wait for a kernel that runs, which waits for this one.
  launch_between();
  // It needs one warp, but other kernels may have the whole GPU.
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(context_.timeout_ns);
  while (true) {
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status == cudaSuccess) break;
    if (status != cudaErrorNotReady) check(status, "first launch");
    if (std::chrono::steady_clock::now() > end)
      throw std::runtime_error("first launch: other kernels left no room on the GPU until the limit of the buffer");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Messages::follow(cudaStream_t stream) const {
  check(cudaEventRecord(before_, stream), "event");
  check(cudaStreamWaitEvent(stream_, before_, 0), "event");
}

void Messages::launch_between() {
  between_.state = context_.state;
  between_.message_epochs = context_.own.message_epochs;
  between_.node = context_.node;
  between<<<1, 32, 0, stream_>>>(between_);
  check(cudaGetLastError(), "launch");
  between_ = Between{};
}

template <class PartOf, class Arrays>
void Messages::exchange(uint64_t* flags, int max_chunks, int begin, int end, const PartOf& part_of,
                        const Arrays& arrays) {
  const Region& own = context_.own;
  const auto each_node = [&](const auto& run) {
    for (int node = 0; node < context_.config.num_nodes; ++node) {
      if (node == context_.node) continue;
      const Part part = part_of(node);
      if (part.num_ready > 0 || part.received > 0) run(node, part);
    }
  };
  // Wait for the last chunk: it rises after all others. A flag has the index of this node at the peer.
  each_node([&](int node, const Part& part) {
    if (part.num_ready == 0) return;
    const uint64_t* const ready = own.ready + other_node_idx(node) * own.wire_flags;
    const int index = context_.node - (context_.node > node);
    between_.waits[between_.num_waits++] =
        ready + (flags - own.inbox_free) + index * max_chunks + begin + part.num_ready - 1;
  });
  launch_between();
  comm_->group([&] {
    each_node([&](int node, const Part& part) {
      const auto exchange_array = [&](const Array& array, size_t sent, size_t received) {
        if (sent > 0) comm_->send(array.local, sent * array.bytes, node, stream_);
        if (received > 0) comm_->receive(array.received, received * array.bytes, node, stream_);
        bytes_ += sent * array.bytes;
      };
      arrays(node, [&](const Array& array) { exchange_array(array, part.sent, part.received); });
      exchange_array({own.message_epochs + context_.node, own.message_epochs + node, sizeof(uint64_t)}, 1, 1);
    });
  });
  each_node([&](int node, const Part&) {
    between_.raisers[between_.num_raisers] = node;
    between_.raises[between_.num_raisers++] = flags + other_node_idx(node) * max_chunks + begin;
  });
  between_.num_flags = end - begin;
}

MessageRows Messages::rows_of(const MessageRows* rows) const {
  if (rows) return *rows;
  MessageRows all{};
  std::fill_n(all.to, kMaxNodes, context_.config.max_tokens);
  std::fill_n(all.from, kMaxNodes, context_.config.max_tokens);
  return all;
}

template <class BehindFirst, class Arrays>
void Messages::exchange_rows(uint64_t* flags, int max_chunks, int log_chunk, const int32_t* sent,
                             const int32_t* received, size_t row_bytes, const BehindFirst& behind_first,
                             const Arrays& arrays) {
  const auto chunks_of = [&](int num_rows) { return (num_rows + (1 << log_chunk) - 1) >> log_chunk; };
  const auto most = [](const int32_t* rows) { return *std::max_element(rows, rows + kMaxNodes); };
  const size_t chunk_bytes = row_bytes << log_chunk;
  const int num_chunks = chunks_of(std::max(most(sent), most(received)));
  const int step = static_cast<int>((kBytes + chunk_bytes - 1) / chunk_bytes);
  for (int begin = 0; begin < num_chunks; begin += step) {
    const int end = std::min(num_chunks, begin + step), first_row = begin << log_chunk, last_row = end << log_chunk;
    const auto among = [&](int num_rows) { return std::clamp(num_rows, first_row, last_row) - first_row; };
    const auto part_of = [&](int node) {
      const int here = among(sent[node]);
      return Part{static_cast<size_t>(here), static_cast<size_t>(among(received[node])), chunks_of(here)};
    };
    exchange(flags, max_chunks, begin, end, part_of,
             [&](int node, const auto& add) { arrays(node, static_cast<size_t>(first_row), add); });
    if (begin == 0) behind_first();
  }
}

// Calls and counts of both parities, because the host does not know the epoch of a captured launch. Those of the last
// operation come again, unchanged. Counts always come, so that the message has the same size in every operation.
void Messages::exchange_calls() {
  const Region& own = context_.own;
  exchange(own.call_arrived, 1, 0, 1, whole, [&](int node, const auto& add) {
    for (int parity = 0; parity < 2; ++parity) {
      const size_t first = static_cast<size_t>(parity) * context_.num_ranks;
      const auto counts = [&](int rank) { return own.counts + (first + rank) * context_.counts_ints; };
      add(Array{own.called + (first + context_.config.rank) * Call::kNumWords,
                rail(node, &RailArrays::call) + parity * Call::kNumWords, Call::kNumWords * sizeof(Tagged)});
      add(Array{counts(context_.config.rank), counts(rail_peer(node)), context_.counts_ints * sizeof(int32_t)});
    }
  });
}

void Messages::finish(cudaStream_t stream, bool joins) {
  if (between_.num_raisers > 0) launch_between();
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream_, &status), "capture");
  if (status == cudaStreamCaptureStatusNone) return;
  has_captured_ = true;
  if (!joins) return;
  check(cudaEventRecord(after_, stream_), "event");
  check(cudaStreamWaitEvent(stream, after_, 0), "event");
}

void Messages::exchange_dispatch(const RowArgs& args, size_t bytes_of_metadata) {
  const Config& config = context_.config;
  const Region& own = context_.own;
  const bool known = args.messages.are_known();
  const MessageRows rows = rows_of(args.messages.rows);
  const size_t row_bytes = row_stride(args.row_bytes);
  // Items of a rank lie behind each other; a node has no more of them than rows.
  const auto exchange_items = [&] {
    const size_t locals = config.ranks_per_node, lists = known ? locals : 1, ints = context_.item_ints;
    const auto part_of = [&](int node) { return Part{size_t(rows.to[node]), size_t(rows.from[node]), 1}; };
    exchange(own.items_arrived, 1, 0, 1, part_of, [&](int node, const auto& add) {
      for (size_t list = 0; list < lists; ++list) {
        const size_t first = list * config.max_tokens * ints;
        add(Array{rail(node, &RailArrays::items_out) + first, inbox(node, &Inbox::items) + first,
                  locals / lists * ints * sizeof(int32_t)});
      }
      add(Array{rail(node, &RailArrays::table_out), rail(node, &RailArrays::table_in),
                context_.table_ints * sizeof(int32_t)});
    });
  };
  const bool has_items = args.topk_idx;
  // They say how rows are packed, so rows come behind them. Other rows come earlier than items are listed.
  if (has_items && known) exchange_items();
  const auto behind_first = [&] {
    if (has_items && !known) exchange_items();
  };
  const auto exchange_arrays = [&](int node, size_t row, const auto& add) {
    const bool packs = rows.packed >> node & 1;
    const auto add_array = [&](const char* packed, char* Inbox::* array, size_t bytes) {
      add(Array{(packs ? packed : inbox(context_.node, array)) + row * bytes, inbox(node, array) + row * bytes, bytes});
    };
    add_array(rail(node, &RailArrays::sums), &Inbox::staging, row_bytes);
    if (bytes_of_metadata > 0) add_array(rail(node, &RailArrays::packed_metadata), &Inbox::metadata, bytes_of_metadata);
  };
  exchange_rows(own.rows_arrived, context_.max_token_chunks, config.log_token_chunk, rows.to, rows.from,
                row_bytes + bytes_of_metadata, behind_first, exchange_arrays);
}

void Messages::exchange_sums(const SumArgs& args, size_t weights) {
  const Config& config = context_.config;
  const Region& own = context_.own;
  const MessageRows rows = rows_of(args.messages.rows);  // sums go the other way
  const size_t row_bytes = context_.slot_stride;
  const auto exchange_arrays = [&](int node, size_t row, const auto& add) {
    add(Array{inbox(node, &Inbox::staging) + row * row_bytes, rail(node, &RailArrays::sums) + row * row_bytes,
              row_bytes});
    if (weights > 0)
      add(Array{inbox(node, &Inbox::weights) + row * weights, rail(node, &RailArrays::weights) + row * weights,
                weights * sizeof(float)});
  };
  exchange_rows(
      own.sums_arrived, context_.max_sum_chunks, config.log_sum_chunk, rows.from, rows.to,
      row_bytes + weights * sizeof(float), [] {}, exchange_arrays);
}

void Messages::dispatch(const DispatchArgs& args, Launch launch, cudaStream_t stream) {
  if (launch != Launch::kPull) exchange_calls();
  if (launch != Launch::kPlanAndStage) exchange_dispatch(args, metadata_bytes(context_.config, args));
  finish(stream, launch != Launch::kPlanAndStage);
}

void Messages::combine(const CombineArgs& args, cudaStream_t stream) {
  exchange_calls();
  exchange_sums(args, args.topk_weights ? context_.config.num_topk : 0);
  finish(stream, true);
}

void Messages::decode_dispatch(const DecodeDispatchArgs& args, DecodeLaunch launch, cudaStream_t stream) {
  if (launch != DecodeLaunch::kReceive) {
    exchange_calls();
    exchange_dispatch(args, metadata_bytes(context_.config, args));
  }
  finish(stream, launch != DecodeLaunch::kSend);
}

void Messages::decode_combine(const DecodeCombineArgs& args, DecodeLaunch launch, cudaStream_t stream) {
  if (launch != DecodeLaunch::kReceive) {
    exchange_calls();
    const size_t bytes = context_.config.max_tokens * context_.config.weights_bytes();
    exchange(context_.own.rows_arrived, context_.max_token_chunks, 0, 1, whole, [&](int node, const auto& add) {
      add(Array{inbox(context_.node, &Inbox::weights), inbox(node, &Inbox::weights), bytes});
    });
    exchange_sums(args, 0);
  }
  finish(stream, launch != DecodeLaunch::kSend);
}

}  // namespace ep::cuda
