// The coordinator's key-value store as a c10d store.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "core.hpp"

namespace podring {

// So many of a call's keys or values.
template <class T>
struct Some {
  const T* data = nullptr;
  size_t size = 0;
};

// What a call of the store gives.
struct StoreAnswer {
  int64_t number = 0;
  std::vector<std::vector<uint8_t>> values;
  bool too_large = false;
};

// Any number of threads may use one: a call that waits holds no other up. Clones share its connections, and the
// coordinator if it is this process's: that ends with the last of them.
class RendezvousStore final : public c10d::Store {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Bytes = std::vector<uint8_t>;

  RendezvousStore(PodringKv* kv, std::string host, const Milliseconds& timeout)
      : Store(timeout), kv_(kv), host_(std::move(host)) {}
  RendezvousStore(const RendezvousStore&) = delete;
  RendezvousStore& operator=(const RendezvousStore&) = delete;
  ~RendezvousStore() override {
    const LockReleased unlocked;
    core->kv_free(kv_);
  }

  // As what Python has. `serve`: 0 no, 1 at the endpoint, 2 there or use whoever listens.
  static c10::intrusive_ptr<RendezvousStore> open(const std::string& host, uint32_t port, double timeout,
                                                  uint32_t serve, bool insecure, const std::string& token,
                                                  const std::string& token_file, const std::string& tls_ca,
                                                  const std::string& tls_cert, const std::string& tls_key,
                                                  const std::string& server_name, const std::string& state_dir) {
    if (core->size < offsetof(PodringCore, kv_call) + sizeof(core->kv_call) || core->kv_open == nullptr) {
      raise(PODRING_UNSUPPORTED,
            c10::str("podring's core ", core->version, " has no store: install both of one build"));
    }
    const bool literal = host.find(':') != std::string::npos && host.front() != '[';
    const std::string endpoint = c10::str(literal ? "[" : "", host, literal ? "]:" : ":", port);
    const Milliseconds limit(std::llround(timeout * 1000.0));
    Interrupt interrupt;
    PodringKvConfig config{};
    config.endpoint = endpoint.c_str();
    config.serve = serve;
    config.flags = insecure ? PODRING_KV_INSECURE : 0;
    config.token = token.c_str();
    config.token_file = token_file.c_str();
    config.tls_ca = tls_ca.c_str();
    config.tls_cert = tls_cert.c_str();
    config.tls_key = tls_key.c_str();
    config.server_name = server_name.c_str();
    config.state_dir = state_dir.c_str();
    config.timeout_ms = limit.count();
    config.interrupted = &Interrupt::asked;
    config.interrupted_ctx = &interrupt;
    Error error;
    PodringKv* kv = nullptr;
    int32_t status = PODRING_OK;
    {
      const LockReleased unlocked;
      status = core->kv_open(&config, &kv, &error);
    }
    interrupt.check(status, error);
    return c10::make_intrusive<RendezvousStore>(kv, host, limit);
  }

  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<RendezvousStore>(core->kv_clone(kv_), host_, timeout_);
  }

  using Store::compareSet;
  using Store::set;

  void set(const std::string& key, const Bytes& value) override { call(PODRING_KV_SET, {&key, 1}, {&value, 1}); }

  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    const Bytes values[] = {expected, desired};
    return one(call(PODRING_KV_COMPARE_SET, {&key, 1}, {values, 2}));
  }

  Bytes get(const std::string& key) override { return one(call(PODRING_KV_GET, {&key, 1})); }

  int64_t add(const std::string& key, int64_t value) override {
    return call(PODRING_KV_ADD, {&key, 1}, {}, value).number;
  }

  bool deleteKey(const std::string& key) override { return call(PODRING_KV_DELETE, {&key, 1}).number != 0; }

  bool check(const std::vector<std::string>& keys) override {
    return call(PODRING_KV_CHECK, {keys.data(), keys.size()}).number != 0;
  }

  int64_t getNumKeys() override { return call(PODRING_KV_NUM_KEYS).number; }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }

  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout) override {
    call(PODRING_KV_WAIT, {keys.data(), keys.size()}, {}, 0, timeout);
  }

  void append(const std::string& key, const Bytes& value) override { call(PODRING_KV_APPEND, {&key, 1}, {&value, 1}); }

  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    return std::move(call(PODRING_KV_MULTI_GET, {keys.data(), keys.size()}).values);
  }

  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    if (keys.size() != values.size()) {
      raise(PODRING_INVALID,
            c10::str("multi_set: expected as many values as keys, ", keys.size(), ", got ", values.size()));
    }
    call(PODRING_KV_MULTI_SET, {keys.data(), keys.size()}, {values.data(), values.size()});
  }

  bool hasExtendedApi() const override { return true; }

  void queuePush(const std::string& key, const Bytes& value) override {
    call(PODRING_KV_QUEUE_PUSH, {&key, 1}, {&value, 1});
  }

  Bytes queuePop(const std::string& key, bool block) override {
    return one(call(PODRING_KV_QUEUE_POP, {&key, 1}, {}, block ? 1 : 0));
  }

  int64_t queueLen(const std::string& key) override { return call(PODRING_KV_QUEUE_LEN, {&key, 1}).number; }

  std::vector<std::string> listKeys() override {
    std::vector<std::string> keys;
    for (const Bytes& key : call(PODRING_KV_LIST_KEYS).values) keys.emplace_back(key.begin(), key.end());
    return keys;
  }

  const std::string& host() const { return host_; }
  PodringKvInfo info() const {
    PodringKvInfo info{};
    core->kv_info(kv_, &info);
    return info;
  }

  static void add_to(pybind11::module_& m) {
    namespace py = pybind11;
    py::class_<RendezvousStore, c10::intrusive_ptr<RendezvousStore>, c10d::Store>(m, "Store")
        .def_property_readonly("host", &RendezvousStore::host)
        .def_property_readonly("port", [](const RendezvousStore& store) { return store.info().port; })
        .def_property_readonly(
            "instance", [](const RendezvousStore& store) { return store.info().instance; },
            "Names the life of the coordinator's store.")
        .def_property_readonly(
            "serves", [](const RendezvousStore& store) { return store.info().serves != 0; },
            "Whether the coordinator is this process's.");
    m.def("store", &RendezvousStore::open, py::arg("host"), py::arg("port"), py::arg("timeout"), py::arg("serve"),
          py::arg("insecure"), py::arg("token"), py::arg("token_file"), py::arg("tls_ca"), py::arg("tls_cert"),
          py::arg("tls_key"), py::arg("server_name"), py::arg("state_dir"), "A client of a coordinator's store.");
  }

 private:
  static Bytes one(StoreAnswer answer) {
    if (answer.values.empty()) raise(PODRING_INTERNAL, "podring's store gave no value");
    return std::move(answer.values.front());
  }

  StoreAnswer call(PodringKvOp op, Some<std::string> keys = {}, Some<Bytes> values = {}, int64_t number = 0) {
    return call(op, keys, values, number, timeout_);
  }

  StoreAnswer call(PodringKvOp op, Some<std::string> keys, Some<Bytes> values, int64_t number, Milliseconds timeout) {
    Views key_views(keys);
    Views value_views(values);
    StoreAnswer answer;
    Interrupt interrupt;
    PodringKvCall call{};
    call.op = op;
    call.n_keys = static_cast<uint32_t>(keys.size);
    call.n_values = static_cast<uint32_t>(values.size);
    call.keys = key_views.data();
    call.values = value_views.data();
    call.number = number;
    call.timeout_ms = timeout.count();
    call.patience_ms = timeout.count();
    call.interrupted = &Interrupt::asked;
    call.interrupted_ctx = &interrupt;
    call.sink = [](void* into, const uint8_t* data, size_t len) {
      auto* answer = static_cast<StoreAnswer*>(into);
      try {
        answer->values.emplace_back(data, data + len);
      } catch (const std::exception&) {
        answer->too_large = true;
      }
    };
    call.sink_ctx = &answer;
    Error error;
    int32_t status = PODRING_OK;
    {
      const LockReleased unlocked;
      status = core->kv_call(kv_, &call, &answer.number, &error);
    }
    interrupt.check(status, error);
    if (answer.too_large) raise(PODRING_STORE, "no memory for the store's answer");
    return answer;
  }

  // Strings or byte vectors as the core takes them; most calls have one or two.
  class Views {
   public:
    template <class T>
    explicit Views(const Some<T>& some) {
      PodringBytes* into = few_;
      if (some.size > 2) {
        many_.resize(some.size);
        into = many_.data();
      }
      for (size_t i = 0; i < some.size; ++i) {
        into[i] = {reinterpret_cast<const uint8_t*>(some.data[i].data()), some.data[i].size()};
      }
    }
    const PodringBytes* data() const { return many_.empty() ? few_ : many_.data(); }

   private:
    PodringBytes few_[2]{};
    std::vector<PodringBytes> many_;
  };

  PodringKv* kv_;
  const std::string host_;
};

}  // namespace podring
