# SPDX-License-Identifier: Apache-2.0
"""What is said about MegEngine's names that have no counterpart here. Imported by this room's fronts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def refused(module: str, name: str, instead: Mapping[str, str], offered: Iterable[str]) -> Exception:
    """Return what to raise where a module is asked for a name that it does not have.

    Args:
        module: in MegEngine's words: ``"megengine.data"``.
        name: that was asked for.
        instead: what to use in place of MegEngine's names.
        offered: the names that there are.
    """
    if name in instead:
        # No AttributeError: `from ... import name` would put words of its own in place of these.
        return ConfigurationError(
            f"{module}.{name} is not offered here: rankwise provides only MegEngine's functions for several ranks.",
            do=f"use {instead[name]}",
        )
    return AttributeError(f"rankwise's {module} has no {name!r}; it has {', '.join(sorted(offered))}")
