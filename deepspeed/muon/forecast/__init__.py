# SPDX-License-Identifier: Apache-2.0
"""Forecasts of what the optimizer does on any number of ranks, computed in one process."""
