# SPDX-License-Identifier: Apache-2.0
"""Hooks that torch.compile is kept out of, at no cost where nobody compiles. Used by most strategies."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Return ``fn`` as the compiler leaves it alone: it runs as it is, between two compiled graphs.

    torch.compiler.disable imports the compiler (1.5 s) at once, what it returns at its first call. Here it is only
    called where somebody has imported the compiler: nothing is compiled where nobody has.
    """
    disabled = torch._disable_dynamo(fn)  # noqa: SLF001 - torch.compiler.disable without its import

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else fn)(*args, **kwargs)

    return call
