// Operators that allocate, copy, or only look at memory in another way. `fallback.cpp` has all others.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace simulated {

at::Tensor on_host(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

Range bytes_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {nullptr, nullptr};
  char* begin = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::ScalarType dtype_of(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, allocator(), kKeys, dtype_of(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return new_tensor(sizes, strides, dtype_of(dtype));
}

// --- views -----------------------------------------------------------------------------------------------------------
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor& set_to(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                   c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto contiguous = c10::contiguous_strides(sizes);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides.size() == sizes.size() ? strides : c10::IntArrayRef(contiguous));
  return self;
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage storage) {
  const int64_t numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_to(self, std::move(storage), 0, {numel}, {1});
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_to(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  return set_to(self, new_tensor({0}, {1}, self.scalar_type()).storage(), 0, {0}, {1});
}

// --- copies ----------------------------------------------------------------------------------------------------------
void copy_to_device(const at::Tensor& source, const at::Tensor& target) {
  const auto staged = source.detach().clone();  // as CUDA stages memory that is not pinned: the caller may go on
  const auto to = on_host(target);
  Runtime::get().enqueue(current_stream(target.device().index()), "copy to device", {{}, {bytes_of(target)}},
                         [staged, to] { at::Tensor(to).copy_(staged); });
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target) {
  DeviceStream& stream = current_stream(source.device().index());
  const auto from = on_host(source);
  const auto to = target.detach();
  Runtime::get().enqueue(stream, "copy to host", {{bytes_of(source)}, {}}, [from, to] { at::Tensor(to).copy_(from); });
  Runtime::get().wait_for_read(stream, bytes_of(source), "copy to host");
}

void copy_within_device(const at::Tensor& source, const at::Tensor& target) {
  const auto from = on_host(source), to = on_host(target);
  Runtime::get().enqueue(current_stream(target.device().index()), "copy", {{bytes_of(source)}, {bytes_of(target)}},
                         [from, to] { at::Tensor(to).copy_(from); });
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) {
    if (is_ours(target)) {
      resize_to(target, source.sizes(), std::nullopt);
    } else {
      target.resize_(source.sizes());
    }
  }
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& self) {
  DeviceStream& stream = current_stream(self.device().index());
  const auto from = on_host(self);
  const auto to = at::empty({}, from.options());
  std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());  // what the host sees if it does not wait
  Runtime::get().enqueue(stream, "item", {{bytes_of(self)}, {}},
                         [from, to] { at::Tensor(to).copy_(from.reshape({})); });
  Runtime::get().wait_for_read(stream, bytes_of(self), "item");
  return to.item();
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), stream_of(stream));
}

}  // namespace

at::Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys, dtype);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  if (target.numel() == 0) return target;
  if (!is_ours(source)) {
    copy_to_device(source, target);
  } else if (!is_ours(target)) {
    copy_to_host(source, target);
  } else {
    copy_within_device(source, target);
  }
  return target;
}

const at::Tensor& resize_to(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (needed > self.storage().nbytes()) {
    c10::OptionalDeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, kernels) {
  kernels.impl("empty.memory_format", empty);
  kernels.impl("empty_strided", empty_strided);
  kernels.impl("as_strided", as_strided);
  kernels.impl("view", at::native::view);
  kernels.impl("_reshape_alias", at::native::_reshape_alias);
  kernels.impl("unfold", at::native::unfold);
  kernels.impl("resize_", resize_to);
  kernels.impl("set_", set_to_nothing);
  kernels.impl("set_.source_Storage", set_to_storage);
  kernels.impl("set_.source_Storage_storage_offset", set_to);
  kernels.impl("set_.source_Tensor", set_to_tensor);
  kernels.impl("_copy_from", copy_from);
  kernels.impl("_copy_from_and_resize", copy_from_and_resize);
  kernels.impl("_local_scalar_dense", item);
  kernels.impl("record_stream", record_stream_of);
}

}  // namespace simulated
