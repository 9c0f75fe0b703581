// Checks the division of quantize.cuh with all numbers: a / b of every bfloat16 a by every float32 b. Signs do not
// matter, nor do exponents while nothing underflows. So a is in [128, 256), and b in [1, 2). Prints the number of
// quotients that are not rounded as in IEEE 754.
#include <cmath>
#include <cstdio>

int main() {
  long wrong = 0;
#pragma omp parallel for reduction(+ : wrong) schedule(dynamic, 65536)
  for (int bits = 1 << 23; bits < 1 << 24; ++bits) {
    const float b = std::ldexp(static_cast<float>(bits), -23), reciprocal = 1 / b;
    for (int a = 128; a < 256; ++a) {
      const float near = a * reciprocal, quotient = std::fmaf(std::fmaf(-near, b, a), reciprocal, near);
      wrong += quotient != a / b;
    }
  }
  std::printf("%ld\n", wrong);
}
