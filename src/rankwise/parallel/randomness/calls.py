# SPDX-License-Identifier: Apache-2.0
"""``as_one_rank()``, and what a replicated model does around its forward."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rankwise.batch_rows import BatchRows
from rankwise.errors import ConfigurationError
from rankwise.log import warn
from rankwise.parallel.own_hooks import OwnHook
from rankwise.parallel.random_layers import warn_of_dropout
from rankwise.parallel.randomness.agree import agree_on_generators
from rankwise.parallel.randomness.follow import Follower
from rankwise.parallel.randomness.kernels import install
from rankwise.parallel.randomness.layout import Layout, layouts_of
from rankwise.parallel.randomness.scope import Scope, check_randomness, enter, leave
from rankwise.session import current
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.compiler import is_compiled, uncompiled

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn

    from rankwise.exchange.protocol import Exchange
    from rankwise.parallel.randomness.scope import Planned, Randomness
    from rankwise.session import Session

    Kind = tuple[bool, bool, tuple[tuple[int, torch.dtype], ...]]
    """Forward passes that draw alike: training, with gradients, and the dims and dtypes of the inputs."""

MOST_FOLLOWED = 16
"""How many forward passes of a model are followed: each takes up to three times as long."""


@contextmanager
def as_one_rank(*, num_samples: int | None = None, randomness: Randomness = "counter") -> Generator[None]:
    """Draw random numbers along the batch as one rank would draw them for the global batch.

    Called by: every rank, around the same draws; waits for the others only with ``num_samples``.

    For noise in a training loop: a GAN's latent vectors, negative labels, noise added to inputs. Inside the block, what
    torch draws with as many rows (the first dim) as this rank has samples are this rank's rows of the numbers that one
    rank would draw; what has another shape is the same on every rank. Models that went through
    :func:`rankwise.replicate` need no block. Python's and NumPy's generators are not changed.

    Args:
        num_samples: of this rank, for batches that do not come from :class:`rankwise.DataLoader`.
        randomness: as for :func:`rankwise.replicate`.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ConfigurationError: no batch is known; or a permutation of this rank's samples is drawn inside.
    """
    session = current()
    check_randomness(randomness, "as_one_rank")
    install(session)
    if num_samples is not None:
        rows: BatchRows | None = _rows_of(session, num_samples)
    elif session.rows:
        rows = next(reversed(session.rows.values()))
    elif session.world.world_size == 1:
        rows = None
    else:
        raise ConfigurationError(
            "as_one_rank() does not know how many samples the ranks have.",
            evidence="no loop over a rankwise.DataLoader is under way",
            do="use it inside of `for batch in loader`, or pass this rank's number: as_one_rank(num_samples=len(x))",
        )
    if randomness == "torch" and session.world.world_size == 1:
        yield
        return
    enter(Scope(rows or BatchRows(0, 0, 0), randomness, session.world.rank))
    try:
        yield
    finally:
        leave()


def _rows_of(session: Session, num_samples: int) -> BatchRows:
    """Exchange how many samples each rank has. Called by: every rank."""
    if session.exchange is None:
        return BatchRows(num_samples, num_samples, 0)
    numbers = session.exchange.all_gather(torch.tensor([num_samples]), what="numbers of samples").flatten().tolist()
    return BatchRows(num_samples, sum(numbers), sum(numbers[: session.world.rank]))


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
        self._randomness = randomness
        self._name = name
        self._plans: dict[Kind, tuple[Planned, ...]] = {}
        self._num_followed = 0
        self._is_told = False
        self._open: list[tuple[Kind, Scope, Follower | None]] = []
        install(session)

    def before(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Draw as one rank would from here on."""
        leaves = [one for one in pytree.tree_leaves((tuple(args), kwargs)) if type(one) is torch.Tensor and one.dim()]
        kind = (module.training, torch.is_grad_enabled(), tuple((one.dim(), one.dtype) for one in leaves))
        rows = rows_in_hand(list(self._session.rows.values()), leaves)
        scope = Scope(rows, self._randomness, self._session.world.rank, self._plans.get(kind, ()))
        if rows is None and self._randomness != "per_rank" and not self._is_told:
            scope.on_first_draw = self._tell
        follower = None
        if self._must_follow(kind, rows, module) and rows is not None:
            self._num_followed += 1
            follower = Follower(scope, rows.num, [(one, input_layouts(one, rows)) for one in leaves])
        self._open.append((kind, scope, follower))
        enter(scope)
        if follower is not None:
            follower.__enter__()

    def after(self) -> None:
        """Draw as before the forward pass."""
        if not self._open:
            return
        kind, scope, follower = self._open.pop()
        if follower is not None:
            follower.__exit__(None, None, None)
            self._plans[kind] = tuple(scope.made)
        elif scope.is_off_plan:
            # Other draws than in the pass that was followed: follow the next one.
            self._plans.pop(kind, None)
        leave()

    def _must_follow(self, kind: Kind, rows: BatchRows | None, module: nn.Module) -> bool:
        is_new = rows is not None and rows.num > 0 and kind not in self._plans and self._num_followed < MOST_FOLLOWED
        return is_new and self._randomness != "per_rank" and not is_compiled(module)

    def _tell(self) -> None:
        self._is_told = True
        if self._session.world.world_size > 1:
            warn(
                f"{self._name} draws random numbers (dropout, noise) on each rank by itself, because its samples do not "
                "come from rankwise.DataLoader: a run on another number of ranks differs from this one as a run with "
                "another seed does"
            )


def rows_in_hand(known: Sequence[BatchRows], leaves: Sequence[torch.Tensor]) -> BatchRows | None:
    """Return the samples that a model is called with: of the loader that gave them, or gave as many, or gave last."""
    if len(known) > 1:
        for is_it in (_is_of_batch, _is_as_long):
            for rows in reversed(known):
                if any(is_it(leaf, rows) for leaf in leaves):
                    return rows
    return known[-1] if known else None


def _is_of_batch(leaf: torch.Tensor, rows: BatchRows) -> bool:
    return _dim_in_batch(leaf, rows) is not None


def _is_as_long(leaf: torch.Tensor, rows: BatchRows) -> bool:
    return leaf.shape[0] == rows.num


def _dim_in_batch(leaf: torch.Tensor, rows: BatchRows) -> int | None:
    """Return the dim of a view of what the loader gave that is the first one there."""
    for given in pytree.tree_leaves(rows.batch):
        is_same = isinstance(given, torch.Tensor) and given.dim() > 0 and given.data_ptr() == leaf.data_ptr() != 0
        if is_same and given.shape[0] == rows.num:
            dims = [dim for dim in range(leaf.dim()) if leaf.stride(dim) == given.stride(0) and leaf.shape[dim] == rows.num]
            return dims[0] if len(dims) == 1 else None
    return None


def input_layouts(leaf: torch.Tensor, rows: BatchRows) -> list[Layout]:
    """Return how samples can lie in an input of a model, the likeliest first."""
    dim = _dim_in_batch(leaf, rows)
    if dim is not None:
        return [Layout(dim)]
    found = [one for one in layouts_of(leaf.shape, rows.num) if one.inner == 1]
    if rows.num > 0 and not found and leaf.shape[0] % rows.num == 0 and leaf.shape[0]:
        # Batches one after the other, as of real and generated samples.
        found.append(Layout(0, outer=leaf.shape[0] // rows.num))
    return found


def draw_as_one_rank(
    model: nn.Module, session: Session, exchange: Exchange | None, randomness: Randomness
) -> None:
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
    draws = DrawsOfModel(session, randomness, type(model).__name__)
    # Next to forward: what other hooks draw or communicate is not the model's.
    model.register_forward_pre_hook(BeforeForward(draws), with_kwargs=True)
    model.register_forward_hook(AfterForward(draws), prepend=True, always_call=True)


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
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """End. Called by torch."""
        self._draws.after()
