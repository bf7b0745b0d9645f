# SPDX-License-Identifier: Apache-2.0
"""Where random numbers are drawn as one rank would: inside a replicated model, and inside ``as_one_rank()``."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from rankwise.errors import ConfigurationError
from rankwise.parallel.randomness.sample_layout import SampleLayout, layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from rankwise.comm.session import CurrentBatch

DropoutMask = tuple[int, int, float]
"""A draw of dropout: its number in the pass, the elements of a sample, and the probability that one is kept."""

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
            f"Unknown randomness={randomness!r} of {caller}().",
            do="pass one of " + ", ".join(f'"{one}"' for one in get_args(Randomness)),
        )


@dataclass(frozen=True, slots=True)
class PlannedDraw:
    """How one draw of a forward pass was laid out."""

    operation: str
    num_dims: int
    layout: SampleLayout | None
    """``None``: the same on every rank, as noise on weights is."""
    order: tuple[int, ...]
    """The dims as they lie in memory, the outermost first."""

    def fits(self, operation: str, shape: Sequence[int], num_samples: int) -> bool:
        """Return whether a draw can be this one again, in another batch."""
        if self.operation != operation or self.num_dims != len(shape):
            return False
        return self.layout is None or self.layout.fits(shape, num_samples)


@dataclass
class DrawScope:
    """One forward pass, or one block, of which each draw is told how it is laid out."""

    rows: CurrentBatch | None
    """The samples in hand; ``None`` where no loader tells: each rank then draws for itself."""
    randomness: Randomness
    rank: int
    plan: Sequence[PlannedDraw] = ()
    """The draws of an earlier forward pass of the same kind, in order."""
    expected: Sequence[DropoutMask] = ()
    """The dropout masks of that pass."""
    masks: list[DropoutMask] = field(default_factory=list)
    """Those of this one so far."""
    ahead: dict[DropoutMask, torch.Tensor] = field(default_factory=dict)
    """Masks that are drawn already."""
    made: list[PlannedDraw] = field(default_factory=list)
    """The draws so far."""
    is_off_plan: bool = False
    """Whether a draw was not the one that was planned."""
    traced_layouts: list[SampleLayout | None] = field(default_factory=list)
    """The layout of the next draw, where the batch is being followed."""
    redraw: Callable[[SampleLayout | None], None] | None = None
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

    def note_redraw(self, redraw: Callable[[SampleLayout | None], None] | None) -> None:
        """Note what draws the latest numbers again; ``None`` to forget it."""
        self.redraw = redraw

    def draw_ahead(self, masks: dict[DropoutMask, torch.Tensor]) -> None:
        """Keep masks that are drawn already."""
        self.ahead = masks

    @property
    def is_per_rank(self) -> bool:
        """Whether each rank draws numbers of its own."""
        return self.rows is None or self.randomness == "per_rank"

    @property
    def is_on_plan(self) -> bool:
        """Whether draws are those of an earlier forward pass, by position."""
        return self.randomness == "counter" and bool(self.plan) and not self.traced_layouts

    def plan_draw(self, operation: str, shape: Sequence[int], stride: Sequence[int]) -> PlannedDraw:
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
            return PlannedDraw(operation, len(shape), None, ())
        number, num_samples = len(self.made), self.rows.num
        self.num_single += math.prod(shape) == 1
        if (
            number < len(self.plan)
            and not self.traced_layouts
            and self.plan[number].fits(operation, shape, num_samples)
        ):
            # Its order in memory, too: of a dim of size one the stride says nothing.
            planned = self.plan[number]
        else:
            self.is_off_plan = not self.traced_layouts
            layout = self.traced_layouts[-1] if self.traced_layouts else layout_of(shape, num_samples)
            planned = PlannedDraw(operation, len(shape), layout, memory_order(stride))
        self.made.append(planned)
        return planned


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of a tensor as they lie in memory, the outermost first."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))


class _Here(threading.local):
    """What this thread is in."""

    def __init__(self) -> None:
        self.scopes: list[DrawScope | None] = []
        self.scope: DrawScope | None = None
        self.is_drawing = False


_here = _Here()


def current_scope() -> DrawScope | None:
    """Return the innermost scope of this thread."""
    return _here.scope


def is_drawing() -> bool:
    """Return whether a draw is under way, whose parts are draws of torch's."""
    return _here.is_drawing


def enter(scope: DrawScope | None) -> None:
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
