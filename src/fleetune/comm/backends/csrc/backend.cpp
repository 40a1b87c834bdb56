#include "backend.h"

#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <unistd.h>

namespace fleetune {

namespace {

using c10d::OpType;

/** The numbers of a tensor as the reductions see them: complex ones are pairs. */
at::Tensor real(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* call) {
  if (!tensor.is_complex()) return tensor;
  TORCH_CHECK(c10d::isComplexViewAsRealAllowed(op), call, " does not support this ReduceOp on complex tensors");
  return at::view_as_real(tensor);
}

TransportBackend::Tensors real(const TransportBackend::Tensors& tensors, const c10d::ReduceOp& op, const char* call) {
  TransportBackend::Tensors result;
  for (const auto& tensor : tensors) result.push_back(real(tensor, op, call));
  return result;
}

/** Tensors laid one after the other in memory of their own, and taken from there. */
class Pack {
 public:
  explicit Pack(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    int64_t count = 0;
    for (const auto& tensor : tensors_) count += tensor.numel();
    flat_ = at::empty({count}, tensors_.at(0).options());
  }
  const at::Tensor& flat() const { return flat_; }

  void copy_in(Steps& steps) const {
    steps.prepare([*this] {
      for_each([](const at::Tensor& tensor, const at::Tensor& place) { place.copy_(tensor); });
    });
  }
  void copy_out(Steps& steps) const {
    steps.prepare([*this] {
      for_each([](const at::Tensor& tensor, const at::Tensor& place) { tensor.copy_(place); });
    });
  }
  std::vector<int64_t> counts() const {
    std::vector<int64_t> result;
    for (const auto& tensor : tensors_) result.push_back(tensor.numel());
    return result;
  }

 private:
  template <typename F>
  void for_each(F work) const {
    int64_t start = 0;
    for (const auto& tensor : tensors_) {
      const at::Tensor target = tensor.detach();
      work(target, flat_.narrow(0, start, tensor.numel()).view(tensor.sizes()));
      start += tensor.numel();
    }
  }

  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
};

std::vector<size_t> bytes_of(const std::vector<int64_t>& counts, const at::Tensor& like) {
  std::vector<size_t> result;
  for (const int64_t count : counts) result.push_back(count * like.element_size());
  return result;
}

/** Numbers for each rank, from rows for each rank, or equal shares where none are given. */
std::vector<int64_t> split_counts(const std::vector<int64_t>& splits, const at::Tensor& tensor, int size) {
  c10d::checkSplitSizes(splits, tensor, size);
  const int64_t rows = tensor.size(0), row = rows == 0 ? 1 : tensor.numel() / rows;
  std::vector<int64_t> counts(size, rows / size * row);
  for (size_t r = 0; r < splits.size(); ++r) counts[r] = splits[r] * row;
  return counts;
}

}  // namespace

TransportBackend::TransportBackend(std::string name, int rank, int size, std::chrono::milliseconds timeout,
                                   std::shared_ptr<Queue> queue, std::unique_ptr<Liveness> liveness)
    : Backend(rank, size),
      name_(std::move(name)),
      timeout_(timeout),
      queue_(std::move(queue)),
      liveness_(std::move(liveness)),
      pid_(getpid()) {
  init();
}

TransportBackend::~TransportBackend() { close(true); }

c10::intrusive_ptr<c10d::Backend::Options> TransportBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(name_, timeout_.load());
}

void TransportBackend::setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

c10d::ErrorType TransportBackend::getError() {
  const auto failure = queue_->failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  return failure->is_timeout ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::REMOTE_ERROR;
}

void TransportBackend::shutdown() { close(true); }

void TransportBackend::abort() { close(false); }

void TransportBackend::close(bool politely) {
  if (getpid() != pid_) {  // a forked child: threads and connections are the parent's
    static_cast<void>(liveness_.release());
    return;
  }
  std::lock_guard<std::mutex> lock(closing_);
  if (std::exchange(is_closed_, true)) return;
  if (!politely) queue_->fail({.reason = "the process group was aborted"});
  queue_->drain();
  const auto failure = queue_->failure();
  if (liveness_ != nullptr) {
    if (failure) {
      liveness_->give_up(failure->reason);
    } else {
      liveness_->leave(queue_->num_collectives());
    }
  }
  queue_->close();
  liveness_.reset();
}

std::function<void(const std::string&)> TransportBackend::refuse(const char* name) const {
  return [this, name](const std::string& problem) {
    TORCH_CHECK(false, "ProcessGroup", name_, "::", name, ": ", problem);
  };
}

TransportBackend::WorkPtr TransportBackend::start(Call call) {
  const auto title = name_ + ":" + call.name;
  auto work = c10::make_intrusive<EngineWork>(rank_, call.type, title, call.inputs, std::move(call.outputs));
  auto operation = std::make_shared<Operation>();
  operation->name = call.name;
  operation->steps = call.steps.take();
  operation->is_ordered = call.is_ordered;
  operation->is_barrier = call.is_barrier;
  operation->timeout = call.timeout < std::chrono::milliseconds(0) ? timeout_.load() : call.timeout;
  operation->finish = [work](std::exception_ptr error, int source) { work->end(std::move(error), source); };
  work->follow(queue_, operation);
  try {
    queue_->add(operation);
  } catch (const GroupFailed&) {
    std::rethrow_exception(as_torch_error(std::current_exception()));
  }
  return work;
}

TransportBackend::WorkPtr TransportBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto no = refuse("broadcast");
  c10d::assertRootRank(no, options.rootRank, size_);
  c10d::assertRootTensor(no, options.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertDense(no, tensors);
  c10d::assertCPU(no, tensors);
  c10d::assertTypeAndSizesMatch(no, tensors);
  Steps steps(rank_, size_, *queue_);
  const Contiguous data(tensors[options.rootTensor]);
  data.copy_in(steps);
  steps.broadcast(data.flat(), static_cast<int>(options.rootRank));
  if (rank_ != options.rootRank) data.copy_out(steps);
  if (tensors.size() > 1) {
    steps.prepare([tensors, root = tensors[options.rootTensor]] {
      for (const auto& tensor : tensors) tensor.detach().copy_(root);
    });
  }
  return start({.name = "broadcast", .type = OpType::BROADCAST, .inputs = tensors, .outputs = {tensors},
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto no = refuse("allreduce");
  c10d::assertNonEmpty(no, tensors);
  c10d::assertLayoutMatch(no, tensors);
  c10d::assertTypeAndSizesMatch(no, tensors);
  if (tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  c10d::assertDense(no, tensors);
  c10d::assertCPU(no, tensors);
  c10d::assertSingleElement(no, tensors);
  Steps steps(rank_, size_, *queue_);
  const Contiguous numbers(real(tensors[0], options.reduceOp, "all_reduce"));
  numbers.copy_in(steps);
  steps.allreduce(numbers.flat(), options.reduceOp);
  numbers.copy_out(steps);
  return start({.name = "allreduce", .type = OpType::ALLREDUCE, .inputs = tensors, .outputs = {tensors},
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) {
  refuse("allreduce_sparse")("only supports dense tensors");
  return nullptr;
}

TransportBackend::WorkPtr TransportBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const auto no = refuse("allreduce_coalesced");
  c10d::assertNonEmpty(no, tensors);
  if (!std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
        return t.options().type_equal(tensors[0].options());
      })) {
    no("tensors must all have the same type");
  }
  c10d::assertDense(no, tensors);
  c10d::assertCPU(no, tensors);
  Steps steps(rank_, size_, *queue_);
  const Pack pack(real(tensors, options.reduceOp, "allreduce_coalesced"));
  pack.copy_in(steps);
  steps.allreduce(pack.flat(), options.reduceOp);
  pack.copy_out(steps);
  return start({.name = "allreduce_coalesced", .type = OpType::ALLREDUCE_COALESCED, .inputs = tensors,
                .outputs = {tensors}, .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto no = refuse("reduce");
  c10d::assertRootRank(no, options.rootRank, size_);
  c10d::assertRootTensor(no, options.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertSingleElement(no, tensors);
  c10d::assertDense(no, tensors);
  c10d::assertCPU(no, tensors);
  Steps steps(rank_, size_, *queue_);
  const Contiguous numbers(real(tensors[0], options.reduceOp, "reduce"));
  numbers.copy_in(steps);
  steps.reduce(numbers.flat(), options.reduceOp, static_cast<int>(options.rootRank));
  if (rank_ == options.rootRank) numbers.copy_out(steps);
  return start({.name = "reduce", .type = OpType::REDUCE, .inputs = tensors, .outputs = {tensors},
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto no = refuse("allgather");
  if (inputs.empty()) no("requires non-empty input tensor list");
  if (inputs.size() != outputs.size()) no("requires input/output tensor lists to have the same length");
  c10d::assertSingleElement(no, inputs);
  if (outputs[0].size() != static_cast<size_t>(size_)) {
    no("invalid output tensor list at index 0 (expected length " + std::to_string(size_) + ", got " +
       std::to_string(outputs[0].size()) + ")");
  }
  c10d::assertDense(no, inputs);
  c10d::assertCPU(no, inputs);
  c10d::assertTypeAndSizesMatch(no, outputs[0], inputs[0].options(), inputs[0].sizes());
  Steps steps(rank_, size_, *queue_);
  const Contiguous in(inputs[0]);
  const Pack all(outputs[0]);
  in.copy_in(steps);
  steps.allgather(in.flat(), all.flat());
  all.copy_out(steps);
  return start({.name = "allgather", .type = OpType::ALLGATHER, .inputs = inputs, .outputs = outputs,
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  auto work = allgather_into_tensor_coalesced(outputs, inputs, options);
  return work;
}

TransportBackend::WorkPtr TransportBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto no = refuse("allgather_into_tensor_coalesced");
  c10d::assertNonEmptyInputTensorList(no, inputs.size());
  c10d::assertInputOutputTensorListsSameSize(no, outputs.size(), inputs.size());
  Steps steps(rank_, size_, *queue_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    c10d::assertDense(no, {inputs[i], outputs[i]});
    c10d::assertCPU(no, {inputs[i]});
    TORCH_CHECK(inputs[i].scalar_type() == outputs[i].scalar_type(),
                "output tensor must have the same type as input tensor");
    TORCH_CHECK(inputs[i].numel() * size_ == outputs[i].numel(),
                "output tensor size must be equal to world_size times input tensor size");
    const Contiguous in(inputs[i]), out(outputs[i]);
    in.copy_in(steps);
    steps.allgather(in.flat(), out.flat());
    out.copy_out(steps);
  }
  const bool is_one = inputs.size() == 1;
  return start({.name = is_one ? "_allgather_base" : "allgather_into_tensor_coalesced",
                .type = is_one ? OpType::_ALLGATHER_BASE : OpType::COALESCED, .inputs = inputs, .outputs = {outputs},
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto no = refuse("allgather_coalesced");
  c10d::assertNonEmptyInputTensorList(no, inputs.size());
  c10d::assertAllgatherCoalescedOutputTensorLists(no, outputs, inputs.size(), size_);
  c10d::assertDense(no, inputs);
  c10d::assertCPU(no, inputs);
  for (const auto& list : outputs) {
    for (size_t i = 0; i < list.size(); ++i) {
      c10d::assertTypeMatch(no, inputs[i].options(), list, i);
      if (list[i].sizes() != inputs[i].sizes()) no("invalid size of output tensor at index " + std::to_string(i));
    }
  }
  Steps steps(rank_, size_, *queue_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors column;
    for (const auto& list : outputs) column.push_back(list[i]);
    const Contiguous in(inputs[i]);
    const Pack all(column);
    in.copy_in(steps);
    steps.allgather(in.flat(), all.flat());
    all.copy_out(steps);
  }
  return start({.name = "allgather_coalesced", .type = OpType::ALLGATHER_COALESCED, .inputs = inputs,
                .outputs = outputs, .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::gather(
    TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto no = refuse("gather");
  const auto root = static_cast<int>(options.rootRank);
  c10d::assertRootRank(no, root, size_);
  c10d::assertSingleElementInput(no, inputs);
  c10d::assertDense(no, inputs);
  c10d::assertCPU(no, inputs);
  if (rank_ == root) {
    c10d::assertGatherOutputTensorList(no, outputs, size_);
    c10d::assertTypeAndSizesMatch(no, outputs[0], inputs[0].options(), inputs[0].sizes());
  } else {
    c10d::assertEmptyOutputTensorList(no, outputs);
  }
  Steps steps(rank_, size_, *queue_);
  const Contiguous in(inputs[0]);
  const size_t bytes = inputs[0].numel() * inputs[0].element_size();
  std::vector<size_t> sent(size_, 0), received(size_, rank_ == root ? bytes : 0);
  sent[root] = bytes;
  const Pack all(rank_ == root ? outputs[0] : Tensors{at::empty({0}, inputs[0].options())});
  in.copy_in(steps);
  if (bytes > 0) steps.alltoall(in.flat(), sent, all.flat(), received);
  if (rank_ == root) all.copy_out(steps);
  return start({.name = "gather", .type = OpType::GATHER, .inputs = inputs, .outputs = outputs,
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const auto no = refuse("scatter");
  const auto root = static_cast<int>(options.rootRank);
  c10d::assertRootRank(no, root, size_);
  c10d::assertSingleElementOutput(no, outputs);
  c10d::assertDense(no, outputs);
  c10d::assertCPU(no, outputs);
  if (rank_ == root) {
    c10d::assertScatterInputTensorList(no, inputs, size_);
    c10d::assertTypeAndSizesMatch(no, inputs[0], outputs[0].options(), outputs[0].sizes());
  } else {
    c10d::assertEmptyInputTensorList(no, inputs);
  }
  Steps steps(rank_, size_, *queue_);
  const Contiguous out(outputs[0]);
  const size_t bytes = outputs[0].numel() * outputs[0].element_size();
  std::vector<size_t> sent(size_, rank_ == root ? bytes : 0), received(size_, 0);
  received[root] = bytes;
  const Pack all(rank_ == root ? inputs[0] : Tensors{at::empty({0}, outputs[0].options())});
  if (rank_ == root) all.copy_in(steps);
  if (bytes > 0) steps.alltoall(all.flat(), sent, out.flat(), received);
  out.copy_out(steps);
  return start({.name = "scatter", .type = OpType::SCATTER, .inputs = inputs.empty() ? Tensors() : inputs[0],
                .outputs = {outputs}, .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const auto no = refuse("reduce_scatter");
  c10d::assertSingleElementOutput(no, outputs);
  c10d::assertScatterInputTensorList(no, inputs, size_);
  c10d::assertDense(no, inputs[0]);
  c10d::assertCPU(no, outputs);
  for (size_t i = 0; i < inputs[0].size(); ++i) c10d::assertTypeMatch(no, outputs[0].options(), inputs[0], i);
  c10d::assertSizesMatch(no, outputs[0].sizes(), inputs[0], static_cast<size_t>(rank_));
  const Pack all(real(inputs[0], options.reduceOp, "reduce_scatter"));
  const auto counts = all.counts();
  const bool is_even = std::all_of(counts.begin(), counts.end(), [&](int64_t n) { return n == counts[0]; });
  Steps steps(rank_, size_, *queue_);
  const Contiguous out(real(outputs[0], options.reduceOp, "reduce_scatter"));
  all.copy_in(steps);
  if (is_even) {
    steps.reduce_scatter(all.flat(), out.flat(), options.reduceOp);
  } else {
    steps.reduce_scatter_uneven(all.flat(), counts, out.flat(), options.reduceOp);
  }
  out.copy_out(steps);
  return start({.name = "reduce_scatter", .type = OpType::REDUCE_SCATTER, .inputs = inputs[0], .outputs = {outputs},
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

TransportBackend::WorkPtr TransportBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const auto no = refuse("reduce_scatter_tensor_coalesced");
  c10d::assertNonEmptyInputTensorList(no, inputs.size());
  c10d::assertInputOutputTensorListsSameSize(no, outputs.size(), inputs.size());
  Steps steps(rank_, size_, *queue_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    c10d::assertDense(no, {inputs[i], outputs[i]});
    c10d::assertCPU(no, {inputs[i]});
    TORCH_CHECK(inputs[i].scalar_type() == outputs[i].scalar_type(),
                "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(inputs[i].numel() == outputs[i].numel() * size_,
                "input tensor must be the same size as output size times world size");
    const Contiguous in(real(inputs[i], options.reduceOp, "reduce_scatter_tensor"));
    const Contiguous out(real(outputs[i], options.reduceOp, "reduce_scatter_tensor"));
    in.copy_in(steps);
    steps.reduce_scatter(in.flat(), out.flat(), options.reduceOp);
    out.copy_out(steps);
  }
  const bool is_one = inputs.size() == 1;
  return start({.name = is_one ? "_reduce_scatter_base" : "reduce_scatter_tensor_coalesced",
                .type = is_one ? OpType::_REDUCE_SCATTER_BASE : OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                .inputs = inputs, .outputs = {outputs}, .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  const auto no = refuse("alltoall_base");
  TORCH_CHECK(output.device() == input.device(), "output tensor and input tensor must be on the same type of device");
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
  c10d::assertDense(no, {output, input});
  c10d::assertCPU(no, {input});
  const auto sent = bytes_of(split_counts(input_splits, input, size_), input);
  const auto received = bytes_of(split_counts(output_splits, output, size_), output);
  Steps steps(rank_, size_, *queue_);
  const Contiguous in(input), out(output);
  in.copy_in(steps);
  steps.alltoall(in.flat(), sent, out.flat(), received);
  out.copy_out(steps);
  return start({.name = "alltoall_base", .type = OpType::ALLTOALL_BASE, .inputs = {input}, .outputs = {{output}},
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const auto no = refuse("alltoall");
  c10d::assertAllToAllTensorListSizes(no, outputs.size(), inputs.size(), size_);
  for (int r = 0; r < size_; ++r) {
    c10d::assertTypeMatch(no, inputs[0].options(), inputs, r);
    c10d::assertTypeMatch(no, inputs[0].options(), outputs, r);
  }
  c10d::assertDense(no, inputs);
  c10d::assertCPU(no, inputs);
  Steps steps(rank_, size_, *queue_);
  const Pack in(inputs), out(outputs);
  in.copy_in(steps);
  steps.alltoall(in.flat(), bytes_of(in.counts(), in.flat()), out.flat(), bytes_of(out.counts(), out.flat()));
  out.copy_out(steps);
  return start({.name = "alltoall", .type = OpType::ALLTOALL, .inputs = inputs, .outputs = {outputs},
                .steps = std::move(steps), .timeout = options.timeout});
}

TransportBackend::WorkPtr TransportBackend::barrier(const c10d::BarrierOptions& options) {
  Steps steps(rank_, size_, *queue_);
  steps.start([](Transport& transport) { return transport.barrier(); });
  return start({.name = "barrier", .type = OpType::BARRIER, .inputs = {}, .outputs = {}, .steps = std::move(steps),
                .timeout = options.timeout, .is_barrier = true});
}

TransportBackend::WorkPtr TransportBackend::send(Tensors& tensors, int destination, int tag) {
  const auto no = refuse("send");
  TORCH_CHECK(tensors.size() == 1, "ProcessGroup", name_, "::send takes a single tensor");
  TORCH_CHECK(tag >= 0, "Tag must be nonnegative");
  TORCH_CHECK(destination >= 0 && destination < size_ && destination != rank_, "invalid destination rank: ",
              destination);
  c10d::assertDense(no, tensors);
  c10d::assertCPU(no, tensors);
  Steps steps(rank_, size_, *queue_);
  const Contiguous data(tensors[0]);
  data.copy_in(steps);
  steps.start([flat = data.flat(), destination, tag](Transport& transport) {
    return transport.send(flat.const_data_ptr(), flat.numel() * flat.element_size(), destination, tag);
  });
  return start({.name = "send", .type = OpType::SEND, .inputs = tensors, .outputs = {tensors},
                .steps = std::move(steps), .timeout = c10d::kUnsetTimeout, .is_ordered = false});
}

TransportBackend::WorkPtr TransportBackend::recv(Tensors& tensors, int source, int tag) {
  TORCH_CHECK(source >= 0 && source < size_ && source != rank_, "invalid source rank: ", source);
  return receive(tensors, source, tag, OpType::RECV, "recv");
}

TransportBackend::WorkPtr TransportBackend::recvAnysource(Tensors& tensors, int tag) {
  TORCH_CHECK(size_ > 1, "a group of one rank has no other to receive from");
  return receive(tensors, kAnyRank, tag, OpType::RECVANYSOURCE, "recvAnysource");
}

TransportBackend::WorkPtr TransportBackend::receive(
    Tensors& tensors, int source, int tag, OpType type, const char* name) {
  const auto no = refuse(name);
  TORCH_CHECK(tensors.size() == 1, "ProcessGroup", name_, "::", name, " takes a single tensor");
  TORCH_CHECK(tag >= 0, "Tag must be nonnegative");
  c10d::assertDense(no, tensors);
  c10d::assertCPU(no, tensors);
  Steps steps(rank_, size_, *queue_);
  const Contiguous data(tensors[0]);
  steps.start([flat = data.flat(), source, tag](Transport& transport) {
    return transport.recv(flat.mutable_data_ptr(), flat.numel() * flat.element_size(), source, tag);
  });
  data.copy_out(steps);
  return start({.name = name, .type = type, .inputs = tensors, .outputs = {tensors}, .steps = std::move(steps),
                .timeout = c10d::kUnsetTimeout, .is_ordered = false});
}

}  // namespace fleetune
