#include "sockets.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "transport.h"

namespace fleetune {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBacklog = 1024;
constexpr size_t kSecretBytes = 16;
constexpr size_t kRankDigits = 10;
constexpr size_t kHelloBytes = 2 * kSecretBytes + kRankDigits;
constexpr auto kBetweenTries = std::chrono::milliseconds(50);

[[noreturn]] void refuse(const std::string& what, int error) { throw TransportError(what + ": " + std::strerror(error)); }

struct Resolved {
  sockaddr_storage address{};
  socklen_t length = 0;
  int family = AF_UNSPEC;
};

Resolved resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) throw TransportError("'" + host + "' is no IP address: " + gai_strerror(error));
  Resolved result;
  std::memcpy(&result.address, found->ai_addr, found->ai_addrlen);
  result.length = found->ai_addrlen;
  result.family = found->ai_family;
  freeaddrinfo(found);
  return result;
}

void set_up(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string new_secret() {
  unsigned char bytes[kSecretBytes];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) refuse("no random numbers", errno);
  std::string text;
  char digits[3];
  for (const unsigned char byte : bytes) {
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

int port_of(int fd) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length);
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&own)->sin6_port
                                         : reinterpret_cast<sockaddr_in*>(&own)->sin_port);
}

/** One try; gives the error, 0 for success. */
int try_to_connect(const Socket& socket, const Resolved& target, Clock::time_point deadline) {
  if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&target.address), target.length) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd ready{.fd = socket.fd(), .events = POLLOUT, .revents = 0};
  if (poll(&ready, 1, static_cast<int>(std::max<long>(left, 1))) != 1) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

}  // namespace

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Socket::~Socket() { close(); }

void Socket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::string Address::text() const { return host + " " + std::to_string(port) + " " + secret; }

Address Address::of(const std::string& text) {
  const auto first = text.find(' '), last = text.rfind(' ');
  if (first == std::string::npos || first == last) throw TransportError("'" + text + "' is no address of a rank");
  return {.host = text.substr(0, first), .port = std::stoi(text.substr(first + 1, last - first - 1)),
          .secret = text.substr(last + 1)};
}

Socket listen_on(const std::string& host, Address& chosen) {
  const Resolved own = resolve(host, 0);
  Socket socket(::socket(own.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) refuse("no socket", errno);
  if (bind(socket.fd(), reinterpret_cast<const sockaddr*>(&own.address), own.length) != 0) {
    refuse("cannot listen on " + host + " (GLOO_SOCKET_IFNAME names another network interface)", errno);
  }
  if (listen(socket.fd(), kBacklog) != 0) refuse("cannot listen on " + host, errno);
  set_up(socket.fd());
  chosen = {.host = host, .port = port_of(socket.fd()), .secret = new_secret()};
  return socket;
}

Socket connect_to(const Address& address, int own_rank, std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  const Resolved target = resolve(address.host, address.port);
  while (true) {
    Socket socket(::socket(target.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.is_open()) refuse("no socket", errno);
    set_up(socket.fd());
    const int error = try_to_connect(socket, target, deadline);
    if (error == 0) {
      char rank[kRankDigits + 1];
      std::snprintf(rank, sizeof rank, "%010d", own_rank);
      const std::string hello = address.secret + rank;
      if (send_some(socket, hello.data(), hello.size()) == static_cast<long>(hello.size())) return socket;
    }
    if (Clock::now() + kBetweenTries >= deadline) {
      refuse("cannot connect to " + address.host + ", port " + std::to_string(address.port) +
                 " (GLOO_SOCKET_IFNAME names the interface that leads to the other hosts)",
             error);
    }
    usleep(std::chrono::duration_cast<std::chrono::microseconds>(kBetweenTries).count());
  }
}

void accept_all(const Socket& listener, std::vector<Stranger>& strangers) {
  while (true) {
    Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.is_open()) return;
    set_up(socket.fd());
    strangers.push_back({.socket = std::move(socket), .told = {}});
  }
}

int rank_of(Stranger& stranger, const std::string& secret, int size) {
  char bytes[kHelloBytes];
  const long got = receive_some(stranger.socket, bytes, kHelloBytes - stranger.told.size());
  if (got < 0) return -2;
  stranger.told.append(bytes, static_cast<size_t>(got));
  if (stranger.told.size() < kHelloBytes) return -1;
  if (stranger.told.compare(0, secret.size(), secret) != 0) return -2;
  const long rank = std::strtol(stranger.told.c_str() + secret.size(), nullptr, 10);
  return rank >= 0 && rank < size ? static_cast<int>(rank) : -2;
}

long send_some(const Socket& socket, const void* data, size_t bytes) {
  const ssize_t sent = ::send(socket.fd(), data, bytes, MSG_NOSIGNAL);
  if (sent >= 0) return sent;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

long receive_some(const Socket& socket, void* data, size_t bytes) {
  const ssize_t got = ::recv(socket.fd(), data, bytes, 0);
  if (got > 0 || bytes == 0) return got;
  if (got == 0) return -1;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

}  // namespace fleetune
