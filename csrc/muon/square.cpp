// SPDX-License-Identifier: Apache-2.0
// The smaller of X X^T and X^T X.
#include "muon.h"
#include "symmetric.h"

namespace muon {
namespace {

using at::Tensor;

// The transposes of a batch of tall matrices.
template <typename T>
void transpose_all(const Tensor& x, const Tensor& out) {
  const int64_t rows = x.size(1), columns = x.size(2), strips = (rows + kTile - 1) / kTile;
  const T* from = x.data_ptr<T>();
  T* to = out.data_ptr<T>();
  at::parallel_for(0, x.size(0) * strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t n = unit / strips, i = unit % strips * kTile;
      transpose(
        from + (n * rows + i) * columns, columns, to + n * rows * columns + i, rows, std::min(kTile, rows - i), columns);
    }
  });
}

template <typename T>
void square(const Tensor& x, const Tensor& rest, const Tensor& diagonal, const Tensor& transposed) {
  const bool tall = x.size(1) > x.size(2);
  if (tall) {
    transpose_all<T>(x, transposed);
  }
  const T *from = x.data_ptr<T>(), *wide = (tall ? transposed : x).data_ptr<T>();
  const Symmetrics<T> out(rest, diagonal);
  const int64_t size = out.size(), depth = x.size(1) * x.size(2) / size;
  for_lower_tiles<T>(
    out,
    [&](Strip<T>& strip, int64_t n, int64_t j, int64_t columns) {
      if (tall) {
        strip.pack_columns(from + n * depth * size, size, depth, j, columns);
      } else {
        strip.pack_rows(from + n * size * depth, depth, depth, j, columns);
      }
    },
    [&](const Strip<T>& strip, int64_t n, const Tile& tile) {
      Buffer buffer;
      const Sums sums = out[n].sums(tile, buffer);
      strip.multiply(wide + n * size * depth, depth, tile, sums);
      out[n].store(sums, tile);
    });
}

}  // namespace

bool square(const Tensor& x, const Tensor& rest, const Tensor& diagonal, const Tensor& transposed) {
  const int64_t depth = std::max(x.size(1), x.size(2));
  return has_products(x, rest, diagonal, transposed) &&
     with_product_type(x, depth, [&](auto zero) { square<decltype(zero)>(x, rest, diagonal, transposed); });
}

}  // namespace muon
