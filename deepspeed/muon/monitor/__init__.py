# SPDX-License-Identifier: Apache-2.0
"""What a run records about its steps: measured, summed over ranks, written through DeepSpeed's monitor, read again."""
