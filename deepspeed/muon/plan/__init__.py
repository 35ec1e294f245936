# SPDX-License-Identifier: Apache-2.0
"""Which rank orthogonalizes which matrix, and which elements travel. Without torch."""
