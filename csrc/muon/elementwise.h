// SPDX-License-Identifier: Apache-2.0
// Loads, stores and loops that the elementwise operations share.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstring>

namespace muon {

using at::vec::VectorizedN;

// The unit of all arithmetic: two vectors of fp32, as many elements as one vector of bf16. Ends of slices are loaded and
// stored in part and computed as whole units, so that the arithmetic of an element does not depend on its place.
using Floats = VectorizedN<float, 2>;
using Ints = VectorizedN<int32_t, 2>;
constexpr int kUnit = Floats::size();
static_assert(kUnit == at::vec::Vectorized<at::BFloat16>::size());

// Elements below which a second thread costs more than it saves.
constexpr int64_t kGrain = 32768;

// As many elements as count says, as fp32; zeros in place of the rest.
template <typename T>
inline Floats load(const T* from, int count) {
  if constexpr (std::is_same_v<T, float>) {
    using Half = at::vec::Vectorized<float>;
    constexpr int half = Half::size();
    return Floats(Half::loadu(from, std::min(count, half)), count > half ? Half::loadu(from + half, count - half) : Half(0));
  } else {
    return at::vec::convert<float, 2, T, 1>(VectorizedN<T, 1>::loadu(from, count));
  }
}

template <typename T>
inline void store(T* to, const Floats& values, int count) {
  if constexpr (std::is_same_v<T, float>) {
    values.store(to, count);
  } else {
    at::vec::convert<T, 1, float, 2>(values).store(to, count);  // to nearest even
  }
}

template <typename To, typename From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), static_cast<const void*>(&from), sizeof(to));
  return to;
}

// body(index of the first element, number of elements) for units from begin to end; the last may be shorter.
template <typename Body>
inline void for_units(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kUnit <= end; i += kUnit) body(i, kUnit);
  if (i < end) body(i, static_cast<int>(end - i));
}

template <typename Body>
inline void parallel_units(int64_t numel, const Body& body) {
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) { for_units(begin, end, body); });
}

// start + weight (end - start), with one rounding of the sum, as torch.lerp has it: from the nearer end.
struct Lerp {
  explicit Lerp(float weight)
      : from_start(std::abs(weight) < 0.5f), coefficient(from_start ? weight : weight - 1.0f) {}

  Floats operator()(const Floats& start, const Floats& end) const {
    return at::vec::fmadd(coefficient, end - start, from_start ? start : end);
  }

  bool from_start;
  Floats coefficient;
};

// The new average of a momentum, and the input of Newton-Schulz that follows from it.
struct Momentum {
  Momentum(double momentum, bool nesterov) : average(1.0 - momentum), nesterov_average(momentum), nesterov(nesterov) {}

  Floats ahead(const Floats& gradient, const Floats& average_now) const {
    return nesterov ? nesterov_average(gradient, average_now) : average_now;
  }

  Lerp average, nesterov_average;
  bool nesterov;
};

inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous();
}

// Whether all are plain tensors of the first one's shape.
template <typename... Tensors>
inline bool are_plain(const at::Tensor& first, const Tensors&... others) {
  return is_plain(first) && ((is_plain(others) && others.sizes() == first.sizes()) && ...);
}

template <typename T>
inline const T* input(const at::Tensor& tensor) {
  return tensor.const_data_ptr<T>();
}

// For writing, which autograd must see: a graph that needs the old values is refused by its version.
template <typename T>
inline T* output(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return tensor.mutable_data_ptr<T>();
}

// Calls run with a null pointer to the type of the tensor's elements where that is one of Types; else gives false.
template <typename... Types, typename Run>
inline bool with_type(const at::Tensor& tensor, const Run& run) {
  return ((tensor.scalar_type() == c10::CppTypeToScalarType<Types>::value && (run(static_cast<Types*>(nullptr)), true)) ||
          ...);
}

// Calls run with the elements of a gradient and of the input of Newton-Schulz where both have supported types; else
// gives false.
template <typename Run>
inline bool with_gradient(const at::Tensor& grad, const at::Tensor& out, const Run& run) {
  bool done = false;
  with_type<float, at::BFloat16, at::Half>(grad, [&](auto* g) {
    done = with_type<float, at::BFloat16>(out, [&](auto* o) {
      run(input<std::remove_pointer_t<decltype(g)>>(grad), output<std::remove_pointer_t<decltype(o)>>(out));
    });
  });
  return done;
}

}  // namespace muon
