// SPDX-License-Identifier: Apache-2.0
// advance with a momentum that is kept in bf16 by stochastic rounding.
#include "elementwise.h"
#include "muon.h"
#include "noise.h"

namespace muon {
namespace {

template <typename Grad, typename Out>
void run(at::BFloat16* buffer, const Grad* grad, Out* out, int64_t numel, double momentum, bool nesterov,
         const Noise& noise) {
  const Lerp average(1.0 - momentum), ahead(momentum);
  parallel_units(numel, [=](int64_t i, int count) {
    const Floats gradient = load(grad + i, count);
    const Floats average_now = average(load(buffer + i, count), gradient);
    store(buffer + i, rounded(average_now, noise(i)), count);
    store(out + i, nesterov ? ahead(gradient, average_now) : average_now, count);
  });
}

}  // namespace

bool advance_rounded(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum,
                     bool nesterov, std::pair<int64_t, int64_t> key, int64_t first) {
  if (!are_plain(buffer, grad, out) || buffer.scalar_type() != at::kBFloat16) return false;
  bool done = false;
  with_type<float, at::BFloat16, at::Half>(grad, [&](auto* g) {
    using Grad = std::remove_pointer_t<decltype(g)>;
    done = with_type<float, at::BFloat16>(out, [&](auto* o) {
      using Out = std::remove_pointer_t<decltype(o)>;
      run(output<at::BFloat16>(buffer), input<Grad>(grad), output<Out>(out), buffer.numel(), momentum, nesterov,
          Noise(key, first));
    });
  });
  return done;
}

}  // namespace muon
