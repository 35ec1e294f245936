// SPDX-License-Identifier: Apache-2.0
// X X^T of a matrix that lies by rows (wide below) or by columns (tall).
#include "muon.h"
#include "symmetric.h"

namespace muon {
namespace {

using at::Tensor;

template <typename T>
void square_wide(const T* x, int64_t depth, const Symmetrics<T>& out) {
  const int64_t size = out.size();
  for_panels<T, 1>(out.batch(), size, [&](Panel<T>& panel, int64_t n, int64_t first, int64_t count) {
    const T* rows = x + n * size * depth;
    panel.pack_rows(rows, depth, depth, first, count);
    for_lower_tiles(size, first, count, [&](const Tile& tile) {
      Buffer buffer;
      const Sums sums = out[n].sums(tile, buffer.sums());
      panel.multiply(rows, depth, tile, sums);
      out[n].store(sums, tile);
    });
  });
}

// Rows of a tall matrix that are multiplied together: their transpose and their panel fit into the cache of a core.
template <typename T>
constexpr int64_t kRows = 1024 / sizeof(T);

// Transposes as many rows at a time as the cache keeps until they are used. Each adds to the sums, of which those of
// 16-bit numbers need room of their own.
template <typename T>
void square_tall(const T* x, int64_t depth, const Symmetrics<T>& out) {
  const int64_t size = out.size();
  for_panels<T, 8>(out.batch(), size, [&](Panel<T>& panel, int64_t n, int64_t first, int64_t count) {
    thread_local Scratch of_left, of_sums;
    constexpr int64_t kStride = kRows<T> + 64 / sizeof(T);  // a power of two would use few sets of the cache
    T* left = of_left.get<T>(size * kStride);
    float* apart = of_sums.get<float>(std::is_same_v<T, float> ? 0 : size * count);
    for (int64_t k = 0; k < depth; k += kRows<T>) {
      const int64_t rows = std::min(kRows<T>, depth - k);
      const T* block = x + (n * depth + k) * size;
      transpose(block + first, size, left + first * kStride, kStride, rows, size - first);
      panel.pack_columns(block, size, rows, first, count);
      for_lower_tiles(size, first, count, [&](const Tile& tile) {
        const int64_t at = std::is_same_v<T, float> ? 0 : tile.i * count + tile.j - first;
        const Sums sums = out[n].sums(tile, {apart + at, count});
        panel.multiply(left, kStride, tile, sums, k > 0);
        if (k + rows == depth) {
          out[n].store(sums, tile);
        }
      });
    }
  });
}

}  // namespace

bool square(const Tensor& x, bool transposed, const Tensor& rest, const Tensor& diagonal) {
  const int64_t depth = x.size(transposed ? 1 : 2);
  return has_products(x, rest, diagonal) && has_diagonals(x.scalar_type(), diagonal) &&
     with_product_type(x, depth, [&](auto zero) {
       using T = decltype(zero);
       const Symmetrics<T> out(rest, diagonal);
       (transposed ? square_tall<T> : square_wide<T>)(x.data_ptr<T>(), depth, out);
     });
}

}  // namespace muon
