# SPDX-License-Identifier: Apache-2.0
"""What the optimizer will do on any number of ranks, without them."""
