# SPDX-License-Identifier: Apache-2.0
"""Updates by torch's fused kernels for CPUs: one pass over each parameter instead of about ten.

Their results are those of the loop over parameters up to rounding. torch leaves the choice to the script, and does not
check what these kernels need: they take memory order for granted, and are wrong in half precision up to version 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.replicate.one_copy.seen_state import SeenState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.optimizer import Optimizer

_ADAM = ("step", "exp_avg", "exp_avg_sq")
_STATE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}
"""What a fused update needs of the state, by kind of optimizer."""
_DTYPES = (torch.float32, torch.float64)


class FusedUpdates:
    """The groups of one optimizer whose updates can be fused, from step to step."""

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        """Those of the update under way."""
        self._seen = SeenState()
        self._ready: set[int] = set()
        """The identities of the parameters that can be updated so, if their gradients can."""

    def begin(self, optimizer: Optimizer, unshared: Sequence[torch.Tensor]) -> None:
        """Have the update that follows be fused where it can be, which is the same on all ranks of all hosts.

        Not where the script has chosen a way, and not the first one, which makes the state.

        Args:
            optimizer: with all of its parameters and their state, whichever rank updates them.
            unshared: those that each rank has for itself. A group with one of them is updated by the loop: its
                gradients and state may be there on some ranks only.
        """
        groups = optimizer.param_groups
        if type(optimizer) not in _STATE:
            return
        if self._seen.look(optimizer, [bool(group.get(key)) for group in groups for key in _KINDS]):
            self._ready = {id(one) for group in groups for one in _ready(optimizer, group)}
        alone = set(map(id, unshared))
        self._groups = [
            group
            for group in groups
            if (not alone or alone.isdisjoint(map(id, group["params"]))) and self._is_fused(group)
        ]
        for group in self._groups:
            group["fused"] = True

    def forget(self) -> None:
        """Keep nothing of the state, which is about to be replaced."""
        self._seen = SeenState()

    def end(self) -> None:
        """Give the groups back as they were."""
        for group in self._groups:
            group["fused"] = None
        self._groups = []

    def _is_fused(self, group: dict[str, Any]) -> bool:
        if group["foreach"] is not None or group["fused"] is not None or isinstance(group["lr"], torch.Tensor):
            return False
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and (
                id(parameter) not in self._ready
                or gradient.dtype is not parameter.dtype
                or gradient.layout is not torch.strided
                or not gradient.is_contiguous()
            ):
                return False
        return True


_KINDS = ("momentum", "amsgrad")
"""The settings of a group that decide which state it has."""


def _ready(optimizer: Optimizer, group: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters of a group that can be updated so, as far as they and their state go."""
    keys = _STATE[type(optimizer)]
    if group.get("amsgrad"):
        keys = (*keys, "max_exp_avg_sq")
    elif group.get("momentum") == 0:
        keys = ()
    return [
        one
        for one in group["params"]
        if one.dtype in _DTYPES
        and one.is_contiguous()
        and all(_fits(one, key, optimizer.state.get(one, {}).get(key)) for key in keys)
    ]


def _fits(parameter: torch.Tensor, key: str, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return False
    if key == "step":
        return value.dtype is torch.float32
    return value.dtype is parameter.dtype and value.shape == parameter.shape
