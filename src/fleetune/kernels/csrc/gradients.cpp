#include "gradients.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fleetune {
namespace {

constexpr int64_t kBlock = 1024;  // numbers whose sums stay in the first-level cache

void round_block(int64_t count, const float* __restrict x, float* __restrict residual, bf16* __restrict out) {
#pragma omp simd
  for (int64_t j = 0; j < count; j++) {
    const float wanted = x[j] + residual[j];
    const bf16 sent = from_float<bf16>(wanted);
    out[j] = sent;
    residual[j] = wanted - to_float(sent);
  }
}

template <class T>
void add_block(int64_t count, const T* __restrict part, float* __restrict out) {
#pragma omp simd
  for (int64_t j = 0; j < count; j++) out[j] += to_float(part[j]);
}

float squares(int64_t count, const float* x) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; j++) sum += x[j] * x[j];
  return sum;
}

}  // namespace

void round_with_feedback(int64_t count, const float* x, float* residual, bf16* out) {
  for (int64_t begin = 0; begin < count; begin += kBlock)
    round_block(std::min(kBlock, count - begin), x + begin, residual + begin, out + begin);
}

template <class T>
double sum_parts(int64_t num_parts, int64_t count, const T* parts, int64_t distance, float* out) {
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    float* sums = out + begin;
#pragma omp simd
    for (int64_t j = 0; j < size; j++) sums[j] = to_float(parts[begin + j]);
    for (int64_t i = 1; i < num_parts; i++) add_block(size, parts + i * distance + begin, sums);
    total += double(squares(size, sums));
  }
  return total;
}

template double sum_parts<float>(int64_t, int64_t, const float*, int64_t, float*);
template double sum_parts<bf16>(int64_t, int64_t, const bf16*, int64_t, float*);

void count_up(int32_t* counter, int32_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
  syscall(SYS_futex, counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool wait_for_count(const int32_t* counter, int32_t value, double timeout_s) {
  timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  const int64_t end_ns = end.tv_sec * 1000000000ll + end.tv_nsec + int64_t(timeout_s * 1e9);
  for (;;) {
    const int32_t now = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
    if (now >= value) return true;
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const int64_t left = end_ns - (t.tv_sec * 1000000000ll + t.tv_nsec);
    if (left <= 0) return false;
    const timespec wait = {left / 1000000000ll, left % 1000000000ll};
    syscall(SYS_futex, counter, FUTEX_WAIT, now, &wait, nullptr, 0);
  }
}

}  // namespace fleetune
