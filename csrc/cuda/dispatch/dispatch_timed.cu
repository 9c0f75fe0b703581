// The dispatch kernel that adds up the time of waits (config.h).
#include "cuda/dispatch/launch.cuh"

namespace ep::cuda {

template void Engine::launch_dispatch<Kernels::kTimed>(const DispatchArgs&, int32_t*, Launch, cudaStream_t) const;

}  // namespace ep::cuda
