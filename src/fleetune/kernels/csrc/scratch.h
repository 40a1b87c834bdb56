// Memory that a thread keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace fleetune {

class Scratch {
 public:
  // Room for `count` numbers, aligned to a cache line; what was there before is lost.
  float* at_least(int64_t count) {
    if (count > capacity_) {
      const int64_t bytes = (count * int64_t(sizeof(float)) + 4095) / 4096 * 4096;
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace fleetune
