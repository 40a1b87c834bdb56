#include "ccl/transport_ccl.h"

#include <algorithm>
#include <cstring>
#include <iostream>
#include <mutex>
#include <oneapi/ccl.hpp>
#include <optional>

#include "engine.h"
#include "mesh.h"

namespace fleetune {

namespace {

struct ElementRow {
  Element element;
  ccl::datatype type;
};
// Not the half-precision types: without AVX-512 oneCCL truncates each of their sums.
constexpr ElementRow kElements[] = {
    {Element::int8, ccl::datatype::int8},       {Element::uint8, ccl::datatype::uint8},
    {Element::int16, ccl::datatype::int16},     {Element::int32, ccl::datatype::int32},
    {Element::int64, ccl::datatype::int64},     {Element::float32, ccl::datatype::float32},
    {Element::float64, ccl::datatype::float64},
};

struct ReductionRow {
  Reduction reduction;
  ccl::reduction operation;
};
constexpr ReductionRow kReductions[] = {
    {Reduction::sum, ccl::reduction::sum},
    {Reduction::product, ccl::reduction::prod},
    {Reduction::min, ccl::reduction::min},
    {Reduction::max, ccl::reduction::max},
};

constexpr auto kBytes = ccl::datatype::uint8;

ccl::datatype type_of(Element element) {
  for (const auto& row : kElements) {
    if (row.element == element) return row.type;
  }
  throw TransportError("oneCCL is not asked to reduce such numbers");
}

ccl::reduction operation_of(Reduction reduction) {
  for (const auto& row : kReductions) {
    if (row.reduction == reduction) return row.operation;
  }
  throw TransportError("oneCCL has no such reduction");
}

class CclRequest : public Request {
 public:
  explicit CclRequest(ccl::event event, std::vector<char> kept = {}) : event_(std::move(event)), kept_(std::move(kept)) {}
  bool test() override { return event_.test(); }

 private:
  ccl::event event_;
  std::vector<char> kept_;
};

RequestPtr request(ccl::event event) { return std::make_unique<CclRequest>(std::move(event)); }

/** Initialises oneCCL, which says on the standard output that it was told to say nothing but errors. */
void initialise() {
  auto* const buffer = std::cout.rdbuf(nullptr);
  try {
    ccl::init();
  } catch (...) {
    std::cout.rdbuf(buffer);
    throw;
  }
  std::cout.rdbuf(buffer);
}

class CclTransport : public Transport {
 public:
  CclTransport(const Seat& seat, const std::string& address) : rank_(seat.rank), size_(seat.size), mesh_(seat, address) {
    std::lock_guard<std::mutex> lock(transport_mutex());
    static std::once_flag once;
    std::call_once(once, initialise);
    if (rank_ == 0) {
      keys_ = ccl::create_main_kvs();
      const auto main_address = keys_->get_address();
      seat.store->set("ccl", std::string(main_address.begin(), main_address.end()));
    } else {
      const std::string told = seat.store->get("ccl", seat.timeout);
      ccl::kvs::address_type main_address{};
      std::memcpy(main_address.data(), told.data(), std::min(told.size(), main_address.size()));
      keys_ = ccl::create_kvs(main_address);
    }
    group_.emplace(ccl::create_communicator(size_, rank_, keys_));
  }

  bool can_reduce(Element element, Reduction reduction) const override {
    const auto same_type = [&](const ElementRow& row) { return row.element == element; };
    const auto same_operation = [&](const ReductionRow& row) { return row.reduction == reduction; };
    return std::any_of(std::begin(kElements), std::end(kElements), same_type) &&
           std::any_of(std::begin(kReductions), std::end(kReductions), same_operation);
  }

  RequestPtr allreduce(void* data, size_t count, Element element, Reduction reduction) override {
    return request(ccl::allreduce(data, data, count, type_of(element), operation_of(reduction), *group_));
  }

  RequestPtr reduce(const void* in, void* out, size_t count, Element element, Reduction reduction, int root) override {
    if (rank_ == root) return request(ccl::reduce(in, out, count, type_of(element), operation_of(reduction), root, *group_));
    // It may write to the target of any rank.
    std::vector<char> unused(count * size_of(element));
    auto event = ccl::reduce(in, unused.data(), count, type_of(element), operation_of(reduction), root, *group_);
    return std::make_unique<CclRequest>(std::move(event), std::move(unused));
  }

  RequestPtr reduce_scatter(const void* in, void* out, size_t count, Element element, Reduction reduction) override {
    return request(ccl::reduce_scatter(in, out, count, type_of(element), operation_of(reduction), *group_));
  }

  RequestPtr broadcast(void* data, size_t bytes, int root) override {
    return request(ccl::broadcast(data, bytes, kBytes, root, *group_));
  }

  RequestPtr allgather(const void* in, size_t bytes, void* out) override {
    const std::vector<size_t> counts(static_cast<size_t>(size_), bytes);
    const char* own = static_cast<char*>(out) + static_cast<size_t>(rank_) * bytes;
    if (in != own) return request(ccl::allgatherv(in, bytes, out, counts, kBytes, *group_));
    std::vector<char> copy(own, own + bytes);
    auto event = ccl::allgatherv(copy.data(), bytes, out, counts, kBytes, *group_);
    return std::make_unique<CclRequest>(std::move(event), std::move(copy));
  }

  RequestPtr alltoallv(const void* in, const std::vector<size_t>& in_bytes, void* out,
                       const std::vector<size_t>& out_bytes) override {
    return request(ccl::alltoallv(in, in_bytes, out, out_bytes, kBytes, *group_));
  }

  RequestPtr barrier() override { return request(ccl::barrier(*group_)); }

  RequestPtr send(const void* data, size_t bytes, int destination, int tag) override {
    return mesh_.send(data, bytes, destination, tag);
  }

  RequestPtr recv(void* data, size_t bytes, int source, int tag) override {
    return mesh_.recv(data, bytes, source, tag);
  }

  void close() override {
    group_.reset();
    keys_.reset();
  }

  void abandon() override {
    new std::optional<ccl::communicator>(std::move(group_));  // its destructor would wait for ever
    new ccl::shared_ptr_class<ccl::kvs>(std::move(keys_));
  }

 private:
  const int rank_, size_;
  Mesh mesh_;
  ccl::shared_ptr_class<ccl::kvs> keys_;
  std::optional<ccl::communicator> group_;
};

}  // namespace

std::unique_ptr<Transport> make_ccl_transport(const Seat& seat, const std::string& address) {
  try {
    return std::make_unique<CclTransport>(seat, address);
  } catch (const ccl::exception& error) {
    throw TransportError(std::string("oneCCL cannot make the group: ") + error.what());
  }
}

std::string ccl_version() { return ccl::get_library_version().full; }

}  // namespace fleetune
