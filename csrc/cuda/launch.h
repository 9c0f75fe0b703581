// Kernel launches.
#pragma once
#include "cuda/check.h"

namespace ep::cuda {

// Bytes of dynamic shared memory that a kernel may ask for: 227 KiB a block on SM90, less 1 KiB for its static
// variables.
constexpr size_t kUsableShared = 226 * 1024;

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), int blocks, int threads, size_t shared, cudaStream_t stream, Args&&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "shared memory");
  kernel<<<blocks, threads, shared, stream>>>(static_cast<Args&&>(args)...);
  check(cudaGetLastError(), "launch");
}

}  // namespace ep::cuda
