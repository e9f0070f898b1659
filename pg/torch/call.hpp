// One call of c10d's, turned into the core's plain data: checks what only torch knows (list lengths, devices, layouts,
// dtypes) and leaves the rest, counts against counts and ranks against ranks, to the core.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core.hpp"
#include "device.hpp"

namespace podring {

using Tensors = c10::SmallVector<at::Tensor, 2>;
using LentTensors = std::vector<device::Lent>;

// Who calls, for messages.
struct Identity {
  int rank;
  int size;
  std::string group;
};

struct Op {
  PodringKind kind;
  c10d::OpType type;
  const char* name;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool async = true;
  int64_t root = -1;
  int64_t tag = 0;
};

constexpr uint8_t kNoDType = 255;

inline uint8_t dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return PODRING_U8;
    case at::kChar:
      return PODRING_I8;
    case at::kShort:
      return PODRING_I16;
    case at::kInt:
      return PODRING_I32;
    case at::kLong:
      return PODRING_I64;
    case at::kUInt16:
      return PODRING_U16;
    case at::kUInt32:
      return PODRING_U32;
    case at::kUInt64:
      return PODRING_U64;
    case at::kBool:
      return PODRING_BOOL;
    case at::kHalf:
      return PODRING_F16;
    case at::kBFloat16:
      return PODRING_BF16;
    case at::kFloat:
      return PODRING_F32;
    case at::kDouble:
      return PODRING_F64;
    case at::kComplexHalf:
      return PODRING_C32;
    case at::kComplexFloat:
      return PODRING_C64;
    case at::kComplexDouble:
      return PODRING_C128;
    case at::kFloat8_e4m3fn:
      return PODRING_F8E4M3FN;
    case at::kFloat8_e5m2:
      return PODRING_F8E5M2;
    case at::kFloat8_e4m3fnuz:
      return PODRING_F8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return PODRING_F8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return PODRING_F8E8M0FNU;
    default:
      return kNoDType;
  }
}

class Call {
 public:
  Call(const Identity& who, Op op) : who_(&who), op_(op) {
    if (op_.timeout.count() < 0) op_.timeout = std::chrono::milliseconds::zero();
  }

  const Op& op() const { return op_; }
  const Tensors& inputs() const { return inputs_; }
  const Tensors& outputs() const { return outputs_; }
  // The tensors, for whoever keeps them alive.
  Tensors take_inputs() { return std::move(inputs_); }
  Tensors take_outputs() { return std::move(outputs_); }
  // What stands in for tensors of a device, to be settled when the operation has ended.
  LentTensors take_lent() { return std::move(lent_); }

  template <class... Parts>
  [[noreturn]] void refuse(PodringStatus why, const Parts&... parts) const {
    raise(why, c10::str(where(), parts...));
  }
  template <class... Parts>
  [[noreturn]] void refuse_type(const Parts&... parts) const {
    C10_THROW_ERROR(TypeError, c10::str(where(), parts...));
  }

  void expect_length(size_t got, size_t expected, const char* what) const {
    if (got != expected) refuse(PODRING_INVALID, "expected ", expected, " ", what, ", got ", got);
  }
  const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) const {
    expect_length(tensors.size(), 1, what);
    return tensors.front();
  }
  const std::vector<at::Tensor>& list(const std::vector<std::vector<at::Tensor>>& lists, const char* what) const {
    expect_length(lists.size(), 1, what);
    expect_length(lists.front().size(), static_cast<size_t>(who_->size), what);
    return lists.front();
  }
  // A rank within the group, as c10d gives it.
  void expect_rank(int64_t rank, const char* what) const {
    if (rank < 0 || rank >= who_->size) {
      refuse(PODRING_INVALID, "invalid ", what, " rank: ", rank, " (expected 0 to ", who_->size - 1, ")");
    }
  }

  // A part: first begin(), then what it reads, then what it writes.
  void begin(const at::Tensor& like) {
    if (!like.defined()) refuse_type("expected a tensor, got an undefined one");
    dtype_ = like.scalar_type();
    PodringPart part{};
    part.dtype = dtype_of(dtype_);
    part.reduction = PODRING_NO_REDUCTION;
    if (part.dtype == kNoDType) refuse(PODRING_UNSUPPORTED, "dtype ", dtype_, " is not supported");
    parts_.push_back(part);
    spans_.push_back(Spans{});
  }
  void begin(const at::Tensor& like, const c10d::ReduceOp& reduction) {
    begin(like);
    PodringPart& part = parts_.back();
    part.reduction = reduction.op_;
    if (part.reduction > c10d::ReduceOp::PREMUL_SUM) refuse(PODRING_INVALID, "unknown reduction ", int{reduction.op_});
    if (part.reduction == c10d::ReduceOp::PREMUL_SUM) part.factor = factor_of(reduction);
  }

  void reads(at::TensorList tensors) {
    spans_.back().in = add(tensors, device::Use::kRead);
    inputs_.append(tensors.begin(), tensors.end());
  }
  void writes(at::TensorList tensors) {
    spans_.back().out = add(tensors, device::Use::kWrite);
    outputs_.append(tensors.begin(), tensors.end());
  }
  // In place: the same tensor on both sides.
  void updates(const at::Tensor& tensor) {
    check(tensor);
    outputs_.push_back(tensor);
    if (tensor.device().is_cpu()) {
      spans_.back().in = spans_.back().out = add(tensor, device::Use::kUpdate);
      return;
    }
    const device::Lent& lent = lent_.emplace_back(tensor, device::Use::kUpdate, parts_.back().dtype);
    spans_.back().in = add(lent.source());
    spans_.back().out = add(lent.target());
  }
  // Of a broadcast: the root's tensor is only read, the others' are only written; both are named on both sides.
  void shares(const at::Tensor& tensor) {
    const bool root = op_.root == who_->rank;
    spans_.back().in = spans_.back().out = add(tensor, root ? device::Use::kRead : device::Use::kWrite);
    outputs_.push_back(tensor);
  }

  // One tensor as one equal block per rank.
  void reads_blocks(const at::Tensor& tensor, const at::Tensor& block) {
    reads(tensor);
    cut_equally(spans_.back().in, tensor, block);
  }
  void writes_blocks(const at::Tensor& tensor, const at::Tensor& block) {
    writes(tensor);
    cut_equally(spans_.back().out, tensor, block);
  }
  // One tensor as blocks of `splits` rows along dimension 0; equal ones if there are no splits.
  void reads_splits(const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    reads(tensor);
    cut_rows(spans_.back().in, tensor, splits, "input");
  }
  void writes_splits(const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    writes(tensor);
    cut_rows(spans_.back().out, tensor, splits, "output");
  }

  // Whether `next` can be part of this launch.
  bool joins(const Call& next) const {
    return op_.kind == next.op_.kind && op_.root == next.op_.root && op_.timeout == next.op_.timeout &&
           device_ == next.device_ && !next.parts_.empty();
  }
  // `next` has handed on what is lent to it.
  void join(const Call& next) {
    const auto tensors = static_cast<uint32_t>(tensors_.size());
    const auto counts = static_cast<uint32_t>(counts_.size());
    tensors_.append(next.tensors_.begin(), next.tensors_.end());
    counts_.append(next.counts_.begin(), next.counts_.end());
    parts_.append(next.parts_.begin(), next.parts_.end());
    for (Spans spans : next.spans_) {
      for (Span* span : {&spans.in, &spans.out}) {
        span->tensor += tensors;
        span->count += counts;
      }
      spans_.push_back(spans);
    }
  }

  // For an operation without tensors.
  void runs_on_device() { device_ = c10::Device(c10::DeviceType::PrivateUse1, 0); }

  // Plain data that lives as long as this call and its tensors.
  PodringCollective collective(bool sync) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      parts_[i].inputs = side(spans_[i].in);
      parts_[i].outputs = side(spans_[i].out);
    }
    PodringCollective collective{};
    collective.kind = static_cast<uint32_t>(op_.kind);
    collective.root = static_cast<int32_t>(op_.root);
    collective.tag = static_cast<uint32_t>(op_.tag);
    collective.n_parts = static_cast<uint32_t>(parts_.size());
    collective.parts = parts_.data();
    collective.timeout_ms = op_.timeout.count();
    collective.flags = (sync ? PODRING_SYNC : 0) | (device_ && device::is_tpu(*device_) ? PODRING_DEVICE : 0);
    return collective;
  }

 private:
  // Places in tensors_ and counts_, which move while they grow.
  struct Span {
    uint32_t tensor = 0;
    uint32_t n_tensors = 0;
    uint32_t count = 0;
    uint32_t n_counts = 0;
  };
  struct Spans {
    Span in;
    Span out;
  };

  std::string where() const {
    return c10::str(op_.name, " on rank ", who_->rank, " of ", who_->size, " (group ", who_->group, "): ");
  }

  PodringSide side(const Span& span) const {
    return PodringSide{span.n_tensors != 0 ? tensors_.data() + span.tensor : nullptr, span.n_tensors,
                       span.n_counts != 0 ? counts_.data() + span.count : nullptr, span.n_counts};
  }

  Span add(at::TensorList tensors, device::Use use) {
    Span span;
    span.tensor = static_cast<uint32_t>(tensors_.size());
    span.n_tensors = static_cast<uint32_t>(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      check(tensor);
      if (!tensor.device().is_cpu()) {
        const device::Lent& lent = lent_.emplace_back(tensor, use, parts_.back().dtype);
        tensors_.push_back(use == device::Use::kRead ? lent.source() : lent.target());
        continue;
      }
      void* data = nullptr;
      if (tensor.numel() != 0) {
        // An input's memory is not written, so that a lazily copied tensor stays lazy.
        data = use == device::Use::kRead ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
      }
      tensors_.push_back(device::describe(tensor, data));
    }
    return span;
  }
  Span add(const PodringTensor& plain) {
    Span span;
    span.tensor = static_cast<uint32_t>(tensors_.size());
    span.n_tensors = 1;
    tensors_.push_back(plain);
    return span;
  }

  void check(const at::Tensor& tensor) {
    if (!tensor.defined()) refuse_type("expected a tensor, got an undefined one");
    if (tensor.layout() != at::kStrided) {
      refuse(PODRING_UNSUPPORTED, "expected a dense tensor, got one of layout ", tensor.layout());
    }
    if (!tensor.device().is_cpu() && !device::is_tpu(tensor.device())) {
      refuse(PODRING_UNSUPPORTED, "expected a tensor on cpu or tpu, got one on ", tensor.device());
    }
    if (!tensor.device().is_cpu() && tensor.device().index() > 0) {
      refuse(PODRING_INVALID, "expected a tensor on tpu:0, this process's one chip, got one on ", tensor.device());
    }
    if (!device_) device_ = tensor.device();
    if (tensor.device() != *device_) {
      refuse(PODRING_INVALID, "expected every tensor on ", *device_, " as the operation's first is, got one on ",
             tensor.device());
    }
    if (tensor.scalar_type() != dtype_) {
      refuse_type("expected dtype ", dtype_, " as the operation's other tensors have, got ", tensor.scalar_type());
    }
  }

  void cut_equally(Span& span, const at::Tensor& tensor, const at::Tensor& block) {
    const int64_t each = block.numel();
    if (tensor.numel() != each * who_->size) {
      refuse(PODRING_INVALID, "expected ", each * who_->size, " elements, ", who_->size, " times those of shape ",
             block.sizes(), ", got ", tensor.numel(), " of shape ", tensor.sizes());
    }
    span.count = static_cast<uint32_t>(counts_.size());
    span.n_counts = static_cast<uint32_t>(who_->size);
    counts_.append(static_cast<size_t>(who_->size), static_cast<uint64_t>(each));
  }

  void cut_rows(Span& span, const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) {
    if (tensor.dim() == 0) {
      refuse(PODRING_INVALID, "expected an ", what, " of at least one dimension, got a scalar");
    }
    const int64_t rows = tensor.size(0);
    const int64_t row = rows != 0 ? tensor.numel() / rows : 1;
    span.count = static_cast<uint32_t>(counts_.size());
    span.n_counts = static_cast<uint32_t>(who_->size);
    if (splits.empty()) {
      if (rows % who_->size != 0) {
        refuse(PODRING_INVALID, "dimension 0 of the ", what, " (", rows, ") does not divide equally across ",
               who_->size, " ranks");
      }
      counts_.append(static_cast<size_t>(who_->size), static_cast<uint64_t>(rows / who_->size * row));
      return;
    }
    if (splits.size() != static_cast<size_t>(who_->size)) {
      refuse(PODRING_INVALID, "expected ", who_->size, " ", what, " splits, one per rank, got ", splits.size());
    }
    int64_t sum = 0;
    for (const int64_t split : splits) {
      if (split < 0) refuse(PODRING_INVALID, "expected ", what, " splits of 0 or more rows, got ", split);
      sum += split;
      counts_.push_back(static_cast<uint64_t>(split * row));
    }
    if (sum != rows) {
      refuse(PODRING_INVALID, "the ", what, " splits sum to ", sum, " rows, dimension 0 of the ", what, " is ", rows);
    }
  }

  double factor_of(const c10d::ReduceOp& reduction) const {
    const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(reduction.supplement_.get());
    if (supplement == nullptr) refuse(PODRING_INVALID, "PREMUL_SUM needs a factor");
    if (!supplement->tensor_factor.defined()) return supplement->double_factor;
    if (supplement->tensor_factor.is_complex()) {
      refuse(PODRING_UNSUPPORTED, "PREMUL_SUM takes a real factor, got one of dtype ",
             supplement->tensor_factor.scalar_type());
    }
    return supplement->tensor_factor.item().toDouble();
  }

  const Identity* who_;
  Op op_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  std::optional<c10::Device> device_;
  LentTensors lent_;
  Tensors inputs_;
  Tensors outputs_;
  c10::SmallVector<PodringTensor, 4> tensors_;
  c10::SmallVector<uint64_t, 8> counts_;
  c10::SmallVector<PodringPart, 1> parts_;
  c10::SmallVector<Spans, 1> spans_;
};

}  // namespace podring
