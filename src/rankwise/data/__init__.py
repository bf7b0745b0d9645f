# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank gets, in which order, and how they reach its device."""
