// Kernels that work row by row: normalisation with what stands around it, activations, embeddings, sums of rows.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"

namespace fleetune {

// What LayerNorm keeps of each row for its backward.
struct Moments {
  float *mean, *rstd;
};

// sum = dropout(x) + residual; y = (sum - mean) * rstd * weight + bias. `residual` and `bias` may be null.
template <class T>
void add_norm_forward(int64_t rows, int64_t width, const T* x, const T* residual, const float* weight,
                      const float* bias, float eps, const Dropout& dropout, T* y, T* sum, Moments moments);

// Gradients of `x` and `residual` (the same values, but for the mask), of the weight and the bias. `dx` may be null.
template <class T>
void add_norm_backward(int64_t rows, int64_t width, const T* dy, const T* sum, const float* weight, Moments moments,
                       const Dropout& dropout, T* dx, T* dresidual, float* dweight, float* dbias);

// A table of embeddings and the row of each token in it.
struct Lookup {
  const float* table;
  const int64_t* ids;
};

// sum = the tables' rows added up; y = dropout(norm(sum)).
template <class T>
void embed_forward(int64_t rows, int64_t width, const std::vector<Lookup>& lookups, const float* weight,
                   const float* bias, float eps, const Dropout& dropout, T* y, float* sum, Moments moments);

template <class T>
void embed_backward(int64_t rows, int64_t width, const T* dy, const float* sum, const float* weight, Moments moments,
                    const Dropout& dropout, float* dsum, float* dweight, float* dbias);

template <class T>
void dropout_rows(int64_t rows, int64_t width, const T* x, const Dropout& dropout, T* y);

// y = x, of which the first `heads` times 2 * half columns are turned: column j of a head, and column j + half, are a
// point that is turned by the angle whose cosine and sine are column j of `cos` and `sin` (rows x half).
template <class T>
void rotate(int64_t rows, int64_t width, int64_t heads, int64_t half, const T* x, const float* cos, const float* sin,
            T* y);

enum class Gelu : int64_t { kErf = 0, kTanh = 1 };

template <class T>
void gelu_forward(int64_t count, const T* x, Gelu kind, T* y);
// `y`, the result of the forward, is computed again where it is not null.
template <class T>
void gelu_backward(int64_t count, const T* dy, const T* x, Gelu kind, T* dx, T* y);

// x has rows of 2 * width: y = gelu(first half) * second half.
template <class T>
void geglu_forward(int64_t rows, int64_t width, const T* x, Gelu kind, T* y);
template <class T>
void geglu_backward(int64_t rows, int64_t width, const T* dy, const T* x, Gelu kind, T* dx);

template <class T>
void column_sums(int64_t rows, int64_t width, const T* x, int64_t x_row, float* sums);

// Groups of equal ids, ascending.
struct Groups {
  std::vector<int64_t> ids, starts, members;  // members[starts[g]] to members[starts[g + 1]] are the places of ids[g]
};
Groups group(int64_t count, const int64_t* ids);

// Row g of `sums` = sum of the rows of x that are members of group g.
template <class T>
void group_sums(const Groups& groups, int64_t width, const T* x, float* sums);

}  // namespace fleetune
