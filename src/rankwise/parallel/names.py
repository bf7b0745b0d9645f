# SPDX-License-Identifier: Apache-2.0
"""Modules by name, with ``*`` for any part of one. Used by shard and tensor_parallel."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern stands for: ``layers.*`` is each layer, and nothing within one."""
    return [name for name in names if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)]
