# SPDX-License-Identifier: Apache-2.0
"""Find which of a model's parameters Muon updates and which matrices they hold, and build the parameter groups."""
