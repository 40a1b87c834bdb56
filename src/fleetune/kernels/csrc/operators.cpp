// The kernels as operators of torch: everything is checked here, so that no wrong call reaches a pointer.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include "attention.h"
#include "clock.h"
#include "gradients.h"
#include "optimizer.h"
#include "product.h"
#include "rows.h"
#include "simd.h"

namespace fleetune {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_float(const Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16), name,
              ": a float32 or bfloat16 tensor on the CPU is needed, not ", x.toString());
}

void check_dense(const Tensor& x, at::ScalarType type, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == type, name, ": ", toString(type), " is needed, not ",
              x.toString());
  TORCH_CHECK(x.sizes() == sizes, name, ": has shape ", x.sizes(), ", ", sizes, " is needed");
  TORCH_CHECK(x.is_contiguous(), name, ": must be contiguous");
}

// A matrix whose rows are contiguous, of any distance.
void check_rows(const Tensor& x, at::ScalarType type, int64_t rows, int64_t width, const char* name) {
  check_float(x, name);
  TORCH_CHECK(x.scalar_type() == type, name, ": ", toString(type), " is needed, not ", x.toString());
  TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.size(1) == width, name, ": has shape ", x.sizes(), ", [", rows,
              ", ", width, "] is needed");
  TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name, ": its rows must be contiguous");
}

Tensor float_like(at::IntArrayRef sizes) { return at::empty(sizes, at::TensorOptions().dtype(at::kFloat)); }

Dropout make_dropout(double rate, int64_t site_key, const OptionalTensor& row_keys, int64_t rows) {
  TORCH_CHECK(rate >= 0.0 && rate < 1.0, "rate ", rate, " is not in [0, 1)");
  if (rate == 0.0) return {};
  TORCH_CHECK(row_keys.has_value(), "dropout needs the keys of the rows");
  check_dense(*row_keys, at::kLong, {rows}, "row_keys");
  return {rate, site_key, row_keys->const_data_ptr<int64_t>()};
}

Gelu gelu_kind(int64_t kind) {
  TORCH_CHECK(kind == 0 || kind == 1, "kind ", kind, " is neither 0 (erf) nor 1 (tanh)");
  return Gelu(kind);
}

void check_ids(const Tensor& ids, int64_t count, int64_t table_rows, const char* name) {
  check_dense(ids, at::kLong, {count}, name);
  const int64_t* data = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; i++)
    TORCH_CHECK_INDEX(data[i] >= 0 && data[i] < table_rows, name, ": id ", data[i], " is outside a table of ",
                      table_rows, " rows");
}

// Calls of(T{}) with the storage type of `x`.
template <class F>
void for_type(const Tensor& x, F&& of) {
  x.scalar_type() == at::kFloat ? of(float{}) : of(bf16{});
}
template <class T>
const T* read(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* write(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}
template <class T>
Heads<const T> read_heads(const Tensor& x) {
  return {read<T>(x), x.stride(0)};
}
template <class T>
Heads<T> write_heads(const Tensor& x) {
  return {write<T>(x), x.stride(0)};
}
Moments moments(const Tensor& mean, const Tensor& rstd) { return {write<float>(mean), write<float>(rstd)}; }

// ---- products -----------------------------------------------------------------------------------------------------

Tensor product(const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  for (const Tensor& x : {a, b})
    TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kFloat && x.dim() == 2,
                "product: float32 matrices on the CPU are needed, not ", x.toString(), " of ", x.dim(), " dimensions");
  TORCH_CHECK(a.size(1) == b.size(0), "product: shapes ", a.sizes(), " and ", b.sizes(), " do not fit");
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (bias.has_value()) check_dense(*bias, at::kFloat, {n}, "bias");
  if (k == 0) return bias.has_value() ? bias->expand({m, n}).contiguous() : at::zeros({m, n}, a.options());
  Tensor c = float_like({m, n});
  if (m > 0 && n > 0)
    multiply(m, n, k, {read<float>(a), a.stride(0), a.stride(1)}, {read<float>(b), b.stride(0), b.stride(1)},
             bias.has_value() ? read<float>(*bias) : nullptr, false, write<float>(c), n);
  return c;
}

// The same by torch, in the type of `a`: oneDNN's for bfloat16, with the other operands rounded for it.
Tensor product_by_torch(const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  const Tensor other = b.to(a.scalar_type());
  return bias.has_value() ? at::addmm(bias->to(a.scalar_type()), a, other) : at::mm(a, other);
}

Tensor column_sums_op(const Tensor& x) {
  check_float(x, "x");
  TORCH_CHECK(x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1), "x: a matrix with contiguous rows is needed");
  Tensor sums = float_like({x.size(1)});
  for_type(x, [&]<class T>(T) { column_sums(x.size(0), x.size(1), read<T>(x), x.stride(0), write<float>(sums)); });
  return sums;
}

// ---- attention ----------------------------------------------------------------------------------------------------

void check_prefix_sums(const Tensor& cu, int64_t rows, const char* name) {
  check_dense(cu, at::kLong, {cu.numel()}, name);
  TORCH_CHECK(cu.numel() >= 1, name, ": must not be empty");
  const int64_t* data = cu.const_data_ptr<int64_t>();
  TORCH_CHECK(data[0] == 0 && data[cu.numel() - 1] == rows, name, ": must run from 0 to ", rows);
  for (int64_t i = 1; i < cu.numel(); i++) TORCH_CHECK(data[i - 1] <= data[i], name, ": must not decrease");
}

Sequences make_sequences(const Tensor& q, const Tensor& k, const Tensor& cu_q, const Tensor& cu_k, int64_t num_heads,
                         double scale, int64_t window, double rate, int64_t site_key, const OptionalTensor& row_keys) {
  check_prefix_sums(cu_q, q.size(0), "cu_q");
  check_prefix_sums(cu_k, k.size(0), "cu_k");
  TORCH_CHECK(cu_q.numel() == cu_k.numel(), "cu_q and cu_k are of different numbers of sequences");
  TORCH_CHECK(num_heads > 0 && q.size(1) > 0 && q.size(1) % num_heads == 0, "a width of ", q.size(1),
              " cannot be cut into ", num_heads, " heads");
  TORCH_CHECK(window >= 0, "window ", window, " is negative");
  TORCH_CHECK(scale > 0.0, "scale ", scale, " is not positive");
  const int64_t *starts_q = cu_q.const_data_ptr<int64_t>(), *starts_k = cu_k.const_data_ptr<int64_t>();
  for (int64_t i = 0; i + 1 < cu_q.numel(); i++)
    TORCH_CHECK(starts_q[i] == starts_q[i + 1] || starts_k[i] < starts_k[i + 1], "sequence ", i,
                " has queries but no keys");
  for (int64_t i = 0; window > 0 && i + 1 < cu_q.numel(); i++)
    TORCH_CHECK(starts_q[i + 1] - starts_q[i] <= starts_k[i + 1] - starts_k[i], "sequence ", i,
                " has more queries than keys, which a window has no place for");
  return {starts_q, starts_k, cu_q.numel() - 1, num_heads, q.size(1) / num_heads, float(scale), window,
          make_dropout(rate, site_key, row_keys, q.size(0))};
}

void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK(q.dim() == 2 && k.dim() == 2, "q and k must be matrices");
  check_rows(q, q.scalar_type(), q.size(0), q.size(1), "q");
  check_rows(k, q.scalar_type(), k.size(0), q.size(1), "k");
  check_rows(v, q.scalar_type(), k.size(0), q.size(1), "v");
}

// The bias of every head and distance; it must have a column for every pair of tokens of a sequence.
Bias make_bias(const Tensor& bias, const Sequences& s) {
  TORCH_CHECK(bias.dim() == 2 && bias.size(1) % 2 == 1, "bias: a matrix of an odd width is needed, not ", bias.sizes());
  check_dense(bias, at::kFloat, {s.num_heads, bias.size(1)}, "bias");
  int64_t longest = 1;
  for (const int64_t* cu : {s.cu_q, s.cu_k})
    for (int64_t i = 0; i < s.count; i++) longest = std::max(longest, cu[i + 1] - cu[i]);
  TORCH_CHECK(bias.size(1) >= 2 * longest - 1, "bias: ", bias.size(1), " distances are too few for a sequence of ",
              longest, " tokens");
  return {read<float>(bias), bias.size(1)};
}

std::tuple<Tensor, Tensor> attend(const Sequences& s, const Tensor& q, const Tensor& k, const Tensor& v) {
  Tensor out = at::empty(q.sizes(), q.options()), lse = float_like({q.size(0), s.num_heads});
  for_type(q, [&]<class T>(T) {
    attention_forward<T>(s, read_heads<T>(q), read_heads<T>(k), read_heads<T>(v), write_heads<T>(out),
                         write<float>(lse));
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_forward_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q,
                                                const Tensor& cu_k, int64_t num_heads, double scale, int64_t window,
                                                double rate, int64_t site_key, const OptionalTensor& row_keys) {
  check_qkv(q, k, v);
  return attend(make_sequences(q, k, cu_q, cu_k, num_heads, scale, window, rate, site_key, row_keys), q, k, v);
}

std::tuple<Tensor, Tensor> biased_attention_forward_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                                       const Tensor& bias, const Tensor& cu_q, const Tensor& cu_k,
                                                       int64_t num_heads, double scale, int64_t window, double rate,
                                                       int64_t site_key, const OptionalTensor& row_keys) {
  check_qkv(q, k, v);
  Sequences s = make_sequences(q, k, cu_q, cu_k, num_heads, scale, window, rate, site_key, row_keys);
  s.bias = make_bias(bias, s);
  return attend(s, q, k, v);
}

// The gradients are the columns of one matrix where q, k and v were: their product with the weights is then one, too.
std::tuple<Tensor, Tensor, Tensor> attend_backward(const Sequences& s, const Tensor& dout, const Tensor& q,
                                                   const Tensor& k, const Tensor& v, const Tensor& lse, float* dbias) {
  check_rows(dout, q.scalar_type(), q.size(0), q.size(1), "dout");
  check_dense(lse, at::kFloat, {q.size(0), s.num_heads}, "lse");
  Tensor dq, dk, dv;
  if (q.size(0) == k.size(0)) {
    const Tensor joined = at::empty({q.size(0), 3 * q.size(1)}, q.options());
    dq = joined.narrow(1, 0, q.size(1));
    dk = joined.narrow(1, q.size(1), q.size(1));
    dv = joined.narrow(1, 2 * q.size(1), q.size(1));
  } else {
    dq = at::empty(q.sizes(), q.options());
    dk = at::empty(k.sizes(), k.options());
    dv = at::empty(v.sizes(), v.options());
  }
  for_type(q, [&]<class T>(T) {
    attention_backward<T>(s, read_heads<T>(dout), read_heads<T>(q), read_heads<T>(k), read_heads<T>(v),
                          read<float>(lse), write_heads<T>(dq), write_heads<T>(dk), write_heads<T>(dv), dbias);
  });
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_op(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const Tensor& lse, const Tensor& cu_q,
                                                         const Tensor& cu_k, int64_t num_heads, double scale,
                                                         int64_t window, double rate, int64_t site_key,
                                                         const OptionalTensor& row_keys) {
  check_qkv(q, k, v);
  const Sequences s = make_sequences(q, k, cu_q, cu_k, num_heads, scale, window, rate, site_key, row_keys);
  return attend_backward(s, dout.contiguous(), q, k, v, lse, nullptr);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> biased_attention_backward_op(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& lse,
    const Tensor& cu_q, const Tensor& cu_k, int64_t num_heads, double scale, int64_t window, double rate,
    int64_t site_key, const OptionalTensor& row_keys) {
  check_qkv(q, k, v);
  Sequences s = make_sequences(q, k, cu_q, cu_k, num_heads, scale, window, rate, site_key, row_keys);
  s.bias = make_bias(bias, s);
  Tensor dbias = float_like(bias.sizes());
  const auto [dq, dk, dv] = attend_backward(s, dout.contiguous(), q, k, v, lse, write<float>(dbias));
  return {dq, dk, dv, dbias};
}

// ---- rows ---------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm_forward_op(const Tensor& x, const OptionalTensor& residual,
                                                               const Tensor& weight, const OptionalTensor& bias,
                                                               double eps, double rate, int64_t site_key,
                                                               const OptionalTensor& row_keys) {
  check_float(x, "x");
  TORCH_CHECK(x.dim() == 2, "x must be a matrix");
  const int64_t rows = x.size(0), width = x.size(1);
  check_dense(x, x.scalar_type(), {rows, width}, "x");
  if (residual.has_value()) check_dense(*residual, x.scalar_type(), {rows, width}, "residual");
  check_dense(weight, at::kFloat, {width}, "weight");
  if (bias.has_value()) check_dense(*bias, at::kFloat, {width}, "bias");
  const Dropout dropout = make_dropout(rate, site_key, row_keys, rows);
  Tensor y = at::empty_like(x), sum = at::empty_like(x), mean = float_like({rows}), rstd = float_like({rows});
  for_type(x, [&]<class T>(T) {
    add_norm_forward(rows, width, read<T>(x), residual.has_value() ? read<T>(*residual) : nullptr, read<float>(weight),
                     bias.has_value() ? read<float>(*bias) : nullptr, float(eps), dropout, write<T>(y), write<T>(sum),
                     moments(mean, rstd));
  });
  return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm_backward_op(const Tensor& dy_any, const Tensor& sum,
                                                                const Tensor& weight, const Tensor& mean,
                                                                const Tensor& rstd, double rate, int64_t site_key,
                                                                const OptionalTensor& row_keys) {
  const Tensor dy = dy_any.contiguous();
  check_float(dy, "dy");
  TORCH_CHECK(dy.dim() == 2, "dy must be a matrix");
  const int64_t rows = dy.size(0), width = dy.size(1);
  check_dense(sum, dy.scalar_type(), {rows, width}, "sum");
  check_dense(weight, at::kFloat, {width}, "weight");
  check_dense(mean, at::kFloat, {rows}, "mean");
  check_dense(rstd, at::kFloat, {rows}, "rstd");
  const Dropout dropout = make_dropout(rate, site_key, row_keys, rows);
  Tensor dresidual = at::empty_like(dy), dx = dropout.active() ? at::empty_like(dy) : dresidual;
  Tensor dweight = float_like({width}), dbias = float_like({width});
  for_type(dy, [&]<class T>(T) {
    add_norm_backward(rows, width, read<T>(dy), read<T>(sum), read<float>(weight), moments(mean, rstd), dropout,
                      dropout.active() ? write<T>(dx) : nullptr, write<T>(dresidual), write<float>(dweight),
                      write<float>(dbias));
  });
  return {dx, dresidual, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> embed_forward_op(at::TensorList tables, at::TensorList ids,
                                                            const Tensor& weight, const Tensor& bias, double eps,
                                                            bool as_bfloat16, double rate, int64_t site_key,
                                                            const OptionalTensor& row_keys) {
  TORCH_CHECK(!tables.empty() && tables.size() == ids.size(), "embed: one list of ids a table is needed");
  const int64_t rows = ids[0].numel(), width = weight.numel();
  std::vector<Lookup> lookups;
  for (size_t i = 0; i < tables.size(); i++) {
    TORCH_CHECK(tables[i].dim() == 2, "embed: tables must be matrices");
    check_dense(tables[i], at::kFloat, {tables[i].size(0), width}, "table");
    check_ids(ids[i], rows, tables[i].size(0), "ids");
    lookups.push_back({read<float>(tables[i]), read<int64_t>(ids[i])});
  }
  check_dense(weight, at::kFloat, {width}, "weight");
  check_dense(bias, at::kFloat, {width}, "bias");
  const Dropout dropout = make_dropout(rate, site_key, row_keys, rows);
  Tensor sum = float_like({rows, width}), mean = float_like({rows}), rstd = float_like({rows});
  Tensor y = at::empty({rows, width}, at::TensorOptions().dtype(as_bfloat16 ? at::kBFloat16 : at::kFloat));
  for_type(y, [&]<class T>(T) {
    embed_forward(rows, width, lookups, read<float>(weight), read<float>(bias), float(eps), dropout, write<T>(y),
                  write<float>(sum), moments(mean, rstd));
  });
  return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> embed_backward_op(const Tensor& dy_any, const Tensor& sum, const Tensor& weight,
                                                     const Tensor& mean, const Tensor& rstd, double rate,
                                                     int64_t site_key, const OptionalTensor& row_keys) {
  const Tensor dy = dy_any.contiguous();
  check_float(dy, "dy");
  TORCH_CHECK(dy.dim() == 2, "dy must be a matrix");
  const int64_t rows = dy.size(0), width = dy.size(1);
  check_dense(sum, at::kFloat, {rows, width}, "sum");
  check_dense(weight, at::kFloat, {width}, "weight");
  check_dense(mean, at::kFloat, {rows}, "mean");
  check_dense(rstd, at::kFloat, {rows}, "rstd");
  const Dropout dropout = make_dropout(rate, site_key, row_keys, rows);
  Tensor dsum = float_like({rows, width}), dweight = float_like({width}), dbias = float_like({width});
  for_type(dy, [&]<class T>(T) {
    embed_backward(rows, width, read<T>(dy), read<float>(sum), read<float>(weight), moments(mean, rstd), dropout,
                   write<float>(dsum), write<float>(dweight), write<float>(dbias));
  });
  return {dsum, dweight, dbias};
}

Tensor dropout_rows_op(const Tensor& x, double rate, int64_t site_key, const OptionalTensor& row_keys) {
  check_float(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x must be a contiguous matrix");
  const Dropout dropout = make_dropout(rate, site_key, row_keys, x.size(0));
  if (!dropout.active()) return x.clone();
  Tensor y = at::empty_like(x);
  for_type(x, [&]<class T>(T) { dropout_rows(x.size(0), x.size(1), read<T>(x), dropout, write<T>(y)); });
  return y;
}

Tensor rotate_op(const Tensor& x_any, const Tensor& cos, const Tensor& sin, int64_t num_heads) {
  const Tensor x = x_any.contiguous();
  check_float(x, "x");
  TORCH_CHECK(x.dim() == 2 && cos.dim() == 2 && num_heads > 0, "rotate: matrices, and one head or more, are needed");
  const int64_t half = cos.size(1);
  check_dense(cos, at::kFloat, {x.size(0), half}, "cos");
  check_dense(sin, at::kFloat, {x.size(0), half}, "sin");
  TORCH_CHECK(2 * half * num_heads <= x.size(1), "rotate: ", num_heads, " heads of ", 2 * half,
              " columns are more than ", x.size(1));
  Tensor y = at::empty_like(x);
  for_type(x, [&]<class T>(T) {
    rotate(x.size(0), x.size(1), num_heads, half, read<T>(x), read<float>(cos), read<float>(sin), write<T>(y));
  });
  return y;
}

Tensor gelu_forward_op(const Tensor& x_any, int64_t kind) {
  const Tensor x = x_any.contiguous();
  check_float(x, "x");
  const Gelu gelu = gelu_kind(kind);
  Tensor y = at::empty_like(x);
  for_type(x, [&]<class T>(T) { gelu_forward(x.numel(), read<T>(x), gelu, write<T>(y)); });
  return y;
}

void gelu_backward_into(const Tensor& dy, const Tensor& x, int64_t kind, const Tensor& dx, const OptionalTensor& y) {
  check_float(x, "x");
  check_dense(dy, x.scalar_type(), x.sizes(), "dy");
  const Gelu gelu = gelu_kind(kind);
  for_type(x, [&]<class T>(T) {
    gelu_backward(x.numel(), read<T>(dy), read<T>(x), gelu, write<T>(dx), y.has_value() ? write<T>(*y) : nullptr);
  });
}

Tensor gelu_backward_op(const Tensor& dy, const Tensor& x_any, int64_t kind) {
  const Tensor x = x_any.contiguous(), dx = at::empty_like(x);
  gelu_backward_into(dy.contiguous(), x, kind, dx, std::nullopt);
  return dx;
}

std::tuple<Tensor, Tensor> gelu_again_op(const Tensor& dy, const Tensor& x_any, int64_t kind) {
  const Tensor x = x_any.contiguous(), dx = at::empty_like(x), y = at::empty_like(x);
  gelu_backward_into(dy.contiguous(), x, kind, dx, y);
  return {dx, y};
}

Tensor geglu_forward_op(const Tensor& x_any, int64_t kind) {
  const Tensor x = x_any.contiguous();
  check_float(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x: a matrix of an even width is needed");
  const Gelu gelu = gelu_kind(kind);
  const int64_t width = x.size(1) / 2;
  Tensor y = at::empty({x.size(0), width}, x.options());
  for_type(x, [&]<class T>(T) { geglu_forward(x.size(0), width, read<T>(x), gelu, write<T>(y)); });
  return y;
}

Tensor geglu_backward_op(const Tensor& dy_any, const Tensor& x_any, int64_t kind) {
  const Tensor dy = dy_any.contiguous(), x = x_any.contiguous();
  check_float(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x: a matrix of an even width is needed");
  const int64_t width = x.size(1) / 2;
  check_dense(dy, x.scalar_type(), {x.size(0), width}, "dy");
  const Gelu gelu = gelu_kind(kind);
  Tensor dx = at::empty_like(x);
  for_type(x, [&]<class T>(T) { geglu_backward(x.size(0), width, read<T>(dy), read<T>(x), gelu, write<T>(dx)); });
  return dx;
}

std::tuple<Tensor, Tensor> row_sums_op(const Tensor& ids, const Tensor& x_any, int64_t num_rows) {
  const Tensor x = x_any.contiguous();
  check_float(x, "x");
  TORCH_CHECK(x.dim() == 2, "x must be a matrix");
  check_ids(ids, x.size(0), num_rows, "ids");
  const Groups groups = group(ids.numel(), read<int64_t>(ids));
  const int64_t count = int64_t(groups.ids.size());
  Tensor rows = at::empty({count}, ids.options()), sums = float_like({count, x.size(1)});
  std::copy(groups.ids.begin(), groups.ids.end(), write<int64_t>(rows));
  for_type(x, [&]<class T>(T) { group_sums(groups, x.size(1), read<T>(x), write<float>(sums)); });
  return {rows, sums};
}

// ---- a layer ------------------------------------------------------------------------------------------------------

// Runs a part of the layer under the name that it has as an operation of its own, for profilers, and takes its time.
template <class F>
auto part(Kind kind, const char* name, F&& run) {
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{});
  const Timed timed(kind);
  return run();
}

// Our product, or torch's where that is wanted; of bfloat16 always torch's, with the weights rounded for it.
Tensor either_product(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool by_torch) {
  if (a.scalar_type() != at::kFloat || by_torch) {
    const Timed timed(kProducts);
    return product_by_torch(a, b, bias);
  }
  return part(kProducts, "fleetune::product", [&] { return product(a, b, bias); });
}

// sum += a b, for a matrix of contiguous rows that the caller has made.
void add_product(const Tensor& sum, const Tensor& a, const Tensor& b, bool by_torch) {
  TORCH_CHECK(b.dim() == 2 && b.scalar_type() == at::kFloat && a.size(1) == b.size(0) && sum.size(1) == b.size(1),
              "product: shapes ", a.sizes(), ", ", b.sizes(), " and ", sum.sizes(), " do not fit");
  if (sum.numel() == 0) return;
  if (a.scalar_type() != at::kFloat || by_torch) {
    const Timed timed(kProducts);
    sum.addmm_(a, b.to(a.scalar_type()));
    return;
  }
  part(kProducts, "fleetune::product", [&] {
    multiply(a.size(0), b.size(1), a.size(1), {read<float>(a), a.stride(0), a.stride(1)},
             {read<float>(b), b.stride(0), b.stride(1)}, nullptr, true, write<float>(sum), sum.stride(0));
  });
}

Tensor weight_gradient(const Tensor& dy, const Tensor& x, bool by_torch) {
  return either_product(dy.t(), x, std::nullopt, by_torch).to(at::kFloat);
}

// Weights and biases of a post-norm layer, in the order of forward: queries, keys and values as one; what follows
// attention; its norm; up; down; the last norm.
struct LayerWeights {
  Tensor qkv, qkv_bias, output, output_bias, norm1, norm1_bias, up, up_bias, down, down_bias, norm2, norm2_bias;

  explicit LayerWeights(at::TensorList w) {
    TORCH_CHECK(w.size() == 12, "layer: 12 weights are needed, not ", w.size());
    Tensor* own[] = {&qkv, &qkv_bias, &output, &output_bias, &norm1, &norm1_bias,
                     &up,  &up_bias,  &down,   &down_bias,   &norm2, &norm2_bias};
    for (size_t i = 0; i < w.size(); i++) *own[i] = w[i];
  }
};

// Rates and keys of the dropout of attention's probabilities, of what follows attention, and of the layer's end.
struct LayerDropout {
  at::ArrayRef<double> rates;
  at::IntArrayRef keys;
  const OptionalTensor& rows;

  void check() const { TORCH_CHECK(rates.size() == 3 && keys.size() == 3, "layer: three rates and keys are needed"); }
};

// What backward needs of forward, in this order.
enum Kept { kQkv, kLse, kAttended, kSum1, kMean1, kRstd1, kMiddle, kUp, kSum2, kMean2, kRstd2, kNumKept };

std::vector<Tensor> layer_forward_op(const Tensor& x, at::TensorList weights, const Tensor& cu, int64_t num_heads,
                                     double scale, at::ArrayRef<double> eps, int64_t kind,
                                     at::ArrayRef<double> rates, at::IntArrayRef keys, const OptionalTensor& row_keys,
                                     bool by_torch) {
  const LayerWeights w(weights);
  const LayerDropout d{rates, keys, row_keys};
  d.check();
  TORCH_CHECK(eps.size() == 2, "layer: eps of two norms is needed");
  const int64_t width = w.qkv.size(0) / 3;
  const Tensor qkv = either_product(x, w.qkv.t(), w.qkv_bias, by_torch);
  auto [attended, lse] = part(kAttention, "fleetune::attention_forward", [&] {
    return attention_forward_op(qkv.narrow(1, 0, width), qkv.narrow(1, width, width), qkv.narrow(1, 2 * width, width),
                                cu, cu, num_heads, scale, 0, rates[0], keys[0], row_keys);
  });
  auto [middle, sum1, mean1, rstd1] =
      add_norm_forward_op(either_product(attended, w.output.t(), w.output_bias, by_torch), x, w.norm1, w.norm1_bias,
                          eps[0], rates[1], keys[1], row_keys);
  const Tensor up = either_product(middle, w.up.t(), w.up_bias, by_torch);
  auto [y, sum2, mean2, rstd2] =
      add_norm_forward_op(either_product(gelu_forward_op(up, kind), w.down.t(), w.down_bias, by_torch), middle,
                          w.norm2, w.norm2_bias, eps[1], rates[2], keys[2], row_keys);
  return {y, qkv, lse, attended, sum1, mean1, rstd1, middle, up, sum2, mean2, rstd2};
}

std::vector<Tensor> layer_backward_op(const Tensor& dy, const Tensor& x, at::TensorList weights, at::TensorList kept,
                                      const Tensor& cu, int64_t num_heads, double scale, int64_t kind,
                                      at::ArrayRef<double> rates, at::IntArrayRef keys, const OptionalTensor& row_keys,
                                      bool by_torch) {
  const LayerWeights w(weights);
  const LayerDropout d{rates, keys, row_keys};
  d.check();
  TORCH_CHECK(kept.size() == kNumKept, "layer: ", int(kNumKept), " kept tensors are needed, not ", kept.size());
  const auto product_of = [&](const Tensor& a, const Tensor& b) { return either_product(a, b, std::nullopt, by_torch); };
  auto [ddown, dmiddle, dnorm2, dnorm2_bias] = add_norm_backward_op(dy, kept[kSum2], w.norm2, kept[kMean2],
                                                                    kept[kRstd2], rates[2], keys[2], row_keys);
  Tensor dup, ddown_weight;
  {
    const auto [dx, activated] = gelu_again_op(product_of(ddown, w.down), kept[kUp], kind);
    dup = dx;
    ddown_weight = weight_gradient(ddown, activated, by_torch);
  }
  const Tensor ddown_bias = column_sums_op(ddown);
  add_product(dmiddle, dup, w.up, by_torch);  // may be the memory of ddown, which is not read any more
  const Tensor dup_weight = weight_gradient(dup, kept[kMiddle], by_torch), dup_bias = column_sums_op(dup);
  dup.reset();
  auto [doutput, dx, dnorm1, dnorm1_bias] = add_norm_backward_op(dmiddle, kept[kSum1], w.norm1, kept[kMean1],
                                                                 kept[kRstd1], rates[1], keys[1], row_keys);
  const Tensor doutput_weight = weight_gradient(doutput, kept[kAttended], by_torch);
  const Tensor doutput_bias = column_sums_op(doutput);
  const Tensor& qkv = kept[kQkv];
  const int64_t width = qkv.size(1) / 3;
  const Tensor dattended = product_of(doutput, w.output);
  const auto dparts = part(kAttention, "fleetune::attention_backward", [&] {
    return attention_backward_op(dattended, qkv.narrow(1, 0, width), qkv.narrow(1, width, width),
                                 qkv.narrow(1, 2 * width, width), kept[kLse], cu, cu, num_heads, scale, 0, rates[0],
                                 keys[0], row_keys);
  });
  const Tensor dqkv = std::get<0>(dparts).as_strided({qkv.size(0), 3 * width}, {3 * width, 1});
  add_product(dx, dqkv, w.qkv, by_torch);  // may be the memory of doutput
  return {dx,         weight_gradient(dqkv, x, by_torch), column_sums_op(dqkv), doutput_weight, doutput_bias, dnorm1,
          dnorm1_bias, dup_weight, dup_bias, ddown_weight, ddown_bias, dnorm2, dnorm2_bias};
}

// ---- optimizer ----------------------------------------------------------------------------------------------------

Tensor squared_norm_op(at::TensorList tensors) {
  std::vector<Span> spans;
  for (const Tensor& x : tensors) {
    check_dense(x, at::kFloat, x.sizes(), "gradient");
    spans.push_back({read<float>(x), x.numel()});
  }
  return at::scalar_tensor(squared_norm(spans), at::TensorOptions().dtype(at::kDouble));
}

void check_step(int64_t step) { TORCH_CHECK(step >= 1, "step ", step, ": the first update is step 1"); }

void adamw_op(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
              double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale) {
  TORCH_CHECK(params.size() == grads.size() && params.size() == exp_avgs.size() && params.size() == exp_avg_sqs.size(),
              "adamw: the lists are of different lengths");
  check_step(step);
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < params.size(); i++) {
    check_dense(params[i], at::kFloat, params[i].sizes(), "parameter");
    check_dense(grads[i], at::kFloat, params[i].sizes(), "gradient");
    check_dense(exp_avgs[i], at::kFloat, params[i].sizes(), "exp_avg");
    check_dense(exp_avg_sqs[i], at::kFloat, params[i].sizes(), "exp_avg_sq");
    parameters.push_back({write<float>(params[i]), read<float>(grads[i]), write<float>(exp_avgs[i]),
                          write<float>(exp_avg_sqs[i]), params[i].numel()});
  }
  adamw({lr, beta1, beta2, eps, weight_decay, step, grad_scale}, parameters);
}

void adamw_rows_op(const Tensor& param, const Tensor& rows, const Tensor& values, const Tensor& exp_avg,
                   const Tensor& exp_avg_sq, const Tensor& seen, double lr, double beta1, double beta2, double eps,
                   double weight_decay, int64_t step, double grad_scale) {
  TORCH_CHECK(param.dim() == 2, "adamw_rows: the table must be a matrix");
  check_step(step);
  const int64_t num_rows = param.size(0), width = param.size(1);
  check_dense(param, at::kFloat, param.sizes(), "parameter");
  check_dense(exp_avg, at::kFloat, param.sizes(), "exp_avg");
  check_dense(exp_avg_sq, at::kFloat, param.sizes(), "exp_avg_sq");
  check_dense(seen, at::kBool, {num_rows}, "seen");
  check_ids(rows, rows.numel(), num_rows, "rows");
  check_dense(values, at::kFloat, {rows.numel(), width}, "values");
  adamw_rows({lr, beta1, beta2, eps, weight_decay, step, grad_scale}, write<float>(param), num_rows, width,
             read<int64_t>(rows), read<float>(values), rows.numel(), write<float>(exp_avg), write<float>(exp_avg_sq),
             write<bool>(seen));
}

// ---- gradients between ranks --------------------------------------------------------------------------------------

void round_with_feedback_op(const Tensor& x, const Tensor& residual, const Tensor& out) {
  check_dense(x, at::kFloat, x.sizes(), "x");
  check_dense(residual, at::kFloat, x.sizes(), "residual");
  check_dense(out, at::kBFloat16, x.sizes(), "out");
  round_with_feedback(x.numel(), read<float>(x), write<float>(residual), write<bf16>(out));
}

double sum_parts_op(const Tensor& parts, const Tensor& out) {
  check_float(parts, "parts");
  TORCH_CHECK(parts.dim() == 2 && parts.size(0) >= 1, "parts: a matrix of one row or more is needed");
  check_rows(parts, parts.scalar_type(), parts.size(0), parts.size(1), "parts");
  check_dense(out, at::kFloat, {parts.size(1)}, "out");
  double squares = 0.0;
  for_type(parts, [&]<class T>(T) {
    squares = sum_parts<T>(parts.size(0), parts.size(1), read<T>(parts), parts.stride(0), write<float>(out));
  });
  return squares;
}

int32_t* counter_of(const Tensor& counters, int64_t index) {
  check_dense(counters, at::kInt, {counters.numel()}, "counters");
  TORCH_CHECK(index >= 0 && index < counters.numel(), "counter ", index, " of ", counters.numel());
  return write<int32_t>(counters) + index;
}

void count_up_op(const Tensor& counters, int64_t index, int64_t value) {
  count_up(counter_of(counters, index), int32_t(value));
}

bool wait_for_count_op(const Tensor& counters, int64_t index, int64_t value, double timeout_s) {
  return wait_for_count(counter_of(counters, index), int32_t(value), timeout_s);
}

// ---- time ---------------------------------------------------------------------------------------------------------

Tensor kernel_clock_op() {
  Tensor told = at::empty({2, kNumKinds}, at::kLong);
  for (int i = 0; i < 2 * kNumKinds; i++) write<int64_t>(told)[i] = kernel_clock.numbers[i].load();
  return told;
}

void keep_spans_op(bool wanted) { kernel_clock.keeps_spans.store(wanted); }

Tensor take_spans_op() {
  const std::lock_guard<std::mutex> lock(kernel_clock.mutex);
  std::vector<KernelSpan> taken;
  taken.swap(kernel_clock.spans);
  Tensor told = at::empty({int64_t(taken.size()), 3}, at::kLong);
  int64_t* to = write<int64_t>(told);
  for (const KernelSpan& span : taken)
    for (int64_t number : {span.kind, span.begin_ns, span.end_ns}) *to++ = number;
  return told;
}

// What it costs to take the time of an operation, ns: for the benchmark of that.
double stay_ns_op(int64_t count) {
  const int64_t began = now_ns();
  for (int64_t i = 0; i < count; i++) const Timed timed(kOther);
  return double(now_ns() - began) / double(count);
}

}  // namespace
}  // namespace fleetune

TORCH_LIBRARY(fleetune, m) {
  m.def("product(Tensor a, Tensor b, Tensor? bias=None) -> Tensor");
  m.def("product_by_torch(Tensor a, Tensor b, Tensor? bias=None) -> Tensor");
  m.def("column_sums(Tensor x) -> Tensor");
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int num_heads, float scale, "
      "int window, float rate, int site_key, Tensor? row_keys) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor cu_q, Tensor cu_k, "
      "int num_heads, float scale, int window, float rate, int site_key, Tensor? row_keys) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "biased_attention_forward(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor cu_q, Tensor cu_k, int num_heads, "
      "float scale, int window, float rate, int site_key, Tensor? row_keys) -> (Tensor, Tensor)");
  m.def(
      "biased_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor lse, Tensor cu_q, "
      "Tensor cu_k, int num_heads, float scale, int window, float rate, int site_key, Tensor? row_keys) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("rotate(Tensor x, Tensor cos, Tensor sin, int num_heads) -> Tensor");
  m.def(
      "add_norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, float rate, int site_key, "
      "Tensor? row_keys) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "add_norm_backward(Tensor dy, Tensor sum, Tensor weight, Tensor mean, Tensor rstd, float rate, int site_key, "
      "Tensor? row_keys) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "embed_forward(Tensor[] tables, Tensor[] ids, Tensor weight, Tensor bias, float eps, bool as_bfloat16, "
      "float rate, int site_key, Tensor? row_keys) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "embed_backward(Tensor dy, Tensor sum, Tensor weight, Tensor mean, Tensor rstd, float rate, int site_key, "
      "Tensor? row_keys) -> (Tensor, Tensor, Tensor)");
  m.def("dropout_rows(Tensor x, float rate, int site_key, Tensor? row_keys) -> Tensor");
  m.def("gelu_forward(Tensor x, int kind) -> Tensor");
  m.def("gelu_backward(Tensor dy, Tensor x, int kind) -> Tensor");
  m.def("gelu_again(Tensor dy, Tensor x, int kind) -> (Tensor, Tensor)");
  m.def("geglu_forward(Tensor x, int kind) -> Tensor");
  m.def("geglu_backward(Tensor dy, Tensor x, int kind) -> Tensor");
  m.def(
      "layer_forward(Tensor x, Tensor[] weights, Tensor cu, int num_heads, float scale, float[] eps, int kind, "
      "float[] rates, int[] site_keys, Tensor? row_keys, bool by_torch) -> Tensor[]");
  m.def(
      "layer_backward(Tensor dy, Tensor x, Tensor[] weights, Tensor[] kept, Tensor cu, int num_heads, float scale, "
      "int kind, float[] rates, int[] site_keys, Tensor? row_keys, bool by_torch) -> Tensor[]");
  m.def("row_sums(Tensor ids, Tensor x, int num_rows) -> (Tensor, Tensor)");
  m.def("squared_norm(Tensor[] tensors) -> Tensor");
  m.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, float lr, "
      "float beta1, float beta2, float eps, float weight_decay, int step, float grad_scale) -> ()");
  m.def(
      "adamw_rows_(Tensor(a!) param, Tensor rows, Tensor values, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor(d!) seen, float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
      "float grad_scale) -> ()");
  m.def("round_with_feedback_(Tensor x, Tensor(a!) residual, Tensor(b!) out) -> ()");
  m.def("sum_parts_(Tensor parts, Tensor(a!) out) -> float");
  m.def("count_up_(Tensor(a!) counters, int index, int value) -> ()");
  m.def("wait_for_count(Tensor counters, int index, int value, float timeout_s) -> bool");
  m.def("kernel_clock() -> Tensor", fleetune::kernel_clock_op);
  m.def("keep_spans(bool wanted) -> ()", fleetune::keep_spans_op);
  m.def("take_spans() -> Tensor", fleetune::take_spans_op);
  m.def("stay_ns(int count) -> float", fleetune::stay_ns_op);
}

TORCH_LIBRARY_IMPL(fleetune, CPU, m) {
  using namespace fleetune;
  m.impl("product", timed<kProducts, product>);
  m.impl("product_by_torch", timed<kProducts, product_by_torch>);
  m.impl("column_sums", timed<kOther, column_sums_op>);
  m.impl("attention_forward", timed<kAttention, attention_forward_op>);
  m.impl("attention_backward", timed<kAttention, attention_backward_op>);
  m.impl("biased_attention_forward", timed<kAttention, biased_attention_forward_op>);
  m.impl("biased_attention_backward", timed<kAttention, biased_attention_backward_op>);
  m.impl("rotate", timed<kOther, rotate_op>);
  m.impl("add_norm_forward", timed<kOther, add_norm_forward_op>);
  m.impl("add_norm_backward", timed<kOther, add_norm_backward_op>);
  m.impl("embed_forward", timed<kOther, embed_forward_op>);
  m.impl("embed_backward", timed<kOther, embed_backward_op>);
  m.impl("dropout_rows", timed<kOther, dropout_rows_op>);
  m.impl("gelu_forward", timed<kOther, gelu_forward_op>);
  m.impl("gelu_backward", timed<kOther, gelu_backward_op>);
  m.impl("gelu_again", timed<kOther, gelu_again_op>);
  m.impl("geglu_forward", timed<kOther, geglu_forward_op>);
  m.impl("geglu_backward", timed<kOther, geglu_backward_op>);
  m.impl("layer_forward", timed<kOther, layer_forward_op>);
  m.impl("layer_backward", timed<kOther, layer_backward_op>);
  m.impl("row_sums", timed<kOther, row_sums_op>);
  m.impl("squared_norm", squared_norm_op);
  m.impl("adamw_", adamw_op);
  m.impl("adamw_rows_", adamw_rows_op);
  m.impl("round_with_feedback_", round_with_feedback_op);
  m.impl("sum_parts_", sum_parts_op);
  m.impl("count_up_", count_up_op);
  m.impl("wait_for_count", wait_for_count_op);
}
