// The optimizer's step: norm of all gradients, AdamW (Loshchilov and Hutter 2019).
#pragma once

#include <cstdint>
#include <vector>

namespace fleetune {

struct Span {
  const float* data;
  int64_t count;
};

// Sum of squares, in an order that the sizes alone decide.
double squared_norm(const std::vector<Span>& spans);

struct AdamW {
  float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay;
  float correction1, root_correction2;  // 1 - beta1^step, sqrt(1 - beta2^step)
  float grad_scale;                     // every gradient is multiplied by it

  AdamW(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale);
};

struct Parameter {
  float* value;
  const float* grad;  // null: zero
  float *exp_avg, *exp_avg_sq;
  int64_t count;
};

void adamw(const AdamW& settings, const std::vector<Parameter>& parameters);

// A table whose gradient is zero outside some rows; `seen` marks the rows that ever had one. A row that was never seen
// has zero moments: weight decay alone changes it.
void adamw_rows(const AdamW& settings, float* table, int64_t num_rows, int64_t width, const int64_t* rows,
                const float* grads, int64_t num_grads, float* exp_avg, float* exp_avg_sq, bool* seen);

}  // namespace fleetune
