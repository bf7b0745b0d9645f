# SPDX-License-Identifier: Apache-2.0
"""What a loss is averaged over, read from its autograd graph before backward runs."""
