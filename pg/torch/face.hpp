// podring as a c10d backend: names and shapes in, the core's plain calls out.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "call.hpp"
#include "work.hpp"

namespace podring {

// The operations between startCoalescing and endCoalescing, which c10d calls on one thread.
struct Batch {
  std::thread::id thread;
  c10::intrusive_ptr<FaceWork> work;
  std::vector<Call> calls;
};

class TpuBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using TensorVector = std::vector<at::Tensor>;

  // Forms the group: returns when every member is known.
  TpuBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~TpuBackend() override;

  const std::string getBackendName() const override { return "tpu"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  WorkPtr allreduce(TensorVector& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(TensorVector& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  // COO tensors, SUM. Complete when it returns: it is several collectives, each of which needs the one before.
  WorkPtr allreduce_sparse(TensorVector& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr broadcast(TensorVector& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(TensorVector& tensors, const c10d::ReduceOptions& opts) override;

  WorkPtr allgather(Lists& outputs, TensorVector& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(Lists& outputs, TensorVector& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single_coalesced(TensorVector& outputs, TensorVector& inputs,
                                      const c10d::AllgatherOptions& opts) override;

  WorkPtr reduce_scatter(TensorVector& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single_coalesced(TensorVector& outputs, TensorVector& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;

  WorkPtr alltoall(TensorVector& outputs, TensorVector& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;

  WorkPtr gather(Lists& outputs, TensorVector& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(TensorVector& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override;

  WorkPtr send(TensorVector& tensors, int destination, int tag) override;
  WorkPtr recv(TensorVector& tensors, int source, int tag) override;
  WorkPtr recvAnysource(TensorVector& tensors, int tag) override;

  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Collectives of one kind between the two become one launch; sends and receives start at once. The work that
  // endCoalescing returns, and every call in between, waits for them all. A call that fails ends the batch.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return true; }
  // `ranks`: within this group. Null for a rank that is not among them.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;

  // The core counts on its own, from 0 on every rank.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return core->group_sequence(group_); }

  // For collectives inside of programs on virtual chips: this group's members are all ranks, in order.
  void lend_world() const;

  // Compiles the programs of calls to come; of how many.
  uint64_t warm_up(const std::vector<PodringSized>& calls) const;

  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  // Bytes by kind.
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;

 private:
  // Fills a call in and starts it. If that fails within a batch, the batch ends: calls after it start at once again.
  template <class Fill>
  WorkPtr run(Op op, Fill fill);
  WorkPtr launch(Call& call);
  WorkPtr launch_profiled(Call& call);
  void submit(Call& call, FaceWork& work, bool sync);
  WorkPtr add_to_batch(Batch& batch, Call& call);

  Batch* open_batch();
  std::unique_ptr<Batch> take_batch();

  // Of the group's members, in the default group.
  std::vector<uint32_t> global_ranks() const;

  const c10::intrusive_ptr<Options> options_;
  const Identity who_;
  PodringGroup* group_ = nullptr;
  std::atomic<bool> shut_down_{false};

  std::atomic<int> open_batches_{0};
  std::mutex batches_mutex_;
  std::vector<std::unique_ptr<Batch>> batches_;
};

}  // namespace podring
