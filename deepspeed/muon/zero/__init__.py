# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on DeepSpeed's runtime: patches, layouts of the ZeRO stages, checkpoints."""
