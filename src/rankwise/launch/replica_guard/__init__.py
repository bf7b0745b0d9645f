# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --guard``: ranks of a hand-written script compare what they train."""
