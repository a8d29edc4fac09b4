// Every operator that has no kernel of its own: its CPU kernel, as a task of the current stream.
//
// The host needs the shapes of the results at once. It calls the operator on tensors without data for them; where torch
// cannot tell shapes so (`nonzero`), the host waits for the device, as it does on CUDA.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tensors.h"

namespace simulated {
namespace {

using Stack = torch::jit::Stack;

template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(function(tensor));
    return c10::IValue(mapped);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorList().vec()) {
      mapped.push_back(tensor ? std::optional<at::Tensor>(function(*tensor)) : std::nullopt);
    }
    return c10::IValue(mapped);
  }
  return value;
}

template <class Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

// One call of an operator, from its arguments on the device to its results there.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), schema_(op.schema()) {
    const auto given = torch::jit::last(stack, schema_.arguments().size());
    arguments_.assign(given.begin(), given.end());
    name_ = schema_.name().rfind("aten::", 0) == 0 ? schema_.name().substr(6) : schema_.name();
    for (const auto& argument : arguments_) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (device_ < 0 && is_ours(tensor)) device_ = tensor.device().index();
      });
    }
    if (device_ < 0) device_ = current_device();
  }

  Stack run() {
    const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(device_));
    c10::DeviceGuard guard(device);
    const bool knows_shapes = find_shapes();
    for (auto& [tensor, shape] : written_) accesses_.writes.push_back(bytes_of(tensor));
    Stack host = host_arguments();
    return knows_shapes ? enqueue(std::move(host)) : wait_for(std::move(host));
  }

 private:
  bool is_written(size_t index) const {
    const auto* alias = schema_.arguments()[index].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  // Fills `shapes_` with results without data; false if only the data can tell.
  bool find_shapes() {
    Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const bool writes = is_written(i);
      for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        if (is_ours(tensor)) accesses_.reads.push_back(bytes_of(tensor));
      });
      const auto without_data = [&](const at::Tensor& tensor) {
        if (!is_ours(tensor)) return tensor;
        auto shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
        if (writes) written_.emplace_back(tensor, shape);
        return shape;
      };
      stack.push_back(elsewhere(map_tensors(arguments_[i], without_data), at::kMeta));
    }
    for (const auto& result : schema_.returns()) {
      const auto kind = result.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
    }
    try {
      op_.callBoxed(&stack);
    } catch (const std::exception&) {
      return false;
    }
    for (auto& [tensor, shape] : written_) {
      if (tensor.sizes() != shape.sizes()) resize_to(tensor, shape.sizes(), std::nullopt);  // an `out` of another size
    }
    shapes_ = std::move(stack);
    return true;
  }

  static c10::IValue elsewhere(const c10::IValue& value, c10::Device device) {
    return value.isDevice() && value.toDevice().type() == kDeviceType ? c10::IValue(device) : value;
  }

  Stack host_arguments() const {
    Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto as_host = [](const at::Tensor& tensor) {
        if (is_ours(tensor)) return on_host(tensor);
        if (!tensor.defined()) return tensor;
        at::Tensor copied = tensor.detach().clone();  // a number that the caller may change
        // A Python number stays one: else its dtype, double, would be that of the result.
        copied.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        return copied;
      };
      stack.push_back(elsewhere(map_tensors(arguments_[i], as_host), at::kCPU));
      if (schema_.arguments()[i].type()->str() == "Generator?") {
        stack.back() = at::make_generator<at::CPUGeneratorImpl>(draw_seed());
      }
    }
    return stack;
  }

  // The argument that a result is, if the operator returns one; -1 if the result is new.
  int returned_argument(size_t result) const {
    const auto* alias = schema_.returns()[result].alias_info();
    if (alias == nullptr) return -1;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* own = schema_.arguments()[i].alias_info();
      if (own != nullptr && own->beforeSets() == alias->beforeSets() && is_written(i)) return static_cast<int>(i);
    }
    TORCH_CHECK(false, "simulated device: a view has no kernel: ", name_);
  }

  Stack enqueue(Stack host) {
    Stack results;
    std::vector<at::Tensor> targets;
    std::vector<bool> is_new;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const int argument = returned_argument(i);
      is_new.push_back(argument < 0);
      if (argument >= 0) {
        results.push_back(arguments_[argument]);
        continue;
      }
      results.push_back(map_tensors(shapes_[i], [&](const at::Tensor& shape) {
        if (!shape.defined()) return shape;
        auto made = new_tensor(shape.sizes(), shape.strides(), shape.scalar_type());
        accesses_.writes.push_back(bytes_of(made));
        targets.push_back(on_host(made));
        return made;
      }));
    }
    auto stack = std::make_shared<Stack>(std::move(host));
    const auto task = [op = op_, stack, targets, is_new] {
      op.callBoxed(stack.get());
      size_t place = 0;
      for (size_t i = 0; i < is_new.size(); ++i) {
        if (!is_new[i]) continue;
        for_each_tensor((*stack)[i], [&](const at::Tensor& made) {
          const at::Tensor& target = targets[place++];
          // The kernel for shapes may promise more than the kernel of the CPU gives: statistics of an evaluation.
          if (made.numel() > 0) at::Tensor(target).copy_(made);
        });
      }
    };
    Runtime::get().enqueue(current_stream(device_), name_, accesses_, task);
    return results;
  }

  Stack wait_for(Stack host) {
    auto stack = std::make_shared<Stack>(std::move(host));
    auto error = std::make_shared<std::string>();
    DeviceStream& stream = current_stream(device_);
    Runtime::get().enqueue(stream, name_, accesses_, [op = op_, stack, error] {
      try {
        op.callBoxed(stack.get());
      } catch (const std::exception& raised) {
        *error = raised.what();  // an argument that torch refuses: for the caller, not for the device
      }
    });
    Runtime::get().synchronize(stream, name_);
    TORCH_CHECK(error->empty(), *error);
    Stack results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const int argument = returned_argument(i);
      results.push_back(argument >= 0 ? arguments_[argument] : map_tensors((*stack)[i], [](const at::Tensor& made) {
        if (!made.defined()) return made;
        auto copied = new_tensor(made.sizes(), made.strides(), made.scalar_type());
        copy_from(made, copied, false);
        return copied;
      }));
    }
    return results;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  int device_ = -1;
  std::vector<c10::IValue> arguments_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // arguments that are written, and what stands for them
  Stack shapes_;
  Accesses accesses_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  Stack results = call.run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, every) {
  every.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace simulated
