// SPDX-License-Identifier: Apache-2.0
// Each matrix of a batch scaled to a Frobenius norm: sums of squares, then one pass that scales.
#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"
#include "muon.h"

namespace muon {
namespace {

// Elements whose squares are summed at once; sums of blocks are added in their order, whoever made them.
constexpr int64_t kBlock = 16384;
// Elements that are summed before any of them is scaled: few enough to be still in the cache then.
constexpr int64_t kInCache = 1 << 19;
// Elements whose squares are summed in fp32, and between which values such a sum is as good as one in fp64.
constexpr int64_t kPart = 1024;
constexpr double kSmall = 1e-27, kLarge = 1e30;

// In fp64, in which the square of every fp32 is a normal number or zero: nothing over- or underflows.
template <typename T>
double exact_sum_of_squares(const T* x, int64_t numel) {
  double sum = 0.0;
  for (int64_t i = 0; i < numel; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

// In fp32 over few elements and fp64 over these, but where squares come near the ends of fp32's range.
template <typename T>
double sum_of_squares(const T* x, int64_t numel) {
  double sum = 0.0;
  for (int64_t part = 0; part < numel; part += kPart) {
    const int64_t end = std::min(part + kPart, numel);
    Floats squares(0.0f);
    for_units(part, end, [&](int64_t i, int count) {
      const Floats values = load(x + i, count);
      squares = at::vec::fmadd(values, values, squares);
    });
    float lanes[kUnit];
    squares.store(lanes);
    double partial = 0.0;
    for (float lane : lanes) partial += lane;
    sum += partial > kSmall && partial < kLarge ? partial : exact_sum_of_squares(x + part, end - part);
  }
  return sum;
}

// out <- x power / norm. The power of two rounds nothing and brings the norm near one; it is itself a normal fp32, hence a
// matrix of subnormal numbers only ends near 2^-23, which is safe. A quotient is a product and one step of Newton's,
// which is as exact and several times as fast as the instruction.
template <typename T, typename Out>
void scale(const T* x, Out* out, int64_t begin, int64_t end, double norm, double wanted) {
  int exponent = 0;
  if (std::isfinite(norm)) std::frexp(norm, &exponent);
  exponent = std::clamp(exponent, -126, 126);
  const float near_one = norm == 0.0 ? 1.0f : static_cast<float>(std::ldexp(norm, -exponent) / wanted);
  const Floats power(static_cast<float>(std::ldexp(1.0, -exponent))), inverse(1.0f / near_one), minus(-near_one);
  for_units(begin, end, [=](int64_t i, int count) {
    const Floats value = load(x + i, count) * power, quotient = value * inverse;
    store(out + i, at::vec::fmadd(at::vec::fmadd(quotient, minus, value), inverse, quotient), count);
  });
}

template <typename T, typename Out>
void run(const T* x, Out* out, int64_t batch, int64_t numel, double wanted) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock, grain = std::max<int64_t>(1, kGrain / std::min(numel, kBlock));
  const int64_t together = std::clamp<int64_t>(kInCache / numel, 1, batch);
  std::vector<double> sums(together * blocks);
  for (int64_t first = 0; first < batch; first += together) {
    const int64_t count = std::min(together, batch - first) * blocks;
    const auto each = [&](const auto& body) {
      at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) {
          const int64_t start = k % blocks * kBlock;
          body(k, (first + k / blocks) * numel, start, std::min(start + kBlock, numel));
        }
      });
    };
    each([&](int64_t k, int64_t matrix, int64_t begin, int64_t end) {
      sums[k] = sum_of_squares(x + matrix + begin, end - begin);
    });
    each([&](int64_t k, int64_t matrix, int64_t begin, int64_t end) {
      double sum = 0.0;
      for (int64_t block = k / blocks * blocks; block < (k / blocks + 1) * blocks; ++block) sum += sums[block];
      scale(x + matrix, out + matrix, begin, end, std::sqrt(sum), wanted);
    });
  }
}

}  // namespace

bool normalize(const at::Tensor& x, const at::Tensor& out, double norm) {
  if (!are_plain(x, out) || x.dim() != 3) return false;
  bool done = false;
  with_type<float, at::BFloat16>(x, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    done = with_type<float, at::BFloat16, at::Half>(out, [&](auto* o) {
      using Out = std::remove_pointer_t<decltype(o)>;
      Out* to = output<Out>(out);
      if (x.numel() > 0) run(input<T>(x), to, x.size(0), x.size(1) * x.size(2), norm);
    });
  });
  return done;
}

}  // namespace muon
