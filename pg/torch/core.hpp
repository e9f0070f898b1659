// What every part of the face needs of the core: its table, its errors as torch's exceptions, and the manners of
// waiting and of being called from the core's threads while an interpreter is around.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "podring.h"

namespace podring {

// The core's table, set once when the module is loaded.
inline const PodringCore* core = nullptr;

// An error as the core gives it, released with the scope.
class Error {
 public:
  Error() = default;
  Error(const Error&) = delete;
  Error& operator=(const Error&) = delete;
  ~Error() {
    if (raw_.message != nullptr) core->error_free(&raw_);
  }

  PodringError* operator&() { return &raw_; }  // NOLINT(google-runtime-operator): it stands where the C struct would.
  const char* message() const { return raw_.message != nullptr ? raw_.message : "the core gave no reason"; }

 private:
  PodringError raw_{};
};

// The one place where the core's kinds of error become torch's.
template <class Use>
auto with_exception(int32_t status, std::string message, Use use) {
  const c10::SourceLocation here{"podring", __FILE__, static_cast<uint32_t>(__LINE__)};
  switch (status) {
    case PODRING_INVALID:
      return use(c10::ValueError(here, std::move(message)));
    case PODRING_UNSUPPORTED:
      return use(c10::NotImplementedError(here, std::move(message)));
    case PODRING_STORE:
      return use(c10::DistStoreError(here, std::move(message)));
    case PODRING_NETWORK:
      return use(c10::DistNetworkError(here, std::move(message)));
    case PODRING_QUEUE_EMPTY:
      return use(c10::DistQueueEmptyError(here, std::move(message)));
    default:  // timeout, peer lost, mismatch, aborted, internal, and what a newer core may add
      return use(c10::DistBackendError(here, std::move(message)));
  }
}

[[noreturn]] inline void raise(int32_t status, std::string message) {
  with_exception(status, std::move(message), [](auto&& error) { throw std::forward<decltype(error)>(error); });
  std::terminate();  // not reached: every branch throws
}

inline std::exception_ptr as_exception(int32_t status, std::string message) {
  return with_exception(status, std::move(message),
                        [](auto&& error) { return std::make_exception_ptr(std::forward<decltype(error)>(error)); });
}

inline bool on_main_thread() noexcept { return gettid() == getpid(); }

// Gives up the interpreter lock for the scope if this thread holds it.
class LockReleased {
 public:
  LockReleased() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) saved_ = PyEval_SaveThread();
  }
  LockReleased(const LockReleased&) = delete;
  LockReleased& operator=(const LockReleased&) = delete;
  ~LockReleased() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_ = nullptr;
};

// Lets Ctrl-C end a wait. Only the main thread runs Python's signal handlers, so no other asks for the interpreter
// lock.
class Interrupt {
 public:
  static int32_t asked(void* self) noexcept {
    if (!on_main_thread() || Py_IsInitialized() == 0) return 0;
    const PyGILState_STATE state = PyGILState_Ensure();
    int32_t interrupted = 0;
    if (PyErr_CheckSignals() != 0) {
      interrupted = 1;
      try {
        static_cast<Interrupt*>(self)->pending_ = std::make_exception_ptr(pybind11::error_already_set());
      } catch (...) {
        static_cast<Interrupt*>(self)->pending_ = std::current_exception();
      }
    }
    PyGILState_Release(state);
    return interrupted;
  }

  // Throws what `status` says; an interruption as the Python exception that the signal handler raised.
  void check(int32_t status, const Error& error) const {
    if (status == PODRING_OK) return;
    if (status == PODRING_INTERRUPTED && pending_) std::rethrow_exception(pending_);
    raise(status, error.message());
  }

 private:
  std::exception_ptr pending_;
};

// A thread of the core that wants the interpreter's lock after the interpreter has ended is killed by CPython, and the
// process with it. So the core's threads pass this gate before they touch what may need the lock (a tensor's last
// reference, a store written in Python), and the gate closes before the interpreter ends.
class ExitGate {
 public:
  // Entered only if true; then leave() must follow. Always open to the main thread, which is the one that ends the
  // interpreter.
  static bool enter() noexcept {
    inside_.fetch_add(1);
    if (!closed_.load() || on_main_thread()) return true;
    inside_.fetch_sub(1);
    return false;
  }
  static void leave() noexcept { inside_.fetch_sub(1); }

  // Lets nobody in any more and waits for those inside. False if some still are when the time is over.
  static bool close(std::chrono::milliseconds timeout) {
    closed_.store(true);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (inside_.load() != 0) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  // A forked child has none of the threads that may have been inside.
  static void follow_forks() {
    pthread_atfork(nullptr, nullptr, [] { inside_.store(0); });
  }

 private:
  inline static std::atomic<int64_t> inside_{0};
  inline static std::atomic<bool> closed_{false};
};

}  // namespace podring
