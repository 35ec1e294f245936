# SPDX-License-Identifier: Apache-2.0
"""Which matrices a model has, and where they lie in its parameters."""
