// SPDX-License-Identifier: Apache-2.0
// Symmetric matrices, each its diagonal in fp32 and the rest, and products that are symmetric: of those the tiles on and
// below the diagonal are computed, and mirrored.
#pragma once

#include "tiles.h"

namespace muon {

// One symmetric matrix [size, size]: its diagonal in fp32, and the rest, on whose diagonal there are zeros.
template <typename T>
struct Symmetric {
  T* rest;
  float* diagonal;
  int64_t size;

  // Where to sum a tile: in fp32 in the matrix itself, else in the buffer.
  Sums sums(const Tile& tile, Buffer& buffer) const {
    if constexpr (std::is_same_v<T, float>) {
      return {rest + tile.i * size + tile.j, size};
    } else {
      return {buffer.values, kTile};
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
  // Moves the diagonal out, and copies the lower triangle to the upper one: rounding may have made them differ.
  void store_diagonal(const Sums& sums, int64_t first, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = sums.values + r * sums.stride;
      diagonal[first + r] = row[r];
      row[r] = 0;
      for (int64_t c = 0; c < r; ++c) {
        sums.values[c * sums.stride + r] = row[c];
      }
    }
  }
};

// A batch of them.
template <typename T>
class Symmetrics {
 public:
  Symmetrics(const at::Tensor& rest, const at::Tensor& diagonal)
    : rest_(rest.data_ptr<T>()), diagonal_(diagonal.data_ptr<float>()), batch_(rest.size(0)), size_(rest.size(-1)) {}

  Symmetric<T> operator[](int64_t n) const {
    return {rest_ + n * size_ * size_, diagonal_ + n * size_, size_};
  }

  int64_t batch() const {
    return batch_;
  }

  int64_t size() const {
    return size_;
  }

 private:
  T* rest_;
  float* diagonal_;
  int64_t batch_, size_;
};

// While it lives, fp32 matrices hold their diagonals themselves, as exactly as apart. 16-bit matrices stay as they are.
template <typename T>
class Whole {
 public:
  explicit Whole(const Symmetrics<T>& matrices) : matrices_(matrices) {
    set_diagonals([](const Symmetric<T>& one, int64_t i) { return one.diagonal[i]; });
  }

  ~Whole() {
    set_diagonals([](const Symmetric<T>&, int64_t) { return 0.0f; });
  }

  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;

 private:
  template <typename Value>
  void set_diagonals(const Value& value) const {
    if constexpr (std::is_same_v<T, float>) {
      at::parallel_for(0, matrices_.batch(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
          const Symmetric<T> one = matrices_[n];
          for (int64_t i = 0; i < one.size; ++i) one.rest[i * (one.size + 1)] = value(one, i);
        }
      });
    }
  }

  const Symmetrics<T>& matrices_;
};

// Computes the tiles on and below the diagonal of every matrix, a strip of columns at a time.
// pack(strip, n, j, columns) packs the strip; compute(strip, n, tile) computes and stores a tile.
template <typename T, typename Pack, typename Compute>
void for_lower_tiles(const Symmetrics<T>& out, const Pack& pack, const Compute& compute) {
  const int64_t batch = out.batch(), size = out.size();
  const int64_t strips = (size + kTile - 1) / kTile, pairs = (strips + 1) / 2;
  auto one = [&](Strip<T>& strip, int64_t n, int64_t first) {
    const int64_t columns = std::min(kTile, size - first);
    pack(strip, n, first, columns);
    for (int64_t i = first; i < first + columns; i += kDiagonalRows) {
      const int64_t rows = std::min(kDiagonalRows, size - i);
      compute(strip, n, Tile{i, first, rows, i + rows - first});
    }
    for (int64_t i = first + columns; i < size; i += kTile) {
      compute(strip, n, Tile{i, first, std::min(kTile, size - i), columns});
    }
  };
  // The first strip is the longest: taken with the last one it makes a unit of work as large as every other.
  at::parallel_for(0, batch * pairs, 1, [&](int64_t begin, int64_t end) {
    Strip<T> strip;
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
