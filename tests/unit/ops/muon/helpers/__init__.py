# SPDX-License-Identifier: Apache-2.0
"""What the tests share: models, oracles, jobs for ranks and the pools that run them."""
