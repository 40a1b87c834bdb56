#include "steps.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "reduction.h"

namespace fleetune {

namespace {

using c10d::ReduceOp;

/** Up to so many bytes in all, everybody gets everything and adds it up himself: one exchange in place of two. */
constexpr int64_t kSmallBytes = 32 << 10;

struct TypeRow {
  at::ScalarType type;
  Element element;
};
constexpr TypeRow kTypes[] = {
    {at::kByte, Element::uint8},     {at::kChar, Element::int8},         {at::kShort, Element::int16},
    {at::kInt, Element::int32},      {at::kLong, Element::int64},        {at::kBool, Element::uint8},
    {at::kHalf, Element::float16},   {at::kBFloat16, Element::bfloat16}, {at::kFloat, Element::float32},
    {at::kDouble, Element::float64},
};

Element element_of(at::ScalarType type) {
  for (const auto& row : kTypes) {
    if (row.type == type) return row.element;
  }
  TORCH_CHECK(false, "Invalid scalar type: numbers of type ", type, " cannot be reduced");
}

const char* name_of(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::AVG: return "AVG";
    case ReduceOp::BAND: return "BAND";
    case ReduceOp::BOR: return "BOR";
    case ReduceOp::BXOR: return "BXOR";
    case ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
    default: return "this";
  }
}

Reduction reduction_of(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM: case ReduceOp::AVG: return Reduction::sum;
    case ReduceOp::PRODUCT: return Reduction::product;
    case ReduceOp::MIN: return Reduction::min;
    case ReduceOp::MAX: return Reduction::max;
    case ReduceOp::BAND: return Reduction::band;
    case ReduceOp::BOR: return Reduction::bor;
    case ReduceOp::BXOR: return Reduction::bxor;
    default: TORCH_CHECK(false, "Unhandled ReduceOp");
  }
}

/** A sum of truth values is whether there is one, a product whether all are: as NCCL has it. */
Reduction reduction_of_truth(ReduceOp::RedOpType op) {
  TORCH_CHECK(op != ReduceOp::AVG, "Cannot use ReduceOp.AVG with bool");
  switch (reduction_of(op)) {
    case Reduction::sum: case Reduction::max: case Reduction::bor: return Reduction::max;
    case Reduction::bxor: return Reduction::bxor;
    default: return Reduction::min;
  }
}

bool is_half_precision(const at::Tensor& numbers) {
  return numbers.scalar_type() == at::kHalf || numbers.scalar_type() == at::kBFloat16;
}

size_t bytes_of(const at::Tensor& data) { return data.numel() * data.element_size(); }

bool is_part_of(const at::Tensor& part, const at::Tensor& whole) {
  const auto* start = static_cast<const char*>(whole.const_data_ptr());
  const auto* place = static_cast<const char*>(part.const_data_ptr());
  return place < start + bytes_of(whole) && start < place + bytes_of(part);
}

}  // namespace

Steps::Arithmetic Steps::arithmetic(const at::Tensor& numbers, const ReduceOp& op) const {
  const auto type = numbers.scalar_type();
  const bool is_bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  TORCH_CHECK(!is_bitwise || at::isIntegralType(type, /*includeBool=*/true), "Cannot use ReduceOp.",
              name_of(op.op_), " with non-integral dtype");
  const Element element = element_of(type);
  const Reduction reduction = type == at::kBool ? reduction_of_truth(op.op_) : reduction_of(op.op_);
  return {.element = element, .reduction = reduction, .divisor = op == ReduceOp::AVG ? size_ : 1,
          .is_native = queue_.get().can_reduce(element, reduction)};
}

void Steps::prepare(std::function<void()> work) {
  auto guarded = [work = std::move(work)] {
    at::AutoDispatchBelowADInplaceOrView guard;  // memory is written, and no graph is about that
    work();
  };
  steps_.push_back({.prepare = std::move(guarded), .start = nullptr});
}

void Steps::start(std::function<RequestPtr(Transport&)> operation) {
  if (size_ == 1) return;
  if (steps_.empty() || steps_.back().start) steps_.emplace_back();
  steps_.back().start = std::move(operation);
}

/** What PREMUL_SUM sums: a copy, in float32 for half-precision numbers, so that they are rounded once, at the end. */
at::Tensor Steps::scaled(const at::Tensor& numbers, const ReduceOp& op) {
  TORCH_CHECK(at::isFloatingType(numbers.scalar_type()), "Cannot use ReduceOp.PREMUL_SUM with non-floating dtype");
  const auto* known = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(known != nullptr, "ReduceOp.PREMUL_SUM without a factor");
  const double factor = known->tensor_factor.defined() ? known->tensor_factor.item<double>() : known->double_factor;
  const auto type = is_half_precision(numbers) ? at::kFloat : numbers.scalar_type();
  at::Tensor copy = at::empty(numbers.sizes(), numbers.options().dtype(type));
  prepare([=] { copy.copy_(numbers).mul_(factor); });
  return copy;
}

void Steps::divide(const at::Tensor& numbers, const Arithmetic& how) {
  if (how.divisor == 1) return;
  prepare([=] {
    reduce_blocks(numbers.const_data_ptr(), 1, numbers.numel(), numbers.mutable_data_ptr(), how.element, how.reduction,
                  how.divisor);
  });
}

void Steps::allreduce(const at::Tensor& numbers, const ReduceOp& op) {
  if (op == ReduceOp::PREMUL_SUM) {
    const at::Tensor copy = scaled(numbers, op);
    allreduce(copy, ReduceOp::SUM);
    prepare([=] { numbers.copy_(copy); });
    return;
  }
  const Arithmetic how = arithmetic(numbers, op);
  if (numbers.numel() == 0 || size_ == 1) return;
  if (!how.is_native) return allreduce_by_exchange(numbers, how);
  start([=](Transport& transport) {
    return transport.allreduce(numbers.mutable_data_ptr(), numbers.numel(), how.element, how.reduction);
  });
  divide(numbers, how);
}

void Steps::allreduce_by_exchange(const at::Tensor& numbers, const Arithmetic& how) {
  const int64_t count = numbers.numel(), item = numbers.element_size(), size = size_;
  if (count * item * size <= kSmallBytes) {
    const at::Tensor all = at::empty({size * count}, numbers.options());
    allgather(numbers, all);
    prepare([=] {
      reduce_blocks(all.const_data_ptr(), size, count, numbers.mutable_data_ptr(), how.element, how.reduction,
                    how.divisor);
    });
    return;
  }
  const int64_t share = (count + size - 1) / size;
  std::vector<int64_t> counts(size);
  for (int64_t r = 0; r < size; ++r) counts[r] = std::clamp<int64_t>(count - r * share, 0, share);
  const at::Tensor result = at::empty({size * share}, numbers.options());
  const at::Tensor own = result.narrow(0, rank_ * share, counts[rank_]);
  const at::Tensor parts = at::empty({size * counts[rank_]}, numbers.options());
  std::vector<size_t> sent(size), received(size, counts[rank_] * item);
  for (int64_t r = 0; r < size; ++r) sent[r] = counts[r] * item;
  alltoall(numbers, sent, parts, received);
  prepare([=] {
    reduce_blocks(parts.const_data_ptr(), size, own.numel(), own.mutable_data_ptr(), how.element, how.reduction,
                  how.divisor);
  });
  allgather(result.narrow(0, rank_ * share, share), result);
  prepare([=] { numbers.copy_(result.narrow(0, 0, count)); });
}

void Steps::reduce(const at::Tensor& numbers, const ReduceOp& op, int root) {
  if (size_ == 1) return allreduce(numbers, op);
  if (op == ReduceOp::PREMUL_SUM) {
    const at::Tensor copy = scaled(numbers, op);
    reduce(copy, ReduceOp::SUM, root);
    if (rank_ == root) prepare([=] { numbers.copy_(copy); });
    return;
  }
  const Arithmetic how = arithmetic(numbers, op);
  if (numbers.numel() == 0) return;
  if (!how.is_native) {
    const at::Tensor copy = at::empty(numbers.sizes(), numbers.options());
    prepare([=] { copy.copy_(numbers); });
    allreduce_by_exchange(copy, how);
    if (rank_ == root) prepare([=] { numbers.copy_(copy); });
    return;
  }
  start([=](Transport& transport) {
    return transport.reduce(numbers.const_data_ptr(), numbers.mutable_data_ptr(), numbers.numel(), how.element,
                            how.reduction, root);
  });
  if (rank_ == root) divide(numbers, how);
}

void Steps::reduce_scatter(const at::Tensor& in, const at::Tensor& out, const ReduceOp& op) {
  if (op == ReduceOp::PREMUL_SUM) {
    const at::Tensor copy = scaled(in, op);
    const at::Tensor sum = at::empty(out.sizes(), copy.options());
    reduce_scatter(copy, sum, ReduceOp::SUM);
    prepare([=] { out.copy_(sum); });
    return;
  }
  const Arithmetic how = arithmetic(in, op);
  if (out.numel() == 0) return;
  if (!how.is_native) {
    return reduce_scatter_uneven(in, std::vector<int64_t>(size_, out.numel()), out, op);
  }
  const at::Tensor target = is_part_of(out, in) ? at::empty(out.sizes(), out.options()) : out;
  start([=](Transport& transport) {
    return transport.reduce_scatter(
        in.const_data_ptr(), target.mutable_data_ptr(), target.numel(), how.element, how.reduction);
  });
  divide(target, how);
  if (!target.is_same(out)) prepare([=] { out.copy_(target); });
}

void Steps::reduce_scatter_uneven(
    const at::Tensor& in, const std::vector<int64_t>& counts, const at::Tensor& out, const ReduceOp& op) {
  const Arithmetic how = arithmetic(in, op);
  const int64_t item = in.element_size(), size = size_;
  const at::Tensor parts = at::empty({size * out.numel()}, in.options());
  std::vector<size_t> sent(size), received(size, out.numel() * item);
  for (int64_t r = 0; r < size; ++r) sent[r] = counts[r] * item;
  alltoall(in, sent, parts, received);
  prepare([=] {
    reduce_blocks(parts.const_data_ptr(), size, out.numel(), out.mutable_data_ptr(), how.element, how.reduction,
                  how.divisor);
  });
}

void Steps::broadcast(const at::Tensor& data, int root) {
  if (data.numel() == 0) return;
  start([=](Transport& transport) { return transport.broadcast(data.mutable_data_ptr(), bytes_of(data), root); });
}

void Steps::allgather(const at::Tensor& in, const at::Tensor& out) {
  if (in.numel() == 0) return;
  if (size_ == 1) {
    if (!is_part_of(in, out)) prepare([=] { out.copy_(in); });
    return;
  }
  start([=](Transport& transport) {
    return transport.allgather(in.const_data_ptr(), bytes_of(in), out.mutable_data_ptr());
  });
}

void Steps::alltoall(const at::Tensor& in, const std::vector<size_t>& in_bytes, const at::Tensor& out,
                     const std::vector<size_t>& out_bytes) {
  if (size_ == 1) {
    prepare([=] { out.copy_(in); });
    return;
  }
  start([=](Transport& transport) {
    static char nothing = 0;  // libraries take no null, even for no bytes
    const void* from = in.numel() > 0 ? in.const_data_ptr() : &nothing;
    void* to = out.numel() > 0 ? out.mutable_data_ptr() : &nothing;
    return transport.alltoallv(from, in_bytes, to, out_bytes);
  });
}

Contiguous::Contiguous(at::Tensor tensor) : tensor_(tensor.detach()) {
  flat_ = tensor_.is_contiguous() ? tensor_.view({-1}) : at::empty({tensor_.numel()}, tensor_.options());
}

void Contiguous::copy_in(Steps& steps) const {
  if (tensor_.is_contiguous()) return;
  steps.prepare([tensor = tensor_, flat = flat_] { flat.view(tensor.sizes()).copy_(tensor); });
}

void Contiguous::copy_out(Steps& steps) const {
  if (tensor_.is_contiguous()) return;
  steps.prepare([tensor = tensor_, flat = flat_] { tensor.copy_(flat.view(tensor.sizes())); });
}

}  // namespace fleetune
