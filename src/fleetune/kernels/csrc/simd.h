// What every kernel needs: storage types, elementary functions that compilers vectorise, parallel loops.
//
// The functions are plain scalar code without branches, to be called inside loops marked `#pragma omp simd`: one
// source serves AVX2, AVX-512 and Arm NEON. All arithmetic is float32; bfloat16 is a way of storing it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// A call that is left in a loop keeps it from being vectorised.
#define FLEETUNE_INLINE inline __attribute__((always_inline))

namespace fleetune {

// The upper half of a float32. An enumeration, not a struct: loops over it are vectorised.
enum class bf16 : uint16_t {};

FLEETUNE_INLINE float to_float(float x) { return x; }
FLEETUNE_INLINE float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x) << 16); }

template <class T>
T from_float(float x);

template <>
FLEETUNE_INLINE float from_float<float>(float x) {
  return x;
}

// Round to nearest, ties to even; a NaN stays one.
template <>
FLEETUNE_INLINE bf16 from_float<bf16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return bf16(uint16_t(x == x ? rounded : 0x7FC0u));
}

// A row as float32: itself, or converted into `buffer`.
inline const float* as_floats(const float* row, float*, int64_t) { return row; }
inline const float* as_floats(const bf16* row, float* buffer, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; j++) buffer[j] = to_float(row[j]);
  return buffer;
}

// exp within 2 units in the last place; 0 where the result would be below 1e-38.
FLEETUNE_INLINE float exp_f(float x) {
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const float least = -87.3f, most = 88.3f;
  const float within = x > most ? most : x;
  const float shifted = within * kLog2E + kRound;
  const int32_t n = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const float whole = shifted - kRound;
  const float r = (within - whole * kLn2High) - whole * kLn2Low;
  // (exp(r) - 1 - r) / r^2 on [-ln(2)/2, ln(2)/2], a least-maximum fit of degree 4
  float q = 0.00139517017f;
  q = q * r + 0.00836959163f;
  q = q * r + 0.0416661876f;
  q = q * r + 0.16666513f;
  q = q * r + 0.50000001f;
  const float value = (q * (r * r) + r + 1.0f) * std::bit_cast<float>((n + 127) << 23);
  return x < least ? 0.0f : value;
}

// exp(-x^2 / 2) and the normal distribution function of x, the latter within 2.5e-7 and relatively in the left tail.
struct Normal {
  float exponential, distribution;
};
FLEETUNE_INLINE Normal normal_f(float x) {
  const float a = std::fabs(x);
  const float t = 1.0f / (1.0f + 0.247487373f * a);  // 0.35 / sqrt(2)
  // erfc(z) exp(z^2) / t with t = 1 / (1 + 0.35 z), a least-maximum fit of degree 6
  float p = -0.197514358f;
  p = p * t + 0.770151208f;
  p = p * t - 0.676301477f;
  p = p * t + 0.680083307f;
  p = p * t - 0.00591373892f;
  p = p * t + 0.235053028f;
  p = p * t + 0.194442031f;
  const float e = exp_f(-0.5f * x * x);
  const float tail = 0.5f * e * t * p;
  return {e, x < 0.0f ? tail : 1.0f - tail};
}

FLEETUNE_INLINE float tanh_f(float x) {
  const float t = std::fabs(x), s = t * t;
  const float large = 1.0f - 2.0f / (exp_f(2.0f * t) + 1.0f);
  const float small = t * (1.0f + s * (-0.333333333f + s * (0.133333333f - s * 0.0539682540f)));  // Taylor
  return std::copysign(t < 0.15f ? small : large, x);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How rows are cut for sums over them: the cut depends on their count alone, so that the result does not depend on
// the number of threads.
struct Chunks {
  int64_t size, count;
  explicit Chunks(int64_t rows) : size(std::max<int64_t>(32, ceil_div(rows, 128))), count(ceil_div(rows, size)) {}
};

}  // namespace fleetune
