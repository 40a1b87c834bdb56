// torch.distributed over a transport: every call that torch defines for CPU tensors, in terms of a few operations.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "engine.h"
#include "liveness.h"
#include "steps.h"
#include "work.h"

namespace fleetune {

class TransportBackend : public c10d::Backend {
 public:
  /** `liveness` may be none: then only timeouts tell that a rank is lost. */
  TransportBackend(std::string name, int rank, int size, std::chrono::milliseconds timeout,
                   std::shared_ptr<Queue> queue, std::unique_ptr<Liveness> liveness);
  ~TransportBackend() override;

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return queue_->num_collectives(); }
  c10d::ErrorType getError() override;
  void shutdown() override;
  void abort() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  /** Leave the group; as `shutdown`, which a group may be asked for several times. */
  void close(bool politely);

 private:
  struct Call {
    const char* name;
    c10d::OpType type;
    Tensors inputs;
    TensorLists outputs;
    Steps steps;
    std::chrono::milliseconds timeout;
    bool is_ordered = true;
    bool is_barrier = false;
  };
  WorkPtr start(Call call);
  std::function<void(const std::string&)> refuse(const char* name) const;
  WorkPtr receive(Tensors& tensors, int source, int tag, c10d::OpType type, const char* name);

  const std::string name_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::shared_ptr<Queue> queue_;
  std::unique_ptr<Liveness> liveness_;
  const int pid_;
  std::mutex closing_;
  bool is_closed_ = false;
};

}  // namespace fleetune
