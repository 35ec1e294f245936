// SPDX-License-Identifier: Apache-2.0
// X X^T of a matrix that lies by rows (wide below) or by columns (tall).
#include "symmetric.h"

namespace muon {
namespace {

template <typename T>
void square_wide(const T* x, int64_t depth, const Symmetrics<T>& out) {
  const int64_t size = out.size;
  for_panels<T, 1>(out.batch, size, [&](Panel<T>& panel, int64_t n, int64_t first, int64_t count) {
    const T* rows = x + n * size * depth;
    panel.pack_rows(rows, depth, depth, first, count);
    for_lower_tiles(size, first, count, [&](const Tile& tile) {
      Buffer buffer;
      const Sums sums = out[n].sums(tile, buffer.sums());
      panel.multiply(rows + tile.i * depth, depth, tile, sums);
      out[n].store(sums, tile);
    });
  });
}

// Rows of a tall matrix that are multiplied together: their panel fits into the cache of a core.
template <typename T>
constexpr int64_t kRows = 1024 / sizeof(T);

// Takes kRows rows at a time, and transposes the columns of a tile where it needs them. Each time adds to the sums, of
// which those of 16-bit numbers need room of their own.
template <typename T>
void square_tall(const T* x, int64_t depth, const Symmetrics<T>& out) {
  const int64_t size = out.size;
  for_panels<T, 8>(out.batch, size, [&](Panel<T>& panel, int64_t n, int64_t first, int64_t count) {
    thread_local Scratch of_left, of_sums;
    constexpr int64_t kStride = kRows<T> + 64 / sizeof(T);  // a power of two would use few sets of the cache
    T* left = of_left.get<T>(kTile * kStride);
    float* apart = of_sums.get<float>(std::is_same_v<T, float> ? 0 : size * count);
    for (int64_t k = 0; k < depth; k += kRows<T>) {
      const int64_t rows = std::min(kRows<T>, depth - k);
      const T* block = x + (n * depth + k) * size;
      panel.pack_columns(block, size, rows, first, count);
      for (int64_t i = first; i < size; i += kTile) {
        transpose(block + i, size, left, kStride, rows, std::min(kTile, size - i));
        for_tiles_of_rows(size, i, first, count, [&](const Tile& tile) {
          const int64_t at = std::is_same_v<T, float> ? 0 : tile.i * count + tile.j - first;
          const Sums sums = out[n].sums(tile, {apart + at, count});
          panel.multiply(left + (tile.i - i) * kStride, kStride, tile, sums, k > 0);
          if (k + rows == depth) {
            out[n].store(sums, tile);
          }
        });
      }
    }
  });
}

}  // namespace

bool multiplies_apart(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 && has_products(base_of(x).first) && with_product_type(x, [](auto) {});
}

bool has_fast_bf16() {
#if defined(__x86_64__)
  // Intel's cores have AVX512_FP16, too. Without AMX their products of bf16 are slower than those of fp32.
  constexpr unsigned kAmxBf16 = 1u << 22, kAvx512Fp16 = 1u << 23;  // CPUID leaf 7, EDX
  unsigned a, b, c, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ((d & kAvx512Fp16) && !(d & kAmxBf16))) return false;
#endif
  return multiplies_bf16() && has_bf16_kernel();
}

bool square(const at::Tensor& x, const Parts& out) {
  const auto base = base_of(x);
  return has_products(base.first) && are_symmetric(x.scalar_type(), out) &&
     with_product_type(x, [&](auto zero) {
       using T = decltype(zero);
       (base.second ? square_tall<T> : square_wide<T>)(base.first.data_ptr<T>(), x.size(-1), Symmetrics<T>(out));
     });
}

}  // namespace muon
