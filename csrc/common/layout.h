// Where things lie in a block of memory. Offsets are written once: the same code measures and hands out.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ep {

// Hands out consecutive aligned arrays. Without a base it only measures: size() is then what must be allocated.
class Cursor {
 public:
  static constexpr size_t kAlignment = 64;

  explicit Cursor(void* base = nullptr) : base_(reinterpret_cast<uintptr_t>(base)) {}

  // `alignment`: a multiple of kAlignment
  template <class T>
  T* take(size_t count, size_t alignment = kAlignment) {
    offset_ = (offset_ + alignment - 1) / alignment * alignment;
    T* array = reinterpret_cast<T*>(base_ + offset_);
    offset_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

  size_t size() const { return offset_; }

 private:
  uintptr_t base_;
  size_t offset_ = 0;
};

}  // namespace ep
