// Grouped GEMMs of float8 operands with a scale for 128 entries, on the tensor cores of Hopper (compute
// capability 9.0).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace ep::cuda {

// out[r] = rows[r] @ weights[e].T + row_weights[r] * bias[e] for the rows r of each expert e. All pointers are of the
// GPU. Sums of 128 products are multiplied by both scales and added in float32.
struct Float8Gemm {
  const void* rows;     // float8 e4m3 [num_rows, length]
  const float* scales;  // [num_rows, ceil(length / 128)]
  int32_t num_rows, length;

  // float8 e4m3 [columns, length] each. That of expert e begins 16 * shift bytes behind `weights`: shifts[e], or
  // without that table first + e * step. num_shifts is larger than each of them.
  const void* weights;
  const int32_t* shifts;
  int64_t num_shifts, first, step;

  // [ceil(columns / 128), ceil(length / 128)] each. That of expert e begins at the address scale_addresses[e], or
  // without that table at weight_scales + e * scale_step; `scale_stride` floats from row to row.
  const float* weight_scales;
  const int64_t* scale_addresses;
  int64_t scale_step, scale_stride;

  const int32_t* ends;  // [experts]: behind the last row of each expert
  int32_t experts;

  void* out;  // bfloat16 [num_rows, columns]; rows from ends[-1] on are not written
  int32_t columns;
  const void* bias;  // [experts, columns], or null
  DType bias_dtype;
  const float* row_weights;  // [num_rows], or null: 1
};

// [host] Launch it. Addresses of rows, weights and out are multiples of 16 bytes, length is one of 16, columns of 8.
// Throw std::runtime_error if that fails.
void float8_gemm(const Float8Gemm& gemm, int num_sms, cudaStream_t stream);

}  // namespace ep::cuda
