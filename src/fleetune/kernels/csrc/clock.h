// How long operations take, by kind, in numbers that Python reads now and then.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace fleetune {

// `kernels/clock.py` has the same order.
enum Kind : int { kProducts, kAttention, kOther, kNumKinds };

struct KernelSpan {
  int64_t kind, begin_ns, end_ns;
};

// Of the process: nanoseconds of each kind, then stays in each kind; spans while they are wanted.
struct KernelClock {
  std::atomic<int64_t> numbers[2 * kNumKinds] = {};
  std::atomic<bool> keeps_spans{false};
  std::mutex mutex;
  std::vector<KernelSpan> spans;
};

inline KernelClock kernel_clock;

// As Python's time.perf_counter_ns counts.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Time from here to the end of the scope is of a kind. What a scope inside takes is not counted outside: a thread is
// in one kind at a time.
class Timed {
 public:
  explicit Timed(Kind kind) : before_(current_) {
    change_to(kind);
    kernel_clock.numbers[kNumKinds + kind].fetch_add(1, std::memory_order_relaxed);
  }
  ~Timed() { change_to(before_); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  static void change_to(int kind) {
    const int64_t now = now_ns();
    if (current_ != kNumKinds) {
      kernel_clock.numbers[current_].fetch_add(now - since_ns_, std::memory_order_relaxed);
      if (kernel_clock.keeps_spans.load(std::memory_order_relaxed)) {
        const std::lock_guard<std::mutex> lock(kernel_clock.mutex);
        kernel_clock.spans.push_back({current_, since_ns_, now});
      }
    }
    current_ = kind;
    since_ns_ = now;
  }

  static thread_local inline int current_ = kNumKinds;  // none
  static thread_local inline int64_t since_ns_ = 0;
  int before_;
};

template <Kind kind, auto operation>
struct TimedOperation;

template <Kind kind, class Result, class... Arguments, Result (*operation)(Arguments...)>
struct TimedOperation<kind, operation> {
  static Result run(Arguments... arguments) {
    const Timed timed(kind);
    return operation(std::forward<Arguments>(arguments)...);
  }
};

// An operation with its time taken, for the dispatcher.
template <Kind kind, auto operation>
constexpr auto timed = &TimedOperation<kind, operation>::run;

}  // namespace fleetune
