# SPDX-License-Identifier: Apache-2.0
"""The version, and the range of DeepSpeed versions that the test suite was run on."""

__version__ = "0.2.0"

#: Oldest and newest DeepSpeed version tested.
TESTED_DEEPSPEED = ("0.19.7", "0.19.8")
