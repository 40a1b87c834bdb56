// TCP between the ranks of a group: each listens on one address of the network that the hosts share.

#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace fleetune {

/** An open socket, closed with the object. */
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

/** Where a rank listens, and the secret that callers must know: strangers are turned away. */
struct Address {
  std::string host;
  int port = 0;
  std::string secret;

  std::string text() const;
  static Address of(const std::string& text);
};

/** Listens on a free port of one address of this host. */
Socket listen_on(const std::string& host, Address& chosen);

/** Connects, and tells secret and rank. Throws `TransportError` where that does not succeed in time. */
Socket connect_to(const Address& address, int own_rank, std::chrono::milliseconds patience);

/** A caller that has not yet told who it is. */
struct Stranger {
  Socket socket;
  std::string told;
};

/** Takes all callers that wait, without waiting for more. */
void accept_all(const Socket& listener, std::vector<Stranger>& strangers);

/** The rank that a stranger tells of itself; -1 while it has not yet, -2 where it is none of us. */
int rank_of(Stranger& stranger, const std::string& secret, int size);

/** How much could be sent or received at once; -1 where the other side has gone. */
long send_some(const Socket& socket, const void* data, size_t bytes);
long receive_some(const Socket& socket, void* data, size_t bytes);

}  // namespace fleetune
