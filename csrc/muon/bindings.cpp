// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "muon.h"

#define MUON_TEXT(x) MUON_QUOTED(x)
#define MUON_QUOTED(x) #x

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = MUON_TEXT(TORCH_VERSION_MAJOR) "." MUON_TEXT(TORCH_VERSION_MINOR);
  m.attr("cpu_capability") = MUON_TEXT(CPU_CAPABILITY);
  m.def("advance", &muon::advance);
  m.def("advance_rounded", &muon::advance_rounded);
  m.def("advance_codes", &muon::advance_codes);
  m.def("apply_", &muon::apply_);
  m.def("copy_rounded", &muon::copy_rounded);
  m.def("normalize", &muon::normalize);
  m.def("has_fast_bf16", &muon::has_fast_bf16);
  m.def("multiplies_apart", &muon::multiplies_apart);
  m.def("square", &muon::square);
  m.def("product", &muon::product);
  m.def("multiply", &muon::multiply);
}
