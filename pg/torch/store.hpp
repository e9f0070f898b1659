// The launcher's store, as the core asks for it.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core.hpp"

namespace podring {

// The prefix of a store, which c10d keeps to itself.
inline const std::string& prefix_of(const c10d::PrefixStore& store) {
  struct Peek : c10d::PrefixStore {
    static const std::string& prefix(const c10d::PrefixStore& store) { return store.*(&Peek::prefix_); }
  };
  return Peek::prefix(store);
}

// Connections of podring's own to users' stores, so that later a blocking call of the user's on the same client can't
// hold ours up. One connection per store and process: a thousand groups must not add a thousand sockets.
class StoreConnections {
 public:
  using Weak = c10::weak_intrusive_ptr<c10d::Store>;

  // Of a store that still is in use.
  static c10::intrusive_ptr<c10d::Store> to(const c10::intrusive_ptr<c10d::Store>& base) {
    // Never destroyed: a store's destructor may not run after the interpreter's end.
    static auto& guard = *new std::mutex;
    static auto& known = *new std::vector<std::pair<Weak, Weak>>;
    const std::lock_guard<std::mutex> lock(guard);
    for (auto entry = known.begin(); entry != known.end();) {
      auto original = entry->first.lock();
      auto connection = entry->second.lock();
      if (!original || !connection) {
        entry = known.erase(entry);
      } else if (original == base) {
        return connection;
      } else {
        ++entry;
      }
    }
    c10::intrusive_ptr<c10d::Store> connection;
    try {
      connection = base->clone();
    } catch (const std::exception&) {
      return base;  // a store that can't be cloned (one written in Python, say) is shared with the user
    }
    if (!connection) return base;
    known.emplace_back(Weak(base), Weak(connection));
    return connection;
  }
};

class StoreAdapter {
 public:
  // The core releases it, also if the group can't be formed.
  static PodringStore make(const c10::intrusive_ptr<c10d::Store>& store) {
    return PodringStore{new StoreAdapter(store), &set, &get, &check, &add, &release};
  }

  // While a thread has one, it forms a group with this store: inside of the user's own call, which has used the store
  // just before. What a connection more costs, milliseconds where names are looked up, is saved there: most groups
  // never use the store again.
  class Forming {
   public:
    explicit Forming(c10d::Store& store) { given() = &store; }
    ~Forming() { given() = nullptr; }
    Forming(const Forming&) = delete;
    Forming& operator=(const Forming&) = delete;
  };

 private:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : base_(store) {
    while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
      prefixes_.push_back(prefix_of(*prefixed));
      store = prefixed->getUnderlyingStore();
    }
    base_ = StoreConnections::Weak(store);
  }

  static c10d::Store*& given() {
    static thread_local c10d::Store* here = nullptr;
    return here;
  }

  // The core makes one call at a time.
  c10d::Store& store() {
    if (given() != nullptr) return *given();
    if (!own_) {
      auto base = base_.lock();
      TORCH_CHECK(base, "the launcher's store is gone");
      own_ = StoreConnections::to(base);
      for (auto prefix = prefixes_.rbegin(); prefix != prefixes_.rend(); ++prefix) {
        own_ = c10::make_intrusive<c10d::PrefixStore>(*prefix, std::move(own_));
      }
    }
    return *own_;
  }

  static void explain(char* why, size_t size, const char* text) noexcept {
    if (size == 0) return;
    const size_t length = std::min(std::strlen(text), size - 1);
    std::memcpy(why, text, length);
    why[length] = '\0';
  }

  template <class Call>
  static int32_t guarded(void* ctx, char* why, size_t why_size, Call call) noexcept {
    if (!ExitGate::enter()) {
      explain(why, why_size, "the interpreter is ending");
      return 1;
    }
    int32_t failed = 1;
    try {
      call(static_cast<StoreAdapter*>(ctx)->store());
      failed = 0;
    } catch (const c10::Error& error) {
      explain(why, why_size, error.what_without_backtrace());
    } catch (const std::exception& error) {
      explain(why, why_size, error.what());
    } catch (...) {
      explain(why, why_size, "the store threw something that is no exception");
    }
    ExitGate::leave();
    return failed;
  }

  static int32_t set(void* ctx, const char* key, const uint8_t* value, size_t len, char* why, size_t why_size) {
    return guarded(ctx, why, why_size,
                   [&](c10d::Store& store) { store.set(key, std::vector<uint8_t>(value, value + len)); });
  }

  static int32_t get(void* ctx, const char* key, void (*sink)(void*, const uint8_t*, size_t), void* sink_ctx, char* why,
                     size_t why_size) {
    return guarded(ctx, why, why_size, [&](c10d::Store& store) {
      const std::vector<uint8_t> value = store.get(key);
      sink(sink_ctx, value.data(), value.size());
    });
  }

  static int32_t check(void* ctx, const char* const* keys, size_t n, int32_t* present, char* why, size_t why_size) {
    return guarded(ctx, why, why_size, [&](c10d::Store& store) {
      *present = store.check(std::vector<std::string>(keys, keys + n)) ? 1 : 0;
    });
  }

  static int32_t add(void* ctx, const char* key, int64_t amount, int64_t* value, char* why, size_t why_size) {
    return guarded(ctx, why, why_size, [&](c10d::Store& store) { *value = store.add(key, amount); });
  }

  static void release(void* ctx) {
    if (!ExitGate::enter()) return;  // left to the end of the process
    delete static_cast<StoreAdapter*>(ctx);
    ExitGate::leave();
  }

  // The outermost first.
  std::vector<std::string> prefixes_;
  // Whoever has the group has its store too, and no longer than wanted: rank 0's may be the one that serves.
  StoreConnections::Weak base_;
  c10::intrusive_ptr<c10d::Store> own_;
};

}  // namespace podring
