// SPDX-License-Identifier: Apache-2.0
// Matrix products tile by tile, on oneDNN's kernels: a tile of fp32 sums stays in the cache until it is rounded, once.
// The left factor is read where it lies; of the right one a panel of columns is packed, because dot products of bf16
// take pairs of rows, and because packed rows are read in whole cache lines.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/bit_cast.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#if defined(HWCAP2_BF16)
#define MUON_HAS_BFMMLA
#endif
#endif

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace muon {

// Rows that a packed panel holds side by side, because one instruction takes pairs of bf16 together.
template <typename T>
constexpr int64_t kTogether = std::is_same_v<T, at::BFloat16> ? 2 : 1;

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

  Sums sums() {
    return {values, kTile};
  }
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

#if defined(CPU_CAPABILITY_AVX512)
// Transposes 16 x 16 words in registers, and calls store with the place of each new row and the row: at::vec's goes
// through memory, and takes more than twice as long.
template <typename Store>
inline void transpose_words(__m512 (&a)[16], const Store& store) {
  __m512 b[16];
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
    store(i, even(up, down));
    store(i + 4, even(up_odd, down_odd));
    store(i + 8, odd(up, down));
    store(i + 12, odd(up_odd, down_odd));
  }
}

// 16 columns of a row of fp32, or of a pair of rows of 16-bit numbers, as words.
inline __m512 words(const float* from, int64_t) {
  return _mm512_loadu_ps(from);
}

template <typename T>
inline __m512 words(const T* from, int64_t stride) {
  const auto row = [&](const T* start) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(start)));
  };
  return _mm512_castsi512_ps(_mm512_or_si512(row(from), _mm512_slli_epi32(row(from + stride), 16)));
}

// Transposes a square block; a side has 64 bytes of T.
template <typename T>
inline void transpose_block(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  constexpr int64_t kPerWord = sizeof(float) / sizeof(T);
  for (int64_t j = 0; j < 16 * kPerWord; j += 16) {
    __m512 block[16];
    for (int64_t i = 0; i < 16; ++i) block[i] = words(from + i * kPerWord * from_stride + j, from_stride);
    transpose_words(block, [&](int64_t i, __m512 row) { _mm512_storeu_ps(to + (j + i) * to_stride, row); });
  }
}
#else
// Transposes a square block; a side has 64 bytes of T.
template <typename T>
inline void transpose_block(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  constexpr int64_t kBlock = 64 / sizeof(T);
  at::vec::transpose_mxn<T, kBlock, kBlock>(from, from_stride, to, to_stride);
}
#endif

// Transposes [rows, columns] into [columns, rows], a few rows at a time from end to end, as hardware prefetchers follow
// them so.
template <typename T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
  constexpr int64_t kBlock = 64 / sizeof(T);
  for (int64_t i = 0; i < rows; i += kBlock) {
    for (int64_t j = 0; j < columns; j += kBlock) {
      const int64_t height = std::min(kBlock, rows - i), width = std::min(kBlock, columns - j);
      const T* source = from + i * from_stride + j;
      T* target = to + j * to_stride + i;
      if (height == kBlock && width == kBlock) {
        transpose_block(source, from_stride, target, to_stride);
      } else {
        at::vec::transpose_mxn<T>(source, from_stride, target, to_stride, height, width);
      }
    }
  }
}

// Numbers as fp32.
inline void widen(const float* from, float* to, int64_t count) {
  std::copy(from, from + count, to);
}

inline void widen(const at::BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = c10::bit_cast<float>(static_cast<uint32_t>(from[i].x) << 16);
  }
}

// Memory that a thread keeps from one call to the next.
class Scratch {
 public:
  // Room for numbers, aligned to a cache line: a load that crosses one costs two.
  template <typename T>
  T* get(int64_t count) {
    constexpr size_t kLine = 64;
    const size_t bytes = count * sizeof(T);
    if (memory_.size() < bytes + kLine) {
      memory_.resize(bytes + kLine);
    }
    void* start = memory_.data();
    size_t space = memory_.size();
    return static_cast<T*>(std::align(kLine, bytes, start, space));
  }

 private:
  std::vector<std::byte> memory_;
};

// A panel of columns of a right factor, packed in strips as [strips, depth / kTogether, kTile, kTogether].
template <typename T>
class Panel {
 public:
  ~Panel() {
    at::native::cpublas::brgemm_release(kIsBf16);
  }

  // Packs columns [first, first + count) of row-major y [depth, *].
  void pack_columns(const T* y, int64_t stride, int64_t depth, int64_t first, int64_t count) {
    reserve(depth, first, count);
    for (int64_t j = first; j < first + count; j += kTile) {
      with_width(std::min(kTile, first + count - j), [&](auto width) { pack_strip(y + j, stride, strip(j), width); });
    }
  }

  // Packs rows [first, first + count) of row-major y [*, depth], the columns of its transpose.
  void pack_rows(const T* y, int64_t stride, int64_t depth, int64_t first, int64_t count) {
    reserve(depth, first, count);
    for (int64_t j = first; j < first + count; j += kTile) {
      const int64_t width = std::min(kTile, first + count - j);
      if constexpr (kTogether<T> == 1) {
        transpose(y + j * stride, stride, strip(j), kTile, width, depth);
      } else {  // a pair of bf16 is one word
        auto* words = reinterpret_cast<const float*>(y + j * stride);
        transpose(words, stride / kTogether<T>, reinterpret_cast<float*>(strip(j)), kTile, width, depth / kTogether<T>);
      }
    }
  }

  // sums <- the rows of a tile, row-major left [rows, depth], times its columns of the right factor; or sums plus that.
  void multiply(const T* left, int64_t stride, const Tile& tile, const Sums& sums, bool add = false) const {
    const T* right = strip(tile.j);
    for (int64_t k = 0; k < depth_; k += kDepth) {
      at::native::cpublas::brgemm(
        tile.rows, tile.columns, std::min(kDepth, depth_ - k), stride, kTile, sums.stride, add || k > 0, left + k,
        right + k * kTile, sums.values, kIsBf16);
    }
  }

 private:
  static constexpr bool kIsBf16 = std::is_same_v<T, at::BFloat16>;
  static constexpr int64_t kAhead = 16;
  // The longest sum that one kernel call makes, so that both factors of a tile stay in the cache.
  static constexpr int64_t kDepth = 2048 / sizeof(T);

  template <typename Width>
  void pack_strip(const T* y, int64_t stride, T* packed, Width width) const {
    for (int64_t k = 0; k < depth_; k += kTogether<T>, packed += kTile * kTogether<T>) {
      const T* row = y + k * stride;
      for (int64_t ahead = k + kAhead; ahead < std::min(k + kAhead + kTogether<T>, depth_); ++ahead) {
        prefetch(y + ahead * stride, width);
      }
      if constexpr (kTogether<T> == 1) {
        for (int64_t c = 0; c < width; ++c) packed[c] = row[c];
      } else {
        auto* low = reinterpret_cast<const uint16_t*>(row);
        auto* high = low + stride;
        auto* pair = reinterpret_cast<uint32_t*>(packed);
        for (int64_t c = 0; c < width; ++c) pair[c] = low[c] | static_cast<uint32_t>(high[c]) << 16;
      }
    }
  }

  // Hardware prefetchers do not follow rows that lie far apart.
  static void prefetch(const T* row, int64_t count) {
    for (int64_t c = 0; c < count; c += 64 / sizeof(T)) __builtin_prefetch(row + c);
  }

  void reserve(int64_t depth, int64_t first, int64_t count) {
    thread_local Scratch scratch;
    depth_ = depth;
    first_ = first;
    packed_ = scratch.get<T>(depth * ((count + kTile - 1) / kTile * kTile));
  }

  // The strip whose first column is j.
  T* strip(int64_t j) const {
    return packed_ + (j - first_) * depth_;
  }

  T* packed_ = nullptr;
  int64_t depth_ = 0, first_ = 0;
};

// Calls body(panel, n, first, count) for the columns of every matrix of a batch, in panels of at most kStrips strips,
// which share the reads of the left factor. Of fewer where a thread would have less than two panels, unless each of them
// has as many matrices.
template <typename T, int64_t kStrips, typename Body>
void for_panels(int64_t batch, int64_t columns, const Body& body) {
  const int64_t strips = (columns + kTile - 1) / kTile, threads = at::get_num_threads();
  const int64_t least = batch % threads == 0 ? threads : 2 * threads;
  const int64_t width = kTile * std::clamp<int64_t>(batch * strips / least, 1, kStrips);
  const int64_t panels = (columns + width - 1) / width;
  at::parallel_for(0, batch * panels, 1, [&](int64_t begin, int64_t end) {
    Panel<T> panel;
    for (int64_t unit = begin; unit < end; ++unit) {
      // From both ends in turn: of a triangle the first panel is the longest, and the last one the shortest.
      const int64_t turn = unit % panels, place = turn % 2 == 0 ? turn / 2 : panels - 1 - turn / 2;
      body(panel, unit / panels, place * width, std::min(width, columns - place * width));
    }
  });
}

// Whether the tensors are of a kind that the products are made for.
template <typename... Tensors>
bool has_products(const Tensors&... tensors) {
  return (... && (tensors.is_cpu() && tensors.is_contiguous()));
}

// Whether this CPU has the instructions for products of bf16: on Arm bfmmla, elsewhere those that oneDNN's kernels need;
// without them oneDNN would emulate.
inline bool multiplies_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#elif defined(MUON_HAS_BFMMLA)
  return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#else
  return false;
#endif
}

// Whether there is a kernel for bf16 now. A user may switch oneDNN off, or limit its instructions by an environment
// variable; at::native::cpublas::brgemm raises then.
inline bool has_bf16_kernel() {
#if defined(MUON_HAS_BFMMLA)
  return true;  // that of bfmmla.h
#endif
  if (!at::globalContext().userEnabledMkldnn()) return false;
  static const bool runs = [] {
    const at::BFloat16 factor[4] = {};
    float sums[4] = {};
    try {
      at::native::cpublas::brgemm(2, 2, 2, 2, 2, 2, false, factor, factor, sums, true);
      at::native::cpublas::brgemm_release(true);
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }();
  return runs;
}

// Calls body with a zero of x's type where there are products for it: of fp32, and of bf16 with even sizes, because
// pairs of rows must not cross the end of a factor.
template <typename Body>
bool with_product_type(const at::Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) {
    body(float());
    return true;
  }
  if (x.scalar_type() != at::kBFloat16 || x.size(-1) % 2 != 0 || x.size(-2) % 2 != 0) return false;
  if (!multiplies_bf16() || !has_bf16_kernel()) return false;
  body(at::BFloat16());
  return true;
}

}  // namespace muon
