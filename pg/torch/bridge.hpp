// From a tensor of torch_tpu's to the PJRT buffer that it is a handle of, and back, through functions that torch_tpu
// exports by name. Nothing is linked: what is missing, or of a build whose objects are laid out otherwise than those
// seen, leaves the staged road, and one warning that says so.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core.hpp"

namespace podring::device {

// Memory for results, which become the memory of tensors and come back when these are gone. Warm: a fresh allocation of
// tens of megabytes costs as much as the collective.
class Pool {
 public:
  static constexpr size_t kAlignment = 64;  // XLA's for buffers on a CPU
  static constexpr size_t kKept = size_t{256} << 20;

  static void* take(size_t bytes) {
    bytes = rounded(bytes);
    {
      const std::lock_guard<std::mutex> lock(mutex());
      auto& list = free_lists()[bytes];
      if (!list.empty()) {
        void* memory = list.back();
        list.pop_back();
        kept() -= bytes;
        return memory;
      }
    }
    // Twice the alignment: in front lies the size, for whoever gives it back.
    void* memory = std::aligned_alloc(kAlignment, bytes + kAlignment);
    if (memory == nullptr) throw std::bad_alloc();
    *static_cast<size_t*>(memory) = bytes;
    return static_cast<char*>(memory) + kAlignment;
  }

  // Also what the core calls when a buffer over pooled memory is deleted.
  static void give(void* memory, void* = nullptr) noexcept {
    void* whole = static_cast<char*>(memory) - kAlignment;
    const size_t bytes = *static_cast<size_t*>(whole);
    try {
      const std::lock_guard<std::mutex> lock(mutex());
      if (kept() + bytes <= kKept) {
        free_lists()[bytes].push_back(memory);
        kept() += bytes;
        return;
      }
    } catch (...) {
      // No room to note it down: then it is freed.
    }
    std::free(whole);
  }

 private:
  // Size classes of at most an eighth more than asked for, so that unequal sizes share memory.
  static size_t rounded(size_t bytes) {
    size_t step = kAlignment;
    while (step * 16 < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
  }
  // Never destroyed: buffers may be deleted after the program's own end.
  static std::mutex& mutex() {
    static auto* const one = new std::mutex;
    return *one;
  }
  static std::map<size_t, std::vector<void*>>& free_lists() {
    static auto* const one = new std::map<size_t, std::vector<void*>>;
    return *one;
  }
  static size_t& kept() {
    static size_t bytes = 0;
    return bytes;
  }
};

class Bridge {
 public:
  // What torch_tpu says of its version, before the first collective.
  static std::string& version() {
    static std::string known;
    return known;
  }

  // Null if tensors have to be staged through the host. The client exists: `tensor` has a value on the device.
  static const Bridge* get(const at::Tensor& tensor) {
    static const Bridge* const one = connect(tensor);
    return one;
  }

  // A tensor's base buffer, held until the end of this object: a view's is that of the tensor it is a view of.
  class Buffer {
   public:
    Buffer(const Bridge& bridge, const at::Tensor& tensor) : bridge_(&bridge) {
      bridge.get_base_(&handle_, &tensor);
      expect(handle_.status, "GetBaseTensorBuffer");
    }
    Buffer(Buffer&& other) noexcept : bridge_(other.bridge_), handle_(std::exchange(other.handle_, StatusOr{})) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() {
      if (handle_.status == kOk) bridge_->destroy_(&handle_.value);
    }

    // torch_tpu's object for the buffer, once it has a value.
    void* wait() {
      uintptr_t done = 0;
      bridge_->materialize_(&done, &handle_.value);
      expect(done, "Materialize");
      StatusOr buffer;
      bridge_->await_(&buffer, &handle_.value);
      expect(buffer.status, "AwaitBuffer");
      return buffer.value;
    }

   private:
    friend class Bridge;
    const Bridge* bridge_;
    struct StatusOr {
      uintptr_t status = 0;
      void* value = nullptr;
    } handle_;
  };

  // Where the elements of a buffer lie; false if that can't be said, which is no error.
  bool memory(void* torch_tpu_buffer, PodringMemory* memory) const {
    Error error;
    return core->device_memory(at<void*>(torch_tpu_buffer, build_->buffer), memory, &error) == PODRING_OK;
  }

  // A tensor over pooled memory.
  at::Tensor adopt(void* memory, at::IntArrayRef sizes, uint8_t dtype) const {
    Error error;
    void* buffer = nullptr;
    const int32_t status = core->device_adopt(
        memory, sizes.data(), sizes.size(), dtype, [](void* data, void*) { Pool::give(data); }, nullptr, &buffer,
        &error);
    if (status != PODRING_OK) raise(status, error.message());
    void* object = ::operator new(build_->buffer_bytes);
    construct_(object, client_, buffer);
    Buffer::StatusOr handle;
    make_(&handle, &object);  // takes the object
    expect(handle.status, "MakeTensorBuffer");
    Buffer::StatusOr tensor;
    to_tensor_(&tensor, &handle.value);
    destroy_(&handle.value);
    expect(tensor.status, "ToTensor");
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
        static_cast<c10::TensorImpl*>(tensor.value)));
  }

 private:
  static constexpr uintptr_t kOk = 1;  // an absl::Status that holds no error

  // Functions that return objects take the place for it first.
  using Function = void* (*)(void*, const void*);
  using Construct = void (*)(void*, void*, void*);
  using Destroy = void (*)(void*);

  // How a build of torch_tpu lays out xla::PjRtCApiBuffer and xla::PjRtCApiClient. Found by reading; connect() checks
  // them against pointers that are known.
  struct Build {
    const char* torch_tpu;
    size_t buffer_bytes;   // sizeof(PjRtCApiBuffer)
    size_t buffer_client;  // its PjRtCApiClient*
    size_t buffer;         // its PJRT_Buffer*
    size_t client;         // in PjRtCApiClient, its PJRT_Client*
  };
  static constexpr Build kBuilds[] = {{"0.2.0", 520, 8, 48, 56}};

  static void expect(uintptr_t status, const char* what) {
    if (status != kOk) raise(PODRING_INTERNAL, c10::str("torch_tpu's ", what, " failed for a tensor of a collective"));
  }

  template <class T>
  static T at(const void* object, size_t offset) {
    return *reinterpret_cast<T const*>(static_cast<const char*>(object) + offset);
  }

  // The loaded library of torch_tpu's whose name starts and ends like this.
  static void* library(const char* prefix, const char* suffix) {
    struct Search {
      std::string prefix, suffix, found;
    } search{std::string("/torch_tpu/"), suffix, {}};
    const std::string name = prefix;
    std::pair<Search*, const std::string*> both{&search, &name};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* raw) {
          auto [wanted, start] = *static_cast<std::pair<Search*, const std::string*>*>(raw);
          const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
          const size_t slash = path.rfind('/');
          if (slash == std::string::npos || path.find(wanted->prefix) == std::string::npos) return 0;
          const std::string file = path.substr(slash + 1);
          if (file.rfind(*start, 0) != 0 || file.size() < wanted->suffix.size() ||
              file.compare(file.size() - wanted->suffix.size(), std::string::npos, wanted->suffix) != 0) {
            return 0;
          }
          wanted->found = path;
          return 1;
        },
        &both);
    return search.found.empty() ? nullptr : dlopen(search.found.c_str(), RTLD_NOW | RTLD_NOLOAD);
  }

  static const Bridge* connect(const at::Tensor& tensor) {
    auto* bridge = new Bridge;
    const std::string missing = bridge->try_connect(tensor);
    if (missing.empty()) return bridge;
    delete bridge;
    TORCH_WARN("podring stages tpu tensors through host memory, since ", missing,
               ". Every collective copies its tensors twice: a 64 MiB all_reduce takes some 80 ms longer.");
    return nullptr;
  }

  // What is missing; empty if nothing is.
  std::string try_connect(const at::Tensor& tensor) {
    if (core->size < offsetof(PodringCore, device_adopt) + sizeof(core->device_adopt)) {
      return "podring's core is older than its face";
    }
    void* const client = core->device_client();
    if (client == nullptr) return "its chip's memory is not this process's";
    for (const Build& build : kBuilds) {
      if (version() == build.torch_tpu) build_ = &build;
    }
    if (build_ == nullptr) return "torch_tpu " + version() + " is not a version whose buffers are known (0.2.0)";
    void* const glue = library("libpywrap_", "_common.so");
    void* const xla = library("libxla_base", ".so");
    if (glue == nullptr || xla == nullptr) return "torch_tpu's libraries are not loaded";
    const struct {
      void* library;
      const char* symbol;
      void** place;
    } symbols[] = {
        {glue, "_ZN9torch_tpu19GetBaseTensorBufferERKN2at6TensorE", reinterpret_cast<void**>(&get_base_)},
        {glue, "_ZN9torch_tpu18TensorBufferHandle11MaterializeEv", reinterpret_cast<void**>(&materialize_)},
        {glue, "_ZN9torch_tpu18TensorBufferHandle11AwaitBufferEv", reinterpret_cast<void**>(&await_)},
        {glue, "_ZN9torch_tpu16MakeTensorBufferESt10unique_ptrIN3xla10PjRtBufferESt14default_deleteIS2_EE",
         reinterpret_cast<void**>(&make_)},
        {glue, "_ZNK9torch_tpu18TensorBufferHandle8ToTensorEv", reinterpret_cast<void**>(&to_tensor_)},
        {glue, "_ZN9torch_tpu18TensorBufferHandleD1Ev", reinterpret_cast<void**>(&destroy_)},
        {xla, "_ZN3xla14PjRtCApiBufferC1EPNS_14PjRtCApiClientEP11PJRT_Buffer", reinterpret_cast<void**>(&construct_)},
    };
    for (const auto& one : symbols) {
      *one.place = dlsym(one.library, one.symbol);
      if (*one.place == nullptr) return c10::str("torch_tpu does not export ", one.symbol);
    }
    // Is this object what it is taken for? Its class by its table of virtual functions, its client by the address that
    // the plugin knows.
    Buffer buffer(*this, tensor);
    const void* const object = buffer.wait();
    const auto* const table = static_cast<const char*>(dlsym(xla, "_ZTVN3xla14PjRtCApiBufferE"));
    if (table == nullptr || at<const char*>(object, 0) != table + 2 * sizeof(void*)) {
      return "torch_tpu's buffers are of another class than those known";
    }
    client_ = at<void*>(object, build_->buffer_client);
    if (client_ == nullptr || at<void*>(client_, build_->client) != client) {
      return "torch_tpu's buffers are laid out otherwise than those known";
    }
    return {};
  }

  const Build* build_ = nullptr;
  void* client_ = nullptr;
  Function get_base_ = nullptr;
  Function materialize_ = nullptr;
  Function await_ = nullptr;
  Function make_ = nullptr;
  Function to_tensor_ = nullptr;
  Construct construct_ = nullptr;
  Destroy destroy_ = nullptr;
};

}  // namespace podring::device
