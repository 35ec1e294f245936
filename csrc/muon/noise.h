// SPDX-License-Identifier: Apache-2.0
// The random numbers of deepspeed/muon/kernels/rounding.py, a function of the key and the element's index alone, and
// the rounding to bf16 that takes them.
#pragma once

#include <utility>

#include "elementwise.h"

namespace muon {

struct Noise {
  Noise(std::pair<int64_t, int64_t> key, int64_t first)
      : start(static_cast<uint32_t>(key.first) + static_cast<uint32_t>(first)), second(static_cast<int32_t>(key.second)) {}

  template <int shift>
  static Ints mix(const Ints& x, int32_t multiplier) {
    const Ints above = (x >> Ints(shift)) & Ints((1 << (32 - shift)) - 1);
    return (x ^ above) * Ints(multiplier);
  }

  // Numbers from 0 to 2^16 - 1 for elements i, i + 1 and so on.
  Ints operator()(int64_t i) const {
    constexpr int32_t first = 0x7feb352d, last = static_cast<int32_t>(0x846ca68b);  // lowbias32
    const Ints index = lanes + Ints(static_cast<int32_t>(start + static_cast<uint32_t>(i)));
    const Ints mixed = mix<15>(mix<16>(index, first) + second, last);
    return (mixed >> Ints(16)) & Ints(0xffff);
  }

  uint32_t start;
  Ints second, lanes = Ints::arange(0, 1);
};

constexpr int32_t kLargest = 0x7f7f0000;  // the largest finite bf16, as the bits of an fp32

// The neighbour in bf16, as an fp32; never infinity for a finite value.
inline Floats rounded(const Floats& value, const Ints& noise) {
  const Ints bits = same_bits<Ints>(value);
  const Ints is_below = ((bits & Ints(0x7fffffff)) - Ints(kLargest)) >> Ints(31);
  return same_bits<Floats>((bits + (noise & is_below)) & Ints(static_cast<int32_t>(0xffff0000)));
}

}  // namespace muon
