// SPDX-License-Identifier: Apache-2.0
// The operations of deepspeed/muon/kernels/reference.py for a CPU. Each takes what its twin of the same name takes, less
// the workspace, and returns whether it did the work: false, and nothing touched, for devices, dtypes and strides that
// it is not made for. Each has one line here and one in bindings.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
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

// Rest and diagonal of symmetric matrices: in fp32 the diagonal has no elements.
using Parts = std::pair<at::Tensor, at::Tensor>;

bool square(const at::Tensor& x, const Parts& out);
// by: alpha, beta and shift.
bool product(const Parts& a, const Parts& b, const Parts& out, std::tuple<double, double, double> by);
bool multiply(const Parts& p, const at::Tensor& x, const at::Tensor& out);

}  // namespace muon
