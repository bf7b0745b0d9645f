# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model on one rank of a pipeline: those of its own stages, and meta tensors for all others.

Names, order and tied weights do not change. In first steps, mistakes are found that would give wrong numbers and no
error. Used by pipeline; plan decides which rank holds which stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.comm.same_state import numbers_of_all
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values
from rankwise.pipeline.traced import tensor_places
from rankwise.replicate.from_meta import fill, is_as_filled, unfilled
from rankwise.replicate.same_model import CHECKED_STEPS, digest_of_tensors
from rankwise.replicate.strategy_registry import check_no_optimizer_holds
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part, placed_like

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ref

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.pipeline.plan import StagePlan


META = torch.device("meta")


class RefuseForward:
    """A hook before the forward of a model whose parameters are on several ranks."""

    def __call__(self, module: nn.Module, _: object) -> None:
        """Raise before forward runs."""
        raise ConfigurationError(
            f"This {type(module).__name__} is divided into stages: no rank can run all of it.",
            do="call the step that rankwise.pipeline() returned, or its predict()",
        )


def hold_own_stages(plan: StagePlan, place: int) -> list[tuple[str, torch.Tensor, int]]:
    """Keep only the stages of the rank at ``place``, on its device.

    Returns:
        Tensors that were on the meta device and must be filled: name, tensor, version.
    """
    model = plan.model
    new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    empty: list[tuple[str, torch.Tensor, int]] = []
    for name, table, key, tensor in list(tensor_places(model)):
        is_own = plan.holds(name, place)
        part = own_part(tensor)
        if part.device == (plan.device if is_own else META):
            continue
        if id(tensor) not in new:
            new[id(tensor)] = tensor, _on(tensor, plan.device if is_own else META)
            if is_own and part.is_meta:
                found = new[id(tensor)][1]
                empty.append((name, found, version_of(own_part(found))))
        table[key] = new[id(tensor)][1]
    if plan.num_ranks > 1:
        model.register_forward_pre_hook(RefuseForward())
        model.register_load_state_dict_pre_hook(_leave_others)
    return empty


def find_unfilled(model: nn.Module, empty: list[tuple[str, torch.Tensor, int]]) -> str | None:
    """Return the name of a tensor that has not been written to since, if there is one."""
    now = {name: tensor for name, _, _, tensor in tensor_places(model)}
    for name, tensor, version in empty:
        part = own_part(tensor)
        if now.get(name) is tensor and version_of(part) == version and is_as_filled(part):
            return name
    return None


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on another device; one from the meta device is filled so that it cannot pass for loaded."""
    part = own_part(tensor).detach()
    if device.type == "meta":
        part = torch.empty_like(part, device="meta")
    elif part.is_meta:
        part = torch.empty_like(part, device=device)
        fill(part)
    else:
        part = part.to(device)
    if own_part(tensor) is not tensor:
        part = placed_like(tensor, part)
    return nn.Parameter(part, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _leave_others(model: nn.Module, state: dict[str, Any], prefix: str, *_given: object) -> None:
    """Have ``load_state_dict`` skip the tensors of other ranks: torch would warn of each."""
    for name, _table, _key, tensor in tensor_places(model):
        given = state.get(prefix + name)
        if own_part(tensor).is_meta and isinstance(given, torch.Tensor) and given.shape == tensor.shape:
            state[prefix + name] = tensor


class FirstSteps:
    """Compares the first batches of the ranks, and looks for unfilled parameters and outdated optimizers."""

    def __init__(
        self,
        along: Exchange | None,
        replaced: Sequence[ref[nn.Parameter]],
        empty: Sequence[tuple[str, torch.Tensor, int]],
    ) -> None:
        """Note what to check.

        Args:
            along: the ranks of the pipeline.
            replaced: parameters in whose place the model has others now.
            empty: tensors that were on the meta device: name, tensor, version.
        """
        self._along = along
        self._replaced = list(replaced)
        self._empty = list(empty)
        self._num_left = CHECKED_STEPS

    def __call__(self, model: nn.Module, batch: object) -> None:
        """Check a step. Called by: every rank of the pipeline, at the beginning of each step.

        Raises:
            ConfigurationError: parameters are not filled yet, an optimizer holds replaced parameters, or the ranks
                received different values.
        """
        if self._num_left <= 0:
            return
        self._num_left -= 1
        name = find_unfilled(model, self._empty) if self._empty else None
        if self._along is not None:
            own = [digest_of_tensors(batch), int(name is not None)]
            rows = numbers_of_all(self._along, own, "values of the batch")
            if name is None:
                _compare([digest for digest, _ in rows], [place for place, (_, flag) in enumerate(rows) if flag])
        if name is not None:
            raise unfilled("pipeline", name, is_saved=name in model.state_dict())
        self._empty.clear()
        check_no_optimizer_holds(self._replaced, "pipeline")
        self._replaced.clear()


def _compare(digests: Sequence[int], unfilled_places: Sequence[int]) -> None:
    if unfilled_places:
        raise ConfigurationError(
            f"The stages of pp {', '.join(map(str, unfilled_places))} were on the meta device and have not been "
            "initialized since.",
            where=f"reported on {current().world}",
            do="initialize the model first: rankwise.load_weights(path, model), or restore a checkpoint",
        )
    if len(set(digests)) > 1:
        raise ConfigurationError(
            "The ranks of one pipeline received different batches.",
            where=f"reported on {current().world}",
            evidence="checksums of x and target, by rank along pp:\n" + fold_values(dict(enumerate(digests))),
            do="take batches from rankwise.DataLoader, which yields the same to all ranks along pp; use the same "
            "seed for random inputs",
        )
