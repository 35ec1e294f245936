# SPDX-License-Identifier: Apache-2.0
"""The mathematics of a step, without ranks."""
