// The dispatch kernels that make a direct plan (config.h).
#include "cuda/dispatch/launch.cuh"

namespace ep::cuda {

template void Engine::launch_dispatch<Kernels::kDirect>(const DispatchArgs&, int32_t*, Launch, cudaStream_t) const;

}  // namespace ep::cuda
