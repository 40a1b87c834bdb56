#include "work.h"

#include <c10/util/Exception.h>
#include <sched.h>

namespace fleetune {

namespace {

/** How long a waiter looks itself, before it leaves that to the engine's thread. */
constexpr auto kHelping = std::chrono::microseconds(100);

c10::TypePtr future_type(size_t num_lists) {
  const auto tensors = c10::ListType::create(c10::TensorType::get());
  if (num_lists > 1) return c10::ListType::create(tensors);
  return tensors;
}

}  // namespace

EngineWork::EngineWork(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs,
                       std::vector<std::vector<at::Tensor>> outputs)
    : Work(rank, type, title.c_str(), inputs),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(future_type(outputs_.size()))) {}

void EngineWork::follow(std::shared_ptr<Queue> queue, const std::shared_ptr<Operation>& operation) {
  queue_ = std::move(queue);
  operation_ = operation;
}

bool EngineWork::wait(std::chrono::milliseconds timeout) {
  const auto until = Clock::now() + kHelping;
  if (const auto operation = operation_.lock()) {
    while (!has_ended_ && Clock::now() < until) {
      queue_->advance(operation.get());
      if (!has_ended_) sched_yield();
    }
  }
  return Work::wait(timeout);
}

int EngineWork::sourceRank() const { return source_; }

std::vector<at::Tensor> EngineWork::result() {
  TORCH_CHECK(isCompleted(), "Work needs to be completed before calling result(). Should call wait() before result().");
  TORCH_CHECK(outputs_.size() <= 1, "work result does not support list of lists, use .getFuture() and value()");
  return outputs_.empty() ? std::vector<at::Tensor>() : outputs_[0];
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::getFuture() { return future_; }

uint64_t EngineWork::getSequencenumber() const {
  const auto operation = operation_.lock();
  return operation == nullptr ? 0 : operation->number;
}

void EngineWork::end(std::exception_ptr error, int source) {
  source_ = source;
  if (error != nullptr) {
    error = as_torch_error(error);
    future_->setError(error);
  } else if (outputs_.size() > 1) {
    future_->markCompleted(c10::IValue(outputs_));
  } else {
    future_->markCompleted(c10::IValue(outputs_.empty() ? std::vector<at::Tensor>() : outputs_[0]));
  }
  finish(error);
  has_ended_ = true;
}

std::exception_ptr as_torch_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    return error;
  } catch (const std::exception& other) {
    try {
      C10_THROW_ERROR(DistBackendError, other.what());
    } catch (...) {
      return std::current_exception();
    }
  }
}

}  // namespace fleetune
