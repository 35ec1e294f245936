// SPDX-License-Identifier: Apache-2.0
// Products of bf16 on 64-bit Arm, by the instruction bfmmla: 2 x 4 numbers times 4 x 2, added to 2 x 2 sums in fp32.
// The module runs on every CPU: only these functions are compiled for the instruction, and tiles.h asks the CPU for it.
#pragma once

#include "tiles.h"

#if defined(MUON_HAS_BFMMLA)
#include <arm_neon.h>

#include <cstring>

namespace muon {
namespace bfmmla {

#define MUON_BFMMLA __attribute__((target("arch=armv8.2-a+bf16")))

// Rows and columns of the sums that the innermost loop keeps in registers.
constexpr int64_t kBlock = 8;

// How many numbers of a row or column one instruction multiplies (kTogether), and how many one load reads (kStep).
constexpr int64_t kTogether = 4, kStep = 8;

// Adds the products of kStep numbers of each row with those of packed columns.
MUON_BFMMLA [[gnu::always_inline]] inline void add_step(
  const uint16_t* const (&left)[kBlock], int64_t k, const uint16_t* right, float32x4_t (&sums)[4][4]) {
  bfloat16x8_t pairs[2][4];
#pragma GCC unroll 4
  for (int p = 0; p < 4; ++p) {
    const uint64x2_t a = vreinterpretq_u64_u16(vld1q_u16(left[2 * p] + k));
    const uint64x2_t b = vreinterpretq_u64_u16(vld1q_u16(left[2 * p + 1] + k));
    pairs[0][p] = vreinterpretq_bf16_u64(vtrn1q_u64(a, b));
    pairs[1][p] = vreinterpretq_bf16_u64(vtrn2q_u64(a, b));
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, right += kTile * kTogether) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const bfloat16x8_t columns = vreinterpretq_bf16_u16(vld1q_u16(right + q * kStep));
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) sums[p][q] = vbfmmlaq_f32(sums[p][q], pairs[half][p], columns);
    }
  }
}

// out <- the product of rows of the left factor with packed columns of the right one.
MUON_BFMMLA inline void multiply_block(
  const uint16_t* (&left)[kBlock], const uint16_t* right, int64_t depth, float (&out)[kBlock][kBlock]) {
  float32x4_t sums[4][4] = {};
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep, right += kStep * kTile) {
    add_step(left, k, right, sums);
  }
  if (k < depth) {  // pad with zeros: what follows a row's end may be infinite, and infinity times zero is NaN
    uint16_t ends[kBlock][kStep] = {};
    for (int r = 0; r < kBlock; ++r) {
      std::memcpy(ends[r], left[r] + k, (depth - k) * sizeof(uint16_t));
      left[r] = ends[r];
    }
    add_step(left, 0, right, sums);
  }
  const auto row = [](float32x4_t a, float32x4_t b, bool low) {
    const uint64x2_t x = vreinterpretq_u64_f32(a), y = vreinterpretq_u64_f32(b);
    return vreinterpretq_f32_u64(low ? vtrn1q_u64(x, y) : vtrn2q_u64(x, y));
  };
#pragma GCC unroll 8
  for (int r = 0; r < kBlock; ++r) {
    vst1q_f32(out[r], row(sums[r / 2][0], sums[r / 2][1], r % 2 == 0));
    vst1q_f32(out[r] + 4, row(sums[r / 2][2], sums[r / 2][3], r % 2 == 0));
  }
}

}  // namespace bfmmla

// A panel packed as [strips, depth / 4, kTile, 4], with zeros behind the depth up to a multiple of kStep.
template <>
class Panel<at::BFloat16> {
 public:
  void pack_columns(const at::BFloat16* y, int64_t stride, int64_t depth, int64_t first, int64_t count) {
    pack(y + first, stride, 1, depth, first, count);
  }

  void pack_rows(const at::BFloat16* y, int64_t stride, int64_t depth, int64_t first, int64_t count) {
    pack(y + first * stride, 1, stride, depth, first, count);
  }

  // sums <- the rows of a tile, row-major left [rows, depth], times its columns of the right factor; or sums plus that.
  void multiply(const at::BFloat16* left, int64_t stride, const Tile& tile, const Sums& sums, bool add = false) const {
    const auto* rows = reinterpret_cast<const uint16_t*>(left);
    const uint16_t* strip = packed_ + (tile.j - first_) * padded_;
    for (int64_t k = 0; k < depth_; k += kDepth, strip += kDepth * kTile, add = true) {
      const int64_t depth = std::min(kDepth, depth_ - k);
      for (int64_t i = 0; i < tile.rows; i += kBlock) {
        for (int64_t j = 0; j < tile.columns; j += kBlock) {
          const uint16_t* starts[kBlock];  // past the tile's end its last row is repeated, and the sums are dropped
          for (int64_t r = 0; r < kBlock; ++r) starts[r] = rows + std::min(i + r, tile.rows - 1) * stride + k;
          float block[kBlock][kBlock];
          bfmmla::multiply_block(starts, strip + j * bfmmla::kTogether, depth, block);
          for (int64_t r = 0; r < std::min(kBlock, tile.rows - i); ++r) {
            float* to = sums.values + (i + r) * sums.stride + j;
            for (int64_t c = 0; c < std::min(kBlock, tile.columns - j); ++c) {
              to[c] = add ? to[c] + block[r][c] : block[r][c];
            }
          }
        }
      }
    }
  }

 private:
  static constexpr int64_t kBlock = bfmmla::kBlock;
  // The longest sum of one call, so that the rows of a block and a strip stay in the cache.
  static constexpr int64_t kDepth = 1024;

  // Packs columns [first, first + count) of the right factor, whose row k and column c is y[k * row + c * column].
  void pack(const at::BFloat16* y, int64_t row, int64_t column, int64_t depth, int64_t first, int64_t count) {
    using bfmmla::kTogether, bfmmla::kStep;
    thread_local Scratch scratch;
    depth_ = depth;
    padded_ = (depth + kStep - 1) / kStep * kStep;
    first_ = first;
    packed_ = scratch.get<uint16_t>(padded_ * ((count + kTile - 1) / kTile * kTile));
    for (int64_t j = 0; j < count; j += kTile) {
      for (int64_t k = 0; k < padded_; k += kTogether) {
        uint16_t* to = packed_ + j * padded_ + k * kTile;
        for (int64_t c = j; c < std::min(j + kTile, count); ++c) {
          for (int64_t i = k; i < k + kTogether; ++i) *to++ = i < depth ? y[i * row + c * column].x : 0;
        }
      }
    }
  }

  uint16_t* packed_ = nullptr;
  int64_t depth_ = 0, padded_ = 0, first_ = 0;
};

}  // namespace muon
#endif
