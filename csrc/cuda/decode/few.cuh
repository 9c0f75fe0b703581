// Combine of few tokens in decode layout. Partial sums travel as tagged words, 8 bytes of a sum with the epoch in each
// word: no fence, no flag, and no counter of blocks comes behind them, and the owner takes them as they arrive. They
// have memory of their own. Rows are summed in registers, by warps without a common pipeline: the code is short.
//
// A rank pushes after all ranks agree. So all of them have begun this combine, and have read the tagged words of the
// one before.
#pragma once
#include "cuda/decode/combine_weights.cuh"

namespace ep::cuda {

// A warp makes a part of a sum at once: kFewVectors vectors of 16 bytes in each lane. A vector is two tagged words.
constexpr int kFewVectors = 2, kPartBytes = kFewVectors * 32 * 16, kPartWords = kPartBytes / kTaggedSumBytes;
static_assert(kPartBytes == kLine, "tagged_sum_words has room for whole parts");

// [thread] Return a part of the partial sum with this number, pushed by `rank`, in the memory of `owner`.
template <Kernels K>
__device__ inline Tagged* tagged_sum_at(const Op<K>& op, int owner, int rank, int number, int part) {
  const size_t sum = static_cast<size_t>(rank) * op.context.config.max_tokens + number;
  return op.context.peers.at(op.context.own.tagged_sums, owner) + sum * tagged_sum_words(op.context.row_bytes) +
         part * kPartWords;
}

// Parts of sums that a warp makes in turn: units first, first + step, ...
struct FewUnits {
  int first, step, parts;  // parts of a sum
  int num_vectors;         // of a row

  // [thread] Return whether the lane has a vector i in a part.
  __device__ bool has(int part, int i) const { return vector(part, i) < num_vectors; }
  __device__ int vector(int part, int i) const { return (part * kFewVectors + i) * 32 + threadIdx.x % 32; }
};

// [warp] Sum the rows of this warp's items, and push the sums once all ranks agree. Wait for combine weights. With
// another verdict push no more.
// raises: tagged_sums
template <class T, Kernels K>
__device__ inline void push_tagged_sums(const Op<K>& op, const DecodeCombineParams& params,
                                        const PostedVerdict& verdict, const FewUnits& units) {
  constexpr int kTogether = 4;  // rows under way
  const Context& context = op.context;
  const PlanHead& head = *params.plan.head;
  const int lane = threadIdx.x % 32, num_ranks = op.num_ranks();
  const int end_of_source = lane < num_ranks ? head.item_begin()[lane + 1] : INT32_MAX;
#pragma unroll 1
  for (int unit = units.first; unit < head.num_items * units.parts; unit += units.step) {
    const int index = unit / units.parts, part = unit - index * units.parts;
    const Item item{params.plan.items + static_cast<size_t>(index) * context.item_ints, context.max_copies};
    const int num_copies = item.num_copies(), copy = min(lane, num_copies - 1);
    const int row_of_lane = item.value(copy), at = item.token() * context.config.num_topk + item.k(copy);
    const int source = __popc(__ballot_sync(~0u, index >= end_of_source));
    float total[kFewVectors][T::kElements] = {}, combine_weight = 0;
#pragma unroll 1
    for (int first = 0; first < num_copies; first += kTogether) {
      // Load rows, and meanwhile each lane the combine weight of its copy.
      uint4 vectors[kTogether][kFewVectors];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int row = __shfl_sync(~0u, row_of_lane, min(first + j, num_copies - 1));
        const auto* from = reinterpret_cast<const uint4*>(params.args.y + static_cast<size_t>(row) * context.row_bytes);
#pragma unroll
        for (int i = 0; i < kFewVectors; ++i)
          if (first + j < num_copies && units.has(part, i)) vectors[j][i] = __ldcg(from + units.vector(part, i));
      }
      if (first == 0 && lane < num_copies) {
        combine_weight = load_combine_weight(op, verdict, source, at);
      }
      __syncwarp();
      // Sum, as sum_rows does.
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float its_weight = __shfl_sync(~0u, combine_weight, min(first + j, num_copies - 1));
        if (first + j >= num_copies) break;
#pragma unroll
        for (int i = 0; i < kFewVectors; ++i) {
          float values[T::kElements];
          T::load(vectors[j][i], values);
#pragma unroll
          for (int e = 0; e < T::kElements; ++e) total[i][e] += __fmul_rn(its_weight, values[e]);
        }
      }
    }
    if (verdict.wait_in_warp() != Verdict::kAgree) return;
    Tagged* const to = tagged_sum_at(op, source, op.rank(), index - head.item_begin()[source], part) + lane;
#pragma unroll
    for (int i = 0; i < kFewVectors; ++i) {
      if (!units.has(part, i)) continue;
      const uint4 sum = T::round(total[i]);
      ptx::store_pair(to + 64 * i, op.epoch, sum.x | static_cast<uint64_t>(sum.y) << 32);
      ptx::store_pair(to + 64 * i + 32, op.epoch, sum.z | static_cast<uint64_t>(sum.w) << 32);
    }
  }
  stamp(op, Step::kPushed);
}

// [thread] Take a tagged word as soon as it is here: 8 bytes of a sum by `rank`. Return false after an abort of this
// rank. Called after kAgree.
// waits: tagged_sums (partial sums)
template <Kernels K>
__device__ inline bool take_tagged_sum(const Op<K>& op, int rank, const Tagged* from, uint64_t& data) {
  uint64_t epoch, since = 0;
  for (uint32_t turn = 1;; ++turn) {
    ptx::load_pair(from, epoch, data);
    if (epoch == op.epoch) return true;
    if (turn % kPollsBetweenChecks != 0) continue;
    if (since == 0) since = ptx::nanoseconds();
    if (is_too_late(op, Phase::kSums, rank, from, 1, since)) return false;
  }
}

// [warp] Sum the partial sums of this warp's tokens, in the order of ranks, and write the output. Return false after an
// abort of this rank. With a verdict other than kAgree write nothing.
template <class T, Kernels K>
__device__ inline bool reduce_tagged_sums(const Op<K>& op, const DecodeCombineParams& params,
                                          const PostedVerdict& verdict, const FewUnits& units) {
  const Context& context = op.context;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int unit = units.first; unit < params.args.num_tokens * units.parts; unit += units.step) {
    const int token = unit / units.parts, part = unit - token * units.parts;
    const int32_t* const table = params.plan.tables + static_cast<size_t>(token) * context.table_ints;
    const int number_of_lane = lane < op.num_ranks() && params.plan.head->usable ? table[lane] : -1;
    if (verdict.wait_in_warp() != Verdict::kAgree) return true;
    float total[kFewVectors][T::kElements] = {};
    bool ok = true;
#pragma unroll 1
    for (uint32_t ranks = __ballot_sync(~0u, number_of_lane >= 0); ranks != 0; ranks &= ranks - 1) {
      const int rank = __ffs(ranks) - 1, number = __shfl_sync(~0u, number_of_lane, rank);
      const Tagged* const from = tagged_sum_at(op, op.rank(), rank, number, part) + lane;
      uint64_t words[2 * kFewVectors], epochs[2 * kFewVectors];
      // These loads overlap. Mostly all words have arrived.
#pragma unroll
      for (int i = 0; i < 2 * kFewVectors; ++i)
        if (units.has(part, i / 2)) ptx::load_pair(from + 32 * i, epochs[i], words[i]);
#pragma unroll
      for (int i = 0; i < 2 * kFewVectors; ++i)
        if (ok && units.has(part, i / 2) && epochs[i] != op.epoch)
          ok = take_tagged_sum(op, rank, from + 32 * i, words[i]);
      if (!__all_sync(~0u, ok)) return false;
#pragma unroll
      for (int i = 0; i < kFewVectors; ++i) {
        const uint64_t low = words[2 * i], high = words[2 * i + 1];
        float values[T::kElements];
        T::load({static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                 static_cast<uint32_t>(high >> 32)},
                values);
#pragma unroll
        for (int e = 0; e < T::kElements; ++e) total[i][e] += values[e];
      }
    }
    auto* const to = reinterpret_cast<uint4*>(params.args.out + static_cast<size_t>(token) * context.row_bytes);
#pragma unroll
    for (int i = 0; i < kFewVectors; ++i)
      if (units.has(part, i)) to[units.vector(part, i)] = T::round(total[i]);
  }
  return true;
}

}  // namespace ep::cuda
