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
  const T* wide = (tall ? transposed : x).data_ptr<T>();
  const int64_t size = rest.size(-1), depth = x.size(1) * x.size(2) / size;
  const Symmetrics<T> out(rest, diagonal);
  for_lower_tiles<T>(
    x.size(0), size,
    [&](Strip<T>& strip, int64_t n, int64_t j, int64_t columns) {
      strip.pack_rows(wide + (n * size + j) * depth, depth, depth, columns);
    },
    [&](const Strip<T>& strip, int64_t n, int64_t i, int64_t j, int64_t rows, int64_t columns) {
      alignas(64) float sums[kTile * kTile];
      strip.multiply(wide + (n * size + i) * depth, depth, sums, rows, columns);
      out[n].store(sums, i, j, rows, columns);
    });
}

}  // namespace

bool square(const Tensor& x, const Tensor& rest, const Tensor& diagonal, const Tensor& transposed) {
  const int64_t depth = std::max(x.size(1), x.size(2));
  return has_products(x, rest, diagonal, transposed) &&
     with_product_type(x, depth, [&](auto zero) { square<decltype(zero)>(x, rest, diagonal, transposed); });
}

}  // namespace muon
