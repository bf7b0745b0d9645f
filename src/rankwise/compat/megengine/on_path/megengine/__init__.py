# SPDX-License-Identifier: Apache-2.0
"""``megengine``, where a program has asked for rankwise to stand in for it."""

from __future__ import annotations

from rankwise.compat.megengine.alias import register

register()
