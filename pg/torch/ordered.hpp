// A store for torch_tpu's own process group, in which each message between two ranks finds its own receive.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store.hpp"

namespace podring {

// A receive of torch_tpu's process group (0.2.0) writes where it can be found to a key of the store, the same one for
// all messages of a sender and a tag, and a send reads it there: the last receive's, if the sender is ahead. Here each
// such key is a row of keys, written and read in order. One rank writes it and one reads it, so both know the place.
//
// It is a prefix store because that group looks for the store below its own to agree with other groups' ranks.
class OrderedStore final : public c10d::PrefixStore {
  // How far each row has come, on one of its two sides.
  class Places {
   public:
    // Where the next values of these keys go, or come from; keys that are no rows are themselves.
    std::vector<std::string> take(std::vector<std::string> keys) { return places(std::move(keys), 1); }
    // The same without going on.
    std::vector<std::string> next(std::vector<std::string> keys) { return places(std::move(keys), 0); }

   private:
    std::vector<std::string> places(std::vector<std::string> keys, uint64_t step) {
      const std::lock_guard<std::mutex> lock(guard_);
      for (std::string& key : keys) {
        if (key.find("cross_host_transfer_descriptor:") == std::string::npos) continue;
        uint64_t& last = last_[key];
        const uint64_t place = last + 1;
        last += step;
        key += "/" + std::to_string(place);
      }
      return keys;
    }

    std::mutex guard_;
    std::unordered_map<std::string, uint64_t> last_;
  };

  struct Rows {
    Places written;
    Places read;
  };

 public:
  // `store` itself if it has no prefix.
  static c10::intrusive_ptr<c10d::Store> over(const c10::intrusive_ptr<c10d::Store>& store) {
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
    if (prefixed == nullptr) return store;
    return c10::make_intrusive<OrderedStore>(prefix_of(*prefixed), prefixed->getUnderlyingStore());
  }

  OrderedStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Rows> rows = {})
      : PrefixStore(std::move(prefix), std::move(store)), rows_(rows ? std::move(rows) : std::make_shared<Rows>()) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<OrderedStore>(prefix_, store_->clone(), rows_);
  }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    PrefixStore::set(rows_->written.take({key}).front(), value);
  }

  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override {
    PrefixStore::multiSet(rows_->written.take(keys), values);
  }

  std::vector<uint8_t> get(const std::string& key) override {
    const auto here = rows_->read.take({key});
    auto value = PrefixStore::get(here.front());
    forget({key}, here);
    return value;
  }

  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    const auto here = rows_->read.take(keys);
    auto values = PrefixStore::multiGet(here);
    forget(keys, here);
    return values;
  }

  bool check(const std::vector<std::string>& keys) override { return PrefixStore::check(rows_->read.next(keys)); }
  void wait(const std::vector<std::string>& keys) override { PrefixStore::wait(rows_->read.next(keys)); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    PrefixStore::wait(rows_->read.next(keys), timeout);
  }

 private:
  void forget(const std::vector<std::string>& keys, const std::vector<std::string>& here) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (here[i] != keys[i]) deleteKey(here[i]);
    }
  }

  std::shared_ptr<Rows> rows_;
};

}  // namespace podring
