# SPDX-License-Identifier: Apache-2.0
"""Each forward of a sharded model computes with the values of now, also where torch keeps whole parameters.

Torch keeps those of the outermost module, and with ``reshard_after_forward=False`` those of all blocks, until backward:
a second forward would compute with the values of the first one. Used by shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.torch_private.fsdp import call_around_forward, free_gathered, shards_of_gathered

if TYPE_CHECKING:
    from torch import nn

    from rankwise.torch_private.fsdp import FSDPParamGroup


class FreshForward:
    """The forwards of one group of parameters, from ``shard`` until the model is deleted."""

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._running: list[nn.Module] = []
        """The modules of the group whose forward is running; one that calls itself is there twice."""
        call_around_forward(group, self._begin, self._end)

    def start_over(self) -> None:
        """Take the next forward for the first one. Called when an error has ended forward."""
        self._running.clear()

    def shards_of_gathered(self) -> dict[int, nn.Parameter]:
        """Return the shard of each whole parameter that modules hold outside forward, by the id of the whole one."""
        return {} if self._running else shards_of_gathered(self._group)

    def _begin(self, module: nn.Module) -> None:
        if not self._running:
            free_gathered(self._group)
        self._running.append(module)

    def _end(self, module: nn.Module) -> None:
        self._running.remove(module)
        # Of several modules that are gathered together, torch reports only the end of the last one.
        if module not in self._running:
            self._running.clear()
