# SPDX-License-Identifier: Apache-2.0
"""Everything that ranks send each other in a step: collectives, process groups, and what happens if one fails."""
