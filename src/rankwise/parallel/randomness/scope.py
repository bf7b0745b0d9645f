# SPDX-License-Identifier: Apache-2.0
"""Where random numbers are drawn as one rank would: inside a replicated model, and inside ``as_one_rank()``."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from rankwise.errors import ConfigurationError
from rankwise.parallel.randomness.layout import Layout, layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from rankwise.batch_in_hand import BatchInHand
    from rankwise.parallel.randomness.ahead import Mask

Randomness = Literal["counter", "torch", "per_rank"]
"""``counter``: by position, the same for any number of ranks; ``torch``: the numbers of torch's own generators for the
whole batch, all drawn by each rank; ``per_rank``: independent ones on each rank.
"""


def check_randomness(randomness: object, caller: str) -> None:
    """Raise unless ``randomness`` is one of the ways to draw.

    Raises:
        ConfigurationError: lists the ways.
    """
    if randomness not in get_args(Randomness):
        raise ConfigurationError(
            f"{caller}() was given randomness={randomness!r}.",
            do="pass one of " + ", ".join(f'"{one}"' for one in get_args(Randomness)),
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """How one draw of a forward pass was laid out."""

    operation: str
    num_dims: int
    layout: Layout | None
    """``None``: the same on every rank, as noise on weights is."""
    order: tuple[int, ...]
    """The dims as they lie in memory, the outermost first."""

    def fits(self, operation: str, shape: Sequence[int], num_samples: int) -> bool:
        """Return whether a draw can be this one again, in another batch."""
        if self.operation != operation or self.num_dims != len(shape):
            return False
        return self.layout is None or self.layout.fits(shape, num_samples)


@dataclass
class Scope:
    """One forward pass, or one block, of which each draw is told how it is laid out."""

    rows: BatchInHand | None
    """The samples in hand; ``None`` where no loader tells: each rank then draws for itself."""
    randomness: Randomness
    rank: int
    plan: Sequence[Planned] = ()
    """The draws of an earlier forward pass of the same kind, in order."""
    expected: Sequence[Mask] = ()
    """The dropout masks of that pass."""
    masks: list[Mask] = field(default_factory=list)
    """Those of this one so far."""
    ahead: dict[Mask, torch.Tensor] = field(default_factory=dict)
    """Masks that are drawn already."""
    made: list[Planned] = field(default_factory=list)
    """The draws so far."""
    is_off_plan: bool = False
    """Whether a draw was not the one that was planned."""
    told: list[Layout | None] = field(default_factory=list)
    """The layout of the next draw, where the batch is being followed."""
    redraw: Callable[[Layout | None], None] | None = None
    """Draws the latest numbers again, with another layout."""
    on_first_draw: Callable[[], None] | None = None
    is_model: bool = False
    """Whether this is a forward pass."""
    has_graph: bool = False
    """Whether gradients are enabled around it."""
    key: int | None = None
    """Of all draws."""
    num_single: int = 0
    """How often one number was drawn."""

    @property
    def is_per_rank(self) -> bool:
        """Whether each rank draws numbers of its own."""
        return self.rows is None or self.randomness == "per_rank"

    @property
    def is_on_plan(self) -> bool:
        """Whether draws are those of an earlier forward pass, by position."""
        return self.randomness == "counter" and bool(self.plan) and not self.told

    def plan_draw(self, operation: str, shape: Sequence[int], stride: Sequence[int]) -> Planned:
        """Return where the samples lie in what is about to be drawn.

        Args:
            operation: that draws.
            shape: of the numbers.
            stride: of the numbers.
        """
        if self.on_first_draw is not None:
            self.on_first_draw()
            self.on_first_draw = None
        if self.rows is None or self.randomness == "per_rank":
            return Planned(operation, len(shape), None, ())
        number, num_samples = len(self.made), self.rows.num
        self.num_single += math.prod(shape) == 1
        if number < len(self.plan) and not self.told and self.plan[number].fits(operation, shape, num_samples):
            # Its order in memory, too: of a dim of size one the stride says nothing.
            planned = self.plan[number]
        else:
            self.is_off_plan = not self.told
            layout = self.told[-1] if self.told else layout_of(shape, num_samples)
            planned = Planned(operation, len(shape), layout, memory_order(stride))
        self.made.append(planned)
        return planned


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of a tensor as they lie in memory, the outermost first."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))


class _Here(threading.local):
    """What this thread is in."""

    def __init__(self) -> None:
        self.scopes: list[Scope | None] = []
        self.scope: Scope | None = None
        self.is_drawing = False


_here = _Here()


def current_scope() -> Scope | None:
    """Return the innermost scope of this thread."""
    return _here.scope


def is_drawing() -> bool:
    """Return whether a draw is under way, whose parts are draws of torch's."""
    return _here.is_drawing


def enter(scope: Scope | None) -> None:
    """Draw as a scope says from here on; ``None``: as torch does."""
    _here.scopes.append(_here.scope)
    _here.scope = scope


def leave() -> None:
    """Return to the scope around this one."""
    _here.scope = _here.scopes.pop()


@contextmanager
def drawing() -> Generator[None]:
    """Have torch draw by itself inside the block."""
    before, _here.is_drawing = _here.is_drawing, True
    try:
        yield
    finally:
        _here.is_drawing = before
