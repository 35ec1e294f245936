# SPDX-License-Identifier: Apache-2.0
"""The kernels that a step spends its time in. A kernel set is one implementation: plain PyTorch, C++ or Triton."""
