# SPDX-License-Identifier: Apache-2.0
"""What the optimizer will do on ranks that do not exist yet."""
