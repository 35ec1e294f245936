// SPDX-License-Identifier: Apache-2.0
// P X of a symmetric P and a wide X, or X P of a tall one.
#include "muon.h"
#include "symmetric.h"

namespace muon {
namespace {

using at::Tensor;

// Rows and columns of a tile of a product that is not symmetric.
constexpr int64_t kWide = 64;

// out <- sums + d x for one row, with one d for all of it or one for each element.
template <typename T>
[[gnu::always_inline]] inline void finish_row(
  const T* x, const float* d, bool each, const float* sums, T* out, int64_t count) {
  float values[kWide], total[kWide];
  widen(x, values, count);
  if (each) {
    for (int64_t c = 0; c < count; ++c) total[c] = sums[c] + d[c] * values[c];
  } else {
    for (int64_t c = 0; c < count; ++c) total[c] = sums[c] + *d * values[c];
  }
  at::vec::convert(total, out, count);
}

template <typename T>
void multiply(const Symmetrics<T>& p, const Tensor& x, const Tensor& out) {
  const int64_t rows = x.size(1), columns = x.size(2), size = std::min(rows, columns);
  const bool tall = rows > columns;
  const T* from = x.data_ptr<T>();
  T* to = out.data_ptr<T>();
  auto tile = [&](const Strip<T>& strip, int64_t n, int64_t i, int64_t j, int64_t height, int64_t width) {
    alignas(64) float sums[kWide * kWide];
    const T* left = tall ? from + n * rows * columns : p[n].rest;
    strip.multiply(left + i * size, size, sums, height, width);
    const float* d = p[n].diagonal;
    with_width<kWide>(width, [&](auto count) {
      for (int64_t r = 0; r < height; ++r) {
        const int64_t at = (n * rows + i + r) * columns + j;
        finish_row(from + at, d + (tall ? j : i + r), tall, sums + r * kWide, to + at, count);
      }
    });
  };
  const int64_t strips = (columns + kWide - 1) / kWide;
  at::parallel_for(0, x.size(0) * strips, 1, [&](int64_t begin, int64_t end) {
    Strip<T> strip(kWide);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t n = unit / strips, j = unit % strips * kWide, width = std::min(kWide, columns - j);
      strip.pack_columns((tall ? p[n].rest : from + n * rows * columns) + j, columns, size, width);
      for (int64_t i = 0; i < rows; i += kWide) {
        tile(strip, n, i, j, std::min(kWide, rows - i), width);
      }
    }
  });
}

}  // namespace

bool multiply(const Tensor& p, const Tensor& diagonal, const Tensor& x, const Tensor& out) {
  return has_products(p, diagonal, x, out) && with_product_type(x, p.size(-1), [&](auto zero) {
       using T = decltype(zero);
       multiply<T>(Symmetrics<T>(p, diagonal), x, out);
     });
}

}  // namespace muon
