// SPDX-License-Identifier: Apache-2.0
// fp32 to bf16 by stochastic rounding.
#include "elementwise.h"
#include "muon.h"
#include "noise.h"

namespace muon {

bool copy_rounded(const at::Tensor& target, const at::Tensor& source, std::pair<int64_t, int64_t> key, int64_t first) {
  if (!are_plain(target, source) || target.scalar_type() != at::kBFloat16 || source.scalar_type() != at::kFloat) {
    return false;
  }
  const float* from = input<float>(source);
  at::BFloat16* to = output<at::BFloat16>(target);
  const Noise noise(key, first);
  parallel_units(target.numel(), [=](int64_t i, int count) {
    store(to + i, rounded(load(from + i, count), noise(i)), count);
  });
  return true;
}

}  // namespace muon
