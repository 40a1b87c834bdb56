// The kernels as a program without torch, which an emulator can run: it answers calls until its input ends.
//
// A call is its length in words of 8 bytes, one such word, and its arguments: the kernel's name, float32 or bfloat16
// as the type of storage, and the kernel's own. Each of them is its size in bytes, an int64 (-1 where there is none),
// and its bytes, padded to whole words. The answer is the number of bytes of all results, an int64, and these bytes.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <type_traits>

#include "attention.h"
#include "optimizer.h"
#include "product.h"
#include "rows.h"
#include "simd.h"

using namespace fleetune;

namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "arm_driver: %s\n", what.c_str());
  std::exit(2);
}

class Call {
 public:
  // Waits for a call; false where there are no more.
  bool read() {
    uint64_t count;
    if (std::fread(&count, sizeof(count), 1, stdin) != 1) return false;
    words_.resize(count);
    if (std::fread(words_.data(), sizeof(uint64_t), count, stdin) != count) fail("a call is cut off");
    return true;
  }

  // The next argument, null if there is none. It may be changed in place.
  template <class T>
  T* array() {
    if (at_ >= words_.size()) fail("an argument is missing");
    size_ = int64_t(words_[at_++]);
    if (size_ < 0) return nullptr;
    T* const data = reinterpret_cast<T*>(words_.data() + at_);
    at_ += size_t(ceil_div(size_, 8));
    if (at_ > words_.size()) fail("the last argument is cut off");
    return data;
  }
  template <class T>
  T number() {
    return *array<T>();
  }
  int64_t integer() { return number<int64_t>(); }
  std::string text() {
    const char* data = array<char>();
    return std::string(data, size_);
  }

  Dropout dropout() {
    const double rate = number<double>();
    const int64_t site = integer();
    const int64_t* rows = array<int64_t>();
    return rate > 0.0 ? Dropout(rate, site, rows) : Dropout();
  }

  // Room for a result of `count` elements; all bits are set, so that what is not written is seen.
  template <class T>
  T* result(int64_t count) {
    results_.emplace_back(count * sizeof(T), char(0xFF));
    return reinterpret_cast<T*>(results_.back().data());
  }
  // An argument that was changed.
  void result_of(const void* data, int64_t bytes) {
    results_.emplace_back(static_cast<const char*>(data), static_cast<const char*>(data) + bytes);
  }
  // Bytes of the argument that was read last.
  int64_t size() const { return size_; }

  void answer() const {
    if (at_ != words_.size()) fail("there are more arguments than are read");
    int64_t total = 0;
    for (const std::vector<char>& bytes : results_) total += int64_t(bytes.size());
    std::fwrite(&total, sizeof(total), 1, stdout);
    for (const std::vector<char>& bytes : results_) std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    if (std::fflush(stdout) != 0) fail("the results cannot be written");
  }

 private:
  std::vector<uint64_t> words_;
  std::deque<std::vector<char>> results_;
  size_t at_ = 0;
  int64_t size_ = 0;
};

// ---- products -----------------------------------------------------------------------------------------------------

Matrix<float> matrix(Call& call) {
  const float* data = call.array<float>();
  const int64_t row = call.integer();
  return {data, row, call.integer()};
}

void product(Call& call) {
  const int64_t m = call.integer(), n = call.integer(), k = call.integer();
  const Matrix<float> a = matrix(call), b = matrix(call);
  const float* bias = call.array<float>();
  multiply(m, n, k, a, b, bias, false, call.result<float>(m * n), n);
}

// ---- attention ----------------------------------------------------------------------------------------------------

// The rows of queries and of keys, and how the latter are attended to.
struct Layout {
  int64_t num_q, num_k;
  Sequences s;

  explicit Layout(Call& call) : num_q(call.integer()), num_k(call.integer()) {
    const int64_t count = call.integer(), heads = call.integer(), width = call.integer();
    const int64_t *cu_q = call.array<int64_t>(), *cu_k = call.array<int64_t>();
    const float scale = float(call.number<double>());
    const int64_t window = call.integer();
    s = {cu_q, cu_k, count, heads, width, scale, window, call.dropout()};
  }
  int64_t row() const { return s.num_heads * s.width; }
  template <class T>
  Heads<T> heads(T* data) const {
    return {data, row()};
  }
};

template <class T>
void attend(Call& call) {
  const Layout l(call);
  const T *q = call.array<T>(), *k = call.array<T>(), *v = call.array<T>();
  T* out = call.result<T>(l.num_q * l.row());
  attention_forward<T>(l.s, l.heads(q), l.heads(k), l.heads(v), l.heads(out),
                       call.result<float>(l.num_q * l.s.num_heads));
}

template <class T>
void attend_backward(Call& call) {
  const Layout l(call);
  const T *dout = call.array<T>(), *q = call.array<T>(), *k = call.array<T>(), *v = call.array<T>();
  const float* lse = call.array<float>();
  T* dq = call.result<T>(l.num_q * l.row());
  T* dk = call.result<T>(l.num_k * l.row());
  T* dv = call.result<T>(l.num_k * l.row());
  attention_backward<T>(l.s, l.heads(dout), l.heads(q), l.heads(k), l.heads(v), lse, l.heads(dq), l.heads(dk),
                        l.heads(dv));
}

Bias bias_of(Call& call) {
  const int64_t distances = call.integer();
  return {call.array<float>(), distances};
}

template <class T>
void attend_biased(Call& call) {
  Layout l(call);
  const T *q = call.array<T>(), *k = call.array<T>(), *v = call.array<T>();
  l.s.bias = bias_of(call);
  T* out = call.result<T>(l.num_q * l.row());
  attention_forward<T>(l.s, l.heads(q), l.heads(k), l.heads(v), l.heads(out),
                       call.result<float>(l.num_q * l.s.num_heads));
}

template <class T>
void attend_biased_backward(Call& call) {
  Layout l(call);
  const T *dout = call.array<T>(), *q = call.array<T>(), *k = call.array<T>(), *v = call.array<T>();
  const float* lse = call.array<float>();
  l.s.bias = bias_of(call);
  T* dq = call.result<T>(l.num_q * l.row());
  T* dk = call.result<T>(l.num_k * l.row());
  T* dv = call.result<T>(l.num_k * l.row());
  attention_backward<T>(l.s, l.heads(dout), l.heads(q), l.heads(k), l.heads(v), lse, l.heads(dq), l.heads(dk),
                        l.heads(dv), call.result<float>(l.s.num_heads * l.s.bias.distances));
}

template <class T>
void turn(Call& call) {
  const int64_t rows = call.integer(), width = call.integer(), heads = call.integer(), half = call.integer();
  const T* x = call.array<T>();
  const float *cos = call.array<float>(), *sin = call.array<float>();
  rotate(rows, width, heads, half, x, cos, sin, call.result<T>(rows * width));
}

// ---- rows ---------------------------------------------------------------------------------------------------------

Moments moments(Call& call) {
  float* mean = call.array<float>();
  return {mean, call.array<float>()};
}
Moments new_moments(Call& call, int64_t rows) {
  float* mean = call.result<float>(rows);
  return {mean, call.result<float>(rows)};
}

template <class T>
void add_norm(Call& call) {
  const int64_t rows = call.integer(), width = call.integer();
  const T *x = call.array<T>(), *residual = call.array<T>();
  const float *weight = call.array<float>(), *bias = call.array<float>();
  const float eps = float(call.number<double>());
  const Dropout dropout = call.dropout();
  T *y = call.result<T>(rows * width), *sum = call.result<T>(rows * width);
  add_norm_forward(rows, width, x, residual, weight, bias, eps, dropout, y, sum, new_moments(call, rows));
}

template <class T>
void add_norm_back(Call& call) {
  const int64_t rows = call.integer(), width = call.integer();
  const T *dy = call.array<T>(), *sum = call.array<T>();
  const float* weight = call.array<float>();
  const Moments m = moments(call);
  const Dropout dropout = call.dropout();
  T *dx = call.result<T>(rows * width), *dresidual = call.result<T>(rows * width);
  float *dweight = call.result<float>(width), *dbias = call.result<float>(width);
  add_norm_backward(rows, width, dy, sum, weight, m, dropout, dropout.active() ? dx : nullptr, dresidual, dweight,
                    dbias);
  if (!dropout.active()) std::memcpy(dx, dresidual, rows * width * sizeof(T));
}

template <class T>
void embed(Call& call) {
  const int64_t rows = call.integer(), width = call.integer(), num_tables = call.integer();
  std::vector<Lookup> lookups;
  for (int64_t i = 0; i < num_tables; i++) {
    const float* table = call.array<float>();
    lookups.push_back({table, call.array<int64_t>()});
  }
  const float *weight = call.array<float>(), *bias = call.array<float>();
  const float eps = float(call.number<double>());
  const Dropout dropout = call.dropout();
  T* y = call.result<T>(rows * width);
  float* sum = call.result<float>(rows * width);
  embed_forward(rows, width, lookups, weight, bias, eps, dropout, y, sum, new_moments(call, rows));
}

template <class T>
void embed_back(Call& call) {
  const int64_t rows = call.integer(), width = call.integer();
  const T* dy = call.array<T>();
  const float *sum = call.array<float>(), *weight = call.array<float>();
  const Moments m = moments(call);
  const Dropout dropout = call.dropout();
  float* dsum = call.result<float>(rows * width);
  float *dweight = call.result<float>(width), *dbias = call.result<float>(width);
  embed_backward(rows, width, dy, sum, weight, m, dropout, dsum, dweight, dbias);
}

template <class T>
void drop(Call& call) {
  const int64_t rows = call.integer(), width = call.integer();
  const T* x = call.array<T>();
  dropout_rows(rows, width, x, call.dropout(), call.result<T>(rows * width));
}

template <class T>
void gelu(Call& call) {
  const T* x = call.array<T>();
  const int64_t count = call.size() / sizeof(T);
  gelu_forward(count, x, Gelu(call.integer()), call.result<T>(count));
}

template <class T, bool AGAIN>
void gelu_back(Call& call) {
  const T *dy = call.array<T>(), *x = call.array<T>();
  const int64_t count = call.size() / sizeof(T);
  const Gelu kind = Gelu(call.integer());
  T* dx = call.result<T>(count);
  gelu_backward(count, dy, x, kind, dx, AGAIN ? call.result<T>(count) : nullptr);
}

template <class T>
void geglu(Call& call) {
  const int64_t rows = call.integer(), width = call.integer();
  const T* x = call.array<T>();
  geglu_forward(rows, width, x, Gelu(call.integer()), call.result<T>(rows * width));
}

template <class T>
void geglu_back(Call& call) {
  const int64_t rows = call.integer(), width = call.integer();
  const T *dy = call.array<T>(), *x = call.array<T>();
  geglu_backward(rows, width, dy, x, Gelu(call.integer()), call.result<T>(rows * 2 * width));
}

template <class T>
void sum_columns(Call& call) {
  const int64_t rows = call.integer(), width = call.integer();
  const T* x = call.array<T>();
  column_sums(rows, width, x, width, call.result<float>(width));
}

template <class T>
void sum_rows(Call& call) {
  const int64_t width = call.integer();
  const int64_t* ids = call.array<int64_t>();
  const Groups groups = group(call.size() / sizeof(int64_t), ids);
  const T* x = call.array<T>();
  const int64_t count = int64_t(groups.ids.size());
  call.result_of(groups.ids.data(), count * sizeof(int64_t));
  group_sums(groups, width, x, call.result<float>(count * width));
}

// ---- the optimizer ------------------------------------------------------------------------------------------------

void square(Call& call) {
  std::vector<Span> spans;
  for (int64_t left = call.integer(); left > 0; left--) {
    const float* data = call.array<float>();
    spans.push_back({data, call.size() / int64_t(sizeof(float))});
  }
  *call.result<double>(1) = squared_norm(spans);
}

AdamW settings(Call& call) {
  const double lr = call.number<double>(), beta1 = call.number<double>(), beta2 = call.number<double>();
  const double eps = call.number<double>(), weight_decay = call.number<double>();
  const int64_t step = call.integer();
  return {lr, beta1, beta2, eps, weight_decay, step, call.number<double>()};
}

void update(Call& call) {
  const AdamW s = settings(call);
  std::vector<Parameter> parameters;
  for (int64_t left = call.integer(); left > 0; left--) {
    Parameter p;
    p.value = call.array<float>(), p.grad = call.array<float>();
    p.exp_avg = call.array<float>(), p.exp_avg_sq = call.array<float>();
    p.count = call.size() / int64_t(sizeof(float));
    parameters.push_back(p);
  }
  adamw(s, parameters);
  for (const Parameter& p : parameters)
    for (const float* changed : {p.value, p.exp_avg, p.exp_avg_sq}) call.result_of(changed, p.count * sizeof(float));
}

void update_rows(Call& call) {
  const AdamW s = settings(call);
  const int64_t num_rows = call.integer(), width = call.integer(), num_grads = call.integer();
  float* table = call.array<float>();
  const int64_t* rows = call.array<int64_t>();
  const float* grads = call.array<float>();
  float *exp_avg = call.array<float>(), *exp_avg_sq = call.array<float>();
  bool* seen = call.array<bool>();
  adamw_rows(s, table, num_rows, width, rows, grads, num_grads, exp_avg, exp_avg_sq, seen);
  for (const float* changed : {table, exp_avg, exp_avg_sq}) call.result_of(changed, num_rows * width * sizeof(float));
  call.result_of(seen, num_rows);
}

// ---- what the kernels are made of ---------------------------------------------------------------------------------

void factors(Call& call) {
  const int64_t rows = call.integer(), width = call.integer(), heads = call.integer();
  const Dropout dropout = call.dropout();
  std::vector<float> row(padded_to_32(width));
  float* out = call.result<float>(heads * rows * width);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < rows; i++, out += width) {
      dropout.factors(i, h, 0, width, row.data());
      std::copy(row.begin(), row.begin() + width, out);
    }
}

void rounded(Call& call) {
  const float* x = call.array<float>();
  const int64_t count = call.size() / sizeof(float);
  bf16* out = call.result<bf16>(count);
#pragma omp simd
  for (int64_t j = 0; j < count; j++) out[j] = from_float<bf16>(x[j]);
}

// The calls by the names of the operators, for a type of storage.
template <class T>
std::map<std::string, void (*)(Call&)> calls() {
  std::map<std::string, void (*)(Call&)> all = {
      {"attention_forward", attend<T>},   {"attention_backward", attend_backward<T>},
      {"add_norm_forward", add_norm<T>},  {"add_norm_backward", add_norm_back<T>},
      {"embed_forward", embed<T>},        {"embed_backward", embed_back<T>},
      {"dropout_rows", drop<T>},          {"column_sums", sum_columns<T>},
      {"row_sums", sum_rows<T>},          {"gelu_forward", gelu<T>},
      {"gelu_again", gelu_back<T, true>}, {"gelu_backward", gelu_back<T, false>},
      {"biased_attention_forward", attend_biased<T>},
      {"biased_attention_backward", attend_biased_backward<T>},
      {"rotate", turn<T>},
      {"geglu_forward", geglu<T>},        {"geglu_backward", geglu_back<T>},
  };
  if constexpr (std::is_same_v<T, float>) {
    all["product"] = product;
    all["squared_norm"] = square;
    all["adamw_"] = update;
    all["adamw_rows_"] = update_rows;
    all["factors"] = factors;
    all["rounded"] = rounded;
  }
  return all;
}

}  // namespace

int main() {
  const auto of_float32 = calls<float>(), of_bfloat16 = calls<bf16>();
  while (true) {
    Call call;
    if (!call.read()) return 0;
    const std::string name = call.text(), storage = call.text();
    const auto& all = storage == "bfloat16" ? of_bfloat16 : of_float32;
    const auto found = all.find(name);
    if (found == all.end()) fail("there is no " + name + " of " + storage);
    found->second(call);
    call.answer();
  }
}
