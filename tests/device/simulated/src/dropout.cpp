// The one operator that draws random numbers without being given a generator: the CPU's kernel would take its own.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <tuple>

namespace simulated {

static std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double probability,
                                                         std::optional<bool> train) {
  const auto as_mask = input.options().dtype(at::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, as_mask)};
  auto mask = at::empty_like(input, as_mask).bernoulli_(1 - probability);
  const double scale = probability == 1 ? 0 : 1 / (1 - probability);
  return {input.mul(mask).mul(scale), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, kernels) {
  kernels.impl("native_dropout", native_dropout);
}

}  // namespace simulated
