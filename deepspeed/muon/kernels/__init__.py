# SPDX-License-Identifier: Apache-2.0
"""The kernels of an optimizer step. A kernel set is one implementation of them: plain PyTorch, C++ or Triton."""
