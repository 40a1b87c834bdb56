// What torch waits for: one call of a collective or of send and receive.

#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "engine.h"

namespace fleetune {

/** Completed and failed by the engine, in C++, and its future with it. */
class EngineWork : public c10d::Work {
 public:
  EngineWork(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs,
             std::vector<std::vector<at::Tensor>> outputs);

  /** Helps the engine for a moment, which spares small messages a change of threads, then sleeps. */
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

  /** To be called once, before the call goes to the queue. */
  void follow(std::shared_ptr<Queue> queue, const std::shared_ptr<Operation>& operation);
  void end(std::exception_ptr error, int source);

 private:
  std::vector<std::vector<at::Tensor>> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<Queue> queue_;
  std::weak_ptr<Operation> operation_;
  std::atomic<bool> has_ended_{false};
  std::atomic<int> source_{kAnyRank};
};

/** The same error as torch's own backends raise: DistBackendError. */
std::exception_ptr as_torch_error(const std::exception_ptr& error);

}  // namespace fleetune
