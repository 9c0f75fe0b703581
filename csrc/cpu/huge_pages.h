// Fresh memory costs a page fault every 4 KiB, which is dearer than the copy that fills it.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace ep::cpu {

// Asks for huge pages in [data, data + bytes); memory that is too small, or a system that has none, is left as it is.
inline void prefer_huge_pages(void* data, size_t bytes) {
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace ep::cpu
