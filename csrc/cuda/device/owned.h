// Owners of what CUDA's runtime has made for the host. Their destructors free it, also where the constructor of the
// class that has them throws midway: the destructor of that class does not run then.
#pragma once
#include <cuda_runtime.h>

namespace ep::cuda {

// What `kFree` frees, or null.
template <class Handle, cudaError_t (*kFree)(Handle)>
struct Owned {
  Handle handle{};

  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle) kFree(handle);
  }
  operator Handle() const { return handle; }
};

using OwnedStream = Owned<cudaStream_t, cudaStreamDestroy>;
using OwnedEvent = Owned<cudaEvent_t, cudaEventDestroy>;
using OwnedMemory = Owned<void*, cudaFree>;  // cudaFree waits for kernels under way

}  // namespace ep::cuda
