// The combine kernel for one node (config.h).
#include "cuda/combine/launch.cuh"

namespace ep::cuda {

template void Engine::launch_combine<Kernels::kOneNode>(const CombineArgs&, int32_t*, cudaStream_t) const;

}  // namespace ep::cuda
