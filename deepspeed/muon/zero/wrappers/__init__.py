# SPDX-License-Identifier: Apache-2.0
"""Adapters, one for each of DeepSpeed's optimizer wrappers."""
