// The combine kernels of decode layout with masks and timing (config.h).
#include "cuda/decode/launch_combine.cuh"

namespace ep::cuda {

template void Engine::launch_decode_combine<Kernels::kDecodeExtras>(const DecodeCombineArgs&, int32_t*, DecodeLaunch,
                                                                    cudaStream_t) const;

}  // namespace ep::cuda
