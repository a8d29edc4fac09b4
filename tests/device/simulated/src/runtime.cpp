#include "runtime.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <thread>

namespace simulated {

using Guard = std::lock_guard<std::mutex>;

// --- one stream ------------------------------------------------------------------------------------------------------
DeviceStream::DeviceStream(size_t id, int device, std::string name)
    : id(id), device(device), name(std::move(name)), random_(1234 + id) {
  std::thread([this] { run(); }).detach();
}

void DeviceStream::push(Task task) {
  {
    Guard guard(lock_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void DeviceStream::run() {
  // Kernels are the CPU's: autograd has seen the operators when the host called them.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::AutoGradMode no_grad(false);
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> hold(lock_);
      changed_.wait(hold, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      running_ = task.label;
    }
    const int delay = task.is_work ? delay_us.load() : 0;
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % (2 * delay + 1)));
    try {
      task.run();
    } catch (const std::exception& error) {
      Runtime::get().add_error(task.label + ": " + error.what());
    }
    task.run = nullptr;  // what it holds must be gone before anybody can see that it is done
    {
      Guard guard(lock_);
      num_done_ = task.number;
      running_.clear();
    }
    changed_.notify_all();
  }
}

bool DeviceStream::has_done(uint64_t task) const {
  Guard guard(lock_);
  return num_done_ >= task;
}

void DeviceStream::wait(uint64_t task) const {
  std::unique_lock<std::mutex> hold(lock_);
  changed_.wait(hold, [&] { return num_done_ >= task; });
}

bool DeviceStream::wait(uint64_t task, double seconds) const {
  std::unique_lock<std::mutex> hold(lock_);
  return changed_.wait_for(hold, std::chrono::duration<double>(seconds), [&] { return num_done_ >= task; });
}

std::string DeviceStream::standing() const {
  Guard guard(lock_);
  const std::string place = running_.empty() ? "is idle" : "stands in '" + running_ + "'";
  return place + " after " + std::to_string(num_done_) + " tasks, " + std::to_string(tasks_.size()) + " wait";
}

// --- all streams -----------------------------------------------------------------------------------------------------
static int devices_from_environment() {
  const char* text = std::getenv("SIM_DEVICES");
  return text == nullptr ? 1 : std::atoi(text);
}

Runtime& Runtime::get() {
  static auto* runtime = new Runtime();
  return *runtime;
}

Runtime::Runtime() : num_devices(devices_from_environment()) {
  for (int device = 0; device < num_devices; ++device) add_locked(device, "compute");
}

DeviceStream& Runtime::default_stream(int device) {
  return stream(device);
}

DeviceStream& Runtime::stream(size_t id) {
  Guard guard(lock_);
  return *streams_.at(id);
}

DeviceStream& Runtime::add_stream(int device, const std::string& name) {
  Guard guard(lock_);
  return add_locked(device, name.empty() ? "stream " + std::to_string(streams_.size()) : name);
}

DeviceStream& Runtime::add_locked(int device, const std::string& name) {
  streams_.push_back(std::make_unique<DeviceStream>(streams_.size(), device, name));
  streams_.back()->delay_us = delay_of(name);
  return *streams_.back();
}

void Runtime::rename(size_t id, const std::string& name) {
  Guard guard(lock_);
  streams_.at(id)->name = name;
  streams_.at(id)->delay_us = delay_of(name);
}

std::vector<DeviceStream*> Runtime::streams() {
  Guard guard(lock_);
  std::vector<DeviceStream*> all;
  for (const auto& stream : streams_) all.push_back(stream.get());
  return all;
}

int Runtime::delay_of(const std::string& name) const {
  int delay = 0;
  for (const auto& [part, delay_us] : delays_) {
    if (name.find(part) != std::string::npos) delay = delay_us;
  }
  return delay;
}

void Runtime::set_delay(const std::string& part, int delay_us) {
  Guard guard(lock_);
  delays_.emplace_back(part, delay_us);
  if (part.empty()) delays_ = {{part, delay_us}};  // it is true of all, and hides what was said before
  for (const auto& stream : streams_) stream->delay_us = delay_of(stream->name);
}

// --- work ------------------------------------------------------------------------------------------------------------
static std::string labelled(const std::string& operation) {
  const std::string range = current_range();
  return range.empty() ? operation : range + "/" + operation;
}

uint64_t Runtime::enqueue(DeviceStream& stream, const std::string& operation, const Accesses& accesses,
                          std::function<void()> run, Tasks kind) {
  const std::string label = labelled(operation);
  std::string race;
  uint64_t number = 0;
  {
    Guard guard(lock_);
    stream.clock.merge(host_);
    number = ++stream.num_enqueued;
    stream.clock.advance(stream.id, number);
    ++launches_[operation];
    race = races_.touch({stream.id, number, stream.clock, label + " on " + stream.name}, accesses);
    stream.push({number, label, kind == Tasks::work, std::move(run)});  // in the order of the numbers
  }
  TORCH_CHECK(race.empty() || !raises_on_race, "simulated device: ", race);
  return number;
}

EventPtr Runtime::record(DeviceStream& stream, bool is_counted) {
  auto event = std::make_shared<Event>();
  event->stream = &stream;
  auto time = event->time = std::make_shared<std::chrono::steady_clock::time_point>();
  const auto note_time = [time] { *time = std::chrono::steady_clock::now(); };
  event->task = enqueue(stream, "event", {}, note_time, Tasks::bookkeeping);
  Guard guard(lock_);
  event->clock = stream.clock;
  if (is_counted) ++events_["recorded"];
  return event;
}

void Runtime::wait_event(DeviceStream& stream, const EventPtr& event) {
  {
    Guard guard(lock_);
    ++events_["waited for"];
  }
  if (!faults.strikes(Fault::forgotten_event_wait)) add_edge(stream, event);
}

void Runtime::add_edge(DeviceStream& stream, const EventPtr& event) {
  if (event->stream == &stream) return;
  std::string name;
  {
    Guard guard(lock_);
    stream.clock.merge(event->clock);
    name = event->stream->name;
  }
  enqueue(stream, "wait for " + name, {}, [event] { event->stream->wait(event->task); }, Tasks::bookkeeping);
}

void Runtime::add_error(const std::string& text) {
  Guard guard(lock_);
  errors_.push_back(text);
}

// --- the host --------------------------------------------------------------------------------------------------------
void Runtime::host_waits(DeviceStream& stream, uint64_t task, const Clock& clock, const std::string& why) {
  const std::string label = labelled(why);
  {
    Guard guard(lock_);
    ++syncs_[label];
  }
  TORCH_CHECK(!raises_on_sync, "simulated device: the host waits for the device: ", label);
  TORCH_CHECK(stream.wait(task, hang_s), "simulated device: the host waits for ", stream.name, " since ", hang_s.load(),
              " s: ", label, standing());
  Guard guard(lock_);
  host_.merge(clock);
}

void Runtime::synchronize(const EventPtr& event, const std::string& why) {
  host_waits(*event->stream, event->task, event->clock, why);
}

void Runtime::synchronize(DeviceStream& stream, const std::string& why) {
  Clock clock;
  uint64_t last = 0;
  {
    Guard guard(lock_);
    clock = stream.clock;
    last = stream.num_enqueued;
  }
  host_waits(stream, last, clock, why);
}

bool Runtime::query(const EventPtr& event) {
  if (!event->stream->has_done(event->task)) return false;
  Guard guard(lock_);
  host_.merge(event->clock);
  return true;
}

void Runtime::wait_for_read(DeviceStream& stream, const Range& range, const std::string& why) {
  if (!faults.strikes(Fault::unsynchronized_read)) synchronize(stream, why);
  const std::string label = labelled(why);
  std::string race;
  {
    Guard guard(lock_);
    race = races_.host_reads(host_, range, label);
  }
  TORCH_CHECK(race.empty() || !raises_on_race, "simulated device: ", race);
}

// --- what is told to tests -------------------------------------------------------------------------------------------
void Runtime::clear() {
  Guard guard(lock_);
  races_.clear();
  launches_.clear();
  syncs_.clear();
  events_.clear();
  errors_.clear();
}

Counts Runtime::launches() {
  Guard guard(lock_);
  return launches_;
}

Counts Runtime::syncs() {
  Guard guard(lock_);
  return syncs_;
}

Counts Runtime::events() {
  Guard guard(lock_);
  return events_;
}

std::vector<std::string> Runtime::found_races() {
  Guard guard(lock_);
  return races_.found();
}

std::vector<std::string> Runtime::errors() {
  Guard guard(lock_);
  return errors_;
}

std::string Runtime::standing() {
  Guard guard(lock_);
  std::string text;
  for (const auto& stream : streams_) text += "\n  " + stream->name + " " + stream->standing();
  return text;
}

}  // namespace simulated
