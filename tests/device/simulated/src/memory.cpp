// A caching allocator like CUDA's: what the host frees, it gives out again at once, to the same stream.
//
// Memory of a stream is used again in the order of that stream, so the next owner there needs no wait. Another stream
// that uses it must be waited for before it is freed, or be named by `record_stream`. Freed memory is filled with NaN on
// its stream: this makes the content that nobody wrote visible, and is a write that the detector of races knows. To
// allocate is nothing that a stream does.
#include <cstring>
#include <iterator>
#include <unordered_map>

#include "device.h"

namespace simulated {
namespace {

using Guard = std::lock_guard<std::mutex>;
constexpr size_t kAlignment = 512;

struct Block {
  char* begin;
  size_t size;
  size_t stream;
  std::vector<size_t> users;  // other streams, named by record_stream
};

// A freed block, and the ends of the work of its other users.
struct Held {
  Block* block;
  std::vector<EventPtr> ends;
};

void free_block(void* memory);

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(current_device()));
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    DeviceStream& stream = current_stream();
    size = (size + kAlignment - 1) / kAlignment * kAlignment;
    Block* block = nullptr;
    {
      Guard guard(lock_);
      take_back();
      block = Runtime::get().faults.strikes(Fault::early_reuse) ? find_anywhere(size) : nullptr;
      if (block == nullptr) block = find(stream.id, size);
      if (block == nullptr) block = make(stream.id, size);
      live_[block->begin] = block;
      in_use_ += block->size;
      peak_ = std::max(peak_, in_use_);
    }
    return {block->begin, block->begin, &free_block, device};
  }

  void free(char* memory) {
    Block* block = nullptr;
    std::vector<size_t> users;
    {
      Guard guard(lock_);
      block = live_.at(memory);
      live_.erase(memory);
      in_use_ -= block->size;
      users.swap(block->users);
    }
    if (users.empty()) {
      poison(*block);
      Guard guard(lock_);
      free_[block->stream].emplace(block->size, block);
      return;
    }
    Held held{block, {}};
    for (size_t user : users) held.ends.push_back(Runtime::get().record(Runtime::get().stream(user), false));
    Guard guard(lock_);
    held_.push_back(std::move(held));
  }

  void add_user(const void* memory, size_t stream) {
    Guard guard(lock_);
    const auto found = live_.find(memory);
    if (found != live_.end() && found->second->stream != stream) found->second->users.push_back(stream);
  }

  Counts counts() {
    Guard guard(lock_);
    return {{"in use", in_use_}, {"peak", peak_}, {"reserved", reserved_}, {"reuses", reuses_}, {"held", held_.size()}};
  }

  void clear_counts() {
    Guard guard(lock_);
    peak_ = in_use_;
    reuses_ = 0;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "simulated device: nobody copies by the allocator");
  }

 private:
  static void poison(const Block& block) {
    char* begin = block.begin;
    const size_t size = block.size;
    const auto fill = [begin, size] { std::memset(begin, 0xFF, size); };
    Runtime& runtime = Runtime::get();
    runtime.enqueue(runtime.stream(block.stream), "free", {{}, {{begin, begin + size}}}, fill, Tasks::bookkeeping);
  }

  // The host asks, without a wait, which blocks of several streams are free by now.
  void take_back() {
    for (size_t i = 0; i < held_.size();) {
      const auto is_over = [](const EventPtr& end) { return Runtime::get().query(end); };
      if (!std::all_of(held_[i].ends.begin(), held_[i].ends.end(), is_over)) {
        ++i;
        continue;
      }
      poison(*held_[i].block);
      free_[held_[i].block->stream].emplace(held_[i].block->size, held_[i].block);
      held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  Block* find(size_t stream, size_t size) {
    auto& blocks = free_[stream];
    const auto fits = blocks.lower_bound(size);
    if (fits == blocks.end() || fits->first > 2 * size) return nullptr;
    // Of equal ones the one that was freed last: if anybody still uses it, this shows it.
    const auto found = std::prev(blocks.upper_bound(fits->first));
    Block* block = found->second;
    blocks.erase(found);
    ++reuses_;
    return block;
  }

  Block* find_anywhere(size_t size) {
    for (auto& [stream, blocks] : free_) {
      if (stream == current_stream().id) continue;
      if (Block* block = find(stream, size)) return block;
    }
    return nullptr;
  }

  Block* make(size_t stream, size_t size) {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, kAlignment, size) == 0, "simulated device: out of memory");
    std::memset(memory, 0xFF, size);
    reserved_ += size;
    return new Block{static_cast<char*>(memory), size, stream, {}};
  }

  std::mutex lock_;
  std::unordered_map<const void*, Block*> live_;
  std::map<size_t, std::multimap<size_t, Block*>> free_;  // by stream and size
  std::vector<Held> held_;
  size_t in_use_ = 0, peak_ = 0, reserved_ = 0, reuses_ = 0;
};

Allocator the_allocator;

void free_block(void* memory) {
  if (memory != nullptr) the_allocator.free(static_cast<char*>(memory));
}

}  // namespace

c10::Allocator* allocator() {
  return &the_allocator;
}

void record_stream(const void* memory, DeviceStream& stream) {
  if (Runtime::get().faults.strikes(Fault::ignored_record_stream)) return;
  the_allocator.add_user(memory, stream.id);
}

Counts memory_counts() {
  return the_allocator.counts();
}

void clear_memory_counts() {
  the_allocator.clear_counts();
}

}  // namespace simulated
