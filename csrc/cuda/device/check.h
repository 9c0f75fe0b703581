// Errors of CUDA's runtime calls.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace ep::cuda {

// [host] Throw std::runtime_error if a CUDA call has failed. `step` begins the message.
inline void check(cudaError_t error, const char* step) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(step) + ": " + cudaGetErrorString(error));
}

}  // namespace ep::cuda
