// SPDX-License-Identifier: Apache-2.0
// advance with a momentum that is kept in int8, as deepspeed/muon/kernels/codes.py defines it.
#include "elementwise.h"
#include "muon.h"
#include "noise.h"

namespace muon {
namespace {

constexpr int kBlock = 128, kLevels = 127;
constexpr float kSmallest = 0x1p-119f;
static_assert(kBlock % kUnit == 0);

// The elements of one block, or of a part of it; zeros after the last.
using Values = float[kBlock];

void decode(const int8_t* codes, int count, float absmax, Values& values) {
  int8_t given[kBlock];
  if (count < kBlock) {
    std::memset(given, 0, kBlock);
    codes = static_cast<const int8_t*>(std::memcpy(given, codes, count));
  }
  for (int i = 0; i < kBlock; ++i) values[i] = static_cast<float>(codes[i]) * (1.0f / kLevels) * absmax;
}

// The largest magnitude, by the bits, whose order is that of the numbers; not a number if one of them is not.
float largest_of(const Values& values) {
  int32_t bits[kBlock], largest = 0;
  std::memcpy(bits, values, sizeof(bits));
  for (int i = 0; i < kBlock; ++i) largest = std::max(largest, bits[i] & 0x7fffffff);
  return same_bits<float>(largest);
}

template <typename Grad, typename Out>
void run(int8_t* codes, float* absmax, const Grad* grad, Out* out, int64_t numel, const Momentum& momentum,
         const Noise& noise) {
  const Floats unit(0x1p-16f);
  at::parallel_for(0, (numel + kBlock - 1) / kBlock, kGrain / kBlock, [=](int64_t begin, int64_t end) {
    Values values;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      const int held = static_cast<int>(std::min<int64_t>(kBlock, numel - first));
      decode(codes + first, held, absmax[block], values);
      for_units(0, held, [&](int64_t i, int count) {
        const Floats gradient = load(grad + first + i, count);
        const Floats average_now = momentum.average(Floats::loadu(values + i), gradient);
        average_now.store(values + i);
        store(out + first + i, momentum.ahead(gradient, average_now), count);
      });
      const float largest = largest_of(values), kept = largest < kSmallest ? 0.0f : largest;
      const Floats factor(kept == 0.0f ? 0.0f : kLevels / kept);
      absmax[block] = kept;
      for_units(0, held, [&](int64_t i, int) {
        const Floats uniform = at::vec::convert<float, 2, int32_t, 2>(noise(first + i) | Ints(1)) * unit;
        (Floats::loadu(values + i) * factor + uniform).floor().store(values + i);
      });
      int8_t rounded[kBlock];
      for (int i = 0; i < kBlock; ++i) rounded[i] = static_cast<int8_t>(static_cast<int32_t>(values[i]));
      std::memcpy(codes + first, rounded, held);
    }
  });
}

bool are_codes(const at::Tensor& codes, const at::Tensor& absmax, const at::Tensor& grad) {
  return are_plain(codes, grad) && codes.scalar_type() == at::kChar && is_plain(absmax) &&
         absmax.scalar_type() == at::kFloat;
}

}  // namespace

bool advance_codes(const at::Tensor& codes, const at::Tensor& absmax, const at::Tensor& grad, const at::Tensor& out,
                   double momentum, bool nesterov, std::pair<int64_t, int64_t> key, int64_t first) {
  if (!are_codes(codes, absmax, grad) || !are_plain(codes, out)) return false;
  return with_gradient(grad, out, [&](auto* from, auto* to) {
    run(output<int8_t>(codes), output<float>(absmax), from, to, codes.numel(), Momentum(momentum, nesterov),
        Noise(key, first));
  });
}

}  // namespace muon
