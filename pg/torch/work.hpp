// The handle that c10d's callers hold: one operation of the core's, or a batch of several.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "call.hpp"
#include "core.hpp"
#include "guard.hpp"

namespace podring {

using c10::ivalue::Future;

// The one heap object of an operation: it is also what keeps the tensors alive while the core reads and writes them.
// The core's reference ends with drop(), so the circle work → operation → work ends with the operation.
class FaceWork final : public c10d::Work {
 public:
  FaceWork(int rank, c10d::OpType type, const char* title, const std::optional<std::vector<at::Tensor>>& inputs)
      : Work(rank, type, title, inputs) {}
  ~FaceWork() override {
    for (PodringWork* part : parts_) core->work_free(part);
  }

  // Building it: only on the thread that calls c10d, before anybody else has it.
  void hold(Tensors inputs, Tensors outputs) {
    if (inputs_.empty() && outputs_.empty()) {
      inputs_ = std::move(inputs);
      outputs_ = std::move(outputs);
    } else {
      inputs_.append(inputs.begin(), inputs.end());
      outputs_.append(outputs.begin(), outputs.end());
    }
  }
  void lend(LentTensors lent) {
    for (device::Lent& one : lent) lent_.push_back(std::move(one));
  }
  // Has what the core wrote reach tensors of a device when the operation ends, even if nobody waits for it.
  void watch_for_settling() {
    if (std::none_of(lent_.begin(), lent_.end(), [](const device::Lent& lent) { return lent.written(); })) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(watched_, true)) return;
    }
    watch();
  }
  void post(PodringGroup* group, const PodringCollective& collective) {
    Error error;
    PodringWork* part = nullptr;
    c10::raw::intrusive_ptr::incref(this);  // the core's; drop() gives it back
    const int32_t status = core->post(group, &collective, this, &drop, &part, &error);
    if (status != PODRING_OK) raise(status, error.message());
    parts_.push_back(part);
  }
  // A batch is open while operations are still added to it: nothing of it may be waited for.
  void set_open(bool open) { open_.store(open, std::memory_order_release); }
  // Ends the profiler's row when the operation ends, whoever waits for it.
  void watch_for_profiler() {
    if (!profiled_) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(watched_, true)) return;
    }
    watch();
  }

  bool isCompleted() override {
    if (open()) return false;
    for (PodringWork* part : parts_) {
      if (core->work_state(part) == kUnderWay) return false;
    }
    settle();
    end_profiler_row();
    return true;
  }

  bool isSuccess() const override {
    if (open()) return false;
    for (PodringWork* part : parts_) {
      if (core->work_state(part) != kDone) return false;
    }
    return true;
  }

  std::exception_ptr exception() const override {
    for (PodringWork* part : parts_) {
      if (core->work_state(part) != kFailed) continue;
      Error error;
      const int32_t status = core->work_error(part, &error);
      if (status != PODRING_OK) return as_exception(status, error.message());
    }
    const std::lock_guard<std::mutex> lock(settle_mutex_);
    return settle_failure_;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    // Within a batch a synchronous call waits when the batch ends, as with NCCL.
    if (open()) return true;
    const auto start = std::chrono::steady_clock::now();
    for (PodringWork* part : parts_) {
      int32_t status = PODRING_OK;
      Error error;
      Interrupt interrupt;
      if (core->work_state(part) != kDone) {
        int64_t left = -1;
        if (timeout > kNoTimeout) {
          const auto spent = std::chrono::steady_clock::now() - start;
          left = std::max<int64_t>(0, (timeout - std::chrono::duration_cast<std::chrono::milliseconds>(spent)).count());
        }
        const LockReleased unlocked;
        status = core->work_wait(part, left, &Interrupt::asked, &interrupt, &error);
      }
      if (status != PODRING_OK) {
        if (core->work_state(part) == kFailed) end_profiler_row();
        interrupt.check(status, error);
      }
    }
    settle();
    end_profiler_row();
    return true;
  }

  void synchronize() override { wait(); }
  // A CPU tensor's stream is the thread that uses it.
  void blockCurrentStream() override { wait(); }

  void abort() override {
    for (PodringWork* part : parts_) core->work_abort(part);
  }

  std::vector<at::Tensor> result() override {
    TORCH_CHECK(isCompleted(), "result() of an operation that is still under way: wait() for it first");
    return {outputs_.begin(), outputs_.end()};
  }

  int sourceRank() const override {
    if (parts_.size() != 1 || (opType_ != c10d::OpType::RECVANYSOURCE && opType_ != c10d::OpType::RECV)) {
      return Work::sourceRank();  // refuses
    }
    return core->work_source(parts_.front());
  }

  c10::intrusive_ptr<Future> getFuture() override {
    return future(future_, [] { return c10::ListType::create(c10::TensorType::get()); });
  }
  c10::intrusive_ptr<Future> getFutureResult() override {
    return future(future_result_, [] { return c10::AnyEnumType::get(); });
  }

  uint64_t getSequencenumber() const override { return parts_.empty() ? 0 : core->work_sequence(parts_.front()); }
  // Not an override before torch 2.15.
  uint64_t getCompletionKey() const { return parts_.empty() ? 0 : core->work_key(parts_.front()); }  // NOLINT
  std::chrono::milliseconds getTimeout() const override {
    return std::chrono::milliseconds(parts_.empty() ? 0 : core->work_timeout(parts_.front()));
  }

 private:
  enum State : int32_t { kUnderWay = 0, kDone = 1, kFailed = 2 };
  using Ref = c10::intrusive_ptr<FaceWork>;

  bool open() const { return open_.load(std::memory_order_acquire); }
  Ref self() { return Ref::reclaim_copy(this); }

  static void drop(void* work) noexcept {
    if (!ExitGate::enter()) return;  // left to the end of the process
    Ref::reclaim(static_cast<FaceWork*>(work));
    ExitGate::leave();
  }

  // Futures are made when asked for. `mutex_` guards them, watched_ and ended_.
  template <class Type>
  c10::intrusive_ptr<Future> future(c10::intrusive_ptr<Future>& slot, Type type) {
    TORCH_CHECK(!open(), "a future of a batch of operations can be had only after the batch has ended");
    std::unique_lock<std::mutex> lock(mutex_);
    if (slot) return slot;
    auto made = slot = c10::make_intrusive<Future>(type(), devices());
    const bool ended = ended_;
    const bool watched = std::exchange(watched_, true);
    lock.unlock();
    if (ended) {
      fulfil(made, &slot == &future_);
    } else if (!watched) {
      watch();
    }
    return made;
  }

  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> devices;
    for (const at::Tensor& output : outputs_) {
      const c10::Device device = output.device();
      if (!device.is_cpu() && std::find(devices.begin(), devices.end(), device) == devices.end()) {
        // Its callbacks run on a stream of this device's pool.
        if (device::is_tpu(device)) device::GuardWithPool::install(device);
        devices.push_back(device);
      }
    }
    return devices;
  }

  // Asks the core to call once per part; the last call ends the futures. At once, if all is over already.
  void watch() {
    left_.store(parts_.size() + 1, std::memory_order_relaxed);
    for (PodringWork* part : parts_) {
      core->work_on_done(part, [](void* ctx) { part_done(ctx); }, self().release());
    }
    if (left_.fetch_sub(1) == 1) end();
  }
  static void part_done(void* ctx) noexcept {
    if (!ExitGate::enter()) return;
    {
      const Ref work = Ref::reclaim(static_cast<FaceWork*>(ctx));
      if (work->left_.fetch_sub(1) == 1) work->end();
    }
    ExitGate::leave();
  }
  void end() {
    try {
      settle();
    } catch (...) {
      // Kept; whoever asks gets it.
    }
    end_profiler_row();
    std::unique_lock<std::mutex> lock(mutex_);
    ended_ = true;
    const auto future = future_;
    const auto result = future_result_;
    lock.unlock();
    if (future) fulfil(future, true);
    if (result) fulfil(result, false);
  }
  void fulfil(const c10::intrusive_ptr<Future>& future, bool of_tensors) noexcept {
    try {
      const std::exception_ptr failure = exception();
      if (!of_tensors) {
        future->markCompleted(c10::IValue(static_cast<int64_t>(work_result())));
      } else if (failure) {
        future->setError(failure);
      } else {
        future->markCompleted(c10::IValue(std::vector<at::Tensor>(outputs_.begin(), outputs_.end())));
      }
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  }
  c10d::WorkResult work_result() const {
    for (PodringWork* part : parts_) {
      if (core->work_state(part) != kFailed) continue;
      Error error;
      const int32_t status = core->work_error(part, &error);
      return status == PODRING_TIMEOUT ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
    }
    return c10d::WorkResult::SUCCESS;
  }

  // Gives tensors of a device what the core wrote for them; once, by whoever comes first, while the others wait.
  void settle() {
    if (C10_LIKELY(lent_.empty())) return;
    // Copying to a device may want the interpreter lock on another thread.
    const LockReleased unlocked;
    const std::lock_guard<std::mutex> lock(settle_mutex_);
    if (!std::exchange(settled_, true)) {
      try {
        if (isSuccess()) {
          for (device::Lent& lent : lent_) lent.settle();
        }
      } catch (...) {
        settle_failure_ = std::current_exception();
      }
    }
    if (settle_failure_) std::rethrow_exception(settle_failure_);
  }

  // Under the lock, so that whoever waits leaves only when the row is written.
  void end_profiler_row() noexcept {
    if (C10_LIKELY(!profiled_)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!recordFunctionEndCallback_) return;
    try {
      std::exchange(recordFunctionEndCallback_, nullptr)();
    } catch (const std::exception& error) {
      TORCH_WARN("the profiler did not take the end of an operation: ", error.what());
    }
  }

  c10::SmallVector<PodringWork*, 1> parts_;
  Tensors inputs_;
  Tensors outputs_;
  // Constant once posted. `settle_mutex_` guards the two below it.
  LentTensors lent_;
  mutable std::mutex settle_mutex_;
  bool settled_ = false;
  std::exception_ptr settle_failure_;
  std::atomic<bool> open_{false};
  const bool profiled_ = static_cast<bool>(recordFunctionEndCallback_);
  bool watched_ = false;
  bool ended_ = false;
  std::atomic<size_t> left_{0};
  c10::intrusive_ptr<Future> future_;
  c10::intrusive_ptr<Future> future_result_;
};

}  // namespace podring
