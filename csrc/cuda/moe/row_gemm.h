// Grouped GEMMs of rows and experts' weights, on the tensor cores of Hopper (compute capability 9.0).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace ep::cuda {

// The weights of experts. Those of expert e begin 16 * shift bytes behind `at`: shifts[e], or without that table
// first + e * step. num_shifts is larger than each of them.
struct ExpertWeights {
  const void* at;
  const int32_t* shifts;
  int64_t num_shifts, first, step;
};

// out[r] = rows[r] @ weights[e].T + row_weights[r] * bias[e] for the rows r of each expert e. All pointers are of the
// GPU, and those of rows, weights and out are multiples of 16 bytes.
struct RowGemm {
  const void* rows;  // [num_rows, length]
  int32_t num_rows, length;
  ExpertWeights weights;  // [columns, length] each
  const int32_t* ends;    // [experts]: behind the last row of each expert
  int32_t experts;
  void* out;  // bfloat16 [num_rows, columns]; rows from ends[-1] on are not written
  int32_t columns;
  const void* bias;  // [experts, columns], or null
  DType bias_dtype;
  const float* row_weights;  // [num_rows], or null: 1
};

// Both operands are float8 e4m3, with a scale for 128 entries. Sums of 128 products are multiplied by both scales and
// added in float32.
struct Float8Gemm : RowGemm {
  const float* scales;  // of the rows: [num_rows, ceil(length / 128)]
  // [ceil(columns / 128), ceil(length / 128)] each. That of expert e begins at the address scale_addresses[e], or
  // without that table at weight_scales + e * scale_step; `scale_stride` floats from row to row.
  const float* weight_scales;
  const int64_t* scale_addresses;
  int64_t scale_step, scale_stride;
};

// Both operands are bfloat16. Weights that are not `transposed` are [length, columns] each, and multiplied without .T.
struct BFloat16Gemm : RowGemm {
  bool transposed;
  ExpertWeights copies;  // of the experts from num_own on
  int32_t num_own;
};

// [host] Launch it. Rows and weights have a multiple of 16 bytes in each row, and columns are a multiple of 8. Throw
// std::runtime_error if that fails.
void float8_gemm(const Float8Gemm& gemm, int num_sms, cudaStream_t stream);
void bfloat16_gemm(const BFloat16Gemm& gemm, int num_sms, cudaStream_t stream);

}  // namespace ep::cuda
