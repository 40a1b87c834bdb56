// Matrix products: C = A B (+ bias), float32, any strides. Attention builds on the same tiles.
//
// B is packed into panels of kNR columns, A into panels of kMR rows; a tile of kMR x kNR results stays in registers
// for the whole inner dimension of a block (Goto and van de Geijn 2008). The order of the additions is fixed by the
// shape alone.
#pragma once

#include <cstdint>

namespace fleetune {

#if defined(__AVX512F__) && !defined(__znver3__) && !defined(__znver4__)
constexpr int kWidth = 16, kMR = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX512VL__)
constexpr int kWidth = 8, kMR = 12;  // Zen 4 halves wide operations; narrow ones were up to a tenth faster there
#elif defined(__AVX__)
constexpr int kWidth = 8, kMR = 6;  // 12 of 16
#elif defined(__aarch64__)
// 20 accumulators, two vectors of B and ten numbers of A: just 32 registers. Compilers load the numbers long before
// they use them, so that of 24 accumulators some went through memory in every step.
constexpr int kWidth = 4, kMR = 10;
#else
constexpr int kWidth = 4, kMR = 12;
#endif
constexpr int kNR = 2 * kWidth;

// A matrix in memory: element (i, j) is at data[i * row + j * column].
template <class T>
struct Matrix {
  const T* data;
  int64_t row, column;
};

// Lines that are packed: element k of line i is at data[i * line + k * step].
template <class T>
struct Lines {
  const T* data;
  int64_t line, step;
};

// Packs `count` lines of `depth` elements into panels of R lines, in float32: element k of line i goes to
// out[i / R * panel_size + k * R + i % R]. Lines that the last panel lacks are zero.
template <int R, class T>
void pack_panels(Lines<T> from, int64_t count, int64_t depth, float* out, int64_t panel_size);

// Left-hand side of a tile: element (i, k) is at data[i * row + k * step]; one of the two strides is 1.
struct Left {
  const float* data;
  int64_t row, step;
};

// result = from + A (panel of B), for `rows` <= kMR rows. `from` is a matrix of the tile's shape with rows `from_row`
// apart (0: the same row for all), or null for zero.
void multiply_tile(int rows, int64_t depth, Left a, const float* b, float* result, int64_t result_row,
                   const float* from, int64_t from_row);

// C (m x n, rows `c_row` apart) = A (m x k) B (k x n) + bias (n, or null); or C += A B where it `adds`, without a bias.
void multiply(int64_t m, int64_t n, int64_t k, Matrix<float> a, Matrix<float> b, const float* bias, bool adds, float* c,
              int64_t c_row);

}  // namespace fleetune
