#include "liveness.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

namespace fleetune {

namespace {

using std::chrono::milliseconds;

constexpr auto kBeat = milliseconds(500);
/** Rank 0 listens before it tells where: who cannot reach it has the wrong address, or no way there. */
constexpr auto kPatienceToConnect = milliseconds(30000);
constexpr auto kPatienceAtLeaving = milliseconds(3000);
/** Where this thread itself did not run for so long, the process was stopped: nobody else is to blame. */
constexpr auto kOwnAbsence = milliseconds(2000);

enum Kind : char { kName = 'N', kBeatKind = 'B', kGoodbye = 'G', kLoss = 'L', kAllLeft = 'A' };

struct Header {
  char kind;
  uint32_t rank;
  uint64_t number;
  uint16_t length;
} __attribute__((packed));

constexpr size_t kNobody = static_cast<size_t>(-1);
constexpr size_t kLongestText = 60000;

}  // namespace

Liveness::Liveness(const Seat& seat, const std::string& address, std::string name, milliseconds silence_limit,
                   Listener listener)
    : rank_(seat.rank), name_(std::move(name)), silence_limit_(silence_limit), listener_(std::move(listener)) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw TransportError("no pipe: " + std::string(std::strerror(errno)));
  doorbell_out_ = Socket(ends[0]);
  doorbell_in_ = Socket(ends[1]);
  peers_.resize(is_hub() ? static_cast<size_t>(seat.size) : 1);
  for (auto& peer : peers_) peer.heard = Clock::now();
  if (is_hub()) {
    door_ = listen_on(address, address_);
    for (size_t rank = 0; rank < peers_.size(); ++rank) peers_[rank].name = "rank " + std::to_string(seat.global_ranks[rank]);
    peers_[0].has_left = true;  // its own place
    seat.store->set("liveness", address_.text() + "\n" + name_);
  } else {
    const std::string told = seat.store->get("liveness", seat.timeout);
    const auto end = told.find('\n');
    peers_[0].name = told.substr(end + 1);
    peers_[0].socket = connect_to(Address::of(told.substr(0, end)), rank_, std::min(seat.timeout, kPatienceToConnect));
    peers_[0].heard = Clock::now();
    say(peers_[0], {.kind = kName, .text = name_});
  }
  next_beat_ = Clock::now();
  thread_ = std::thread([this] { run(); });
}

Liveness::~Liveness() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    must_stop_ = true;
  }
  wake();
  thread_.join();
}

void Liveness::leave(uint64_t num_collectives) {
  std::unique_lock<std::mutex> lock(mutex_);
  is_leaving_ = true;
  last_words_ = Frame{.kind = kGoodbye, .rank = static_cast<uint32_t>(rank_), .number = num_collectives, .text = name_};
  wake();
  left_.wait_for(lock, kPatienceAtLeaving, [&] { return may_go_; });
}

void Liveness::give_up(const std::string& reason) {
  std::unique_lock<std::mutex> lock(mutex_);
  last_words_ = Frame{.kind = kLoss, .rank = static_cast<uint32_t>(rank_),
                      .text = (name_ + " has given up: " + reason).substr(0, kLongestText)};
  wake();
  left_.wait_for(lock, kBeat, [&] { return !last_words_; });
}

void Liveness::wake() {
  const char bell = 1;
  static_cast<void>(!write(doorbell_in_.fd(), &bell, 1));
}

void Liveness::run() {
  pthread_setname_np(pthread_self(), "ft_liveness");
  while (true) {
    const auto before = Clock::now();
    wait_for_events();
    const bool was_absent = Clock::now() - before > kBeat + kOwnAbsence;
    if (is_hub()) accept_peers();
    for (size_t index = 0; index < peers_.size(); ++index) {
      read_from(index);
      if (was_absent) peers_[index].heard = Clock::now();
      judge(index);
    }
    say_what_is_due();
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_finished()) {
      may_go_ = true;
      left_.notify_all();
    }
    if (must_stop_) return;
  }
}

void Liveness::wait_for_events() {
  std::vector<pollfd> watched{{.fd = doorbell_out_.fd(), .events = POLLIN, .revents = 0}};
  if (door_.is_open()) watched.push_back({.fd = door_.fd(), .events = POLLIN, .revents = 0});
  for (const auto& stranger : strangers_) watched.push_back({.fd = stranger.socket.fd(), .events = POLLIN, .revents = 0});
  for (const auto& peer : peers_) {
    if (peer.socket.is_open()) watched.push_back({.fd = peer.socket.fd(), .events = POLLIN, .revents = 0});
  }
  const auto left = std::chrono::duration_cast<milliseconds>(next_beat_ - Clock::now()).count();
  poll(watched.data(), watched.size(), static_cast<int>(std::clamp<long>(left + 1, 1, kBeat.count())));
  char bells[64];
  while (read(doorbell_out_.fd(), bells, sizeof bells) > 0) continue;
}

void Liveness::accept_peers() {
  accept_all(door_, strangers_);
  std::erase_if(strangers_, [&](Stranger& stranger) {
    const int rank = rank_of(stranger, address_.secret, static_cast<int>(peers_.size()));
    if (rank > 0 && !peers_[rank].socket.is_open() && !peers_[rank].has_left) {
      peers_[rank].socket = std::move(stranger.socket);
      peers_[rank].heard = Clock::now();
    }
    return rank != -1;
  });
}

void Liveness::read_from(size_t index) {
  Peer& peer = peers_[index];
  char bytes[4096];
  bool has_ended = false;
  while (peer.socket.is_open()) {
    const long got = receive_some(peer.socket, bytes, sizeof bytes);
    has_ended = got < 0;
    if (got <= 0) break;
    peer.heard = Clock::now();
    peer.incoming.append(bytes, static_cast<size_t>(got));
  }
  take_all(index);  // before the end is judged: the last words may say that it is none
  if (!has_ended) return;
  peer.socket.close();
  if (!peer.has_left) lose(index, "has died: its connection was closed");
}

void Liveness::take_all(size_t index) {
  Peer& peer = peers_[index];
  Header header;
  while (peer.incoming.size() >= sizeof header) {
    std::memcpy(&header, peer.incoming.data(), sizeof header);
    const size_t whole = sizeof header + header.length;
    if (peer.incoming.size() < whole) return;
    const Frame frame{.kind = header.kind, .rank = header.rank, .number = header.number,
                      .text = peer.incoming.substr(sizeof header, header.length)};
    peer.incoming.erase(0, whole);
    take(index, frame);
  }
}

void Liveness::take(size_t index, const Frame& frame) {
  Peer& peer = peers_[index];
  switch (frame.kind) {
    case kName:
      peer.name = frame.text;
      break;
    case kGoodbye:
      if (is_hub() || frame.rank == 0) peer.has_left = true;
      if (is_hub()) say_all(frame, index);
      listener_.on_leave(frame.text, frame.number);
      break;
    case kLoss:
      if (is_hub()) peer.has_left = true;
      report_loss(frame.text, index);
      break;
    case kAllLeft: {
      peer.has_left = true;
      std::lock_guard<std::mutex> lock(mutex_);
      may_go_ = true;
      left_.notify_all();
      break;
    }
    default:  // that it came is all that a beat says
      break;
  }
}

void Liveness::judge(size_t index) {
  Peer& peer = peers_[index];
  if (peer.has_left || is_lost_ || Clock::now() - peer.heard < silence_limit_) return;
  char text[160];
  std::snprintf(text, sizeof text, "was not heard of for %g s: its host is down or frozen, or the network is cut",
                static_cast<double>(silence_limit_.count()) / 1000);
  peer.socket.close();
  lose(index, text);
}

void Liveness::lose(size_t index, const std::string& what) {
  peers_[index].has_left = true;
  report_loss(peers_[index].name + " " + what, index);
}

void Liveness::report_loss(const std::string& text, size_t except) {
  if (is_lost_) return;  // what follows is a consequence
  is_lost_ = true;
  if (is_hub()) say_all({.kind = kLoss, .text = text.substr(0, kLongestText)}, except);
  listener_.on_loss(text);
}

void Liveness::say_what_is_due() {
  if (Clock::now() >= next_beat_) {
    next_beat_ = Clock::now() + kBeat;
    say_all(Frame{kBeatKind, 0, 0, {}}, kNobody);
  }
  std::optional<Frame> words;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    words.swap(last_words_);
    if (words && words->kind == kLoss) left_.notify_all();
  }
  if (words) say_all(*words, kNobody);
  for (auto& peer : peers_) flush(peer);
}

void Liveness::say(Peer& peer, const Frame& frame) {
  if (!peer.socket.is_open()) return;
  const Header header{.kind = frame.kind, .rank = frame.rank, .number = frame.number,
                      .length = static_cast<uint16_t>(frame.text.size())};
  peer.outgoing.append(reinterpret_cast<const char*>(&header), sizeof header);
  peer.outgoing += frame.text;
  flush(peer);
}

void Liveness::say_all(const Frame& frame, size_t except) {
  for (size_t index = 0; index < peers_.size(); ++index) {
    if (index != except) say(peers_[index], frame);
  }
}

void Liveness::flush(Peer& peer) {
  if (!peer.socket.is_open() || peer.outgoing.empty()) return;
  const long sent = send_some(peer.socket, peer.outgoing.data(), peer.outgoing.size());
  if (sent > 0) peer.outgoing.erase(0, static_cast<size_t>(sent));  // a closed connection is noticed by reading
}

/** Whether nobody needs this rank any more; with the mutex. */
bool Liveness::is_finished() {
  if (!is_leaving_ || may_go_) return may_go_;
  if (!is_hub()) return is_lost_ || !peers_[0].socket.is_open();
  const bool all_left = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.has_left; });
  if (all_left) say_all(Frame{kAllLeft, 0, 0, {}}, kNobody);
  return all_left || is_lost_;
}

}  // namespace fleetune
