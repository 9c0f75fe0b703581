#include <algorithm>

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
  if (lane < params.num_raisers && state->aborted == 0 &&
      params.message_epochs[lane + (lane >= params.node)] == epoch) {
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

Messages::Messages(const BufferContext& context, std::shared_ptr<NcclComm> comm)
    : context_(context), comm_(std::move(comm)) {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
  // The highest priority: with CUDA_DEVICE_MAX_CONNECTIONS=1 streams of one priority share a queue. There this one
  // would wait for the kernel that waits for its messages.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "stream");
  check(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming), "event");
  check(cudaEventCreateWithFlags(&after_, cudaEventDisableTiming), "event");
  // Load the kernel now: later that could wait for a kernel that runs, which waits for this one.
  launch_between();
  check(cudaStreamSynchronize(stream_), "first launch");
}

Messages::~Messages() {
  if (after_) cudaEventDestroy(after_);
  if (before_) cudaEventDestroy(before_);
  if (stream_) cudaStreamDestroy(stream_);
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

template <class Arrays>
void Messages::exchange(uint64_t* flags, int max_chunks, int begin, int end, const Arrays& arrays) {
  const Region& own = context_.own;
  const auto each_node = [&](const auto& run) {
    for (int node = 0; node < context_.config.num_nodes; ++node)
      if (node != context_.node) run(node);
  };
  // Wait for the last chunk: it rises after all others. A flag has the index of this node at the peer.
  each_node([&](int node) {
    const uint64_t* const ready = own.ready + other_node_idx(node) * own.wire_flags;
    const int index = context_.node - (context_.node > node);
    between_.waits[between_.num_waits++] = ready + (flags - own.inbox_free) + index * max_chunks + end - 1;
  });
  launch_between();
  comm_->group([&] {
    each_node([&](int node) {
      const auto add = [&](const Array& array) {
        comm_->send(array.local, array.bytes, node, stream_);
        comm_->receive(array.received, array.bytes, node, stream_);
      };
      arrays(node, add);
      add(Array{own.message_epochs + context_.node, own.message_epochs + node, sizeof(uint64_t)});
    });
  });
  each_node(
      [&](int node) { between_.raises[between_.num_raisers++] = flags + other_node_idx(node) * max_chunks + begin; });
  between_.num_flags = end - begin;
}

template <class Exchange>
void Messages::split(int num_tokens, int log_chunk, size_t token_bytes, const Exchange& exchange) {
  const int num_chunks = (num_tokens + (1 << log_chunk) - 1) >> log_chunk;
  const size_t chunk_bytes = token_bytes << log_chunk;
  const int step = static_cast<int>((kBytes + chunk_bytes - 1) / chunk_bytes);
  for (int chunk = 0; chunk < num_chunks; chunk += step) {
    const int end = std::min(num_chunks, chunk + step), first_token = chunk << log_chunk;
    exchange(chunk, end, first_token, std::min(num_tokens, end << log_chunk) - first_token);
  }
}

// Calls and counts of both parities, because the host does not know the epoch of a captured launch. Those of the last
// operation come again, unchanged. Counts always come, so that the message has the same size in every operation.
void Messages::exchange_calls() {
  const Region& own = context_.own;
  exchange(own.call_arrived, 1, 0, 1, [&](int node, const auto& add) {
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

void Messages::dispatch(const DispatchArgs& args, bool stages, bool pulls, cudaStream_t stream) {
  const Config& config = context_.config;
  const Region& own = context_.own;
  if (stages) exchange_calls();
  // Items come behind the first message of rows: they are not listed earlier.
  const auto exchange_items = [&] {
    const size_t items = config.ranks_per_node * static_cast<size_t>(config.max_tokens) * context_.item_ints;
    const size_t table = static_cast<size_t>(config.max_tokens) * context_.table_ints;
    exchange(own.items_arrived, 1, 0, 1, [&](int node, const auto& add) {
      add(Array{rail(node, &RailArrays::items_out), inbox(node, &Inbox::items), items * sizeof(int32_t)});
      add(Array{rail(node, &RailArrays::table_out), rail(node, &RailArrays::table_in), table * sizeof(int32_t)});
    });
  };
  const size_t row_bytes = row_stride(args.row_bytes), bytes_of_metadata = metadata_bytes(config, args);
  const auto exchange_rows = [&](int begin, int end, size_t token, size_t num_tokens) {
    exchange(own.rows_arrived, context_.max_token_chunks, begin, end, [&](int node, const auto& add) {
      const auto add_array = [&](char* Inbox::* array, size_t bytes) {
        add(Array{inbox(context_.node, array) + token * bytes, inbox(node, array) + token * bytes, num_tokens * bytes});
      };
      add_array(&Inbox::staging, row_bytes);
      if (bytes_of_metadata > 0) add_array(&Inbox::metadata, bytes_of_metadata);
    });
    if (begin == 0 && args.topk_idx) exchange_items();
  };
  // With a hook rows go after the first launch.
  const bool has_hook = stages != pulls && args.ticket == 0;
  if (has_hook ? stages : pulls)
    split(config.max_tokens, config.log_token_chunk, row_bytes + bytes_of_metadata, exchange_rows);
  finish(stream, pulls);
}

void Messages::combine(const CombineArgs& args, bool pushes, bool reduces, cudaStream_t stream) {
  const Config& config = context_.config;
  const Region& own = context_.own;
  if (pushes) exchange_calls();
  if (pushes && args.combine_weights) {
    const size_t bytes = config.max_tokens * config.weights_bytes();
    exchange(own.rows_arrived, context_.max_token_chunks, 0, 1, [&](int node, const auto& add) {
      add(Array{inbox(context_.node, &Inbox::weights), inbox(node, &Inbox::weights), bytes});
    });
  }
  const size_t row_bytes = context_.slot_stride, weights = args.topk_weights ? config.num_topk : 0;
  const auto exchange_sums = [&](int begin, int end, size_t token, size_t num_tokens) {
    exchange(own.sums_arrived, context_.max_sum_chunks, begin, end, [&](int node, const auto& add) {
      add(Array{inbox(node, &Inbox::staging) + token * row_bytes, rail(node, &RailArrays::sums) + token * row_bytes,
                num_tokens * row_bytes});
      if (weights > 0)
        add(Array{inbox(node, &Inbox::weights) + token * weights, rail(node, &RailArrays::weights) + token * weights,
                  num_tokens * weights * sizeof(float)});
    });
  };
  if (pushes) split(config.max_tokens, config.log_sum_chunk, row_bytes + weights * sizeof(float), exchange_sums);
  finish(stream, reduces);
}

}  // namespace ep::cuda
