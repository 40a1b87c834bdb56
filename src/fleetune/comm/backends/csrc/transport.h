// What a communication library must be able to do for torch.distributed to run over it.
//
// `backend.cpp` puts all of torch's collectives together from these few operations on contiguous memory, and `engine.cpp`
// decides when they are called. A transport is written without torch: see transport_ccl.cpp, transport_mpi.cpp.
//
// The rules that both sides keep:
//   - Calls come from several threads, but never two at a time in a process: the engine holds one mutex for all groups.
//     A transport needs no locks, and MPI no more than MPI_THREAD_SERIALIZED.
//   - No call waits for a peer. Each returns a request at once; the engine polls `test()`, sleeping in between.
//   - All ranks of a group call its collectives in the same order, which is the order that the library sees. Several may
//     be under way at once. send and recv stand outside of that order.
//   - Memory that is passed stays where it is until `test()` has given true, or for ever: where a request cannot be
//     ended, as after a timeout, its memory and the request itself are leaked, and no further call is made.
//   - Counts of 0 do not reach a transport, nor do groups of one rank; but blocks of alltoallv may be empty.
//   - What goes wrong is thrown as a `TransportError`, by the call or by `test()`: that ends the group.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace fleetune {

class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/** What a number is made of. Booleans come as uint8 with the reductions `band`, `bor`, `bxor`, min or max. */
enum class Element : uint8_t {
  int8, uint8, int16, int32, int64, float16, bfloat16, float32, float64, complex64, complex128
};

enum class Reduction : uint8_t { sum, product, min, max, band, bor, bxor };

size_t size_of(Element element);  // in bytes; see reduction.cpp

/** As the rank to receive from: whoever sends first. */
constexpr int kAnyRank = -1;

/** An operation under way. */
class Request {
 public:
  virtual ~Request() = default;
  /** Whether it is complete; it is not asked again after it was. */
  virtual bool test() = 0;
  /** The rank that a message came from; for completed receives alone. */
  virtual int source() const { return kAnyRank; }
  /** Give up, so that the memory is free and the group goes on; false where that cannot be done. */
  virtual bool cancel() { return false; }
};

using RequestPtr = std::unique_ptr<Request>;

/** The ranks of one group, as the library sees them. */
class Transport {
 public:
  virtual ~Transport() = default;

  /** Whether allreduce, reduce and reduce_scatter do this natively, and exactly: half-precision types only where every
   *  sum is kept in float32 and rounded once. What a transport cannot do, alltoallv and local arithmetic do. */
  virtual bool can_reduce(Element element, Reduction reduction) const = 0;

  /** In place. */
  virtual RequestPtr allreduce(void* data, size_t count, Element element, Reduction reduction) = 0;

  /** `out` counts on the root alone, where it may be `in`. */
  virtual RequestPtr reduce(const void* in, void* out, size_t count, Element element, Reduction reduction, int root) = 0;

  /** Rank r gets the sum of block r of everyone's `in`: (size * count) numbers -> count numbers; no overlap. */
  virtual RequestPtr reduce_scatter(
      const void* in, void* out, size_t count, Element element, Reduction reduction) = 0;

  virtual RequestPtr broadcast(void* data, size_t bytes, int root) = 0;

  /** Block r of `out` is what rank r has in `in`: bytes -> size * bytes. `in` may be this rank's block of `out`. */
  virtual RequestPtr allgather(const void* in, size_t bytes, void* out) = 0;

  /** Block s of `in`, of in_bytes[s], goes to rank s; block s of `out` comes from rank s. Blocks lie one after the
   *  other; some may be empty, among them one's own. No overlap. */
  virtual RequestPtr alltoallv(
      const void* in, const std::vector<size_t>& in_bytes, void* out, const std::vector<size_t>& out_bytes) = 0;

  virtual RequestPtr barrier() = 0;

  /** Messages of a pair with the same tag arrive in order; `bytes` may be 0. Complete when `data` may be changed. */
  virtual RequestPtr send(const void* data, size_t bytes, int destination, int tag) = 0;

  /** A message of another size is an error that names both. `source` may be kAnyRank. */
  virtual RequestPtr recv(void* data, size_t bytes, int source, int tag) = 0;

  /** Leave the group, all requests being complete. May wait for peers to leave, a few seconds at most. */
  virtual void close() = 0;

  /** The group has failed, requests are under way and stay so: make no call that could wait or crash, leak instead. */
  virtual void abandon() = 0;
};

/** The key-value store that the ranks of a group share, with a prefix of their own. */
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /** Waits for the key, throws `TransportError` where it does not come in time. */
  virtual std::string get(const std::string& key, std::chrono::milliseconds patience) = 0;
};

/** Who a process is in a group. */
struct Seat {
  int rank = 0;
  int size = 1;
  /** Rank in the world of every rank of the group, by rank. */
  std::vector<int> global_ranks;
  /** Shared by all ranks of the group, and by nothing else. */
  std::shared_ptr<KeyValueStore> store;
  /** How long to wait for the others. */
  std::chrono::milliseconds timeout{};
};

/** Joins a group: called on all of its ranks, without the engine's mutex; may wait for them within the timeout.
 *  `address` is an IP address of this host on the network that all ranks share. Not called for a group of one. */
using MakeTransport = std::function<std::unique_ptr<Transport>(const Seat&, const std::string& address)>;

}  // namespace fleetune
