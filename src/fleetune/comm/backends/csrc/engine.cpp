#include "engine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sys/prctl.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <utility>

namespace fleetune {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

/** How long to sleep between two looks: a hundredth of what was waited for, within these bounds. */
constexpr auto kShortestSleep = microseconds(5);
constexpr auto kLongestSleep = microseconds(1000);
constexpr auto kMostPerWait = 100;
/** Timers of a thread are late by 50 us unless it asks for better. */
constexpr unsigned long kTimerSlackNs = 1000;

void (*set_up_thread)() = [] {};

/** The thread that polls. It is never destroyed, since objects of other libraries may still call at exit. */
class Engine {
 public:
  static Engine& instance() {
    static Engine* engine = new Engine;
    return *engine;
  }

  void add(std::shared_ptr<Queue> queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    queues_.push_back(std::move(queue));
    if (!is_running_) {
      is_running_ = true;
      thread_ = std::thread([this] { run(); });
    }
  }

  void remove(const Queue* queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(queues_, [&](const auto& known) { return known.get() == queue; });
  }

  bool is_own_thread() const { return thread_id_ == std::this_thread::get_id(); }

  /** Something began or ended: look now, and often for a while. */
  void wake() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_awake_ = true;
    }
    woken_.notify_one();
  }

  void stop() {
    std::thread thread;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!is_running_ || is_own_thread()) return;
      is_running_ = false;
      thread = std::move(thread_);
    }
    woken_.notify_one();
    thread.join();
  }

 private:
  void run() {
    thread_id_ = std::this_thread::get_id();
    pthread_setname_np(pthread_self(), "ft_backend");
    prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
    set_up_thread();
    auto busy_since = Clock::now();
    while (true) {
      std::vector<std::shared_ptr<Queue>> queues;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!is_running_) return;
        queues = queues_;
        if (std::exchange(is_awake_, false)) busy_since = Clock::now();
      }
      bool all_done = true;
      for (const auto& queue : queues) all_done &= queue->advance();
      queues.clear();
      if (all_done) {
        std::unique_lock<std::mutex> lock(mutex_);
        woken_.wait(lock, [&] { return is_awake_ || !is_running_; });
      } else {
        pause(Clock::now() - busy_since);
      }
    }
  }

  static void pause(Clock::duration waited) {
    const auto wished = std::clamp<Clock::duration>(waited / kMostPerWait, kShortestSleep, kLongestSleep);
    const timespec time{0, std::chrono::duration_cast<std::chrono::nanoseconds>(wished).count()};
    nanosleep(&time, nullptr);
  }

  std::mutex mutex_;
  std::condition_variable woken_;
  std::vector<std::shared_ptr<Queue>> queues_;
  std::thread thread_;
  std::atomic<std::thread::id> thread_id_;
  bool is_running_ = false;
  bool is_awake_ = false;
};

/** What a library may still write to, after its operation could not be ended: kept for ever. */
void bury(std::shared_ptr<Operation> operation) {
  static auto* grave = new std::vector<std::shared_ptr<Operation>>;
  grave->push_back(std::move(operation));
}

std::string seconds_of(milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", static_cast<double>(time.count()) / 1000);
  return text;
}

}  // namespace

std::mutex& transport_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

void set_up_engine_thread_with(void (*set_up)()) { set_up_thread = set_up; }

void stop_engine() { Engine::instance().stop(); }

void leave_without_destructors_at_exit() {
  static std::once_flag once;
  std::call_once(once, [] {
    on_exit(
        [](int status, void*) {
          std::fflush(nullptr);
          _exit(status);
        },
        nullptr);
  });
}

Queue::Queue(std::string name, std::unique_ptr<Transport> transport)
    : name_(std::move(name)), transport_(std::move(transport)) {}

Queue::~Queue() {
  if (transport_ != nullptr) static_cast<void>(transport_.release());  // not closed: its library may be gone
}

void Queue::open() { Engine::instance().add(shared_from_this()); }

void Queue::add(std::shared_ptr<Operation> operation) {
  {
    std::lock_guard<std::mutex> lock(transport_mutex());
    if (!failure_ && operation->is_ordered && last_possible_ && num_collectives_ >= *last_possible_) {
      failure_ = Failure{.reason = name_ + ": " + operation->name + " cannot complete, as " + who_left_};
      has_failed_ = true;
    }
    if (failure_) throw GroupFailed(*failure_);
    if (is_closed_) throw GroupFailed({.reason = name_ + ": the process group is destroyed"});
    if (operation->is_ordered) operation->number = ++num_collectives_;
    operation->began = Clock::now();
    active_.push_back(std::move(operation));
  }
  advance();
}

bool Queue::advance(const Operation* awaited) {
  const bool is_engine = Engine::instance().is_own_thread();
  std::vector<Ended> ended;
  bool is_done = false;
  {
    std::unique_lock<std::mutex> lock(transport_mutex());
    if (is_advancing_) return false;
    is_advancing_ = true;
    walk(ended, lock);
    is_advancing_ = false;
    const auto is_ours = [&](const Ended& known) { return is_engine || known.operation.get() == awaited; };
    const auto others = std::stable_partition(ended.begin(), ended.end(), is_ours);
    std::move(others, ended.end(), std::back_inserter(handed_over_));
    ended.erase(others, ended.end());
    if (is_engine) {
      std::move(handed_over_.begin(), handed_over_.end(), std::back_inserter(ended));
      handed_over_.clear();
    }
    is_done = active_.empty() && handed_over_.empty();
  }
  for (auto& [operation, error] : ended) {
    operation->finish(error, operation->source);
    operation->finish = nullptr;  // it may hold the last reference to a tensor, or to torch's work
  }
  if (!ended.empty() || !(is_done || is_engine)) Engine::instance().wake();
  return is_done;
}

void Queue::walk(std::vector<Ended>& ended, std::unique_lock<std::mutex>& lock) {
  bool may_start = true;     // all collectives so far have started their last step
  bool all_complete = true;  // and there are none
  for (auto place = active_.begin(); place != active_.end() && !failure_;) {
    const auto operation = *place;
    bool is_complete = false;
    try {
      const bool is_free = operation->is_barrier ? all_complete : may_start;
      if (is_free || !operation->is_ordered || operation->request != nullptr) is_complete = step(operation, lock);
    } catch (const std::exception& error) {
      failure_ = failure_.value_or(Failure{.reason = name_ + ": " + operation->name + " failed: " + error.what()});
      break;
    }
    if (is_complete) {
      ended.push_back({operation, nullptr});
      place = active_.erase(place);
      continue;
    }
    if (has_timed_out(operation, ended)) {
      place = active_.erase(place);
      continue;
    }
    if (operation->is_ordered) {
      may_start &= operation->next_step == operation->steps.size();
      all_complete = false;
    }
    ++place;
  }
  if (failure_) fail_all(ended);
}

/** Goes on with a call as far as it can without waiting; true when all of it is done. */
bool Queue::step(const std::shared_ptr<Operation>& operation, std::unique_lock<std::mutex>& lock) {
  while (!failure_) {
    if (operation->request != nullptr) {
      if (!operation->request->test()) return false;
      operation->source = operation->request->source();
      operation->request.reset();
    }
    if (operation->next_step == operation->steps.size()) return true;
    auto& next = operation->steps[operation->next_step];
    if (next.prepare && !operation->is_prepared) {
      lock.unlock();
      try {
        next.prepare();
      } catch (...) {
        lock.lock();
        throw;
      }
      lock.lock();
      operation->is_prepared = true;
      continue;  // it may have failed meanwhile
    }
    ++operation->next_step;
    operation->is_prepared = false;
    if (next.start) operation->request = next.start(*transport_);
  }
  return false;
}

/** Whether its time is up and it has ended for that; where it cannot be ended alone, the group fails. */
bool Queue::has_timed_out(const std::shared_ptr<Operation>& operation, std::vector<Ended>& ended) {
  if (failure_ || Clock::now() - operation->began < operation->timeout) return false;
  const Failure failure{
      .reason = name_ + ": " + operation->name + " timed out: not complete after " + seconds_of(operation->timeout),
      .is_timeout = true};
  if (!operation->is_ordered && (operation->request == nullptr || operation->request->cancel())) {
    ended.push_back({operation, std::make_exception_ptr(GroupFailed(failure))});
    return true;
  }
  failure_ = failure;
  return false;
}

void Queue::fail_all(std::vector<Ended>& ended) {
  has_failed_ = true;
  const auto error = std::make_exception_ptr(GroupFailed(*failure_));
  for (auto& operation : active_) {
    if (operation->request != nullptr && !operation->request->cancel()) {
      // The buffers live in the steps; what is done at the end must not live as long.
      auto kept = std::make_shared<Operation>();
      kept->steps = operation->steps;
      kept->request = std::move(operation->request);
      bury(std::move(kept));
    }
    ended.push_back({operation, error});
  }
  active_.clear();
  if (!is_abandoned_ && transport_ != nullptr) {
    is_abandoned_ = true;
    leave_without_destructors_at_exit();
  }
}


void Queue::fail(Failure failure) {
  {
    std::lock_guard<std::mutex> lock(transport_mutex());
    if (is_closed_ || failure_) return;
    failure_ = Failure{.reason = name_ + ": " + failure.reason, .is_timeout = failure.is_timeout};
    has_failed_ = true;
  }
  Engine::instance().wake();
}

void Queue::peer_left(const std::string& who, uint64_t num_collectives) {
  bool is_late = false;
  {
    std::lock_guard<std::mutex> lock(transport_mutex());
    if (!last_possible_ || num_collectives < *last_possible_) {
      last_possible_ = num_collectives;
      who_left_ = who + " has left the group";
    }
    const auto beyond = [&](const auto& known) { return known->is_ordered && known->number > num_collectives; };
    is_late = std::any_of(active_.begin(), active_.end(), beyond);
  }
  if (is_late) fail({.reason = who + " has left the group, before what is under way here"});
}

void Queue::drain() {
  while (!advance() && !has_failed()) std::this_thread::sleep_for(microseconds(200));
  while (!advance()) std::this_thread::sleep_for(microseconds(200));  // those that failed are told so
}

void Queue::close() {
  {
    std::lock_guard<std::mutex> lock(transport_mutex());
    if (std::exchange(is_closed_, true)) return;
  }
  Engine::instance().remove(this);
  std::lock_guard<std::mutex> lock(transport_mutex());
  if (transport_ == nullptr) return;
  if (failure_) {
    transport_->abandon();
    static_cast<void>(transport_.release());
  } else {
    transport_->close();
    transport_.reset();
  }
}

bool Queue::can_reduce(Element element, Reduction reduction) const {
  return transport_ != nullptr && transport_->can_reduce(element, reduction);
}

bool Queue::has_failed() const { return has_failed_; }

std::optional<Failure> Queue::failure() const {
  std::lock_guard<std::mutex> lock(transport_mutex());
  return failure_;
}

uint64_t Queue::num_collectives() const {
  std::lock_guard<std::mutex> lock(transport_mutex());
  return num_collectives_;
}

}  // namespace fleetune
