// SPDX-License-Identifier: Apache-2.0
// P X + shift X of a symmetric P and a matrix that lies by rows (wide below) or by columns (tall).
#include "symmetric.h"

namespace muon {
namespace {

using at::Tensor;

// out <- sums + (d + shift) x for one row, with one d for all of it or one for each element.
template <typename T>
[[gnu::always_inline]] inline void finish_row(
  const T* x, const float* d, bool each, float shift, const float* sums, T* out, int64_t count) {
  float values[kTile], total[kTile];
  widen(x, values, count);
  if (each) {
    for (int64_t c = 0; c < count; ++c) total[c] = sums[c] + (d[c] + shift) * values[c];
  } else {
    const float factor = *d + shift;
    for (int64_t c = 0; c < count; ++c) total[c] = sums[c] + factor * values[c];
  }
  at::vec::convert(total, out, count);
}

// One tile of the product of one matrix, summed in the result in fp32, else in a buffer and rounded once.
template <typename T>
void compute(const Panel<T>& panel, const Symmetric<T>& p, const T* x, float shift, T* out, int64_t columns, bool tall,
             const Tile& tile) {
  T* to = out + tile.i * columns + tile.j;
  const T* left = (tall ? x : p.rest) + tile.i * p.size;
  const T* from = x + tile.i * columns + tile.j;
  if constexpr (std::is_same_v<T, float>) {
    const Sums sums{to, columns};
    panel.multiply(left, p.size, tile, sums);
    with_width(tile.columns, [&](auto width) {
      for (int64_t r = 0; r < (shift == 0 ? 0 : tile.rows); ++r, from += columns, to += columns) {
        for (int64_t c = 0; c < width; ++c) to[c] += shift * from[c];
      }
    });
  } else {
    Buffer buffer;
    panel.multiply(left, p.size, tile, buffer.sums());
    const float* d = p.diagonal + (tall ? tile.j : tile.i);
    with_width(tile.columns, [&](auto width) {
      for (int64_t r = 0; r < tile.rows; ++r, from += columns, to += columns) {
        finish_row(from, tall ? d : d + r, tall, shift, buffer.values + r * kTile, to, width);
      }
    });
  }
}

template <typename T>
void multiply(const Symmetrics<T>& p, const Tensor& x, float shift, bool tall, const Tensor& out) {
  const int64_t rows = x.size(1), columns = x.size(2), size = p.size;
  for_panels<T, 4>(p.batch, columns, [&](Panel<T>& panel, int64_t n, int64_t first, int64_t count) {
    const T* from = x.data_ptr<T>() + n * rows * columns;
    T* to = out.data_ptr<T>() + n * rows * columns;
    panel.pack_columns(tall ? p[n].rest : from, columns, size, first, count);
    for (int64_t i = 0; i < rows; i += kTile) {
      for (int64_t j = first; j < first + count; j += kTile) {
        const Tile tile{i, j, std::min(kTile, rows - i), std::min(kTile, first + count - j)};
        compute(panel, p[n], from, shift, to, columns, tall, tile);
      }
    }
  });
}

}  // namespace

bool multiply(const Parts& p, const Tensor& x, const Tensor& out, double shift) {
  const auto base = base_of(x);
  const Tensor result = base_of(out).first;
  return has_products(base.first, result) && are_symmetric(x.scalar_type(), p) &&
     with_product_type(x, [&](auto zero) {
       multiply(Symmetrics<decltype(zero)>(p), base.first, static_cast<float>(shift), base.second, result);
     });
}

}  // namespace muon
