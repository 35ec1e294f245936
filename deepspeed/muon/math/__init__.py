# SPDX-License-Identifier: Apache-2.0
"""The mathematics of a step. Nothing in it knows of ranks or shards."""
