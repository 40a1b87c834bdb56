// Calls of torch on their way through a transport: what starts when, who polls, and how it ends.
//
// A call is a list of steps. A group's collectives start in the order in which they were called, and one starts no
// sooner than all steps before it have: so every rank's library sees the same sequence, although a call may need
// several of its operations. What needs one alone overlaps with its neighbours.
//
// One thread of the process polls for all groups, asleep most of the time. Who calls or waits helps it: a call that may
// start does so at once, in the caller's thread.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport.h"

namespace fleetune {

using Clock = std::chrono::steady_clock;

/** Around every call of any transport of this process. */
std::mutex& transport_mutex();

struct Step {
  /** Local arithmetic and copies before `start`; without the mutex. */
  std::function<void()> prepare;
  /** Gives the request, or none where nothing is left to wait for; under the mutex. */
  std::function<RequestPtr(Transport&)> start;
};

/** One call of torch. */
struct Operation {
  std::string name;
  std::vector<Step> steps;
  /** Collectives are, messages between two ranks are not. */
  bool is_ordered = true;
  /** Starts when all collectives before it are complete, not only under way. */
  bool is_barrier = false;
  /** Number among the collectives of the group, from 1. */
  uint64_t number = 0;
  std::chrono::milliseconds timeout{};
  /** Called once, without the mutex: with what went wrong, if anything, and the rank a message came from. */
  std::function<void(std::exception_ptr, int)> finish;

 private:
  friend class Queue;
  size_t next_step = 0;
  bool is_prepared = false;
  RequestPtr request;
  Clock::time_point began;
  int source = kAnyRank;
};

/** Why a group can no longer be used, and whether time ran out. */
struct Failure {
  std::string reason;
  bool is_timeout = false;
};

/** Thrown for a failure: backend.cpp makes torch's errors of it. */
class GroupFailed : public std::runtime_error {
 public:
  explicit GroupFailed(const Failure& failure) : std::runtime_error(failure.reason), is_timeout(failure.is_timeout) {}
  const bool is_timeout;
};

/** The calls of one group. */
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  /** `transport` is none for a group of one rank, whose steps are all local. */
  Queue(std::string name, std::unique_ptr<Transport> transport);
  ~Queue();

  /** Have the engine poll for this queue, from now until `close`. */
  void open();

  /** Takes a call, and starts it if it may. Throws `GroupFailed` after a failure. */
  void add(std::shared_ptr<Operation> operation);

  /** Does what can be done now; true if nothing is under way. Whoever waits for a call may help with it: that call alone
   *  ends in the thread of the waiter, all others in the engine's, since what follows from an end is anybody's code. */
  bool advance(const Operation* awaited = nullptr);

  /** All calls, those to come too, fail. May be called from anywhere, and returns at once. */
  void fail(Failure failure);

  /** A rank left after so many collectives: later ones, of which it knows nothing, fail. */
  void peer_left(const std::string& who, uint64_t num_collectives);

  /** Wait until all calls have ended, or it has failed. */
  void drain();

  /** Leave the group, or, if it failed, leave it behind. No call is under way. */
  void close();

  /** See `Transport`. */
  bool can_reduce(Element element, Reduction reduction) const;
  bool has_failed() const;
  std::optional<Failure> failure() const;
  uint64_t num_collectives() const;

 private:
  struct Ended {
    std::shared_ptr<Operation> operation;
    std::exception_ptr error;
  };
  bool step(const std::shared_ptr<Operation>& operation, std::unique_lock<std::mutex>& lock);
  bool has_timed_out(const std::shared_ptr<Operation>& operation, std::vector<Ended>& ended);
  void walk(std::vector<Ended>& ended, std::unique_lock<std::mutex>& lock);
  void fail_all(std::vector<Ended>& ended);

  const std::string name_;
  std::unique_ptr<Transport> transport_;
  // All below under transport_mutex().
  std::list<std::shared_ptr<Operation>> active_;
  std::vector<Ended> handed_over_;  // to the engine's thread
  std::optional<Failure> failure_;
  std::atomic<bool> has_failed_{false};
  bool is_advancing_ = false;
  bool is_closed_ = false;
  bool is_abandoned_ = false;
  uint64_t num_collectives_ = 0;
  std::string who_left_;
  std::optional<uint64_t> last_possible_;
};

/** What the polling thread does first, such as asking for no helpers in its arithmetic. */
void set_up_engine_thread_with(void (*set_up)());

/** End the polling thread; a later queue starts it again. */
void stop_engine();

/** After a failure, leave the process without the destructors of libraries whose threads still work: they crash or hang.
 *  What was printed is written, and the exit status stays. */
void leave_without_destructors_at_exit();

}  // namespace fleetune
