#include "module.h"

#include <ATen/Parallel.h>
#include <numeric>
#include <omp.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend.h"

namespace fleetune {

namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/** torch's store, which has a prefix for each group. */
class TorchStore : public KeyValueStore {
 public:
  explicit TorchStore(StorePtr store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key, milliseconds patience) override {
    try {
      store_->wait({key}, patience);
      const auto value = store_->get(key);
      return {value.begin(), value.end()};
    } catch (const c10::Error& error) {
      throw TransportError("the store has no '" + key + "': " + error.what_without_backtrace());
    }
  }

 private:
  StorePtr store_;
};

/** Groups that were not destroyed. */
class Open {
 public:
  static Open& groups() {
    static auto* groups = new Open;
    return *groups;
  }
  void add(const c10::intrusive_ptr<TransportBackend>& backend) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(known_, [](const auto& known) { return known.expired(); });
    known_.emplace_back(backend);
  }
  void close() {
    std::vector<c10::weak_intrusive_ptr<TransportBackend>> known;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      known.swap(known_);
    }
    for (const auto& weak : known) {
      if (const auto backend = weak.lock()) backend->close(true);
    }
    stop_engine();
  }

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<TransportBackend>> known_;
};

/** Waits for all ranks of a group: libraries are less patient, or endlessly so, and do not name who is missing. */
void call_roll(const std::string& name, const Seat& seat) {
  seat.store->set("here/" + std::to_string(seat.rank), "");
  const auto deadline = Clock::now() + seat.timeout;
  for (int rank = 0; rank < seat.size; ++rank) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    try {
      seat.store->get("here/" + std::to_string(rank), std::max(left, milliseconds(1)));
    } catch (const TransportError& error) {
      throw TransportError(name + ": rank " + std::to_string(seat.global_ranks[rank]) + " did not join the group within " +
                           std::to_string(seat.timeout.count() / 1000) + " s (" + error.what() + ")");
    }
  }
}

struct Wishes {
  std::string address;
  std::string host;
  milliseconds silence_limit;
};

std::unique_ptr<Liveness> watch(const Seat& seat, const Wishes& wishes, const std::shared_ptr<Queue>& queue) {
  if (wishes.silence_limit.count() == 0) return nullptr;
  std::weak_ptr<Queue> weak = queue;
  Listener listener{
      .on_loss = [weak](const std::string& text) {
        if (const auto known = weak.lock()) known->fail({.reason = text});
      },
      .on_leave = [weak](const std::string& who, uint64_t num_collectives) {
        if (const auto known = weak.lock()) known->peer_left(who, num_collectives);
      }};
  const std::string name = "rank " + std::to_string(seat.global_ranks[seat.rank]) + " on host " + wishes.host;
  return std::make_unique<Liveness>(seat, wishes.address, name, wishes.silence_limit, std::move(listener));
}

c10::intrusive_ptr<TransportBackend> join(
    const std::string& name, const MakeTransport& make_transport, const Seat& seat, const Wishes& wishes) {
  std::unique_ptr<Transport> transport;
  if (seat.size > 1) {
    call_roll(name, seat);
    transport = make_transport(seat, wishes.address);
  }
  auto queue = std::make_shared<Queue>(name, std::move(transport));
  auto liveness = seat.size > 1 ? watch(seat, wishes, queue) : nullptr;
  queue->open();
  auto backend = c10::make_intrusive<TransportBackend>(
      name, seat.rank, seat.size, seat.timeout, std::move(queue), std::move(liveness));
  Open::groups().add(backend);
  return backend;
}

}  // namespace

void define_backend(pybind11::module_& module, const std::string& name, MakeTransport make_transport) {
  namespace py = pybind11;
  set_up_engine_thread_with([] {
    at::get_num_threads();  // would set the number by itself, later
    omp_set_num_threads(1);
  });
  module.def(
      "create",
      [name, make_transport](const StorePtr& store, int rank, int size, milliseconds timeout,
                             std::vector<int> global_ranks, std::string address, std::string host,
                             milliseconds silence_limit) -> c10::intrusive_ptr<c10d::Backend> {
        if (global_ranks.empty()) {  // torch's way to say: the world
          global_ranks.resize(static_cast<size_t>(size));
          std::iota(global_ranks.begin(), global_ranks.end(), 0);
        }
        // A store may outlive a group of this name and serve the next one: what the last one left must not be found.
        const auto turn = size > 1 ? store->add("turn/" + std::to_string(rank), 1) : 1;
        const auto own = c10::make_intrusive<c10d::PrefixStore>(std::to_string(turn), store);
        const Seat seat{.rank = rank, .size = size, .global_ranks = std::move(global_ranks),
                        .store = std::make_shared<TorchStore>(own), .timeout = timeout};
        const Wishes wishes{.address = std::move(address), .host = std::move(host), .silence_limit = silence_limit};
        try {
          return join(name, make_transport, seat, wishes);
        } catch (const TransportError& error) {
          C10_THROW_ERROR(DistBackendError, error.what());
        }
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("global_ranks"),
      py::arg("address"), py::arg("host"), py::arg("silence_limit"), py::call_guard<py::gil_scoped_release>());
  module.def("close_all", [] { Open::groups().close(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace fleetune
