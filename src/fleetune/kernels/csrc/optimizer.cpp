#include "optimizer.h"

#include "simd.h"

namespace fleetune {
namespace {

constexpr int64_t kPiece = 1 << 14;  // elements that a thread takes at once

template <bool HAS_GRAD>
void update(const AdamW& a, int64_t count, float* value, const float* grad, float* exp_avg, float* exp_avg_sq) {
  const AdamW s = a;  // a copy that no store can change
  const float decay = 1.0f - s.lr * s.weight_decay, step = s.lr / s.correction1;
#pragma omp simd
  for (int64_t j = 0; j < count; j++) {
    const float g = HAS_GRAD ? grad[j] * s.grad_scale : 0.0f;
    const float m = s.beta1 * exp_avg[j] + s.one_minus_beta1 * g;
    const float v = s.beta2 * exp_avg_sq[j] + s.one_minus_beta2 * g * g;
    exp_avg[j] = m;
    exp_avg_sq[j] = v;
    value[j] = value[j] * decay - step * m / (std::sqrt(v) / s.root_correction2 + s.eps);
  }
}

void update_any(const AdamW& a, int64_t count, float* value, const float* grad, float* exp_avg, float* exp_avg_sq) {
  grad ? update<true>(a, count, value, grad, exp_avg, exp_avg_sq)
       : update<false>(a, count, value, grad, exp_avg, exp_avg_sq);
}

// Pieces of several arrays, so that threads share large ones and small ones alike.
struct Piece {
  size_t array;
  int64_t begin, count;
};

template <class A>
std::vector<Piece> pieces_of(const std::vector<A>& arrays) {
  std::vector<Piece> pieces;
  for (size_t a = 0; a < arrays.size(); a++)
    for (int64_t begin = 0; begin < arrays[a].count; begin += kPiece)
      pieces.push_back({a, begin, std::min(kPiece, arrays[a].count - begin)});
  return pieces;
}

}  // namespace

AdamW::AdamW(double rate, double b1, double b2, double epsilon, double decay, int64_t step, double scale)
    : lr(float(rate)),
      beta1(float(b1)),
      beta2(float(b2)),
      one_minus_beta1(float(1.0 - b1)),
      one_minus_beta2(float(1.0 - b2)),
      eps(float(epsilon)),
      weight_decay(float(decay)),
      correction1(float(1.0 - std::pow(b1, double(step)))),
      root_correction2(float(std::sqrt(1.0 - std::pow(b2, double(step))))),
      grad_scale(float(scale)) {}

double squared_norm(const std::vector<Span>& spans) {
  const std::vector<Piece> pieces = pieces_of(spans);
  std::vector<double> sums(pieces.size());
#pragma omp parallel for schedule(dynamic, 4)
  for (size_t p = 0; p < pieces.size(); p++) {
    const float* x = spans[pieces[p].array].data + pieces[p].begin;
    double sum = 0.0;
    for (int64_t begin = 0; begin < pieces[p].count; begin += 512) {
      float part = 0.0f;
#pragma omp simd reduction(+ : part)
      for (int64_t j = begin; j < std::min<int64_t>(begin + 512, pieces[p].count); j++) part += x[j] * x[j];
      sum += double(part);
    }
    sums[p] = sum;
  }
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

void adamw(const AdamW& settings, const std::vector<Parameter>& parameters) {
  const std::vector<Piece> pieces = pieces_of(parameters);
#pragma omp parallel for schedule(dynamic, 4)
  for (size_t i = 0; i < pieces.size(); i++) {
    const Piece& piece = pieces[i];
    const Parameter& p = parameters[piece.array];
    update_any(settings, piece.count, p.value + piece.begin, p.grad ? p.grad + piece.begin : nullptr,
               p.exp_avg + piece.begin, p.exp_avg_sq + piece.begin);
  }
}

void adamw_rows(const AdamW& settings, float* table, int64_t num_rows, int64_t width, const int64_t* rows,
                const float* grads, int64_t num_grads, float* exp_avg, float* exp_avg_sq, bool* seen) {
  std::vector<const float*> grad_of(num_rows, nullptr);
  for (int64_t i = 0; i < num_grads; i++) {
    grad_of[rows[i]] = grads + i * width;
    seen[rows[i]] = true;
  }
  const float decay = 1.0f - settings.lr * settings.weight_decay;
#pragma omp parallel for schedule(dynamic, 64)
  for (int64_t r = 0; r < num_rows; r++) {
    float* row = table + r * width;
    if (seen[r]) {
      update_any(settings, width, row, grad_of[r], exp_avg + r * width, exp_avg_sq + r * width);
    } else if (decay != 1.0f) {
#pragma omp simd
      for (int64_t j = 0; j < width; j++) row[j] *= decay;
    }
  }
}

}  // namespace fleetune
