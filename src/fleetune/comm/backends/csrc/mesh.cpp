#include "mesh.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

namespace fleetune {

namespace {

struct Header {
  int32_t tag;
  uint64_t bytes;
} __attribute__((packed));

constexpr size_t kMostAtOnce = size_t{4} << 20;

}  // namespace

/** A message on its way out. */
struct Mesh::Outgoing {
  Header header{};
  const char* data = nullptr;
  size_t sent = 0;  // of header and data
  int destination = 0;
  bool is_sent() const { return sent == sizeof header + header.bytes; }
};

/** A message that is asked for, or has come without being so. */
struct Mesh::Incoming {
  int source = kAnyRank;
  int tag = 0;
  size_t bytes = 0;
  char* data = nullptr;          // where it goes
  std::vector<char> kept;        // where it went, before it was asked for
  size_t received = 0;
  bool has_begun = false, is_complete = false;
  std::string error;
};

struct Mesh::Shared {
  /** What comes from one rank. */
  struct Source {
    Socket socket;
    Header header{};
    size_t header_received = 0;
    std::shared_ptr<Incoming> current;
    bool has_ended = false;
  };

  int rank = 0;
  std::vector<Socket> targets;
  std::vector<std::deque<std::shared_ptr<Outgoing>>> outgoing;
  std::vector<Source> sources;
  std::list<std::shared_ptr<Incoming>> wanted, unexpected;
  Socket door;
  Address address;
  std::vector<Stranger> strangers;
  std::shared_ptr<KeyValueStore> store;
  std::chrono::milliseconds timeout{};

  void progress();
  void send_to(size_t target);
  void receive_from(size_t index);
  bool receive_header(Source& source);
  void begin_message(Source& source, int from);
  bool receive_payload(Source& source);
  void end(Source& source, int from);
  void accept_sources();
};

class Mesh::SendRequest : public Request {
 public:
  SendRequest(std::shared_ptr<Shared> shared, std::shared_ptr<Outgoing> message)
      : shared_(std::move(shared)), message_(std::move(message)) {}
  bool test() override {
    shared_->progress();
    return message_->is_sent();
  }
  bool cancel() override {
    auto& queue = shared_->outgoing[static_cast<size_t>(message_->destination)];
    if (message_->sent > 0) return false;  // half a message cannot be taken back
    std::erase(queue, message_);
    return true;
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Outgoing> message_;
};

class Mesh::RecvRequest : public Request {
 public:
  RecvRequest(std::shared_ptr<Shared> shared, std::shared_ptr<Incoming> message)
      : shared_(std::move(shared)), message_(std::move(message)) {}
  bool test() override {
    if (!message_->is_complete) shared_->progress();
    if (!message_->error.empty()) throw TransportError(message_->error);
    return message_->is_complete;
  }
  int source() const override { return message_->source; }
  bool cancel() override {
    if (message_->has_begun) return false;
    shared_->wanted.remove(message_);
    return true;
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Incoming> message_;
};

Mesh::Mesh(const Seat& seat, const std::string& address) : shared_(std::make_shared<Shared>()) {
  const auto size = static_cast<size_t>(seat.size);
  shared_->rank = seat.rank;
  shared_->targets.resize(size);
  shared_->outgoing.resize(size);
  shared_->sources = std::vector<Shared::Source>(size);
  shared_->store = seat.store;
  shared_->timeout = seat.timeout;
  shared_->door = listen_on(address, shared_->address);
  seat.store->set("mesh/" + std::to_string(seat.rank), shared_->address.text());
}

Mesh::~Mesh() = default;

RequestPtr Mesh::send(const void* data, size_t bytes, int destination, int tag) {
  auto message = std::make_shared<Outgoing>();
  message->header = {.tag = tag, .bytes = bytes};
  message->data = static_cast<const char*>(data);
  message->destination = destination;
  const auto target = static_cast<size_t>(destination);
  if (!shared_->targets[target].is_open()) {
    const std::string address = shared_->store->get("mesh/" + std::to_string(destination), shared_->timeout);
    shared_->targets[target] = connect_to(Address::of(address), shared_->rank, shared_->timeout);
  }
  shared_->outgoing[target].push_back(message);
  shared_->send_to(target);
  return std::make_unique<SendRequest>(shared_, message);
}

RequestPtr Mesh::recv(void* data, size_t bytes, int source, int tag) {
  auto& unexpected = shared_->unexpected;
  const auto fits = [&](const auto& known) {
    return known->tag == tag && (source == kAnyRank || known->source == source) && known->data == nullptr;
  };
  const auto found = std::find_if(unexpected.begin(), unexpected.end(), fits);
  auto message = found == unexpected.end() ? std::make_shared<Incoming>() : *found;
  if (found == unexpected.end()) {
    message->data = static_cast<char*>(data);
    message->source = source;
    message->tag = tag;
    message->bytes = bytes;
    const auto ended = [&](int rank) { return shared_->sources[static_cast<size_t>(rank)].has_ended; };
    if (source != kAnyRank && ended(source)) {
      throw TransportError("rank " + std::to_string(source) + " of the group has closed its connection");
    }
    shared_->wanted.push_back(message);
  } else {
    unexpected.erase(found);
    if (message->bytes != bytes) {
      throw TransportError("rank " + std::to_string(message->source) + " sent " + std::to_string(message->bytes) +
                           " bytes where " + std::to_string(bytes) + " are received");
    }
    message->data = static_cast<char*>(data);
    std::memcpy(data, message->kept.data(), message->received);  // the rest goes where it belongs
    if (message->is_complete) message->kept.clear();
  }
  return std::make_unique<RecvRequest>(shared_, message);
}

void Mesh::Shared::progress() {
  accept_sources();
  for (size_t target = 0; target < targets.size(); ++target) send_to(target);
  for (size_t index = 0; index < sources.size(); ++index) receive_from(index);
}

void Mesh::Shared::send_to(size_t target) {
  auto& queue = outgoing[target];
  while (!queue.empty()) {
    Outgoing& message = *queue.front();
    while (!message.is_sent()) {
      const bool is_header = message.sent < sizeof message.header;
      const char* from = is_header ? reinterpret_cast<const char*>(&message.header) + message.sent
                                   : message.data + (message.sent - sizeof message.header);
      const size_t left = (is_header ? sizeof message.header : sizeof message.header + message.header.bytes) - message.sent;
      const long sent = send_some(targets[target], from, std::min(left, kMostAtOnce));
      if (sent < 0) throw TransportError("rank " + std::to_string(target) + " of the group has closed its connection");
      if (sent == 0) return;
      message.sent += static_cast<size_t>(sent);
    }
    queue.pop_front();
  }
}

void Mesh::Shared::accept_sources() {
  accept_all(door, strangers);
  std::erase_if(strangers, [&](Stranger& stranger) {
    const int from = rank_of(stranger, address.secret, static_cast<int>(sources.size()));
    if (from >= 0) sources[static_cast<size_t>(from)].socket = std::move(stranger.socket);
    return from != -1;
  });
}

void Mesh::Shared::receive_from(size_t index) {
  Source& source = sources[index];
  while (source.socket.is_open()) {
    if (source.current == nullptr) {
      if (!receive_header(source)) break;
      begin_message(source, static_cast<int>(index));
    }
    if (!receive_payload(source)) break;
  }
  if (source.has_ended) end(source, static_cast<int>(index));
}

/** Whether the header is there. */
bool Mesh::Shared::receive_header(Source& source) {
  char* into = reinterpret_cast<char*>(&source.header) + source.header_received;
  const long got = receive_some(source.socket, into, sizeof source.header - source.header_received);
  if (got < 0) {
    source.has_ended = true;
    source.socket.close();
    return false;
  }
  source.header_received += static_cast<size_t>(got);
  return source.header_received == sizeof source.header;
}

void Mesh::Shared::begin_message(Source& source, int from) {
  source.header_received = 0;
  const Header header = source.header;
  const auto fits = [&](const auto& known) {
    return known->tag == header.tag && (known->source == kAnyRank || known->source == from);
  };
  const auto found = std::find_if(wanted.begin(), wanted.end(), fits);
  if (found != wanted.end()) {
    source.current = *found;
    wanted.erase(found);
    source.current->source = from;
    source.current->has_begun = true;
    if (source.current->bytes == header.bytes) return;
    source.current->error = "rank " + std::to_string(from) + " sent " + std::to_string(header.bytes) +
                            " bytes where " + std::to_string(source.current->bytes) + " are received";
  }
  auto message = std::make_shared<Incoming>();
  message->source = from;
  message->tag = header.tag;
  message->bytes = header.bytes;
  message->kept.resize(header.bytes);
  message->has_begun = true;
  if (found == wanted.end() && source.current == nullptr) unexpected.push_back(message);
  source.current = message;
}

/** Whether the message is complete. */
bool Mesh::Shared::receive_payload(Source& source) {
  Incoming& message = *source.current;
  while (message.received < message.bytes) {
    char* start = message.data != nullptr ? message.data : message.kept.data();
    const size_t left = std::min(message.bytes - message.received, kMostAtOnce);
    const long got = receive_some(source.socket, start + message.received, left);
    if (got < 0) {
      source.has_ended = true;
      source.socket.close();
      message.error = "rank " + std::to_string(message.source) + " of the group has closed its connection";
      return false;
    }
    if (got == 0) return false;
    message.received += static_cast<size_t>(got);
  }
  message.is_complete = true;
  source.current.reset();
  return true;
}

/** Nothing more comes from a rank: what was asked of it alone fails. */
void Mesh::Shared::end(Source& source, int from) {
  source.current.reset();
  for (auto& message : wanted) {
    if (message->source == from) message->error = "rank " + std::to_string(from) + " of the group has closed its connection";
  }
  std::erase_if(wanted, [](const auto& message) { return !message->error.empty(); });
}

}  // namespace fleetune
