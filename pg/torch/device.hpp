// Tensors of the device "tpu": their memory is a PJRT buffer's, which torch neither reads nor writes itself, so that
// something else stands in for them while the core works.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "bridge.hpp"

namespace podring::device {

// Whether torch's PrivateUse1 device is called "tpu" here is seen once: torch allows one name for good.
inline bool is_tpu(const at::Device& device) {
  if (device.type() != c10::DeviceType::PrivateUse1) return false;
  static const bool named = c10::get_privateuse1_backend() == "tpu";
  return named;
}

inline PodringTensor describe(const at::Tensor& shape, void* data) {
  PodringTensor plain{};
  plain.data = data;
  plain.sizes = shape.sizes().data();
  plain.strides = shape.strides().data();
  plain.dims = static_cast<uint32_t>(shape.dim());
  plain.flags = (shape.is_conj() ? PODRING_CONJ : 0) | (shape.is_neg() ? PODRING_NEG : 0);
  return plain;
}

// What the core does with a tensor.
enum class Use { kRead, kWrite, kUpdate };

// A tensor of the device while the core works for it. Two roads: on a virtual chip the core reads the tensor's own
// memory and writes into pooled memory, which becomes the tensor's at the end; otherwise host memory stands in for it.
// A tensor's memory is never written: clones, copies and views share it.
class Lent {
 public:
  // Waits for the tensor's value if it is to be read.
  Lent(const at::Tensor& tensor, Use use, uint8_t dtype) : tensor_(tensor), dtype_(dtype), use_(use) {
    const at::AutoDispatchBelowAutograd below;
    const c10::AutoGradMode no_grad(false);
    if (!take_own_memory()) stage();
  }
  Lent(Lent&& other) noexcept
      : tensor_(std::move(other.tensor_)),
        dtype_(other.dtype_),
        use_(other.use_),
        buffer_(std::move(other.buffer_)),
        host_(std::move(other.host_)),
        source_(other.source_),
        target_(other.target_),
        pooled_(std::exchange(other.pooled_, nullptr)) {}
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  Lent& operator=(Lent&&) = delete;
  ~Lent() {
    if (pooled_ != nullptr) Pool::give(pooled_);
  }

  // What the core reads, and where it writes.
  const PodringTensor& source() const { return source_; }
  const PodringTensor& target() const { return target_; }
  bool written() const { return use_ != Use::kRead; }

  // Gives the tensor what the core wrote. Once, after the operation.
  void settle() {
    if (!written()) return;
    const at::AutoDispatchBelowAutograd below;
    const c10::AutoGradMode no_grad(false);
    // Shares storage and version counter with the tensor, but is no leaf that requires gradients.
    const at::Tensor target = tensor_.detach();
    if (pooled_ == nullptr) {
      target.copy_(host_);
      return;
    }
    // Between tensors of the device a copy is an exchange of buffers.
    target.copy_(Bridge::get(target)->adopt(std::exchange(pooled_, nullptr), target.sizes(), dtype_));
  }

 private:
  bool take_own_memory() {
    // Others are rare, and then a copy that torch makes dense is what is wanted anyway.
    if (tensor_.numel() == 0 || !tensor_.is_contiguous() || tensor_.is_conj() || tensor_.is_neg()) return false;
    const Bridge* const bridge = Bridge::get(tensor_);
    if (bridge == nullptr) return false;
    const size_t bytes = tensor_.nbytes();
    if (use_ != Use::kWrite) {
      buffer_.emplace(*bridge, tensor_);
      PodringMemory memory{};
      const size_t start = static_cast<size_t>(tensor_.storage_offset()) * tensor_.element_size();
      if (!bridge->memory(buffer_->wait(), &memory) || memory.dtype != dtype_ || start + bytes > memory.bytes) {
        buffer_.reset();
        return false;
      }
      source_ = describe(tensor_, static_cast<char*>(memory.data) + start);
    }
    if (use_ != Use::kRead) {
      pooled_ = Pool::take(bytes);
      target_ = describe(tensor_, pooled_);
    }
    return true;
  }

  void stage() {
    const at::Tensor plain = tensor_.detach();
    host_ = use_ == Use::kWrite ? at::empty(plain.sizes(), plain.options().device(at::kCPU).requires_grad(false))
                                : plain.contiguous().to(at::kCPU);
    source_ = target_ = describe(host_, host_.numel() != 0 ? host_.mutable_data_ptr() : nullptr);
  }

  at::Tensor tensor_;
  uint8_t dtype_;
  Use use_;
  std::optional<Bridge::Buffer> buffer_;
  at::Tensor host_;
  PodringTensor source_{};
  PodringTensor target_{};
  void* pooled_ = nullptr;
};

}  // namespace podring::device
