#include "product.h"

#include <omp.h>

#include <type_traits>

#include "scratch.h"
#include "simd.h"

namespace fleetune {
namespace {

typedef float Vector __attribute__((vector_size(kWidth * sizeof(float)), aligned(alignof(float))));
typedef float Four __attribute__((vector_size(16), aligned(alignof(float))));
typedef int32_t FourInts __attribute__((vector_size(16)));

constexpr int64_t kDepth = 512;      // of a block: a panel of B of this depth is read from the second-level cache
constexpr int64_t kRowPanels = 24;   // of A in a task at most: packed, they fill half a second-level cache
constexpr int64_t kPackedRows = 32;  // rows of B that a thread packs at once

// Elements of two vectors by number, 4 to 7 those of the second.
template <int A, int B, int C, int D>
FLEETUNE_INLINE Four pick(Four x, Four y) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, A, B, C, D);
#else
  return __builtin_shuffle(x, y, FourInts{A, B, C, D});
#endif
}

// out[k * R + i] = line i's element k, for a multiple of four lines that are contiguous in k.
template <int R>
void transpose_lines(const float* data, int64_t line, int lines, int64_t depth, float* out) {
  for (int i = 0; i < lines; i += 4) {
    const float* s = data + i * line;
    float* d = out + i;
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      const Four a = *(const Four*)(s + k), b = *(const Four*)(s + line + k);
      const Four c = *(const Four*)(s + 2 * line + k), e = *(const Four*)(s + 3 * line + k);
      const Four ab_low = pick<0, 4, 1, 5>(a, b);
      const Four ab_high = pick<2, 6, 3, 7>(a, b);
      const Four ce_low = pick<0, 4, 1, 5>(c, e);
      const Four ce_high = pick<2, 6, 3, 7>(c, e);
      *(Four*)(d + k * R) = pick<0, 1, 4, 5>(ab_low, ce_low);
      *(Four*)(d + (k + 1) * R) = pick<2, 3, 6, 7>(ab_low, ce_low);
      *(Four*)(d + (k + 2) * R) = pick<0, 1, 4, 5>(ab_high, ce_high);
      *(Four*)(d + (k + 3) * R) = pick<2, 3, 6, 7>(ab_high, ce_high);
    }
    for (; k < depth; k++)
      for (int j = 0; j < 4; j++) d[k * R + j] = s[j * line + k];
  }
}

// Strides of the left-hand side that the compiler knows make its addresses cheap.
enum class Layout { kPacked, kColumns, kRows };

template <int ROWS, bool ADDS, Layout LAYOUT>
void tile(int64_t depth, Left left, const float* __restrict b, float* result, int64_t result_row, const float* from,
          int64_t from_row) {
  const int64_t row = LAYOUT == Layout::kRows ? left.row : 1;
  const int64_t step = LAYOUT == Layout::kPacked ? kMR : LAYOUT == Layout::kColumns ? left.step : 1;
  const float* __restrict a = left.data;
  Vector sums[ROWS][2];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++) {
    sums[i][0] = sums[i][1] = Vector{};
    __builtin_prefetch(result + i * result_row, 1);
    __builtin_prefetch(result + i * result_row + kWidth, 1);
  }
  for (int64_t k = 0; k < depth; k++, a += step, b += kNR) {
    const Vector b0 = *(const Vector*)b, b1 = *(const Vector*)(b + kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const Vector x = a[i * row] - Vector{};
      sums[i][0] += x * b0;
      sums[i][1] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++) {
    Vector* c = (Vector*)(result + i * result_row);
    if constexpr (ADDS) {
      const Vector* f = (const Vector*)(from + i * from_row);
      sums[i][0] += f[0];
      sums[i][1] += f[1];
    }
    c[0] = sums[i][0];
    c[1] = sums[i][1];
  }
}

template <int ROWS, Layout LAYOUT>
void tile_of(int rows, int64_t depth, Left a, const float* b, float* result, int64_t result_row, const float* from,
             int64_t from_row) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1) tile_of<ROWS - 1, LAYOUT>(rows, depth, a, b, result, result_row, from, from_row);
  } else if (from) {
    tile<ROWS, true, LAYOUT>(depth, a, b, result, result_row, from, from_row);
  } else {
    tile<ROWS, false, LAYOUT>(depth, a, b, result, result_row, nullptr, 0);
  }
}

// The same for a tile that ends in the middle of a panel of B: through a whole tile beside it.
void narrow_tile(int rows, int columns, int64_t depth, Left a, const float* b, float* result, int64_t result_row,
                 const float* from, int64_t from_row) {
  alignas(64) float whole[kMR * kNR];
  multiply_tile(rows, depth, a, b, whole, kNR, nullptr, 0);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++)
      result[i * result_row + j] = whole[i * kNR + j] + (from ? from[i * from_row + j] : 0.0f);
}

// How a product is cut into tasks, blocks of panels of A by panels of B, so that threads end at the same time.
struct Tasks {
  int64_t row_panels = 1, column_panels = 1, across = 1, count = 1;

  Tasks(int64_t a_panels, int64_t b_panels, int64_t threads) {
    double least = INFINITY;
    for (int64_t splits = 1; splits <= std::min(b_panels, 2 * threads); splits++) {
      const int64_t columns = ceil_div(b_panels, splits);
      for (int64_t rows = kRowPanels; rows >= 1; rows--) {
        const int64_t number = ceil_div(a_panels, rows) * ceil_div(b_panels, columns);
        const double longest = double(ceil_div(number, threads)) * cost(double(rows), double(columns));
        if (longest < least * 0.995) {
          least = longest;
          row_panels = rows, column_panels = columns, across = ceil_div(b_panels, columns), count = number;
        }
      }
    }
  }

 private:
  // Of a task, in tiles: their products, packing the panels of A, and fetching those of B.
  static double cost(double rows, double columns) { return rows * columns + 0.5 * rows + 0.5 * columns; }
};

}  // namespace

template <int R, class T>
void pack_panels(Lines<T> from, int64_t count, int64_t depth, float* out, int64_t panel_size) {
  if (from.line == 1) {  // across all panels for each k: memory is read in the order in which it lies
    for (int64_t k = 0; k < depth; k++) {
      const T* row = from.data + k * from.step;
      int64_t i = 0;
      for (; i + R <= count; i += R) {
        float* to = out + i / R * panel_size + k * R;
#pragma omp simd
        for (int j = 0; j < R; j++) to[j] = to_float(row[i + j]);
      }
      if (i < count) {
        float* to = out + i / R * panel_size + k * R;
        for (int j = 0; j < R; j++) to[j] = i + j < count ? to_float(row[i + j]) : 0.0f;
      }
    }
    return;
  }
  for (int64_t i = 0; i < count; i += R) {
    const T* data = from.data + i * from.line;
    float* panel = out + i / R * panel_size;
    const int width = int(std::min<int64_t>(R, count - i));
    int done = 0;
    if constexpr (std::is_same_v<T, float>) {
      if (from.step == 1) {
        done = width / 4 * 4;
        transpose_lines<R>(data, from.line, done, depth, panel);
      }
    }
    for (int l = done; l < width; l++)
      for (int64_t k = 0; k < depth; k++) panel[k * R + l] = to_float(data[l * from.line + k * from.step]);
    if (width < R)
      for (int64_t k = 0; k < depth; k++) std::memset(panel + k * R + width, 0, (R - width) * sizeof(float));
  }
}

template void pack_panels<kMR, float>(Lines<float>, int64_t, int64_t, float*, int64_t);
template void pack_panels<kNR, float>(Lines<float>, int64_t, int64_t, float*, int64_t);
template void pack_panels<kNR, bf16>(Lines<bf16>, int64_t, int64_t, float*, int64_t);

void multiply_tile(int rows, int64_t depth, Left a, const float* b, float* result, int64_t result_row,
                   const float* from, int64_t from_row) {
  if (a.row == 1 && a.step == kMR)
    tile_of<kMR, Layout::kPacked>(rows, depth, a, b, result, result_row, from, from_row);
  else if (a.row == 1)
    tile_of<kMR, Layout::kColumns>(rows, depth, a, b, result, result_row, from, from_row);
  else
    tile_of<kMR, Layout::kRows>(rows, depth, a, b, result, result_row, from, from_row);
}

void multiply(int64_t m, int64_t n, int64_t k, Matrix<float> a, Matrix<float> b, const float* bias, bool adds, float* c,
              int64_t c_row) {
  const int64_t a_panels = ceil_div(m, kMR), b_panels = ceil_div(n, kNR);
  const Tasks tasks(a_panels, b_panels, omp_get_max_threads());
  static thread_local Scratch packed_b;
  float* const panels_b = packed_b.at_least(b_panels * kNR * k);
#pragma omp parallel
  {
    static thread_local Scratch packed_a;
    float* const panels_a = packed_a.at_least(kRowPanels * kMR * kDepth);
    if (b.column == 1) {
#pragma omp for schedule(static)
      for (int64_t k0 = 0; k0 < k; k0 += kPackedRows)
        pack_panels<kNR>(Lines<float>{b.data + k0 * b.row, 1, b.row}, n, std::min(kPackedRows, k - k0),
                         panels_b + k0 * kNR, k * kNR);
    } else {
#pragma omp for schedule(static)
      for (int64_t p = 0; p < b_panels; p++)
        pack_panels<kNR>(Lines<float>{b.data + p * kNR * b.column, b.column, b.row}, std::min<int64_t>(kNR, n - p * kNR),
                         k, panels_b + p * kNR * k, 0);
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t t = 0; t < tasks.count; t++) {
      const int64_t a_first = t / tasks.across * tasks.row_panels, b_first = t % tasks.across * tasks.column_panels;
      const int64_t a_last = std::min(a_panels, a_first + tasks.row_panels);
      const int64_t b_last = std::min(b_panels, b_first + tasks.column_panels);
      for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
        const int64_t depth = std::min(kDepth, k - k0);
        pack_panels<kMR>(Lines<float>{a.data + a_first * kMR * a.row + k0 * a.column, a.row, a.column},
                         std::min(m, a_last * kMR) - a_first * kMR, depth, panels_a, kMR * depth);
        for (int64_t p = b_first; p < b_last; p++) {
          const int columns = int(std::min<int64_t>(kNR, n - p * kNR));
          const float* panel_b = panels_b + p * kNR * k + k0 * kNR;
          for (int64_t q = a_first; q < a_last; q++) {
            const int rows = int(std::min<int64_t>(kMR, m - q * kMR));
            const Left panel_a{panels_a + (q - a_first) * kMR * depth, 1, kMR};
            float* result = c + q * kMR * c_row + p * kNR;
            const bool goes_on = adds || k0 > 0;
            const float* from = goes_on ? result : (bias ? bias + p * kNR : nullptr);
            const int64_t from_row = goes_on ? c_row : 0;
            if (columns == kNR)
              multiply_tile(rows, depth, panel_a, panel_b, result, c_row, from, from_row);
            else
              narrow_tile(rows, columns, depth, panel_a, panel_b, result, c_row, from, from_row);
          }
        }
      }
    }
  }
}

}  // namespace fleetune
