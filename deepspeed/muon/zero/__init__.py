# SPDX-License-Identifier: Apache-2.0
"""Everything that knows DeepSpeed's runtime: seams, layouts of the ZeRO stages, checkpoints."""
