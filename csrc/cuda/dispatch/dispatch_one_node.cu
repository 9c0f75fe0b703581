// The dispatch kernel for one node (config.h).
#include "cuda/dispatch/launch.cuh"

namespace ep::cuda {

template void Engine::launch_dispatch<Kernels::kOneNode>(const DispatchArgs&, int32_t*, Launch, cudaStream_t) const;

}  // namespace ep::cuda
