# SPDX-License-Identifier: Apache-2.0
"""The package ``megengine`` of programs that have requested the alias."""

from __future__ import annotations

from rankwise.compat.megengine.alias import register

register()
