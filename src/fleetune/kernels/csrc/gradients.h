// What gradients go through between ranks: rounding for the wire, sums of what was sent, and waiting for each other in
// memory that the ranks of a host share. All by the calling thread alone: it works beside those that compute.
#pragma once

#include <cstdint>

#include "simd.h"

namespace fleetune {

// out = x + residual, rounded to nearest; residual = what the rounding lost.
void round_with_feedback(int64_t count, const float* x, float* residual, bf16* out);

// out[j] = sum of parts[i * distance + j] over i, from the first part to the last, for j < count.
// Returns the sum of the squares of out.
template <class T>
double sum_parts(int64_t num_parts, int64_t count, const T* parts, int64_t distance, float* out);

// A counter in memory that processes share. One of them counts, the others wait.
void count_up(int32_t* counter, int32_t value);
// Waits until the counter is at least `value`; false when the time is over.
bool wait_for_count(const int32_t* counter, int32_t value, double timeout_s);

}  // namespace fleetune
