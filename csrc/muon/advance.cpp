// SPDX-License-Identifier: Apache-2.0
// Momentum, Nesterov's look-ahead and the cast into the send buffer in one pass over memory.
#include "elementwise.h"
#include "muon.h"

namespace muon {
namespace {

template <typename Grad, typename Out>
void run(float* buffer, const Grad* grad, Out* out, int64_t numel, const Momentum& momentum) {
  parallel_units(numel, [=](int64_t i, int count) {
    const Floats gradient = load(grad + i, count);
    const Floats average_now = momentum.average(load(buffer + i, count), gradient);
    store(buffer + i, average_now, count);
    store(out + i, momentum.ahead(gradient, average_now), count);
  });
}

}  // namespace

bool advance(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum, bool nesterov) {
  if (!are_plain(buffer, grad, out) || buffer.scalar_type() != at::kFloat) return false;
  return with_gradient(grad, out, [&](auto* from, auto* to) {
    run(output<float>(buffer), from, to, buffer.numel(), Momentum(momentum, nesterov));
  });
}

}  // namespace muon
