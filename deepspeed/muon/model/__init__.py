# SPDX-License-Identifier: Apache-2.0
"""What the model says: which parameters go to Muon, which matrices they hold, and their parameter groups."""
