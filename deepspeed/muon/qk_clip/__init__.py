# SPDX-License-Identifier: Apache-2.0
"""QK-clip: observe a model's attention logits in training; scale down heads whose logits are too large."""
