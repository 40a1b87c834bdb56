// Steps of calls: copies to and from contiguous memory, what the transport does, and what is left to do here.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "engine.h"

namespace fleetune {

/** What a call consists of; a builder. All tensors that steps use live as long as they do. */
class Steps {
 public:
  Steps(int rank, int size, const Queue& queue) : rank_(rank), size_(size), queue_(queue) {}

  /** Local work; the next `start` follows it. */
  void prepare(std::function<void()> work);
  /** An operation of the transport: left out in a group of one, where local work must do all. */
  void start(std::function<RequestPtr(Transport&)> operation);
  std::vector<Step> take() { return std::move(steps_); }

  // All tensors below are contiguous; sizes and dtypes fit. `numbers` are flat.

  /** In place. */
  void allreduce(const at::Tensor& numbers, const c10d::ReduceOp& op);
  void reduce(const at::Tensor& numbers, const c10d::ReduceOp& op, int root);
  /** `out` may be part of `in`. */
  void reduce_scatter(const at::Tensor& in, const at::Tensor& out, const c10d::ReduceOp& op);
  /** Blocks of these sizes; own block to `out`. */
  void reduce_scatter_uneven(
      const at::Tensor& in, const std::vector<int64_t>& counts, const at::Tensor& out, const c10d::ReduceOp& op);
  void broadcast(const at::Tensor& data, int root);
  /** `in` may be this rank's part of `out`. */
  void allgather(const at::Tensor& in, const at::Tensor& out);
  /** Sizes in bytes, one for each rank. */
  void alltoall(const at::Tensor& in, const std::vector<size_t>& in_bytes, const at::Tensor& out,
                const std::vector<size_t>& out_bytes);

 private:
  struct Arithmetic {
    Element element;
    Reduction reduction;
    int divisor;
    bool is_native;
  };
  Arithmetic arithmetic(const at::Tensor& numbers, const c10d::ReduceOp& op) const;
  at::Tensor scaled(const at::Tensor& numbers, const c10d::ReduceOp& op);
  void allreduce_by_exchange(const at::Tensor& numbers, const Arithmetic& arithmetic);
  void divide(const at::Tensor& numbers, const Arithmetic& arithmetic);

  int rank_, size_;
  std::reference_wrapper<const Queue> queue_;
  std::vector<Step> steps_;
};

/** The memory of a tensor, if it is contiguous, else of a copy: made when the steps run, not before. */
class Contiguous {
 public:
  explicit Contiguous(at::Tensor tensor);
  /** Flat. */
  const at::Tensor& flat() const { return flat_; }
  void copy_in(Steps& steps) const;
  void copy_out(Steps& steps) const;

 private:
  at::Tensor tensor_, flat_;
};

}  // namespace fleetune
