// Kernel launches.
#pragma once
#include "cuda/device/check.h"

namespace ep::cuda {

// [bytes] dynamic shared memory of a block: 227 KiB on SM90, less those of static variables. With NVSHMEM these are
// 1056 in a dispatch, because the dynamic part begins at a multiple of 1024.
constexpr size_t kUsableShared = 226 * 1024 - 128;

constexpr size_t kMaxParams = 4096;  // [bytes] of a kernel's parameters, with any driver

// [host] Launch a kernel on `stream` with `shared` bytes of dynamic shared memory, and return. Throw std::runtime_error
// if the launch fails.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), int blocks, int threads, size_t shared, cudaStream_t stream, Args&&... args) {
  static_assert((sizeof(Params) + ...) <= kMaxParams);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "shared memory");
  kernel<<<blocks, threads, shared, stream>>>(static_cast<Args&&>(args)...);
  check(cudaGetLastError(), "launch");
}

}  // namespace ep::cuda
