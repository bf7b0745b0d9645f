// SPDX-License-Identifier: Apache-2.0
// What the strict backend (strict.cpp) shares with the device (standin.cpp).
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace standin {

// A result that is not there yet. Whoever waits for it on the device gets it delivered: copied to where it belongs.
struct Pending {
  std::mutex lock;
  std::condition_variable changed;
  bool finished = false;
  bool failed = false;
  std::function<void()> deliver;  // Emptied once it has run.

  void finish(bool has_failed) {
    std::lock_guard<std::mutex> guard(lock);
    if (finished) return;
    finished = true;
    failed = has_failed;
    if (failed) deliver = nullptr;
    changed.notify_all();
  }
  bool is_finished() {
    std::lock_guard<std::mutex> guard(lock);
    return finished;
  }
  bool is_settled() {
    std::unique_lock<std::mutex> guard(lock, std::try_to_lock);
    return guard && finished && !deliver;
  }
  void settle() {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [this] { return finished; });
    if (deliver) deliver();
    deliver = nullptr;
  }
};

using PendingPtr = std::shared_ptr<Pending>;

c10::Stream new_stream(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
// What is computed on the stream from now on comes after the result.
void order_after(c10::Stream stream, const PendingPtr& pending);
// Block until everything that the current stream was ordered after is there.
void settle_current(c10::DeviceIndex index);
// Count a moment at which the CPU waits for a device.
void host_waits(const char* what);

// Set by the strict backend, which knows Python: releases the GIL, if this thread holds it; takes it again.
extern void* (*leave_python)();
extern void (*enter_python)(void*);

struct OutsidePython {
  void* state = leave_python ? leave_python() : nullptr;
  ~OutsidePython() {
    if (state) enter_python(state);
  }
};

}  // namespace standin
