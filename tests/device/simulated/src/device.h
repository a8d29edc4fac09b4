// What torch knows of the device: the current stream of a thread, the allocator, the generator of random numbers.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "runtime.h"

namespace simulated {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

int current_device();
DeviceStream& current_stream(int device = -1);  // of the calling thread; -1: of its current device
DeviceStream& stream_of(const c10::Stream& stream);

// --- memory
c10::Allocator* allocator();
void record_stream(const void* memory, DeviceStream& stream);
Counts memory_counts();
void clear_memory_counts();

// --- random numbers
uint64_t draw_seed();
std::string random_state();
void set_random_state(const std::string& state);
void set_random_seed(uint64_t seed);

void register_hooks();

}  // namespace simulated
