// SPDX-License-Identifier: Apache-2.0
// alpha A B + beta A + shift I of symmetric matrices that commute.
#include "muon.h"
#include "symmetric.h"

namespace muon {
namespace {

using at::Tensor;

// sums <- alpha (sums + what the diagonals of a and b contribute) + beta a + shift I.
template <typename T>
void complete(
  const Symmetric<T>& a, const Symmetric<T>& b, float alpha, float beta, float shift, float* sums, int64_t i,
  int64_t j, int64_t rows, int64_t columns) {
  with_width<kTile>(columns, [&](auto width) {
    float from_a[kTile], from_b[kTile];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (i + r) * a.size + j;
      widen(a.rest + at, from_a, width);
      widen(b.rest + at, from_b, width);
      float* sum = sums + r * kTile;
      const float diagonal = a.diagonal[i + r];
      for (int64_t c = 0; c < width; ++c) {
        sum[c] = alpha * (sum[c] + (diagonal * from_b[c] + from_a[c] * b.diagonal[j + c])) + beta * from_a[c];
      }
      if (i == j) {
        sum[r] += alpha * (diagonal * b.diagonal[i + r]) + beta * diagonal + shift;
      }
    }
  });
}

template <typename T>
void product(
  const Symmetrics<T>& a, const Symmetrics<T>& b, const Symmetrics<T>& out, int64_t batch, int64_t size, float alpha,
  float beta, float shift) {
  for_lower_tiles<T>(
    batch, size,
    [&](Strip<T>& strip, int64_t n, int64_t j, int64_t columns) {
      strip.pack_columns(b[n].rest + j, size, size, columns);
    },
    [&](const Strip<T>& strip, int64_t n, int64_t i, int64_t j, int64_t rows, int64_t columns) {
      alignas(64) float sums[kTile * kTile];
      strip.multiply(a[n].rest + i * size, size, sums, rows, columns);
      complete(a[n], b[n], alpha, beta, shift, sums, i, j, rows, columns);
      out[n].store(sums, i, j, rows, columns);
    });
}

}  // namespace

bool product(
  const Tensor& a, const Tensor& a_diagonal, const Tensor& b, const Tensor& b_diagonal, const Tensor& out,
  const Tensor& out_diagonal, double alpha, double beta, double shift) {
  return has_products(a, b, out, a_diagonal, b_diagonal, out_diagonal) &&
     with_product_type(a, a.size(-1), [&](auto zero) {
       using S = Symmetrics<decltype(zero)>;
       product<decltype(zero)>(
         S(a, a_diagonal), S(b, b_diagonal), S(out, out_diagonal), a.size(0), a.size(-1),
         static_cast<float>(alpha), static_cast<float>(beta), static_cast<float>(shift));
     });
}

}  // namespace muon
