# SPDX-License-Identifier: Apache-2.0
"""Plan which rank orthogonalizes which matrix, and which elements are sent where, in plain Python without torch."""
