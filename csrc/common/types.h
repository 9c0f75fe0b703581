// Types of both engines.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ep {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
// Where received rows go. kDecode is the expert layout with a place for every row that an expert may get: groups begin
// at fixed rows, and nothing else is written.
enum class Layout : int32_t { kRank = 0, kExpert = 1, kDecode = 2 };

inline size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace ep
