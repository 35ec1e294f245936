// SPDX-License-Identifier: Apache-2.0
// advance with a momentum that is kept in bf16 by stochastic rounding.
#include "elementwise.h"
#include "muon.h"
#include "noise.h"

namespace muon {
namespace {

template <typename Grad, typename Out>
void run(at::BFloat16* buffer, const Grad* grad, Out* out, int64_t numel, const Momentum& momentum,
         const Noise& noise) {
  parallel_units(numel, [=](int64_t i, int count) {
    const Floats gradient = load(grad + i, count);
    const Floats average_now = momentum.average(load(buffer + i, count), gradient);
    store(buffer + i, rounded(average_now, noise(i)), count);
    store(out + i, momentum.ahead(gradient, average_now), count);
  });
}

}  // namespace

bool advance_rounded(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum,
                     bool nesterov, std::pair<int64_t, int64_t> key, int64_t first) {
  if (!are_plain(buffer, grad, out) || buffer.scalar_type() != at::kBFloat16) return false;
  return with_gradient(grad, out, [&](auto* from, auto* to) {
    run(output<at::BFloat16>(buffer), from, to, buffer.numel(), Momentum(momentum, nesterov), Noise(key, first));
  });
}

}  // namespace muon
