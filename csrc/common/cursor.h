// Offsets in a block of memory, written once: the same code measures and hands out, on the host and in kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#ifdef __CUDACC__
#define EP_HOST_DEVICE __host__ __device__
#else
#define EP_HOST_DEVICE
#endif

namespace ep {

// Hands out consecutive aligned arrays. Without a base it only measures: size() is then the memory needed, and arrays
// are offsets.
class Cursor {
 public:
  static constexpr size_t kAlignment = 64;

  EP_HOST_DEVICE explicit Cursor(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  // [host] [thread] Return the next `count` elements, aligned to a multiple of kAlignment. Pointer arithmetic, not a
  // cast from integers: the compiler then still knows the address space.
  template <class T>
  EP_HOST_DEVICE T* take(size_t count, size_t alignment = kAlignment) {
    offset_ = (offset_ + alignment - 1) / alignment * alignment;
    T* array = reinterpret_cast<T*>(base_ + offset_);
    offset_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

  // [host] [thread] Set `array` to the next `count` elements. Only a KindCursor reads their kind.
  template <class T>
  EP_HOST_DEVICE void take(T*& array, const char*, size_t count, size_t alignment = kAlignment) {
    array = take<T>(count, alignment);
  }

  EP_HOST_DEVICE void align(size_t alignment) { take<char>(0, alignment); }

  EP_HOST_DEVICE size_t size() const { return offset_; }

 private:
  char* base_;
  size_t offset_ = 0;
};

constexpr const char* kFlags = "flags and counts";
constexpr const char* kPadding = "padding";

// [host] Measures, and adds up the bytes of each kind of array. An array includes the padding behind it, up to a
// multiple of kAlignment. kPadding has the rest.
class KindCursor : public Cursor {
 public:
  std::map<std::string, size_t> kinds;  // bytes of each

  template <class T>
  void take(T*& array, const char* kind, size_t count, size_t alignment = kAlignment) {
    align(alignment);
    add(kind, [&] { array = Cursor::take<T>(count); });
  }

  void align(size_t alignment) {
    add(kPadding, [&] { Cursor::align(alignment); });
  }

 private:
  template <class Take>
  void add(const char* kind, const Take& take_array) {
    const size_t begin = size();
    take_array();
    if (size() > begin) kinds[kind] += size() - begin;
  }
};

// [host] [thread] Turn arrays that are offsets into arrays of the memory at `base`.
template <class... T>
EP_HOST_DEVICE void set_base(char* base, T*&... arrays) {
  ((arrays = reinterpret_cast<T*>(base + reinterpret_cast<size_t>(arrays))), ...);
}

}  // namespace ep
