// SPDX-License-Identifier: Apache-2.0
// Momentum, Nesterov's look-ahead and the cast into the send buffer in one pass over memory.
#include "elementwise.h"
#include "muon.h"

namespace muon {
namespace {

template <typename Grad, typename Out>
void run(float* buffer, const Grad* grad, Out* out, int64_t numel, double momentum, bool nesterov) {
  const Lerp average(1.0 - momentum), ahead(momentum);
  parallel_units(numel, [=](int64_t i, int count) {
    const Floats gradient = load(grad + i, count);
    const Floats average_now = average(load(buffer + i, count), gradient);
    store(buffer + i, average_now, count);
    store(out + i, nesterov ? ahead(gradient, average_now) : average_now, count);
  });
}

}  // namespace

bool advance(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum, bool nesterov) {
  if (!are_plain(buffer, grad, out) || buffer.scalar_type() != at::kFloat) return false;
  bool done = false;
  with_type<float, at::BFloat16, at::Half>(grad, [&](auto* g) {
    using Grad = std::remove_pointer_t<decltype(g)>;
    done = with_type<float, at::BFloat16>(out, [&](auto* o) {
      using Out = std::remove_pointer_t<decltype(o)>;
      run(output<float>(buffer), input<Grad>(grad), output<Out>(out), buffer.numel(), momentum, nesterov);
    });
  });
  return done;
}

}  // namespace muon
