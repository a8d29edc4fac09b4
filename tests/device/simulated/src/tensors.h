// The device's tensors as the host's kernels see them.
#pragma once
#include <ATen/core/Tensor.h>

#include "device.h"

namespace simulated {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

at::Tensor on_host(const at::Tensor& tensor);  // the same bytes, which it does not own: a task keeps nothing alive
Range bytes_of(const at::Tensor& tensor);
at::Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

// --- kernels that others need, too
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
const at::Tensor& resize_to(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format);

}  // namespace simulated
