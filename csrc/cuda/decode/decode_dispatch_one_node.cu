// The dispatch kernels of decode layout for one node (config.h).
#include "cuda/decode/launch_dispatch.cuh"

namespace ep::cuda {

template void Engine::launch_decode_dispatch<Kernels::kDecode>(const DecodeDispatchArgs&, int32_t*, DecodeLaunch,
                                                               cudaStream_t) const;

}  // namespace ep::cuda
