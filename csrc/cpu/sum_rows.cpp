#include "cpu/sum_rows.h"

#include <cstdint>
#include <cstring>

// Compile each function for several machines: one build runs everywhere, and uses wide registers where they exist.
#if defined(__x86_64__) && defined(__GNUC__)
#define EP_SIMD __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EP_SIMD
#endif

namespace ep::cpu {
namespace {

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof(x));
  return x;
}

struct Float32 {
  using Storage = float;
  static inline float load(float x) { return x; }
  static inline float round(float x) { return x; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static inline float load(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
  static inline uint16_t round(float x) {  // to nearest, ties to even
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
};

struct Float16 {
  using Storage = uint16_t;
  static inline float load(uint16_t h) {
    const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & (0x7c00u << 13);
    const uint32_t normal = magnitude + ((127u - 15u) << 23);
    const uint32_t special = normal + ((128u - 16u) << 23);  // infinity, NaN
    // Of a subnormal: 2^-14 * (1 + fraction) - 2^-14.
    const uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - float_of(113u << 23));
    const uint32_t u = exponent == 0 ? subnormal : exponent == (0x7c00u << 13) ? special : normal;
    return float_of(u | static_cast<uint32_t>(h & 0x8000u) << 16);
  }
  static inline uint16_t round(float x) {  // to nearest, ties to even
    const uint32_t bits = bits_of(x), sign = bits & 0x80000000u, u = bits ^ sign;
    // Below 2^-14, add 0.5: the float adder then rounds to multiples of 2^-24.
    const uint32_t subnormal = bits_of(float_of(u) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
    const uint32_t infinite = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t h = u >= (143u << 23) ? infinite : u < (113u << 23) ? subnormal : normal;
    return static_cast<uint16_t>(h | sign >> 16);
  }
};

#define EP_INLINE __attribute__((always_inline)) inline  // inline into each clone, to be compiled for its machine

// Sum kRows rows, the usual few, in one pass.
template <class T, int kRows>
EP_INLINE void sum_few(const char* const* rows, char* out, size_t n) {
  using Storage = typename T::Storage;
  const Storage* from[kRows];
  for (int r = 0; r < kRows; ++r) from[r] = reinterpret_cast<const Storage*>(rows[r]);
  Storage* __restrict__ to = reinterpret_cast<Storage*>(out);
  for (size_t i = 0; i < n; ++i) {
    float total = 0.0f + T::load(from[0][i]);  // -0.0 becomes +0.0
    for (int r = 1; r < kRows; ++r) total += T::load(from[r][i]);
    to[i] = T::round(total);
  }
}

// Sum any number of rows, each times its weight if there are any. The float32 sums of a block of elements stay in the
// first-level cache.
template <class T, bool kWeighted>
EP_INLINE void sum_many(const char* const* rows, const float* weights, int num_rows, char* out, size_t n) {
  using Storage = typename T::Storage;
  constexpr size_t kBlock = 512;
  float total[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = n - begin < kBlock ? n - begin : kBlock;
    for (size_t i = 0; i < count; ++i) total[i] = 0.0f;
    for (int r = 0; r < num_rows; ++r) {
      const Storage* row = reinterpret_cast<const Storage*>(rows[r]) + begin;
      const float weight = kWeighted ? weights[r] : 0;
      for (size_t i = 0; i < count; ++i) total[i] += kWeighted ? weight * T::load(row[i]) : T::load(row[i]);
    }
    Storage* to = reinterpret_cast<Storage*>(out) + begin;
    for (size_t i = 0; i < count; ++i) to[i] = T::round(total[i]);
  }
}

// Sum one row: copy it, and turn -0.0 into +0.0, as a sum from +0.0 does.
template <class Bits>
EP_INLINE void copy_row(const char* row, char* out, size_t n) {
  constexpr Bits kNegativeZero = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const Bits* from = reinterpret_cast<const Bits*>(row);
  Bits* __restrict__ to = reinterpret_cast<Bits*>(out);
  for (size_t i = 0; i < n; ++i) to[i] = from[i] == kNegativeZero ? Bits{0} : from[i];
}

template <class T>
EP_INLINE void sum(const char* const* rows, const float* weights, int num_rows, char* out, size_t n) {
  if (weights) return sum_many<T, true>(rows, weights, num_rows, out, n);
  switch (num_rows) {
    case 2:
      return sum_few<T, 2>(rows, out, n);
    case 3:
      return sum_few<T, 3>(rows, out, n);
    case 4:
      return sum_few<T, 4>(rows, out, n);
    default:
      return sum_many<T, false>(rows, nullptr, num_rows, out, n);
  }
}

EP_SIMD void sum_float32(const char* const* rows, const float* weights, int num_rows, char* out, size_t n) {
  sum<Float32>(rows, weights, num_rows, out, n);
}
EP_SIMD void sum_bfloat16(const char* const* rows, const float* weights, int num_rows, char* out, size_t n) {
  sum<BFloat16>(rows, weights, num_rows, out, n);
}
EP_SIMD void sum_float16(const char* const* rows, const float* weights, int num_rows, char* out, size_t n) {
  sum<Float16>(rows, weights, num_rows, out, n);
}
EP_SIMD void copy_row16(const char* row, char* out, size_t n) { copy_row<uint16_t>(row, out, n); }
EP_SIMD void copy_row32(const char* row, char* out, size_t n) { copy_row<uint32_t>(row, out, n); }

}  // namespace

void sum_rows(const char* const* rows, const float* weights, int num_rows, char* out, size_t n, DType dtype) {
  if (num_rows == 0) {
    std::memset(out, 0, n * size_of(dtype));
  } else if (num_rows == 1 && !weights) {
    (dtype == DType::kFloat32 ? copy_row32 : copy_row16)(rows[0], out, n);
  } else {
    const auto sum = dtype == DType::kFloat32 ? sum_float32 : dtype == DType::kBFloat16 ? sum_bfloat16 : sum_float16;
    sum(rows, weights, num_rows, out, n);
  }
}

}  // namespace ep::cpu
