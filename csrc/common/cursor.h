// Where things lie in a block of memory. Offsets are written once: the same code measures and hands out, on the host
// and in kernels.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define EP_HOST_DEVICE __host__ __device__
#else
#define EP_HOST_DEVICE
#endif

namespace ep {

// Hands out consecutive aligned arrays. Without a base it only measures: size() is then what must be allocated, and
// the arrays are offsets.
class Cursor {
 public:
  static constexpr size_t kAlignment = 64;

  EP_HOST_DEVICE explicit Cursor(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  // `alignment`: a multiple of kAlignment. Pointer arithmetic keeps the address space that a compiler has inferred.
  template <class T>
  EP_HOST_DEVICE T* take(size_t count, size_t alignment = kAlignment) {
    offset_ = (offset_ + alignment - 1) / alignment * alignment;
    T* array = reinterpret_cast<T*>(base_ + offset_);
    offset_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

  EP_HOST_DEVICE size_t size() const { return offset_; }

 private:
  char* base_;
  size_t offset_ = 0;
};

}  // namespace ep
