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
bool look_ahead(const at::Tensor& codes, const at::Tensor& absmax, int64_t skipped, const at::Tensor& grad,
                const at::Tensor& out, int64_t cols, int64_t pitch, double momentum, bool nesterov);
bool advance_codes(const at::Tensor& codes, const at::Tensor& absmax, const at::Tensor& grad,
                   const std::optional<at::Tensor>& out, double momentum, bool nesterov, std::pair<int64_t, int64_t> key,
                   int64_t first);
bool apply_(const at::Tensor& param, const at::Tensor& update, double lr, double scale, double weight_decay,
            bool cautious);
bool copy_rounded(const at::Tensor& target, const at::Tensor& source, std::pair<int64_t, int64_t> key, int64_t first);
bool normalize(const at::Tensor& x, const at::Tensor& out, double norm);

// Symmetric matrices are two tensors each: in fp32 the second, the diagonal, has no elements.
// `x` and `out` of these two are transposed first where `transposed` says so.
bool square(const at::Tensor& x, bool transposed, const at::Tensor& rest, const at::Tensor& diagonal);
bool product(const at::Tensor& a, const at::Tensor& a_diagonal, const at::Tensor& b, const at::Tensor& b_diagonal,
             const at::Tensor& out, const at::Tensor& out_diagonal, double alpha, double beta, double shift);
bool multiply(const at::Tensor& p, const at::Tensor& diagonal, const at::Tensor& x, bool transposed,
              const at::Tensor& out);

}  // namespace muon
