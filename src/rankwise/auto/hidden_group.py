# SPDX-License-Identifier: Apache-2.0
"""The process group of the ranks, hidden from the script, which knows of one process only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankwise.auto.caller import calling_module
from rankwise.auto.replacing import replaced
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def group_hidden() -> AbstractContextManager[None]:
    """Have the script find no process group inside the block, and be unable to open one."""
    return replaced(
        (dist, ["init_process_group"], lambda _: _opens_group),
        (dist, ["is_initialized"], partial(_for_script, lambda: False)),
        (dist, ["get_rank", "get_world_size"], partial(_for_script, _has_no_group)),
    )


def _for_script(answer: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers the script and its libraries; torch and rankwise get torch's own answer."""

    def call(*args: Any, **kwargs: Any) -> Any:
        is_own = calling_module().partition(".")[0] in {"torch", "rankwise"}
        return function(*args, **kwargs) if is_own else answer()

    return call


def _has_no_group() -> None:
    raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


def _opens_group(*_: Any, **__: Any) -> None:
    raise ConfigurationError(
        "The script opens a process group of its own, but --auto runs scripts for one device.",
        where=words(user_call_site()),
        do="run it without --auto",
    )
