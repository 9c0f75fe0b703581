// Kernel launches and their errors.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace ep::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

constexpr size_t kMaxShared = 227 * 1024;  // bytes a block can have on SM90

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), int blocks, int threads, size_t shared, cudaStream_t stream, Args&&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "shared memory");
  kernel<<<blocks, threads, shared, stream>>>(static_cast<Args&&>(args)...);
  check(cudaGetLastError(), "launch");
}

}  // namespace ep::cuda
