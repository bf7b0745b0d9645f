# SPDX-License-Identifier: Apache-2.0
"""One operation of this rank, until its result is taken. Used by queue and by what submits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rankwise.compat.horovod.request import Request


@dataclass(kw_only=True, eq=False)
class Pending:
    """One operation of this rank, from the call that asks for it to the call that takes its result."""

    request: Request
    tensors: Sequence[torch.Tensor] = ()
    is_in_place: bool = False
    """Whether what arrives is written into ``tensors``."""
    splits: Sequence[int] = ()
    take: Callable[[list[torch.Tensor]], Any] = list
    """Makes the call's result of the tensors that arrived."""
    take_part: Callable[[], None] | None = None
    """What an announced step does in place of sending tensors."""
    is_done: bool = False
    result: Any = None
    error: Exception | None = None

    def finish(self, tensors: list[torch.Tensor]) -> None:
        """Make the result of what has arrived."""
        try:
            self.result = self.take(tensors)
        except Exception as error:  # noqa: BLE001 - it is raised to whoever waits for this one, not to who carries it out
            self.error = error
        self.end()

    def end(self, error: Exception | None = None) -> None:
        """Let go of what was to be sent."""
        self.error = self.error or error
        self.tensors = ()
        self.is_done = True
