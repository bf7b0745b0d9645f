# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device: they get memory when they are spread, and must be filled before they are called.

Used by tensor_parallel, shard and pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from torch import nn


class FromMeta:
    """The tensors of one model that were on the meta device, until all of them are filled."""

    def __init__(self, strategy: str, model: nn.Module, device: str | None) -> None:
        """Give tensors on the meta device memory, filled with values that cannot be mistaken for loaded ones.

        Args:
            strategy: that spread the model.
            model: whose tensors are spread already.
            device: of the memory; ``None`` to leave it to a strategy that follows.
        """
        self._strategy = strategy
        self._names = [name for name, tensor in _tensors(model).items() if tensor.is_meta]
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        if self._names and device is not None:
            _fill(model, self._names, device)
            found = _tensors(model)
            # Integers and booleans have no NaN: an unchanged version shows that they are not filled.
            whole = {name: found[name] for name in self._names if not _can_be_nan(found[name])}
            self._seen = {name: (tensor, version_of(tensor)) for name, tensor in whole.items()}

    def check(self, model: nn.Module) -> None:
        """Raise unless everything has been filled. Called by: every rank, before each forward."""
        if not self._names:
            return
        with all_ranks_succeed("the first forward of a model from the meta device"):
            self._check(model)
        self._names.clear()
        self._seen.clear()

    def _check(self, model: nn.Module) -> None:
        tensors = _tensors(model)
        kept = model.state_dict().keys()
        for name in self._names:
            tensor = tensors.get(name)
            if tensor is None:
                continue
            if tensor.is_meta:
                raise ConfigurationError(
                    f"{name} is still on the meta device.",
                    do="call rankwise.shard() next if the mesh has dp_shard, or build the model on a device",
                )
            if self._is_unfilled(name, tensor):
                raise unfilled(self._strategy, name, is_saved=name in kept)

    def _is_unfilled(self, name: str, tensor: torch.Tensor) -> bool:
        if _can_be_nan(tensor):
            return is_as_filled(tensor)
        seen = self._seen.get(name)
        return seen is not None and seen[0] is tensor and seen[1] == version_of(tensor) and is_as_filled(tensor)


def unfilled(strategy: str, name: str, *, is_saved: bool) -> ConfigurationError:
    """Return the error for a tensor, in checkpoints or not, that was on the meta device and is not filled yet."""
    return ConfigurationError(
        f"{name} was on the meta device in {strategy}() and has not been initialized since.",
        do="initialize the model first: rankwise.load_weights(path, model), or restore a checkpoint"
        if is_saved
        else "compute it: it is a buffer that checkpoints do not contain (persistent=False)",
    )


def check_same_meta(model: nn.Module, strategy: str) -> None:
    """Raise unless the same tensors are on the meta device of every rank. Called by: every rank."""
    of_rank = gather_json(
        [name for name, tensor in _tensors(model).items() if tensor.is_meta], what=f"rankwise.{strategy}()"
    )
    if any(names != of_rank[0] for names in of_rank):
        raise ConfigurationError(
            "Different parts of the model are on the meta device on different ranks.",
            where=f"reported on {current().world}",
            evidence=fold_values({rank: f"{len(names)} tensors" for rank, names in enumerate(of_rank)}),
            do="build it under `with torch.device('meta'):` on every rank or on none, then call rankwise.load()",
        )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _fill(model: nn.Module, names: list[str], device: str) -> None:
    # Some buffers may be computed already.
    kept = {name: _local(tensor).clone() for name, tensor in _tensors(model).items() if not tensor.is_meta}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if name in kept:
                _local(tensor).copy_(kept[name])
            elif name in names:
                fill(tensor)


def fill(tensor: torch.Tensor) -> None:
    """Write values that cannot be mistaken for loaded ones."""
    with torch.no_grad():
        _local(tensor).fill_(_nothing(tensor.dtype))


def is_as_filled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds the values that :func:`fill` wrote; one without elements does not."""
    local = _local(tensor)
    if not local.numel():
        return False
    return bool((local.isnan() if _can_be_nan(local) else local == _nothing(local.dtype)).all())


def _nothing(dtype: torch.dtype) -> float:
    """Return the value that marks an unfilled tensor: NaN, or a number that is no valid index."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).max


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return own_part(tensor).detach()
