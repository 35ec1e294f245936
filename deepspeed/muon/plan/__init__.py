# SPDX-License-Identifier: Apache-2.0
"""Who orthogonalizes which matrix, and which elements travel for it. Without torch."""
