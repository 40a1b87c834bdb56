#include "rows.h"

#include "scratch.h"
#include "simd.h"

namespace fleetune {
namespace {

constexpr int64_t kSerial = 8192;  // elements that are not worth a second thread

float mean_of(int64_t n, const float* x) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; j++) sum += x[j];
  return sum / float(n);
}

// Mean and 1 / sqrt(variance + eps), in two passes: the second one's differences lose no digits.
void moments_of(int64_t n, const float* x, float eps, float& mean, float& rstd) {
  const float m = mean_of(n, x);
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t j = 0; j < n; j++) squares += (x[j] - m) * (x[j] - m);
  mean = m;
  rstd = 1.0f / std::sqrt(squares / float(n) + eps);
}

// Gradient of the normalised row's input, into `dx`; adds to the gradients of weight and bias.
void norm_row_backward(int64_t n, const float* dy, const float* x, const float* weight, float mean, float rstd,
                       float* dx, float* dweight, float* dbias) {
  float sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t j = 0; j < n; j++) {
    const float normed = (x[j] - mean) * rstd, scaled = dy[j] * weight[j];
    sum += scaled;
    dot += scaled * normed;
    dweight[j] += dy[j] * normed;
    dbias[j] += dy[j];
  }
  sum /= float(n);
  dot /= float(n);
#pragma omp simd
  for (int64_t j = 0; j < n; j++) dx[j] = rstd * (dy[j] * weight[j] - sum - (x[j] - mean) * rstd * dot);
}

// One partial sum a chunk of rows, added up in the chunks' order.
struct Partials {
  int64_t width;
  std::vector<float> values;

  Partials(int64_t chunks, int64_t columns) : width(columns), values(size_t(chunks * columns), 0.0f) {}
  float* of(int64_t chunk) { return values.data() + chunk * width; }
  void add_up(int64_t begin, int64_t end, float* sums) const {
    std::fill(sums, sums + (end - begin), 0.0f);
    for (size_t at = 0; at < values.size(); at += width)
      for (int64_t j = begin; j < end; j++) sums[j - begin] += values[at + j];
  }
};

// Calls of(begin, end) for the chunks of a range, in parallel.
template <class F>
void over_elements(int64_t count, F&& of) {
  const int64_t pieces = ceil_div(count, kSerial);
#pragma omp parallel for schedule(static) if (pieces > 1)
  for (int64_t p = 0; p < pieces; p++) of(p * kSerial, std::min(count, (p + 1) * kSerial));
}

// Hendrycks and Gimpel (2016).
template <Gelu KIND>
FLEETUNE_INLINE float gelu(float x) {
  if constexpr (KIND == Gelu::kErf) return x * normal_f(x).distribution;
  return 0.5f * x * (1.0f + tanh_f(0.797884561f * (x + 0.044715f * x * x * x)));
}

template <Gelu KIND>
FLEETUNE_INLINE float gelu_slope(float x) {
  if constexpr (KIND == Gelu::kErf) {
    const Normal normal = normal_f(x);
    return normal.distribution + x * 0.398942280f * normal.exponential;
  }
  const float t = tanh_f(0.797884561f * (x + 0.044715f * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.797884561f * (1.0f + 0.134145f * x * x);
}

template <Gelu KIND, class T>
void gelu_forward_of(int64_t count, const T* x, T* y) {
  over_elements(count, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t j = begin; j < end; j++) y[j] = from_float<T>(gelu<KIND>(to_float(x[j])));
  });
}

template <Gelu KIND, bool AGAIN, class T>
void gelu_backward_of(int64_t count, const T* dy, const T* x, T* dx, T* y) {
  over_elements(count, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t j = begin; j < end; j++) {
      const float value = to_float(x[j]);
      dx[j] = from_float<T>(to_float(dy[j]) * gelu_slope<KIND>(value));
      if constexpr (AGAIN) y[j] = from_float<T>(gelu<KIND>(value));
    }
  });
}

template <Gelu KIND, class T>
void gelu_backward_any(int64_t count, const T* dy, const T* x, T* dx, T* y) {
  y ? gelu_backward_of<KIND, true>(count, dy, x, dx, y) : gelu_backward_of<KIND, false>(count, dy, x, dx, y);
}

template <Gelu KIND, class T>
void geglu_forward_of(int64_t rows, int64_t width, const T* x, T* y) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    const T *gate = x + i * 2 * width, *value = gate + width;
#pragma omp simd
    for (int64_t j = 0; j < width; j++)
      y[i * width + j] = from_float<T>(gelu<KIND>(to_float(gate[j])) * to_float(value[j]));
  }
}

template <Gelu KIND, class T>
void geglu_backward_of(int64_t rows, int64_t width, const T* dy, const T* x, T* dx) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    const T *gate = x + i * 2 * width, *value = gate + width;
    T *dgate = dx + i * 2 * width, *dvalue = dgate + width;
#pragma omp simd
    for (int64_t j = 0; j < width; j++) {
      const float d = to_float(dy[i * width + j]), g = to_float(gate[j]);
      dgate[j] = from_float<T>(d * to_float(value[j]) * gelu_slope<KIND>(g));
      dvalue[j] = from_float<T>(d * gelu<KIND>(g));
    }
  }
}

}  // namespace

template <class T>
void add_norm_forward(int64_t rows, int64_t width, const T* x, const T* residual, const float* weight,
                      const float* bias, float eps, const Dropout& dropout, T* y, T* sum, Moments moments) {
#pragma omp parallel
  {
    static thread_local Scratch memory;
    float* row = memory.at_least(width + padded_to_32(width));
    float* factors = row + width;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      const T* xi = x + i * width;
      if (dropout.active()) {
        dropout.factors(i, 0, 0, width, factors);
#pragma omp simd
        for (int64_t j = 0; j < width; j++) row[j] = to_float(xi[j]) * factors[j];
      } else {
#pragma omp simd
        for (int64_t j = 0; j < width; j++) row[j] = to_float(xi[j]);
      }
      if (residual) {
        const T* ri = residual + i * width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) row[j] += to_float(ri[j]);
      }
      T *si = sum + i * width, *yi = y + i * width;
#pragma omp simd
      for (int64_t j = 0; j < width; j++) {
        si[j] = from_float<T>(row[j]);
        row[j] = to_float(si[j]);  // as backward will see it
      }
      float mean, rstd;
      moments_of(width, row, eps, mean, rstd);
      moments.mean[i] = mean;
      moments.rstd[i] = rstd;
      if (bias) {
#pragma omp simd
        for (int64_t j = 0; j < width; j++) yi[j] = from_float<T>((row[j] - mean) * rstd * weight[j] + bias[j]);
      } else {
#pragma omp simd
        for (int64_t j = 0; j < width; j++) yi[j] = from_float<T>((row[j] - mean) * rstd * weight[j]);
      }
    }
  }
}

template <class T>
void add_norm_backward(int64_t rows, int64_t width, const T* dy, const T* sum, const float* weight, Moments moments,
                       const Dropout& dropout, T* dx, T* dresidual, float* dweight, float* dbias) {
  const Chunks chunks(rows);
  Partials partials(chunks.count, 2 * width);
#pragma omp parallel
  {
    static thread_local Scratch memory;
    float* buffer = memory.at_least(3 * width + padded_to_32(width));
    float *dsum = buffer + 2 * width, *factors = dsum + width;
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < chunks.count; c++) {
      float *dw = partials.of(c), *db = dw + width;
      for (int64_t i = c * chunks.size; i < std::min(rows, (c + 1) * chunks.size); i++) {
        const float* dyi = as_floats(dy + i * width, buffer, width);
        const float* si = as_floats(sum + i * width, buffer + width, width);
        norm_row_backward(width, dyi, si, weight, moments.mean[i], moments.rstd[i], dsum, dw, db);
        T* dri = dresidual + i * width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) dri[j] = from_float<T>(dsum[j]);
        if (dx) {
          dropout.factors(i, 0, 0, width, factors);
          T* dxi = dx + i * width;
#pragma omp simd
          for (int64_t j = 0; j < width; j++) dxi[j] = from_float<T>(dsum[j] * factors[j]);
        }
      }
    }
  }
  partials.add_up(0, width, dweight);
  partials.add_up(width, 2 * width, dbias);
}

template <class T>
void embed_forward(int64_t rows, int64_t width, const std::vector<Lookup>& lookups, const float* weight,
                   const float* bias, float eps, const Dropout& dropout, T* y, float* sum, Moments moments) {
#pragma omp parallel
  {
    static thread_local Scratch memory;
    float* factors = memory.at_least(padded_to_32(width));
    std::fill(factors, factors + width, 1.0f);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      float* si = sum + i * width;
      std::memcpy(si, lookups[0].table + lookups[0].ids[i] * width, width * sizeof(float));
      for (size_t l = 1; l < lookups.size(); l++) {
        const float* from = lookups[l].table + lookups[l].ids[i] * width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) si[j] += from[j];
      }
      float mean, rstd;
      moments_of(width, si, eps, mean, rstd);
      moments.mean[i] = mean;
      moments.rstd[i] = rstd;
      if (dropout.active()) dropout.factors(i, 0, 0, width, factors);
      T* yi = y + i * width;
#pragma omp simd
      for (int64_t j = 0; j < width; j++)
        yi[j] = from_float<T>(((si[j] - mean) * rstd * weight[j] + bias[j]) * factors[j]);
    }
  }
}

template <class T>
void embed_backward(int64_t rows, int64_t width, const T* dy, const float* sum, const float* weight, Moments moments,
                    const Dropout& dropout, float* dsum, float* dweight, float* dbias) {
  const Chunks chunks(rows);
  Partials partials(chunks.count, 2 * width);
#pragma omp parallel
  {
    static thread_local Scratch memory;
    float* dropped = memory.at_least(width + padded_to_32(width));
    float* factors = dropped + width;
    std::fill(factors, factors + width, 1.0f);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < chunks.count; c++) {
      float *dw = partials.of(c), *db = dw + width;
      for (int64_t i = c * chunks.size; i < std::min(rows, (c + 1) * chunks.size); i++) {
        if (dropout.active()) dropout.factors(i, 0, 0, width, factors);
        const T* dyi = dy + i * width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) dropped[j] = to_float(dyi[j]) * factors[j];
        norm_row_backward(width, dropped, sum + i * width, weight, moments.mean[i], moments.rstd[i], dsum + i * width,
                          dw, db);
      }
    }
  }
  partials.add_up(0, width, dweight);
  partials.add_up(width, 2 * width, dbias);
}

template <class T>
void dropout_rows(int64_t rows, int64_t width, const T* x, const Dropout& dropout, T* y) {
#pragma omp parallel if (rows * width > kSerial)
  {
    static thread_local Scratch memory;
    float* factors = memory.at_least(padded_to_32(width));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
      dropout.factors(i, 0, 0, width, factors);
#pragma omp simd
      for (int64_t j = 0; j < width; j++) y[i * width + j] = from_float<T>(to_float(x[i * width + j]) * factors[j]);
    }
  }
}

template <class T>
void gelu_forward(int64_t count, const T* x, Gelu kind, T* y) {
  kind == Gelu::kErf ? gelu_forward_of<Gelu::kErf>(count, x, y) : gelu_forward_of<Gelu::kTanh>(count, x, y);
}

template <class T>
void gelu_backward(int64_t count, const T* dy, const T* x, Gelu kind, T* dx, T* y) {
  kind == Gelu::kErf ? gelu_backward_any<Gelu::kErf>(count, dy, x, dx, y)
                     : gelu_backward_any<Gelu::kTanh>(count, dy, x, dx, y);
}

template <class T>
void rotate(int64_t rows, int64_t width, int64_t heads, int64_t half, const T* x, const float* cos, const float* sin,
            T* y) {
#pragma omp parallel for schedule(static) if (rows * width > kSerial)
  for (int64_t i = 0; i < rows; i++) {
    const float *c = cos + i * half, *s = sin + i * half;
    for (int64_t h = 0; h < heads; h++) {
      const T *a = x + i * width + h * 2 * half, *b = a + half;
      T *to_a = y + i * width + h * 2 * half, *to_b = to_a + half;
#pragma omp simd
      for (int64_t j = 0; j < half; j++) {
        const float first = to_float(a[j]), second = to_float(b[j]);
        to_a[j] = from_float<T>(first * c[j] - second * s[j]);
        to_b[j] = from_float<T>(second * c[j] + first * s[j]);
      }
    }
    std::copy(x + i * width + heads * 2 * half, x + (i + 1) * width, y + i * width + heads * 2 * half);
  }
}

template <class T>
void geglu_forward(int64_t rows, int64_t width, const T* x, Gelu kind, T* y) {
  kind == Gelu::kErf ? geglu_forward_of<Gelu::kErf>(rows, width, x, y)
                     : geglu_forward_of<Gelu::kTanh>(rows, width, x, y);
}

template <class T>
void geglu_backward(int64_t rows, int64_t width, const T* dy, const T* x, Gelu kind, T* dx) {
  kind == Gelu::kErf ? geglu_backward_of<Gelu::kErf>(rows, width, dy, x, dx)
                     : geglu_backward_of<Gelu::kTanh>(rows, width, dy, x, dx);
}

template <class T>
void column_sums(int64_t rows, int64_t width, const T* x, int64_t x_row, float* sums) {
  const Chunks chunks(rows);
  Partials partials(chunks.count, width);
#pragma omp parallel for schedule(dynamic, 1) if (rows * width > kSerial)
  for (int64_t c = 0; c < chunks.count; c++) {
    float* sum = partials.of(c);
    for (int64_t i = c * chunks.size; i < std::min(rows, (c + 1) * chunks.size); i++) {
      const T* xi = x + i * x_row;
#pragma omp simd
      for (int64_t j = 0; j < width; j++) sum[j] += to_float(xi[j]);
    }
  }
  partials.add_up(0, width, sums);
}

Groups group(int64_t count, const int64_t* ids) {
  Groups groups;
  groups.members.resize(count);
  for (int64_t i = 0; i < count; i++) groups.members[i] = i;
  std::sort(groups.members.begin(), groups.members.end(),
            [=](int64_t a, int64_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
  for (int64_t i = 0; i < count; i++) {
    const int64_t id = ids[groups.members[i]];
    if (groups.ids.empty() || groups.ids.back() != id) {
      groups.ids.push_back(id);
      groups.starts.push_back(i);
    }
  }
  groups.starts.push_back(count);
  return groups;
}

template <class T>
void group_sums(const Groups& groups, int64_t width, const T* x, float* sums) {
  const int64_t count = int64_t(groups.ids.size());
#pragma omp parallel for schedule(dynamic, 8) if (count > 1)
  for (int64_t g = 0; g < count; g++) {
    float* sum = sums + g * width;
    std::fill(sum, sum + width, 0.0f);
    for (int64_t m = groups.starts[g]; m < groups.starts[g + 1]; m++) {
      const T* row = x + groups.members[m] * width;
#pragma omp simd
      for (int64_t j = 0; j < width; j++) sum[j] += to_float(row[j]);
    }
  }
}

#define FLEETUNE_ROWS(T)                                                                                             \
  template void add_norm_forward<T>(int64_t, int64_t, const T*, const T*, const float*, const float*, float,         \
                                    const Dropout&, T*, T*, Moments);                                                \
  template void add_norm_backward<T>(int64_t, int64_t, const T*, const T*, const float*, Moments, const Dropout&,    \
                                     T*, T*, float*, float*);                                                        \
  template void embed_forward<T>(int64_t, int64_t, const std::vector<Lookup>&, const float*, const float*, float,    \
                                 const Dropout&, T*, float*, Moments);                                               \
  template void embed_backward<T>(int64_t, int64_t, const T*, const float*, const float*, Moments, const Dropout&,   \
                                  float*, float*, float*);                                                           \
  template void dropout_rows<T>(int64_t, int64_t, const T*, const Dropout&, T*);                                     \
  template void gelu_forward<T>(int64_t, const T*, Gelu, T*);                                                        \
  template void gelu_backward<T>(int64_t, const T*, const T*, Gelu, T*, T*);                                           \
  template void rotate<T>(int64_t, int64_t, int64_t, int64_t, const T*, const float*, const float*, T*);              \
  template void geglu_forward<T>(int64_t, int64_t, const T*, Gelu, T*);                                              \
  template void geglu_backward<T>(int64_t, int64_t, const T*, const T*, Gelu, T*);                                   \
  template void column_sums<T>(int64_t, int64_t, const T*, int64_t, float*);                                         \
  template void group_sums<T>(const Groups&, int64_t, const T*, float*);
FLEETUNE_ROWS(float)
FLEETUNE_ROWS(bf16)

}  // namespace fleetune
