// Combine weights: in decode layout pushes multiply each row by a weight that the owner of its token has. So the
// weights of all tokens travel first, and all warps wait for the verdict of `agree` before their first sum.
#pragma once
#include "cuda/combine/combine.cuh"
#include "cuda/combine/pipeline.cuh"

namespace ep::cuda {

// The verdict of `agree`: one summing warp of each block compares the Calls, and all other warps wait for it before
// their first sum. Meanwhile the preparing warp queues tasks.
struct PostedVerdict {
  Verdict* posted;
  uint64_t* barrier;  // an mbarrier with one arrival

  // [warp] Post the verdict. Called once. Wait for nothing.
  __device__ void post(Verdict verdict) const {
    if (threadIdx.x % 32 != 0) return;
    *posted = verdict;
    ptx::barrier_arrive(barrier);
  }
  // [thread] Wait for the verdict. After kAgree this thread may read all that the Calls cover. It may turn into
  // kAborted later.
  __device__ Verdict wait() const {
    ptx::barrier_wait(barrier, 0);
    return *static_cast<volatile Verdict*>(posted);
  }
  // [warp] Wait for the verdict. Return the same in all lanes.
  __device__ Verdict wait_in_warp() const {
    return static_cast<Verdict>(__shfl_sync(~0u, static_cast<int>(wait()), 0));
  }
  // [thread] Return whether there is a verdict.
  __device__ bool is_posted() const { return ptx::barrier_ended_now(barrier, 0); }
};

// Combine weights of the tasks in the queue, by their rows: first the index of a weight among those of
// Task::weights_from, then the weight.
struct TaskWeights {
  int32_t* data;  // [kQueue, max_addends]
  int max_addends;

  __device__ int32_t& index(int place, int row) const { return data[place * max_addends + row]; }
  // [thread] Return the weights of the task at a place of the queue.
  __device__ const float* of_task(int place) const {
    return reinterpret_cast<const float*>(data + place * max_addends);
  }
};

// Shared memory of a block.
struct DecodeCombineMemory : CombineMemory {
  static constexpr bool kHasWeights = true;

  TaskWeights weights;
  PostedVerdict verdict;

  // [host] Lay out the memory, or measure it: as CombineMemory.
  static DecodeCombineMemory carve(Cursor& c, const Context& context, int num_smem_stages, uint32_t smem_stage_bytes,
                                   int max_addends) {
    DecodeCombineMemory memory{
        CombineMemory::carve(c, context, num_smem_stages, smem_stage_bytes, max_addends), {}, {}};
    memory.weights = {c.take<int32_t>(Pipeline::kQueue * max_addends), max_addends};
    memory.verdict.posted = c.take<Verdict>(1);
    memory.verdict.barrier = c.take<uint64_t>(1);
    return memory;
  }

  // [thread] Return the memory of a block. The arrays of this one are offsets.
  __device__ DecodeCombineMemory in(char* shared) const {
    DecodeCombineMemory memory{CombineMemory::in(shared), weights, verdict};
    set_base(shared, memory.weights.data, memory.verdict.posted, memory.verdict.barrier);
    return memory;
  }
};

// A combine in decode layout.
struct DecodeCombineParams : SumParams {
  using Memory = DecodeCombineMemory;

  DecodeCombineArgs args;
  Memory memory;  // offsets in the shared memory of a block
  // With a hook there are two launches for one epoch. The first one announces, sends the combine weights, and pushes.
  // The second one compares the Calls, reduces, sends sums between nodes, and completes the operation.
  DecodeLaunch launch;
  uint32_t prefetched_bytes;  // of the plan, with few tokens

  // [host] [thread] Return whether this launch pushes, and whether it reduces.
  EP_HOST_DEVICE bool pushes() const { return launch != DecodeLaunch::kReceive; }
  EP_HOST_DEVICE bool reduces() const { return launch != DecodeLaunch::kSend; }
  // [host] [thread] No weights travel with the sums.
  EP_HOST_DEVICE const float* topk_weights() const { return nullptr; }
  EP_HOST_DEVICE float* out_weights() const { return nullptr; }
};

// [warp] Compare the Calls of all ranks, before a push that waits for peers (Pusher::enter).
template <Kernels K>
__device__ inline Verdict agree_before_wait(const Op<K>&, const DecodeCombineMemory& memory) {
  return memory.verdict.wait_in_warp();
}

// [thread] Return whether combine weights are tagged words. Kernels for several nodes alone have no code for them.
template <Kernels K>
__device__ inline bool sends_tagged_weights(const Op<K>& op) {
  return !has_several_nodes(K) && op.context.config.plans_directly;
}

// [thread] Return the combine weights of `source` in the memory of local rank `local`, for this operation: two in each
// word. Only with Config::plans_directly.
template <Kernels K>
__device__ inline Tagged* combine_weights_at(const Op<K>& op, int local, int source) {
  const size_t index = (op.epoch % 2 * op.num_ranks() + source) * op.context.config.combine_weight_words();
  return op.context.peers.at(op.context.own.combine_weights, local) + index;
}

// The combine weights of own tokens. A combine weight is the weight of a row in decode layout. With few tokens they go
// to every rank of the node at once, as tagged words. Else they go to this rank's inbox, where the ranks of the node
// and the senders read them. The first ones are loaded to registers during the wait for slots.
struct CombineWeightCopy {
  static constexpr int kTogether = 2;                           // pairs of combine weights of a thread under way
  static constexpr int kStep = kTogether * Pipeline::kThreads;  // pairs of a block

  const float* const from;
  const int num;  // combine weights
  float2 values[kTogether];

  // [thread] Start to load the first combine weights. `has_any`: whether this block writes them.
  template <Kernels K>
  __device__ CombineWeightCopy(const Op<K>& op, const DecodeCombineParams& params, bool has_any)
      : from(params.args.combine_weights), num(has_any ? params.args.num_tokens * op.context.config.num_topk : 0) {
    load(threadIdx.x);
  }

  // [block] Send all combine weights to the ranks of the node. Called in block 0, unless this rank has aborted. Wait
  // for nothing: `announce` says why.
  // raises: combine_weights
  template <Kernels K>
  __device__ void send(const Op<K>& op) {
    for_each([&](int pair, const float2& value) {
      const uint64_t data = __float_as_uint(value.x) | static_cast<uint64_t>(__float_as_uint(value.y)) << 32;
#pragma unroll 1
      for (int local = 0; local < op.ranks_per_node(); ++local)
        ptx::store_pair(combine_weights_at(op, local, op.rank()) + pair, op.epoch, data);
    });
  }

  // [block] Write all combine weights to the inbox. Called in block 0, once slots are free: then nobody reads combine
  // weights of an earlier combine. The Call covers them.
  template <Kernels K>
  __device__ void store(const Op<K>& op) {
    float* const to = op.my_inbox(op.context.node, &Inbox::weights);
    for_each([&](int pair, const float2& value) {
      to[2 * pair] = value.x;
      if (2 * pair + 1 < num) to[2 * pair + 1] = value.y;
    });
  }

 private:
  __device__ void load(int begin) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = 2 * (begin + i * Pipeline::kThreads);
      if (2 * begin < num) values[i] = {__ldg(from + min(at, num - 1)), __ldg(from + min(at + 1, num - 1))};
    }
  }
  template <class Write>
  __device__ void for_each(const Write& write) {
#pragma unroll 1
    for (int begin = threadIdx.x; 2 * begin < num; begin += kStep) {
      if (begin >= kStep) load(begin);
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (2 * (begin + i * Pipeline::kThreads) < num) write(begin + i * Pipeline::kThreads, values[i]);
    }
  }
};

// [thread] Return the memory with the combine weights of `source`.
template <Kernels K>
__device__ inline const void* combine_weights_of(const Op<K>& op, int source) {
  if (sends_tagged_weights(op)) return combine_weights_at(op, op.context.local, source);
  return op.inbox_holding(source, &Inbox::weights);
}

// [thread] Load combine weight `at` of `source`. A tagged one may arrive before all ranks are known to agree. Wait for
// it, or for a verdict other than kAgree, then return 0: no sum is made. After kAgree the wait has a limit: it then
// aborts this rank, and the verdict becomes kAborted.
// waits: combine_weights (weights)
template <Kernels K>
__device__ inline float load_combine_weight(const Op<K>& op, const PostedVerdict& verdict, int source, int at) {
  const void* const weights = combine_weights_of(op, source);
  if (!sends_tagged_weights(op))
    return verdict.wait() == Verdict::kAgree ? __ldcg(static_cast<const float*>(weights) + at) : 0;
  // With masks the combine weights of an absent rank may never arrive, and nobody reads its sums.
  if (has_masks(op) && (verdict.wait() != Verdict::kAgree || (absent_ranks(op) >> source & 1))) return 0;
  const Tagged* const from = static_cast<const Tagged*>(weights) + at / 2;
  uint64_t epoch, data, since = 0;
  for (uint32_t turn = 1;; ++turn) {
    ptx::load_pair(from, epoch, data);
    if (epoch >= op.epoch) break;
    if (turn % kPollsBetweenChecks != 0 || !verdict.is_posted()) continue;
    if (since == 0) since = ptx::nanoseconds();
    if (verdict.wait() == Verdict::kAgree && is_too_late(op, Phase::kWeights, source, from, 1, since))
      *verdict.posted = Verdict::kAborted;
    if (verdict.wait() != Verdict::kAgree) break;
  }
  // A later epoch means that a peer has masked this rank.
  return epoch == op.epoch ? __uint_as_float(static_cast<uint32_t>(data >> 32 * (at % 2))) : 0;
}

// [warp] Wait until the combine weights of ranks on other nodes are in their inboxes here. Those of this node came with
// the Calls. Return false after an abort of this rank.
// waits: staged (weights)
template <Kernels K>
__device__ inline bool wait_for_combine_weights(const Op<K>& op) {
  const Context& context = op.context;
#pragma unroll 1
  for (int first = 0; op.num_nodes() > 1 && first < op.num_ranks(); first += 32) {
    const int rank = min(first + static_cast<int>(threadIdx.x) % 32, op.num_ranks() - 1);
    const uint64_t* flag = context.own.staged + static_cast<size_t>(rank) * context.max_token_chunks;
    if (op.node_of(rank) == context.node) flag = nullptr;
    if (!wait_until(op, Phase::kWeights, flag, op.epoch, rank, op.raiser_of(rank))) return false;
  }
  return true;
}

// [warp] Load the combine weights of all tasks with `has_task` in their lanes, in an issuing warp. This comes before
// their rows: later, loads would wait behind the stores of sums to other ranks.
template <Kernels K>
__device__ inline void load_combine_weights(const Op<K>& op, const DecodeCombineMemory& memory,
                                            const Issuer::Load& load, const Issuer& issuer, bool has_task) {
  const Task& task = memory.pipeline.queue[load.place];
  if (has_task && load.addend && task.weights_from >= 0) {
    int32_t& weight = memory.weights.index(load.place, load.first + issuer.lane_of_task * Issuer::kWarps);
    weight = __float_as_int(load_combine_weight(op, memory.verdict, task.weights_from, weight));
  }
  __syncwarp();
  if (has_task && issuer.lane_of_task == 0) ptx::barrier_arrive(memory.pipeline.full + load.place);
}

}  // namespace ep::cuda
