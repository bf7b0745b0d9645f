# SPDX-License-Identifier: Apache-2.0
"""Errors for MegEngine's names that are not offered here, which name a replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def refusing(module: str, offered: Iterable[str], instead: Callable[[str], str | None] | str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, which raises for every name.

    Args:
        module: its name in MegEngine: ``"megengine.data"``.
        offered: its names.
        instead: returns what to use in place of a name of MegEngine; or one text for all names.
    """

    def refuse(name: str) -> Any:
        if isinstance(instead, str):
            raise refused(module, name, offered, None if name.startswith("__") else instead)
        raise refused(module, name, offered, instead(name))

    return refuse


def refused(module: str, name: str, offered: Iterable[str], instead: str | None) -> Exception:
    """Return the error for one name; arguments as for :func:`refusing`."""
    if instead is None:
        return AttributeError(f"rankwise's {module} has no {name!r}; it has {', '.join(sorted(offered))}")
    # Not an AttributeError: `from ... import name` would replace its text.
    return ConfigurationError(
        f"{module}.{name} is not offered here: rankwise provides only MegEngine's functions for several ranks.",
        do=f"use {instead}",
    )
