// The dispatch kernels of decode layout with masks and timing (config.h).
#include "cuda/decode/launch_dispatch.cuh"

namespace ep::cuda {

template void Engine::launch_decode_dispatch<Kernels::kDecodeExtras>(const DecodeDispatchArgs&, int32_t*, DecodeLaunch,
                                                                     cudaStream_t) const;

}  // namespace ep::cuda
