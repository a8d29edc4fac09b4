// Streams, events, and what the host knows of them.
//
// A stream is a thread that runs tasks in their order. The host enqueues and goes on. An event is a place in a stream;
// another stream waits for it by a task that blocks its thread, the host by blocking itself.
//
// The host is one clock, though it may be several threads: autograd's device threads run while the thread that called
// `backward` waits for them. A race between two threads of the host itself is not found.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "faults.h"
#include "races.h"

namespace simulated {

using Counts = std::map<std::string, uint64_t>;

struct Task {
  uint64_t number;
  std::string label;
  bool is_work;  // it can be slow: not an event, a wait, or the allocator's
  std::function<void()> run;
};

class DeviceStream {
 public:
  DeviceStream(size_t id, int device, std::string name);

  void push(Task task);
  bool has_done(uint64_t task) const;
  void wait(uint64_t task) const;
  bool wait(uint64_t task, double seconds) const;
  std::string standing() const;  // what it does now, for a report of a deadlock

  const size_t id;
  const int device;
  // The runtime's lock guards these three.
  std::string name;
  Clock clock;
  uint64_t num_enqueued = 0;

  std::atomic<int> delay_us{0};

 private:
  void run();

  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t num_done_ = 0;
  std::string running_;
  std::mt19937 random_;
};

struct Event {
  DeviceStream* stream;
  uint64_t task;
  Clock clock;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};
using EventPtr = std::shared_ptr<Event>;

enum class Tasks { work, bookkeeping };

// All state of the process. Never destroyed: its threads run until the process ends.
class Runtime {
 public:
  static Runtime& get();

  // --- streams
  DeviceStream& default_stream(int device);
  DeviceStream& stream(size_t id);
  DeviceStream& add_stream(int device, const std::string& name = "");
  void rename(size_t id, const std::string& name);
  std::vector<DeviceStream*> streams();
  // From now on every task of streams with `part` in their names comes between 0 and 2 `delay_us` late.
  void set_delay(const std::string& part, int delay_us);

  // --- work
  uint64_t enqueue(DeviceStream& stream, const std::string& operation, const Accesses& accesses,
                   std::function<void()> run, Tasks kind = Tasks::work);
  EventPtr record(DeviceStream& stream, bool is_counted = true);
  void wait_event(DeviceStream& stream, const EventPtr& event);  // unless a fault forgets it
  void add_edge(DeviceStream& stream, const EventPtr& event);
  void add_error(const std::string& text);

  // --- the host
  void synchronize(const EventPtr& event, const std::string& why);
  void synchronize(DeviceStream& stream, const std::string& why);
  bool query(const EventPtr& event);
  void wait_for_read(DeviceStream& stream, const Range& range, const std::string& why);

  // --- what is told to tests
  void clear();
  Counts launches();
  Counts syncs();
  Counts events();
  std::vector<std::string> found_races();
  std::vector<std::string> errors();
  std::string standing();

  const int num_devices;
  Faults faults;
  std::atomic<bool> raises_on_race{false}, raises_on_sync{false};
  std::atomic<double> hang_s{60};  // after which a wait of the host is reported as a deadlock

 private:
  Runtime();
  DeviceStream& add_locked(int device, const std::string& name);
  int delay_of(const std::string& name) const;
  void host_waits(DeviceStream& stream, uint64_t task, const Clock& clock, const std::string& why);

  std::mutex lock_;
  std::vector<std::unique_ptr<DeviceStream>> streams_;  // the first ones are the default streams of the devices
  std::vector<std::pair<std::string, int>> delays_;
  Clock host_;
  Races races_;
  Counts launches_, syncs_, events_;
  std::vector<std::string> errors_;
};

// The innermost range of `torch.profiler.record_function` that the calling thread is in, or "".
std::string current_range();
void observe_ranges();

}  // namespace simulated
