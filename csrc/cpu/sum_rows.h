// The one sum of this engine: rows of any dtype, added in float32 in the order given, rounded once.
#pragma once
#include <cstddef>

#include "common/args.h"

namespace ep {

// out = rows[0] + rows[1] + ...; `num_rows` 0 gives zeros. Rows have `n` elements and may not overlap `out`.
void sum_rows(const char* const* rows, int num_rows, char* out, size_t n, DType dtype);

}  // namespace ep
