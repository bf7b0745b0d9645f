# SPDX-License-Identifier: Apache-2.0
"""Hooks that belong to one model: a copy or a pickle of it is a plain model, with hooks that do nothing."""

from __future__ import annotations

from typing import Any


class OwnHook:
    """A hook of a model that was spread."""

    def __deepcopy__(self, memo: object) -> NoHook:
        return NoHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return (NoHook, ())


class NoHook:
    """What stands in a copied model where the other one had its hook."""

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""
