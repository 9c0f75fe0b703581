// Huge pages for fresh memory. A page fault every 4 KiB costs more than the copy into the page.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace ep::cpu {

// Ask for huge pages in [data, data + bytes). Do nothing for small memory, or on a system without huge pages.
inline void prefer_huge_pages(void* data, size_t bytes) {
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace ep::cpu
