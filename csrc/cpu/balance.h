// Balanced experts on CPUs: counts, the plan of copies, and physical numbers. common/balance.h has the algorithm.
#pragma once
#include <cstdint>

#include "common/balance.h"

namespace ep::cpu {

// [thread] Count the choices of each expert: topk_idx [num_choices] -> counts [num_experts]. Entries that are no
// expert's are left out.
template <class Index>
void balance_count(const Index* topk_idx, int64_t num_choices, int num_experts, int32_t* counts);

// [thread] Plan the copies.
//   rank_at  [num_ranks] the ranks, node by node
//   counts   [num_ranks, row_stride], of which the first num_experts columns are read
//   copies   [num_ranks, num_slots]
//   rows     [2, num_ranks] rows of each rank before and after
// Throw std::invalid_argument if there are more than 2^31 - 1 rows.
void balance_plan(const balance::Sizes& sizes, const int32_t* rank_at, const int32_t* counts, int64_t row_stride,
                  balance::Copy* copies, int32_t* rows);

// [thread] Write the physical expert of each choice of one rank: topk_idx [num_tokens, num_topk] -> physical.
template <class Index>
void balance_rewrite(const balance::Sizes& sizes, int rank, const Index* topk_idx, int64_t num_tokens, int num_topk,
                     const int32_t* counts, int64_t row_stride, const balance::Copy* copies, int64_t* physical);

}  // namespace ep::cpu
