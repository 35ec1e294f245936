# SPDX-License-Identifier: Apache-2.0
"""Saving, loading and converting checkpoints."""
