# SPDX-License-Identifier: Apache-2.0
"""Random numbers in the stages of a pipeline: those that one rank would draw for the whole batch, whatever the cut.

Each draw has its number in the whole forward pass, each micro-batch its place in the batch, and all ranks the key of
the pass. Used by executor.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.comm.current_batch import CurrentBatch
from rankwise.replicate.device_mesh import exchange_along
from rankwise.replicate.random_numbers.counter import mixed
from rankwise.replicate.random_numbers.model_draws import DrawsOfModel, rows_in_hand
from rankwise.replicate.random_numbers.scope import PlannedDraw, take_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from rankwise.comm.session import Session
    from rankwise.pipeline.program import TracedCall
    from rankwise.pipeline.stage_executor import BoundStage
    from rankwise.replicate.random_numbers.scope import DrawScope

_ELSEWHERE = PlannedDraw("", 0, None, ())
"""Stands for a draw of another stage."""


class StageDraws:
    """The draws of one rank's stages."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        """Replace torch's random operations. Called by: every rank of the world."""
        self._session = session
        self._model = model
        self._along = exchange_along("pp", "dp_replicate", "tp")
        self._copy = 0 if session.axes is None else session.axes.data_rank(session.world.rank)
        self._of_stage: dict[int, tuple[_Called, DrawsOfModel]] = {}
        self._num_copies = 1 if session.axes is None else session.axes.data_world_size
        self._rows = CurrentBatch(0, 0, 0, 0, 0, 0)
        self._key = 0
        DrawsOfModel(session, "counter", type(model).__name__)

    def begin(self, leaves: Sequence[Any], samples: int) -> None:
        """Begin a forward pass of a batch in which numbers are drawn. Called by: every rank."""
        key = torch.tensor([take_key(None)])
        if self._along is not None:
            # Of one rank, since a loss_fn or a script that draws on one rank only moves its generator.
            key = self._along.broadcast(key, 0, what="key of the random numbers of a step")
        self._key = int(key)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        rows = rows_in_hand(list(self._session.batches.in_use.values()), tensors)
        if rows is None or rows.num != samples:
            rows = CurrentBatch(0, 0, 0, samples, samples, 0)
            if self._num_copies > 1:
                self._key ^= mixed(self._copy)
        self._rows = rows

    @contextmanager
    def drawing(
        self, bound: BoundStage, leaves: Sequence[Any], received: Sequence[torch.Tensor], first: int, num: int
    ) -> Generator[Callable[[TracedCall], None] | None]:
        """Draw for ``num`` samples of the batch, from ``first`` on, in the block.

        Yields:
            A function to call before each call of the stage; ``None`` if the model draws nothing.
        """
        program = bound.program
        if not program.num_draws:
            yield None
            return
        module, draws = self._of(bound)
        rows = replace(self._rows, num=num, start=self._rows.start + first)
        given = [one for one in (*leaves, *received) if isinstance(one, torch.Tensor) and one.dim()]
        before = torch.get_rng_state() if program.has_draws_apart else None
        scope = draws.begin(module, given, rows, program.draws, self._key)
        try:
            yield lambda call: self._skip(scope, call, None if before is None else rows.start)
        finally:
            draws.after(module)
            if before is not None:
                torch.set_rng_state(before)

    def _skip(self, scope: DrawScope, call: TracedCall, start: int | None) -> None:
        """Leave out the draws of other stages before a call."""
        scope.made.extend([_ELSEWHERE] * (call.first_draw - len(scope.made)))
        if scope.part is not None:
            scope.made_splits.extend([None] * (call.first_draw - len(scope.made_splits)))
        if start is not None:
            # A draw that backward repeats takes its key from the generator: one of this call and these samples.
            torch.default_generator.manual_seed((self._key ^ mixed(call.first_draw) ^ mixed(~start)) & (2**63 - 1))

    def _of(self, bound: BoundStage) -> tuple[_Called, DrawsOfModel]:
        number = bound.stage.number
        if number not in self._of_stage:
            names: Mapping[str, None] = dict.fromkeys(
                call.target for call in bound.stage.calls if isinstance(call.target, str)
            )
            module = _Called([self._model.get_submodule(name) for name in names])
            self._of_stage[number] = module, DrawsOfModel(self._session, "counter", type(self._model).__name__)
        module, draws = self._of_stage[number]
        module.take_mode(self._model)
        return module, draws


class _Called(nn.ModuleList):
    def take_mode(self, model: nn.Module) -> None:
        """Be in training as ``model`` is; each module inside has a mode of its own."""
        self.training = model.training
