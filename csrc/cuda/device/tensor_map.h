// Tensor maps: what the tensor memory accelerator has to know of a matrix.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace ep::cuda {

// [host] Describe one matrix (rank 2) or several (rank 3) for loads of boxes with rows of 128 bytes (tensor_core.cuh).
// sizes[0] are the columns; strides in bytes, from row to row first. Throw std::runtime_error if that fails.
inline CUtensorMap tensor_map(const void* at, CUtensorMapDataType type, int rank, const cuuint64_t* sizes,
                              const cuuint64_t* strides, int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);  // CUDA's runtime has loaded it
    void* const found = driver ? dlsym(driver, "cuTensorMapEncodeTiled") : nullptr;
    if (!found) throw std::runtime_error("the GPU driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
    return reinterpret_cast<Encode>(found);
  }();
  const cuuint32_t columns = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 128 : 64;
  const cuuint32_t box[3] = {columns, static_cast<cuuint32_t>(box_rows), 1}, ones[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, rank, const_cast<void*>(at), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("a matrix of " + std::to_string(sizes[1]) + " x " + std::to_string(sizes[0]) +
                             " entries, " + std::to_string(strides[0]) +
                             " bytes from row to row, has no tensor map: CUDA error " + std::to_string(result));
  return map;
}

}  // namespace ep::cuda
