// Errors of CUDA's own calls.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace ep::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace ep::cuda
