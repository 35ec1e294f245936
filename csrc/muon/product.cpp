// SPDX-License-Identifier: Apache-2.0
// alpha A B + beta A of symmetric matrices that commute.
#include "symmetric.h"

namespace muon {
namespace {

// sums <- alpha A B + beta A, from sums over products of elements off the diagonals.
template <typename T>
void complete(const Symmetric<T>& a, const Symmetric<T>& b, float alpha, float beta, const Sums& sums,
              const Tile& tile) {
  const int64_t left = tile.left_of_diagonal();
  with_width(tile.columns, [&](auto width) {
    float from_a[kTile], from_b[kTile];
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.i + r, at = row * a.size + tile.j;
      widen(a.rest + at, from_a, width);
      widen(b.rest + at, from_b, width);
      float* sum = sums.values + r * sums.stride;
      const float diagonal = a.diagonal[row];
      for (int64_t c = 0; c < width; ++c) {
        const float of_diagonals = diagonal * from_b[c] + from_a[c] * b.diagonal[tile.j + c];
        sum[c] = alpha * (sum[c] + of_diagonals) + beta * from_a[c];
      }
      if (left < tile.columns) {
        sum[left + r] += alpha * (diagonal * b.diagonal[row]) + beta * diagonal;
      }
    }
  });
}

// In fp32 matrices are whole.
void complete(const Symmetric<float>& a, const Symmetric<float>&, float alpha, float beta, const Sums& sums,
              const Tile& tile) {
  with_width(tile.columns, [&](auto width) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const float* from_a = a.rest + (tile.i + r) * a.size + tile.j;
      float* sum = sums.values + r * sums.stride;
      for (int64_t c = 0; c < width; ++c) sum[c] = alpha * sum[c] + beta * from_a[c];
    }
  });
}

template <typename T>
void product(const Symmetrics<T>& a, const Symmetrics<T>& b, const Symmetrics<T>& out, float alpha, float beta) {
  const int64_t size = out.size;
  for_panels<T, 1>(out.batch, size, [&](Panel<T>& panel, int64_t n, int64_t first, int64_t count) {
    panel.pack_columns(b[n].rest, size, size, first, count);
    for_lower_tiles(size, first, count, [&](const Tile& tile) {
      Buffer buffer;
      const Sums sums = out[n].sums(tile, buffer.sums());
      panel.multiply(a[n].rest + tile.i * size, size, tile, sums);
      complete(a[n], b[n], alpha, beta, sums, tile);
      out[n].store(sums, tile);
    });
  });
}

}  // namespace

bool product(const Parts& a, const Parts& b, const Parts& out, double alpha, double beta) {
  return are_symmetric(a.first.scalar_type(), a, b, out) &&
     with_product_type(a.first, [&](auto zero) {
       using S = Symmetrics<decltype(zero)>;
       product(S(a), S(b), S(out), static_cast<float>(alpha), static_cast<float>(beta));
     });
}

}  // namespace muon
