# SPDX-License-Identifier: Apache-2.0
"""Torch's own rendezvous by URL. Imports torch when it is called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def replace_handler(scheme: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch's handler of a URL scheme by ``handler``; return the previous one.

    Source: torch.distributed.rendezvous, whose ``register_rendezvous_handler`` takes new schemes only.
    """
    # torch.distributed exports a function of the same name as this module.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    before: Callable[..., Any] = rendezvous._rendezvous_handlers[scheme]  # noqa: SLF001
    rendezvous._rendezvous_handlers[scheme] = handler  # noqa: SLF001
    return before
