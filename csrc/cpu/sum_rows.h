// The one sum of this engine: rows of any dtype, added in float32 to +0.0 in the order given, rounded once.
#pragma once
#include <cstddef>

#include "common/types.h"

namespace ep::cpu {

// Sum rows of `n` elements: out = 0 + rows[0] + rows[1] + ... No sum is -0.0, not even the sum of a single row. With
// `weights` (else null) each row is multiplied by its weight, and every product is rounded to float32. Rows may not
// overlap `out`.
void sum_rows(const char* const* rows, const float* weights, int num_rows, char* out, size_t n, DType dtype);

}  // namespace ep::cpu
