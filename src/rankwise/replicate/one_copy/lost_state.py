# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose state is partly updated: it says so at its next step, until another state is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.optimizer import Optimizer
    from torch.utils.hooks import RemovableHandle


def lose_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor], what: str) -> None:
    """Replace the state of parameters by NaN, in memory of this rank, and refuse steps until ``load_state_dict``.

    Its structure stays: :func:`rankwise.load` compares it with what is saved.

    Args:
        optimizer: that has the state.
        parameters: of which the state is partly updated.
        what: the step that was to update it.
    """
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = torch.full_like(value, torch.nan if value.is_floating_point() else 0)
    handles: list[RemovableHandle] = []

    def refuse(*_: object) -> None:
        raise RankwiseError(
            f"{type(optimizer).__name__} cannot step: its state is partly updated.",
            evidence=f"{what} was interrupted on some rank; the state is NaN since",
            do="load a checkpoint, parameters and state: rankwise.load(), or load_state_dict() of both",
        )

    def allow(*_: object) -> None:
        while handles:
            handles.pop().remove()

    handles.append(optimizer.register_step_pre_hook(refuse))
    handles.append(optimizer.register_load_state_dict_post_hook(allow))
