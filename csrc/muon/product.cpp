// SPDX-License-Identifier: Apache-2.0
// alpha A B + beta A + shift I of symmetric matrices that commute.
#include "symmetric.h"

namespace muon {
namespace {

struct Scalars {
  float alpha, beta, shift;
};

// sums <- alpha A B + beta A + shift I, from sums over products of elements off the diagonals.
template <typename T>
void complete(const Symmetric<T>& a, const Symmetric<T>& b, const Scalars& by, const Sums& sums, const Tile& tile) {
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
        sum[c] = by.alpha * (sum[c] + of_diagonals) + by.beta * from_a[c];
      }
      if (left < tile.columns) {
        sum[left + r] += by.alpha * (diagonal * b.diagonal[row]) + by.beta * diagonal + by.shift;
      }
    }
  });
}

// In fp32 matrices are whole.
void complete(const Symmetric<float>& a, const Symmetric<float>&, const Scalars& by, const Sums& sums,
              const Tile& tile) {
  if (by.alpha == 1 && by.beta == 0 && by.shift == 0) {
    return;
  }
  const int64_t left = tile.left_of_diagonal();
  with_width(tile.columns, [&](auto width) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const float* from_a = a.rest + (tile.i + r) * a.size + tile.j;
      float* sum = sums.values + r * sums.stride;
      for (int64_t c = 0; c < width; ++c) sum[c] = by.alpha * sum[c] + by.beta * from_a[c];
      if (left < tile.columns) {
        sum[left + r] += by.shift;
      }
    }
  });
}

template <typename T>
void product(const Symmetrics<T>& a, const Symmetrics<T>& b, const Symmetrics<T>& out, const Scalars& by) {
  const int64_t size = out.size;
  for_panels<T, 1>(out.batch, size, [&](Panel<T>& panel, int64_t n, int64_t first, int64_t count) {
    panel.pack_columns(b[n].rest, size, size, first, count);
    for_lower_tiles(size, first, count, [&](const Tile& tile) {
      Buffer buffer;
      const Sums sums = out[n].sums(tile, buffer.sums());
      panel.multiply(a[n].rest + tile.i * size, size, tile, sums);
      complete(a[n], b[n], by, sums, tile);
      out[n].store(sums, tile);
    });
  });
}

}  // namespace

bool product(const Parts& a, const Parts& b, const Parts& out, std::tuple<double, double, double> by) {
  const auto [alpha, beta, shift] = by;
  const Scalars scalars{static_cast<float>(alpha), static_cast<float>(beta), static_cast<float>(shift)};
  return are_symmetric(a.first.scalar_type(), a, b, out) &&
     with_product_type(a.first, a.first.size(-1), [&](auto zero) {
       using S = Symmetrics<decltype(zero)>;
       product(S(a), S(b), S(out), scalars);
     });
}

}  // namespace muon
