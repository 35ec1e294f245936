# SPDX-License-Identifier: Apache-2.0
"""QK-clip: see the attention logits of a model while it trains, and scale heads whose logits are too large."""
