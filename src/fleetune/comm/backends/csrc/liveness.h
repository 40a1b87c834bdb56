// Whether the ranks of a group are alive.
//
// Libraries built for machines that do not fail wait for ever for a rank that is gone. So every rank keeps a TCP
// connection to rank 0, over which both say every half second that they are there. A process that dies closes it at
// once; a frozen host or a cut link falls silent, which is noticed after `silence_limit`. Rank 0 tells all others. Who
// loses rank 0 itself needs no telling. A thread of its own does this, which needs no lock of Python's.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "sockets.h"
#include "transport.h"

namespace fleetune {

/** What is told of the others, from the thread of `Liveness`. */
struct Listener {
  /** "rank 3 on host b has died ..."; the group is lost. */
  std::function<void(const std::string&)> on_loss;
  /** A rank destroyed its group, after so many collectives. */
  std::function<void(const std::string&, uint64_t)> on_leave;
};

class Liveness {
 public:
  /** Called on all ranks of a group; returns when rank 0 is reached.
   *
   * Args:
   *   address: IP address of this host, on the network that all ranks share.
   *   name: what to call this rank in messages, as "rank 3 on host b".
   *   silence_limit: how long a rank may be silent.
   */
  Liveness(const Seat& seat, const std::string& address, std::string name, std::chrono::milliseconds silence_limit,
           Listener listener);
  ~Liveness();

  /** Say good-bye, and wait for those of the others, though not for long: what they still receive comes from here. */
  void leave(uint64_t num_collectives);

  /** Say why this rank gives the group up. */
  void give_up(const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;

  struct Frame {
    char kind = 0;
    uint32_t rank = 0;
    uint64_t number = 0;
    std::string text;
  };
  struct Peer {
    Socket socket;
    std::string name;
    std::string incoming, outgoing;
    Clock::time_point heard;
    bool has_left = false;
  };

  bool is_hub() const { return rank_ == 0; }
  void run();
  void wait_for_events();
  void accept_peers();
  void read_from(size_t index);
  void take_all(size_t index);
  void take(size_t index, const Frame& frame);
  void judge(size_t index);
  void lose(size_t index, const std::string& what);
  void report_loss(const std::string& text, size_t except);
  void say_what_is_due();
  void say(Peer& peer, const Frame& frame);
  void say_all(const Frame& frame, size_t except);
  void flush(Peer& peer);
  bool is_finished();
  void wake();

  const int rank_;
  const std::string name_;
  const std::chrono::milliseconds silence_limit_;
  const Listener listener_;
  Socket doorbell_in_, doorbell_out_;
  Socket door_;
  Address address_;
  std::vector<Stranger> strangers_;
  std::vector<Peer> peers_;  // by rank on rank 0, of which its own place is empty; rank 0 alone on the others
  Clock::time_point next_beat_;
  bool is_lost_ = false;

  std::mutex mutex_;
  std::condition_variable left_;
  std::optional<Frame> last_words_;  // to be said
  bool is_leaving_ = false, may_go_ = false, must_stop_ = false;
  std::thread thread_;
};

}  // namespace fleetune
