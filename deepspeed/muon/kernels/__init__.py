# SPDX-License-Identifier: Apache-2.0
"""The operations that a step spends its time in, behind one table: in plain PyTorch, C++ or Triton."""
