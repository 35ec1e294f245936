# SPDX-License-Identifier: Apache-2.0
"""The mathematics of an optimizer step, without any notion of ranks."""
