# SPDX-License-Identifier: Apache-2.0
"""Measurements of deepspeed-muon. Every published table comes from `python -m benchmarks NAME`."""
