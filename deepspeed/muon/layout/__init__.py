# SPDX-License-Identifier: Apache-2.0
"""Where the elements of matrices lie, as arithmetic on integers: in a parameter, and on the ranks of a job."""
