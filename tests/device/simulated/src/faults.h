// Faults that a test injects, each at every n-th occasion. `clear` ends them all.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

namespace simulated {

enum class Fault : size_t {
  forgotten_event_wait,   // a stream does not wait for an event, though it was told to
  forgotten_work_wait,    // Work.wait() makes no edge from the communicator's stream to the current one
  ignored_record_stream,  // memory is handed back though another stream, which said so, still uses it
  early_reuse,            // memory freed on one stream is given to another one, which does not wait
  early_collective,       // a communicator does not wait until the current stream has written its input
  unsynchronized_read,    // item() and copies to the host do not wait for the device
  failed_communicator,    // the communicator gives up, as after a failure of a link or a peer
  count,
};

inline const std::array<const char*, static_cast<size_t>(Fault::count)> kFaultNames = {
    "forgotten_event_wait", "forgotten_work_wait", "ignored_record_stream", "early_reuse",
    "early_collective",     "unsynchronized_read", "failed_communicator",
};

class Faults {
 public:
  void set(const std::string& name, uint64_t every) {
    std::lock_guard<std::mutex> guard(lock_);
    for (size_t fault = 0; fault < kFaultNames.size(); ++fault) {
      if (name != kFaultNames[fault]) continue;
      every_[fault] = every;
      occasions_[fault] = 0;
      return;
    }
    throw std::invalid_argument("there is no fault named " + name);
  }

  void clear() {
    std::lock_guard<std::mutex> guard(lock_);
    every_.fill(0);
  }

  // Whether the fault happens now. Asked once at each occasion.
  bool strikes(Fault fault) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto index = static_cast<size_t>(fault);
    return every_[index] != 0 && ++occasions_[index] % every_[index] == 0;
  }

 private:
  std::mutex lock_;
  std::array<uint64_t, static_cast<size_t>(Fault::count)> every_{}, occasions_{};
};

}  // namespace simulated
