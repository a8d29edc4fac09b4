// Tells torch of the device: the guard of devices, streams and events, and the hooks of an accelerator.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;

static thread_local int this_device = 0;
static thread_local std::map<int, c10::StreamId> this_stream;  // by device; absent: the default stream

int current_device() {
  return this_device;
}

// torch knows the default stream of each device by the id 0, so ids of devices mean the same stream.
DeviceStream& stream_of(const c10::Stream& stream) {
  return Runtime::get().stream(stream.id() == 0 ? stream.device_index() : stream.id());
}

static c10::Stream as_torch(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(kDeviceType, static_cast<DeviceIndex>(device)), id);
}

static c10::Stream current(int device) {
  if (device < 0) device = this_device;
  const auto found = this_stream.find(device);
  return as_torch(device, found == this_stream.end() ? 0 : found->second);
}

DeviceStream& current_stream(int device) {
  return stream_of(current(device));
}

// --- the guard -------------------------------------------------------------------------------------------------------
static EventPtr& event_at(void* event) {
  return *static_cast<EventPtr*>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDeviceType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return kDeviceType;
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kDeviceType, static_cast<DeviceIndex>(this_device));
  }
  void setDevice(Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(Runtime::get().num_devices);
  }

  c10::Stream getStream(Device device) const override {
    return current(device.index());
  }
  c10::Stream getDefaultStream(Device device) const override {
    return as_torch(device.index() < 0 ? this_device : device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device device, int) const override {
    const int index = device.index() < 0 ? this_device : device.index();
    return as_torch(index, static_cast<c10::StreamId>(Runtime::get().add_stream(index).id));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current(stream.device_index());
    this_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    DeviceStream& mine = stream_of(stream);
    return mine.has_done(mine.num_enqueued);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Runtime::get().synchronize(stream_of(stream), "stream.synchronize");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (DeviceStream* stream : Runtime::get().streams()) {
      if (stream->device == (device < 0 ? this_device : device)) {
        Runtime::get().synchronize(*stream, "device.synchronize");
      }
    }
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr();
    event_at(*event) = Runtime::get().record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Runtime::get().wait_event(stream_of(stream), event_at(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Runtime::get().query(event_at(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Runtime::get().synchronize(event_at(event), "event.synchronize");
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    for (void* event : {begin, end}) event_at(event)->stream->wait(event_at(event)->task);
    return std::chrono::duration<double, std::milli>(*event_at(end)->time - *event_at(begin)->time).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory.get(), stream_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- random numbers --------------------------------------------------------------------------------------------------
// As on CUDA, the host advances the generator when it enqueues an operator: each gets a seed of its own.
static at::Generator& generator() {
  static at::Generator one = at::detail::createCPUGenerator(0);
  return one;
}

static std::mutex& random_lock() {
  static std::mutex lock;
  return lock;
}

uint64_t draw_seed() {
  std::lock_guard<std::mutex> guard(random_lock());
  return at::check_generator<at::CPUGeneratorImpl>(generator())->random64();
}

std::string random_state() {
  std::lock_guard<std::mutex> guard(random_lock());
  const auto state = generator().unsafeGetGeneratorImpl()->get_state();
  return std::string(static_cast<const char*>(state->data()), state->numel());
}

void set_random_state(const std::string& state) {
  std::lock_guard<std::mutex> guard(random_lock());
  auto tensor = generator().unsafeGetGeneratorImpl()->get_state();
  TORCH_CHECK(state.size() == static_cast<size_t>(tensor->numel()), "simulated device: not a state of its generator");
  std::memcpy(tensor->mutable_data(), state.data(), state.size());
  generator().unsafeGetGeneratorImpl()->set_state(*tensor);
}

void set_random_seed(uint64_t seed) {
  std::lock_guard<std::mutex> guard(random_lock());
  generator().set_current_seed(seed);
}

// --- hooks -----------------------------------------------------------------------------------------------------------
struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(Runtime::get().num_devices);
  }
  void setCurrentDevice(DeviceIndex device) const override {
    this_device = device;
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(this_device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = static_cast<DeviceIndex>(this_device);
    if (device >= 0) this_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return generator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr fresh = allocator()->allocate(size);
    const size_t kept = std::min(size, impl->nbytes());
    if (kept > 0) {
      auto* to = static_cast<char*>(fresh.get());
      auto* from = static_cast<char*>(impl->mutable_data());
      const Accesses accesses{{{from, from + kept}}, {{to, to + kept}}};
      Runtime::get().enqueue(current_stream(), "resize", accesses, [to, from, kept] { std::memcpy(to, from, kept); });
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kDeviceType, allocator());
}

}  // namespace simulated
