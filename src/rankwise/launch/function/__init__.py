# SPDX-License-Identifier: Apache-2.0
"""``rankwise.launch``: a function on ranks, and what it returns."""
