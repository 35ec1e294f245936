# SPDX-License-Identifier: Apache-2.0
"""One adapter for each of DeepSpeed's optimizer wrappers."""
