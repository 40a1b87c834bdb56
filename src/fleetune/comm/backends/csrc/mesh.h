// Messages between two ranks, with tags and from any source, for libraries that have none.
//
// One TCP connection for each pair and direction, opened by the sender with its first message. What arrives before it
// is asked for is kept. Nothing runs by itself: `test()` of a message under way moves all of them.

#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sockets.h"
#include "transport.h"

namespace fleetune {

class Mesh {
 public:
  /** Called on all ranks of a group; waits for nobody. */
  Mesh(const Seat& seat, const std::string& address);
  ~Mesh();

  RequestPtr send(const void* data, size_t bytes, int destination, int tag);
  RequestPtr recv(void* data, size_t bytes, int source, int tag);

 private:
  struct Outgoing;
  struct Incoming;
  struct Shared;
  class SendRequest;
  class RecvRequest;
  std::shared_ptr<Shared> shared_;
};

}  // namespace fleetune
