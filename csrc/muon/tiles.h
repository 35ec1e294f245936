// SPDX-License-Identifier: Apache-2.0
// Matrix products tile by tile, on oneDNN's kernels: a tile of fp32 sums stays in the cache until it is rounded, once.
// The left factor is read where it lies; of the right one a strip of columns is packed, as dot products of 16-bit
// numbers take pairs of rows.
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

// The longest sum that one kernel call makes, so that both factors of a tile stay in the cache.
constexpr int64_t kDepth = 1024;

// Calls body with the width of a tile, as a constant where the tile is whole: the compiler then unrolls its loops.
template <int64_t kWhole, typename Body>
void with_width(int64_t width, const Body& body) {
  if (width == kWhole) {
    body(std::integral_constant<int64_t, kWhole>());
  } else {
    body(width);
  }
}

// Transposes [rows, columns] into [columns, rows].
template <typename T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
  constexpr int64_t kBlock = 64 / sizeof(T);
  for (int64_t i = 0; i < rows; i += kBlock) {
    for (int64_t j = 0; j < columns; j += kBlock) {
      at::vec::transpose_mxn<T>(
        from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride,
        std::min(kBlock, rows - i), std::min(kBlock, columns - j));
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

// A strip of columns of a right factor, packed as [depth / together, width, together]; each thread has one.
template <typename T>
class Strip {
 public:
  explicit Strip(int64_t width) : width_(width) {}

  ~Strip() {
    at::native::cpublas::brgemm_release(kIsHalf);
  }

  // Packs columns [0, count) of row-major y [depth, *].
  void pack_columns(const T* y, int64_t stride, int64_t depth, int64_t count) {
    T* packed = reserve(depth);
    for (int64_t k = 0; k < depth; k += together_, packed += width_ * together_) {
      const T* row = y + k * stride;
      if (together_ == 1) {
        std::copy(row, row + count, packed);
      } else {
        auto* low = reinterpret_cast<const uint16_t*>(row);
        auto* high = low + stride;
        auto* pair = reinterpret_cast<uint32_t*>(packed);
        for (int64_t j = 0; j < count; ++j) {
          pair[j] = low[j] | static_cast<uint32_t>(high[j]) << 16;
        }
      }
    }
  }

  // Packs rows [0, count) of row-major y [*, depth], the columns of its transpose; a pair of halves is one 32-bit word.
  void pack_rows(const T* y, int64_t stride, int64_t depth, int64_t count) {
    T* packed = reserve(depth);
    if (together_ == 1) {
      transpose(y, stride, packed, width_, count, depth);
    } else {
      auto* words = reinterpret_cast<float*>(packed);
      transpose(reinterpret_cast<const float*>(y), stride / together_, words, width_, count, depth / together_);
    }
  }

  // sums [rows, columns], of row stride `width` <- a [rows, depth] times the strip.
  void multiply(const T* a, int64_t stride, float* sums, int64_t rows, int64_t columns) const {
    for (int64_t k = 0; k < depth_; k += kDepth) {
      at::native::cpublas::brgemm(
        rows, columns, std::min(kDepth, depth_ - k), stride, width_, width_, k > 0, a + k,
        packed_ + k * width_, sums, kIsHalf);
    }
  }

 private:
  static constexpr bool kIsHalf = sizeof(T) == 2;

  // Aligned to a cache line: a load that crosses one costs two.
  T* reserve(int64_t depth) {
    thread_local std::vector<std::byte> memory;
    constexpr size_t kLine = 64;
    const size_t bytes = depth * width_ * sizeof(T);
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
  int64_t width_, depth_ = 0;
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
