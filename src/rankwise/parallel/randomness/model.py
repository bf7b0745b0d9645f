# SPDX-License-Identifier: Apache-2.0
"""Random numbers inside of a replicated model: around each forward pass. Used by replicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.log import warn
from rankwise.parallel.own_hooks import OwnHook
from rankwise.parallel.random_layers import warn_of_dropout
from rankwise.parallel.randomness.agree import agree_on_generators, compare_generators, note_draw
from rankwise.parallel.randomness.follow import Follower
from rankwise.parallel.randomness.inputs import input_layouts, rows_in_hand
from rankwise.parallel.randomness.kernels import install
from rankwise.parallel.randomness.scope import Scope, enter, leave
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import is_compiled, uncompiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.exchange.protocol import Exchange
    from rankwise.parallel.randomness.ahead import Mask
    from rankwise.parallel.randomness.scope import Planned, Randomness
    from rankwise.session import Session

    Kind = tuple[bool, bool, tuple[tuple[int, torch.dtype], ...]]
    """Forward passes that draw alike: training, with gradients, and the dims and dtypes of the inputs."""

MOST_FOLLOWED = 16
"""How many forward passes of a model are followed: each takes up to three times as long."""


def draw_as_one_rank(model: nn.Module, session: Session, exchange: Exchange | None, randomness: Randomness) -> None:
    """Have each forward pass of a model draw its random numbers as one rank would draw them.

    Called by: every rank of ``exchange``.

    Args:
        model: that is replicated.
        session: that is open.
        exchange: the ranks that hold copies; ``None`` for one alone.
        randomness: how to draw.
    """
    if exchange is None and randomness == "torch":
        return  # torch's own numbers
    if session.axes is not None and session.axes.tp > 1:
        return  # ranks along tp have parts of one sample
    if exchange is not None and randomness != "per_rank":
        agree_on_generators(exchange, torch.device(session.world.device))
        compare_generators(exchange, torch.device(session.world.device))
    draws = DrawsOfModel(session, randomness, type(model).__name__)
    # Next to forward: what other hooks draw or communicate is not the model's.
    model.register_forward_pre_hook(BeforeForward(draws), with_kwargs=True)
    model.register_forward_hook(AfterForward(draws), prepend=True, always_call=True)


class DrawsOfModel:
    """How the forward passes of one replicated model draw random numbers."""

    def __init__(self, session: Session, randomness: Randomness, name: str) -> None:
        """Replace torch's random operations.

        Args:
            session: that is open.
            randomness: how to draw.
            name: of the model.
        """
        self._session = session
        self._randomness: Randomness = randomness
        self._name = name
        self._plans: dict[Kind, tuple[Planned, ...]] = {}
        self._masks: dict[Kind, Sequence[Mask]] = {}
        self._num_followed = 0
        self._is_told = False
        self._open: list[tuple[Kind, Scope, Follower | None]] = []
        install(session)

    def before(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Draw as one rank would from here on."""
        if not in_backward():
            self._abandon()
        leaves = [one for one in pytree.tree_leaves((tuple(args), kwargs)) if type(one) is torch.Tensor and one.dim()]
        kind = (module.training, torch.is_grad_enabled(), tuple((one.dim(), one.dtype) for one in leaves))
        rows = rows_in_hand(list(self._session.batches.values()), leaves)
        scope = Scope(
            rows,
            self._randomness,
            self._session.world.rank,
            self._plans.get(kind, ()),
            self._masks.get(kind, ()),
            is_model=True,
            has_graph=torch.is_grad_enabled(),
        )
        if rows is None and self._randomness != "per_rank" and not self._is_told:
            scope.on_first_draw = self._tell
        follower = None
        if rows is not None and rows.num > 0 and kind not in self._plans and self._can_follow(module):
            self._num_followed += 1
            follower = Follower(scope, rows.num, [(one, input_layouts(one, rows)) for one in leaves])
        self._open.append((kind, scope, follower))
        enter(scope)
        if follower is not None:
            follower.__enter__()

    def after(self, module: nn.Module) -> None:
        """Draw as before the forward pass."""
        if not self._open:
            return
        kind, scope, follower = self._open.pop()
        if scope.made:
            note_draw()
            self._masks[kind] = scope.masks
        if not (self._is_told or scope.made or scope.is_per_rank) and module.training:
            # Nothing passed by here: if layers drop, they draw in compiled code or in fused kernels.
            self._is_told = True
            if self._session.world.world_size > 1:
                warn_of_dropout(module)
        if follower is not None:
            follower.__exit__(None, None, None)
        if follower is None and scope.is_off_plan and self._can_follow(module):
            # Other draws than in the pass that was followed: follow the next one.
            self._plans.pop(kind, None)
        elif follower is not None or scope.is_off_plan:
            self._plans[kind] = tuple(scope.made)
        leave()

    def _abandon(self) -> None:
        """Leave a forward pass whose end was not reached: Ctrl-C calls no hook."""
        while self._open:
            _, _, follower = self._open.pop()
            if follower is not None:
                follower.__exit__(None, None, None)
            leave()

    def _can_follow(self, module: nn.Module) -> bool:
        return self._randomness != "per_rank" and self._num_followed < MOST_FOLLOWED and not is_compiled(module)

    def _tell(self) -> None:
        self._is_told = True
        if self._session.world.world_size > 1:
            warn(
                f"{self._name} draws random numbers (dropout, noise) on each rank by itself, because its samples do "
                "not come from rankwise.DataLoader: a run on another number of ranks differs from this one as a run "
                "with another seed does"
            )


class BeforeForward(OwnHook):
    """Begins the draws of a forward pass."""

    def __init__(self, draws: DrawsOfModel) -> None:
        self._draws = draws

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin. Called by torch."""
        self._draws.before(module, args, kwargs)


class AfterForward(OwnHook):
    """Ends the draws of a forward pass, also of one that raised."""

    def __init__(self, draws: DrawsOfModel) -> None:
        self._draws = draws

    @uncompiled
    def __call__(self, module: nn.Module, *_: object) -> None:
        """End. Called by torch."""
        self._draws.after(module)
