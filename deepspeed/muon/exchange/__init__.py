# SPDX-License-Identifier: Apache-2.0
"""The only collectives of a step."""
