// SPDX-License-Identifier: Apache-2.0
// Decoupled weight decay and the scaled update in one pass over memory.
#include "elementwise.h"
#include "muon.h"

namespace muon {

bool apply_(const at::Tensor& param, const at::Tensor& update, double lr, double scale, double weight_decay) {
  if (!are_plain(param, update) || param.scalar_type() != at::kFloat) return false;
  const Floats keep(static_cast<float>(1.0 - lr * weight_decay)), rate(static_cast<float>(-lr * scale));
  return with_type<float, at::BFloat16>(update, [&](auto* u) {
    const auto* source = input<std::remove_pointer_t<decltype(u)>>(update);
    float* target = output<float>(param);
    parallel_units(param.numel(), [=](int64_t i, int count) {
      store(target + i, at::vec::fmadd(load(source + i, count), rate, load(target + i, count) * keep), count);
    });
  });
}

}  // namespace muon
