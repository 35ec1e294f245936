// SPDX-License-Identifier: Apache-2.0
// Momentum, Nesterov's look-ahead and the cast into the send buffer in one pass over memory; of a momentum in bf16 with
// stochastic rounding.
#include "elementwise.h"
#include "muon.h"
#include "noise.h"

namespace muon {
namespace {

// Kept: how an average is stored, from its elements and the index of the first.
template <typename Buffer, typename Grad, typename Out, typename Kept>
void run(Buffer* buffer, const Grad* grad, Out* out, int64_t numel, const Momentum& momentum, const Kept& kept) {
  parallel_units(numel, [=](int64_t i, int count) {
    const Floats gradient = load(grad + i, count);
    const Floats average_now = momentum.average(load(buffer + i, count), gradient);
    store(buffer + i, kept(average_now, i), count);
    store(out + i, momentum.ahead(gradient, average_now), count);
  });
}

}  // namespace

bool advance(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum, bool nesterov) {
  if (!are_plain(buffer, grad, out) || buffer.scalar_type() != at::kFloat) return false;
  return with_gradient(grad, out, [&](auto* from, auto* to) {
    const auto kept = [](const Floats& average_now, int64_t) { return average_now; };
    run(output<float>(buffer), from, to, buffer.numel(), Momentum(momentum, nesterov), kept);
  });
}

bool advance_rounded(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum,
                     bool nesterov, std::pair<int64_t, int64_t> key, int64_t first) {
  if (!are_plain(buffer, grad, out) || buffer.scalar_type() != at::kBFloat16) return false;
  return with_gradient(grad, out, [&](auto* from, auto* to) {
    const auto kept = [noise = Noise(key, first)](const Floats& average_now, int64_t i) {
      return rounded(average_now, noise(i));
    };
    run(output<at::BFloat16>(buffer), from, to, buffer.numel(), Momentum(momentum, nesterov), kept);
  });
}

}  // namespace muon
