# SPDX-License-Identifier: Apache-2.0
"""Checks of the first steps of a pipeline: mistakes found here would give wrong numbers and no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.comm.same_state.collective import numbers_of_all
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values
from rankwise.pipeline.stage_tensors import find_unfilled
from rankwise.replicate.from_meta import unfilled
from rankwise.replicate.same_model import CHECKED_STEPS, digest_of_tensors
from rankwise.replicate.strategy_registry import check_no_optimizer_holds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ref

    import torch
    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


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
