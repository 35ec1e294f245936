# SPDX-License-Identifier: Apache-2.0
"""The kernels that a step spends its time in. A table of them is one implementation: plain PyTorch, C++ or Triton."""
