// SPDX-License-Identifier: Apache-2.0
// Matrix products tile by tile, on oneDNN's kernels: a tile of fp32 sums stays in the cache until it is rounded, once.
// The left factor is read where it lies; of the right one a strip of columns is packed, because dot products of 16-bit
// numbers take pairs of rows, and because a packed strip is read in whole cache lines.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/bit_cast.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace muon {

// Rows that a packed strip holds side by side, because one instruction takes them together: pairs of bf16; of fp16 pairs
// where AMX multiplies it, and single rows for AVX512_FP16.
template <typename T>
int64_t rows_together() {
  if constexpr (std::is_same_v<T, at::Half>) {
    static const bool pairs = at::native::cpublas::could_pack(at::kHalf);
    return pairs ? 2 : 1;
  }
  return std::is_same_v<T, at::BFloat16> ? 2 : 1;
}

// Rows and columns of a tile: large, so that the kernels are fast and their calls few.
constexpr int64_t kTile = 64;

// Rows of a tile that ends on the diagonal of a symmetric product: few, because what is above it is computed for nothing.
constexpr int64_t kDiagonalRows = 32;

// Where a tile lies in its matrix.
struct Tile {
  int64_t i, j, rows, columns;

  // Of a symmetric product, the columns left of the diagonal.
  int64_t left_of_diagonal() const {
    return std::min(columns, i - j);
  }
};

// Where the sums of a tile are.
struct Sums {
  float* values;
  int64_t stride;
};

// Room for the sums of a tile of 16-bit numbers.
struct alignas(64) Buffer {
  float values[kTile * kTile];
};

// Calls body with the width of a tile, as a constant for the usual widths: the compiler then unrolls its loops.
template <typename Body>
void with_width(int64_t width, const Body& body) {
  if (width == kTile) {
    body(std::integral_constant<int64_t, kTile>());
  } else if (width == kDiagonalRows) {
    body(std::integral_constant<int64_t, kDiagonalRows>());
  } else {
    body(width);
  }
}

// Transposes a block of rows x columns, each at most 64 bytes of T.
template <typename T>
inline void transpose_block(
  const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
  at::vec::transpose_mxn<T>(from, from_stride, to, to_stride, rows, columns);
}

#if defined(CPU_CAPABILITY_AVX512)
// A whole block of fp32 in registers: at::vec's goes through memory, and takes more than twice as long.
inline void transpose_whole_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  const auto low = [](__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0x44); };
  const auto high = [](__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0xee); };
  for (int i = 0; i < 16; i += 4) {
    a[i] = low(b[i], b[i + 2]);
    a[i + 1] = high(b[i], b[i + 2]);
    a[i + 2] = low(b[i + 1], b[i + 3]);
    a[i + 3] = high(b[i + 1], b[i + 3]);
  }
  const auto even = [](__m512 x, __m512 y) { return _mm512_shuffle_f32x4(x, y, 0x88); };
  const auto odd = [](__m512 x, __m512 y) { return _mm512_shuffle_f32x4(x, y, 0xdd); };
  for (int i = 0; i < 4; ++i) {
    const __m512 up = even(a[i], a[i + 4]), down = even(a[i + 8], a[i + 12]);
    const __m512 up_odd = odd(a[i], a[i + 4]), down_odd = odd(a[i + 8], a[i + 12]);
    _mm512_storeu_ps(to + i * to_stride, even(up, down));
    _mm512_storeu_ps(to + (i + 4) * to_stride, even(up_odd, down_odd));
    _mm512_storeu_ps(to + (i + 8) * to_stride, odd(up, down));
    _mm512_storeu_ps(to + (i + 12) * to_stride, odd(up_odd, down_odd));
  }
}

inline void transpose_block(
  const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  if (rows == 16 && columns == 16) {
    transpose_whole_block(from, from_stride, to, to_stride);
  } else {
    at::vec::transpose_mxn<float>(from, from_stride, to, to_stride, rows, columns);
  }
}
#endif

// Transposes [rows, columns] into [columns, rows], kTile columns at a time, so that the cache keeps both sides' lines.
template <typename T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
  constexpr int64_t kBlock = 64 / sizeof(T);
  for (int64_t first = 0; first < columns; first += kTile) {
    for (int64_t i = 0; i < rows; i += kBlock) {
      for (int64_t j = first; j < std::min(first + kTile, columns); j += kBlock) {
        transpose_block(
          from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride,
          std::min(kBlock, rows - i), std::min(kBlock, columns - j));
      }
    }
  }
}

// Numbers as fp32.
inline void widen(const float* from, float* to, int64_t count) {
  std::copy(from, from + count, to);
}

inline void widen(const at::Half* from, float* to, int64_t count) {
  at::vec::convert(from, to, count);
}

inline void widen(const at::BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = c10::bit_cast<float>(static_cast<uint32_t>(from[i].x) << 16);
  }
}

// A strip of columns of a right factor, packed as [depth / together, kTile, together]; each thread has one.
template <typename T>
class Strip {
 public:
  ~Strip() {
    at::native::cpublas::brgemm_release(kIsHalf);
  }

  // Packs columns [j, j + count) of row-major y [depth, *].
  void pack_columns(const T* y, int64_t stride, int64_t depth, int64_t j, int64_t count) {
    T* packed = reserve(depth);
    with_width(count, [&](auto width) {
      for (int64_t k = 0; k < depth; k += together_, packed += kTile * together_) {
        const T* row = y + k * stride + j;
        for (int64_t ahead = k + kAhead; ahead < std::min(k + kAhead + together_, depth); ++ahead) {
          prefetch(y + ahead * stride + j, width);
        }
        if (together_ == 1) {
          for (int64_t c = 0; c < width; ++c) packed[c] = row[c];
        } else {
          auto* low = reinterpret_cast<const uint16_t*>(row);
          auto* high = low + stride;
          auto* pair = reinterpret_cast<uint32_t*>(packed);
          for (int64_t c = 0; c < width; ++c) pair[c] = low[c] | static_cast<uint32_t>(high[c]) << 16;
        }
      }
    });
  }

  // Packs rows [j, j + count) of row-major y [*, depth], the columns of its transpose; a pair of halves is one word.
  void pack_rows(const T* y, int64_t stride, int64_t depth, int64_t j, int64_t count) {
    T* packed = reserve(depth);
    if (together_ == 1) {
      transpose(y + j * stride, stride, packed, kTile, count, depth);
    } else {
      auto* words = reinterpret_cast<const float*>(y + j * stride);
      transpose(words, stride / together_, reinterpret_cast<float*>(packed), kTile, count, depth / together_);
    }
  }

  // sums <- a tile of row-major a [*, depth] times the right factor, whose first column is that of the tile.
  void multiply(const T* a, int64_t stride, const Tile& tile, const Sums& sums) const {
    const T *left = a + tile.i * stride, *right = packed_;
    for (int64_t k = 0; k < depth_; k += kDepth) {
      at::native::cpublas::brgemm(
        tile.rows, tile.columns, std::min(kDepth, depth_ - k), stride, kTile, sums.stride, k > 0, left + k,
        right + k * kTile, sums.values, kIsHalf);
    }
  }

 private:
  static constexpr bool kIsHalf = sizeof(T) == 2;
  static constexpr int64_t kAhead = 16;
  // The longest sum that one kernel call makes, so that both factors of a tile stay in the cache.
  static constexpr int64_t kDepth = 2048 / sizeof(T);

  // Hardware prefetchers do not follow rows that lie far apart.
  static void prefetch(const T* row, int64_t count) {
    for (int64_t c = 0; c < count; c += 64 / sizeof(T)) __builtin_prefetch(row + c);
  }

  // Aligned to a cache line: a load that crosses one costs two.
  T* reserve(int64_t depth) {
    thread_local std::vector<std::byte> memory;
    constexpr size_t kLine = 64;
    const size_t bytes = depth * kTile * sizeof(T);
    if (memory.size() < bytes + kLine) {
      memory.resize(bytes + kLine);
    }
    depth_ = depth;
    void* start = memory.data();
    size_t space = memory.size();
    return packed_ = static_cast<T*>(std::align(kLine, bytes, start, space));
  }

  T* packed_ = nullptr;
  const int64_t together_ = rows_together<T>();
  int64_t depth_ = 0;
};

// Whether the tensors are of a kind that the products are made for.
template <typename... Tensors>
bool has_products(const Tensors&... tensors) {
  return (... && (tensors.is_cpu() && tensors.is_contiguous()));
}

// Whether this CPU has the instructions that oneDNN's kernels need for a 16-bit dtype; without them it would emulate.
inline bool multiplies(at::ScalarType dtype) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  constexpr unsigned kAvx512Fp16 = 1u << 23;  // CPUID leaf 7, EDX; compilers before GCC 12 have no name for it
  return dtype == at::kBFloat16 ? __builtin_cpu_supports("avx512bf16")
                                : __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAvx512Fp16);
#else
  return false;
#endif
}

// Calls body with a zero of x's type where there are kernels for it. Pairs of rows must not cross the end of a factor.
template <typename Body>
bool with_product_type(const at::Tensor& x, int64_t depth, const Body& body) {
  const int64_t size = std::min(x.size(-2), x.size(-1));
  if (x.scalar_type() == at::kFloat) {
    body(float());
    return true;
  }
  const bool is_half = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!is_half || depth % 2 != 0 || size % 2 != 0 || !multiplies(x.scalar_type())) {
    return false;
  }
  if (x.scalar_type() == at::kHalf) {
    body(at::Half());
  } else {
    body(at::BFloat16());
  }
  return true;
}

}  // namespace muon
