// SPDX-License-Identifier: Apache-2.0
// Symmetric matrices, each its diagonal in fp32 and the rest, and products that are symmetric: of those the tiles on and
// below the diagonal are computed, and mirrored.
#pragma once

#include "tiles.h"

namespace muon {

// Rows and columns of a tile: small, as a tile on the diagonal is computed whole.
constexpr int64_t kTile = 32;

// One symmetric matrix [size, size]: its diagonal in fp32, and the rest, on whose diagonal there are zeros.
template <typename T>
struct Symmetric {
  T* rest;
  float* diagonal;
  int64_t size;

  // Writes a tile of values, and its mirror image.
  void store(float* values, int64_t i, int64_t j, int64_t rows, int64_t columns) const {
    if (i == j) {
      store_diagonal(values, i, rows);
    }
    T* tile = rest + i * size + j;
    with_width<kTile>(columns, [&](auto width) {
      for (int64_t r = 0; r < rows; ++r) {
        at::vec::convert(values + r * kTile, tile + r * size, width);
      }
    });
    if (i != j) {
      transpose(tile, size, rest + j * size + i, size, rows, columns);
    }
  }

 private:
  void store_diagonal(float* values, int64_t i, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      diagonal[i + r] = values[r * kTile + r];
      values[r * kTile + r] = 0;
      for (int64_t c = 0; c < r; ++c) {
        values[c * kTile + r] = values[r * kTile + c];
      }
    }
  }
};

// A batch of them.
template <typename T>
class Symmetrics {
 public:
  Symmetrics(const at::Tensor& rest, const at::Tensor& diagonal)
    : rest_(rest.data_ptr<T>()), diagonal_(diagonal.data_ptr<float>()), size_(rest.size(-1)) {}

  Symmetric<T> operator[](int64_t n) const {
    return {rest_ + n * size_ * size_, diagonal_ + n * size_, size_};
  }

 private:
  T* rest_;
  float* diagonal_;
  int64_t size_;
};

// Computes the tiles on and below the diagonal of every matrix, a strip of columns at a time.
// pack(strip, n, j, columns) packs the strip; tile(strip, n, i, j, rows, columns) computes and stores a tile.
template <typename T, typename Pack, typename Tile>
void for_lower_tiles(int64_t batch, int64_t size, const Pack& pack, const Tile& tile) {
  const int64_t strips = (size + kTile - 1) / kTile, pairs = (strips + 1) / 2;
  auto one = [&](Strip<T>& strip, int64_t n, int64_t j) {
    const int64_t columns = std::min(kTile, size - j);
    pack(strip, n, j, columns);
    for (int64_t i = j; i < size; i += kTile) {
      tile(strip, n, i, j, std::min(kTile, size - i), columns);
    }
  };
  // The first strip is the longest: taken with the last one it makes a unit of work as large as every other.
  at::parallel_for(0, batch * pairs, 1, [&](int64_t begin, int64_t end) {
    Strip<T> strip(kTile);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % pairs, last = strips - 1 - first;
      one(strip, unit / pairs, first * kTile);
      if (last != first) {
        one(strip, unit / pairs, last * kTile);
      }
    }
  });
}

}  // namespace muon
