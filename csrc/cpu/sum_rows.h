// The one sum of this engine: rows of any dtype, added in float32 to +0.0 in the order given, rounded once.
#pragma once
#include <cstddef>

#include "common/types.h"

namespace ep::cpu {

// out = 0 + rows[0] + rows[1] + ..., so no sum is -0.0, not even that of a single row. Rows have `n` elements and may
// not overlap `out`.
void sum_rows(const char* const* rows, int num_rows, char* out, size_t n, DType dtype);

}  // namespace ep::cpu
