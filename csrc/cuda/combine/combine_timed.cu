// The combine kernel that adds up the time of waits (config.h).
#include "cuda/combine/launch.cuh"

namespace ep::cuda {

template void Engine::launch_combine<Kernels::kTimed>(const CombineArgs&, int32_t*, cudaStream_t) const;

}  // namespace ep::cuda
