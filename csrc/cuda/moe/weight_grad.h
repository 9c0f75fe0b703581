// Gradients of experts' weights, on the tensor cores of Hopper (compute capability 9.0).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace ep::cuda {

// bfloat16 rows of all experts, side by side. All pointers are of the GPU.
struct GradRows {
  const void *grad, *rows;           // [num_rows, n], [num_rows, k]
  int64_t grad_stride, rows_stride;  // [bytes] from row to row
  int32_t num_rows;
  const int32_t* ends;  // behind the last row of each expert
};

// out[e] = or += the sum of grad[r]^T x rows[r] over the rows r of expert e in all sets. Subnormal numbers count as 0
// in that addition.
struct WeightGrad {
  GradRows sets[2];
  int32_t num_sets;
  const int64_t* out;  // [experts]: addresses of [n, k], multiples of 16
  DType dtype;         // of out: float32, or bfloat16 to store
  bool accumulate;
  int32_t n, k, experts;
};

// [host] Launch it. Addresses and strides of rows are multiples of 16 bytes, n and k multiples of 8. Throw
// std::runtime_error if that fails.
void weight_grad(const WeightGrad& grad, int num_sms, cudaStream_t stream);

}  // namespace ep::cuda
