// The combine kernel for several nodes (config.h).
#include "cuda/combine/launch.cuh"

namespace ep::cuda {

template void Engine::launch_combine<Kernels::kSeveralNodes>(const CombineArgs&, int32_t*, cudaStream_t) const;

}  // namespace ep::cuda
