# SPDX-License-Identifier: Apache-2.0
"""The section ``optimizer.params`` of a ds_config: its keys, their values, and messages about wrong ones."""
