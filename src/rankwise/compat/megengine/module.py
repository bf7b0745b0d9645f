# SPDX-License-Identifier: Apache-2.0
"""``megengine.module`` is torch.nn here, and importing it says so."""

from rankwise.compat.megengine import not_here

raise not_here("module")
