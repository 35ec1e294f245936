// SPDX-License-Identifier: Apache-2.0
// The operations of deepspeed/muon/kernels/reference.py for a CPU. Each takes what its twin of the same name takes, less
// the workspace, and returns whether it did the work: false, and nothing touched, for devices, dtypes and strides that
// it is not made for. Each has one line here and one in bindings.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace muon {

bool advance(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum, bool nesterov);
bool advance_rounded(const at::Tensor& buffer, const at::Tensor& grad, const at::Tensor& out, double momentum,
                     bool nesterov, std::pair<int64_t, int64_t> key, int64_t first);
bool advance_codes(const at::Tensor& codes, const at::Tensor& absmax, const at::Tensor& grad, const at::Tensor& out,
                   double momentum, bool nesterov, std::pair<int64_t, int64_t> key, int64_t first);
bool apply_(const at::Tensor& param, const at::Tensor& update, double lr, double scale, double weight_decay,
            bool cautious);
bool copy_rounded(const at::Tensor& target, const at::Tensor& source, std::pair<int64_t, int64_t> key, int64_t first);
bool normalize(const at::Tensor& x, const at::Tensor& out, double norm);

// Symmetric matrices [batch, size, size]: in bf16 apart from their diagonals [batch, size] in fp32; in fp32 whole.
using Parts = std::pair<at::Tensor, std::optional<at::Tensor>>;

// Whether the products are made for bf16 matrices of x's shape on this CPU, with their diagonals apart.
bool multiplies_apart(const at::Tensor& x);
// Whether products of bf16 are faster than those of fp32 on this CPU.
bool has_fast_bf16();

bool square(const at::Tensor& x, const Parts& out);
bool product(const Parts& a, const Parts& b, const Parts& out, double alpha, double beta);
bool multiply(const Parts& p, const at::Tensor& x, const at::Tensor& out, double shift);

}  // namespace muon
