// The dispatch kernel for several nodes (config.h).
#include "cuda/dispatch/launch.cuh"

namespace ep::cuda {

template void Engine::launch_dispatch<Kernels::kSeveralNodes>(const DispatchArgs&, int32_t*, Launch,
                                                              cudaStream_t) const;

}  // namespace ep::cuda
