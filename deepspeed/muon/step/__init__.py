# SPDX-License-Identifier: Apache-2.0
"""One step of the Muon parameters, from gradient to weight, and what it needs: gradients, second moments, a plan."""
