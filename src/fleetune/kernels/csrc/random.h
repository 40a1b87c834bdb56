// Dropout's random numbers: a pure function of (seed, step, layer, site), of the row, and of the column.
// `random.py` holds the definition in Python, and why it is so.
#pragma once

#include <cstdint>

namespace fleetune {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

struct Dropout {
  uint64_t site_key = 0;
  const int64_t* row_keys = nullptr;  // one a row
  uint32_t threshold = 0;             // values of 16 bits below it are dropped
  float scale = 1.0f;

  Dropout() = default;
  Dropout(double rate, int64_t site, const int64_t* rows)
      : site_key(uint64_t(site)), row_keys(rows), threshold(uint32_t(rate * 65536.0 + 0.5)) {
    scale = 65536.0f / float(65536u - threshold);
  }

  bool active() const { return threshold > 0; }

  // Factors, 0 or `scale`, of columns begin to end of a row; `out` is indexed by column, and has room up to the next
  // multiple of 32, which may be written. `begin` is a multiple of 32.
  void factors(int64_t row, int64_t head, int64_t begin, int64_t end, float* out) const {
    const uint64_t stream = mix64((uint64_t(row_keys[row]) ^ site_key) + uint64_t(head) * kGolden);
    const uint32_t first = uint32_t(stream), second = uint32_t(stream >> 32);
    const uint32_t limit = threshold;
    const float kept = scale;
    for (int64_t c = begin; c < end; c += 32) {
      float* low = out + c;
      const uint32_t n = uint32_t(c / 2);
#pragma omp simd
      for (int i = 0; i < 16; i++) {
        uint32_t x = (n + uint32_t(i)) * 0x9E3779B9u + first;
        x = (x ^ (x >> 16)) * 0x21F0AAADu;
        x = (x ^ (x >> 15)) + second;
        x *= 0x735A2D97u;
        x ^= x >> 15;
        low[i] = (x & 0xFFFFu) >= limit ? kept : 0.0f;
        low[i + 16] = (x >> 16) >= limit ? kept : 0.0f;
      }
    }
  }
};

inline int64_t padded_to_32(int64_t n) { return (n + 31) / 32 * 32; }

}  // namespace fleetune
