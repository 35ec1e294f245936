// SPDX-License-Identifier: Apache-2.0
// Symmetric matrices, and products that are symmetric: the tiles on and below the diagonal are computed, and mirrored.
#pragma once

#include "bfmmla.h"
#include "muon.h"
#include "tiles.h"

namespace muon {

// One symmetric matrix [size, size]. In bf16 its diagonal is apart, in fp32, and zero in the rest.
template <typename T>
struct Symmetric {
  T* rest;
  float* diagonal;
  int64_t size;

  // Where to sum a tile: in fp32 in the matrix itself, else apart.
  Sums sums(const Tile& tile, const Sums& apart) const {
    if constexpr (std::is_same_v<T, float>) {
      return {rest + tile.i * size + tile.j, size};
    } else {
      return apart;
    }
  }

  // Writes a tile of sums, and its mirror image.
  void store(const Sums& sums, const Tile& tile) const {
    const int64_t left = tile.left_of_diagonal();
    if (left < tile.columns) {
      store_diagonal({sums.values + left, sums.stride}, tile.i, tile.rows);
    }
    T* to = rest + tile.i * size + tile.j;
    if constexpr (!std::is_same_v<T, float>) {
      with_width(tile.columns, [&](auto width) {
        for (int64_t r = 0; r < tile.rows; ++r) {
          at::vec::convert(sums.values + r * sums.stride, to + r * size, width);
        }
      });
    }
    transpose(to, size, rest + tile.j * size + tile.i, size, tile.rows, left);
  }

 private:
  // Copies the lower triangle to the upper one, as rounding may have made them differ. In bf16 moves the diagonal out.
  void store_diagonal(const Sums& sums, int64_t first, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = sums.values + r * sums.stride;
      if constexpr (!std::is_same_v<T, float>) {
        diagonal[first + r] = row[r];
        row[r] = 0;
      }
      for (int64_t c = 0; c < r; ++c) {
        sums.values[c * sums.stride + r] = row[c];
      }
    }
  }
};

// A batch of them.
template <typename T>
struct Symmetrics {
  explicit Symmetrics(const Parts& parts)
    : rest(parts.first.data_ptr<T>()), diagonal(parts.second ? parts.second->data_ptr<float>() : nullptr),
      batch(parts.first.size(0)), size(parts.first.size(-1)) {}

  Symmetric<T> operator[](int64_t n) const {
    return {rest + n * size * size, diagonal ? diagonal + n * size : nullptr, size};
  }

  T* rest;
  float* diagonal;
  int64_t batch, size;
};

// Whether the products are made for symmetric matrices: their diagonals are apart in bf16, else in the matrices.
template <typename... Symmetric>
bool are_symmetric(at::ScalarType dtype, const Symmetric&... parts) {
  return (... && (has_products(parts.first) && parts.second.has_value() == (dtype == at::kBFloat16)));
}

// The contiguous tensor that x is or is the transpose of, and whether it is the transpose.
inline std::pair<at::Tensor, bool> base_of(const at::Tensor& x) {
  return x.is_contiguous() ? std::pair(x, false) : std::pair(x.mT(), true);
}

// Calls body for the tiles on and below the diagonal in rows [i, i + kTile) and columns [first, first + count).
template <typename Body>
void for_tiles_of_rows(int64_t size, int64_t i, int64_t first, int64_t count, const Body& body) {
  const int64_t rows = std::min(kTile, size - i);
  for (int64_t j = first; j < std::min(first + count, i); j += kTile) {
    body(Tile{i, j, rows, kTile});
  }
  if (i < first + count) {
    for (int64_t top = i; top < i + rows; top += kDiagonalRows) {
      const int64_t height = std::min(kDiagonalRows, size - top);
      body(Tile{top, i, height, top + height - i});
    }
  }
}

// Calls body for the tiles on and below the diagonal in columns [first, first + count), row by row.
template <typename Body>
void for_lower_tiles(int64_t size, int64_t first, int64_t count, const Body& body) {
  for (int64_t i = first; i < size; i += kTile) for_tiles_of_rows(size, i, first, count, body);
}

}  // namespace muon
