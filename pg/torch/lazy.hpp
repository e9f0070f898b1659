// Lazily conjugated and negated tensors. torch's dispatcher hands an operator that does not say that it reads these
// bits a copy of such a tensor; of c10d's operators, which take their outputs in lists, the result then is in the copy
// and lost, with no error. The core reads and writes through the bits, so podring's groups get the tensor itself. Other
// groups' calls take torch's way.
#pragma once

#include <ATen/native/MathBitsFallback.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include "face.hpp"

namespace podring::lazy {

struct Conjugated final : at::native::MathOpFallback {
  static constexpr auto kKey = c10::DispatchKey::Conjugate;
  Conjugated() : MathOpFallback(kKey, "conjugate") {}
  bool is_bit_set(const at::Tensor& tensor) override { return tensor.is_conj(); }
};

struct Negated final : at::native::MathOpFallback {
  static constexpr auto kKey = c10::DispatchKey::Negative;
  Negated() : MathOpFallback(kKey, "negation") {}
  bool is_bit_set(const at::Tensor& tensor) override { return tensor.is_neg(); }
};

// Whether the call is of a group whose CPU tensors are podring's.
inline bool is_ours(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>();
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[stack.size() - arguments.size() + i];
    if (!value.isObject() || *value.type() != *type) continue;
    const auto group = value.toCustomClass<c10d::ProcessGroup>();
    if (!group->hasBackendForDeviceType(c10::kCPU)) return false;
    return dynamic_cast<TpuBackend*>(group->getBackend(c10::kCPU).get()) != nullptr;
  }
  return false;
}

template <class Bit>
void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (is_ours(op, *stack)) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, Bit::kKey), stack);
    return;
  }
  Bit().fallback_impl(op, keys, stack);
}

template <class Bit>
void register_all(torch::Library& library) {
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "gather_into_tensor_", "scatter_",
        "alltoall_", "alltoall_base_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call<Bit>>());
  }
}

TORCH_LIBRARY_IMPL(c10d, Conjugate, library) { register_all<Conjugated>(library); }
TORCH_LIBRARY_IMPL(c10d, Negative, library) { register_all<Negated>(library); }

}  // namespace podring::lazy
