// SPDX-License-Identifier: Apache-2.0
// Decoupled weight decay and the scaled update in one pass over memory.
#include "elementwise.h"
#include "muon.h"

namespace muon {
namespace {

// Whether update and weight have opposite signs. Their product could underflow to zero.
inline Floats are_opposed(const Floats& u, const Floats& w) {
  const Floats zero(0.0f);
  return ((u < zero) & (w > zero)) | ((u > zero) & (w < zero));
}

}  // namespace

bool apply_(
  const at::Tensor& param, const at::Tensor& update, double lr, double scale, double weight_decay, bool cautious) {
  if (!are_plain(param, update) || param.scalar_type() != at::kFloat) return false;
  const Floats keep(static_cast<float>(1.0 - lr * weight_decay)), rate(static_cast<float>(-lr * scale)), one(1.0f);
  return with_type<float, at::BFloat16>(update, [&](auto* type) {
    const auto* source = input<std::remove_pointer_t<decltype(type)>>(update);
    float* target = output<float>(param);
    const auto apply = [&](const auto& decayed) {
      parallel_units(param.numel(), [=](int64_t i, int count) {
        const Floats u = load(source + i, count), w = load(target + i, count);
        store(target + i, at::vec::fmadd(u, rate, decayed(u, w)), count);
      });
    };
    if (cautious) {
      apply([=](const Floats& u, const Floats& w) { return w * Floats::blendv(keep, one, are_opposed(u, w)); });
    } else {
      apply([=](const Floats&, const Floats& w) { return w * keep; });
    }
  });
}

}  // namespace muon
