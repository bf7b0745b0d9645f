# SPDX-License-Identifier: Apache-2.0
"""Do the ranks hold the same? When they compare, how what they hold travels, and how a difference is described.

Digests are those of ``tensors/checksum``. Knows no model, loader or strategy.
"""
