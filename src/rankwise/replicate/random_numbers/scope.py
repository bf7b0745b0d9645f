# SPDX-License-Identifier: Apache-2.0
"""Where random numbers are drawn as one rank would: inside a replicated model, and inside ``as_one_rank()``."""

from __future__ import annotations

import hashlib
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch

from rankwise.errors import ConfigurationError
from rankwise.replicate.random_numbers.sample_layout import OWN_ROWS, PartOfLayer, SampleLayout, layout_of
from rankwise.torch_private.autograd import innermost_saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.session import CurrentBatch
    from rankwise.replicate.random_numbers.counter import Key
    from rankwise.torch_private.kernels import Kernel

DropoutMask = tuple[int, int, float]
"""A draw of dropout: its number in the pass, the elements of a sample, and the probability that one is kept."""

Randomness = Literal["counter", "torch", "per_rank"]
"""``counter``: by position, the same for any number of ranks; ``torch``: the numbers of torch's own generators for the
whole batch, all drawn by each rank; ``per_rank``: independent numbers on each rank.
"""


def check_randomness(randomness: object, caller: str) -> None:
    """Raise unless ``randomness`` is one of the ways to draw, which the error lists."""
    if randomness not in get_args(Randomness):
        raise ConfigurationError(
            f"Unknown randomness={randomness!r} of {caller}().",
            do="pass one of " + ", ".join(f'"{one}"' for one in get_args(Randomness)),
        )


@dataclass(frozen=True, slots=True)
class PlannedDraw:
    """The layout of one draw of a forward pass."""

    operation: str
    """Empty: any."""
    num_dims: int
    layout: SampleLayout | None
    """``None``: the same numbers on every rank, as for noise on weights."""
    order: tuple[int, ...]
    """The dims in the order of memory, the outermost first."""

    def fits(self, operation: str, shape: Sequence[int], num_samples: int) -> bool:
        """Return whether a draw in another batch can be this one again."""
        if self.operation not in {operation, ""} or self.num_dims != len(shape):
            return False
        return self.layout is None or self.layout == OWN_ROWS or self.layout.fits(shape, num_samples)


class Tracer(Protocol):
    """Follows the operations of a pass."""

    def __enter__(self) -> object: ...
    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object, /) -> object: ...
    def through_layer(self, x: torch.Tensor, out: torch.Tensor, *, is_part: bool) -> None:
        """Note that a layer that is split along ``tp``, whose operations are not seen, gave ``out``."""
        ...


@dataclass
class DrawScope:
    """One forward pass, or one block, which gives each draw in it a layout."""

    rows: CurrentBatch | None
    """This rank's samples; ``None`` if they come from no loader: each rank then draws its own numbers."""
    randomness: Randomness
    rank: int
    plan: Sequence[PlannedDraw] = ()
    """The draws of an earlier forward pass of the same kind, in order."""
    expected: Sequence[DropoutMask] = ()
    """The dropout masks of that pass."""
    masks: list[DropoutMask] = field(default_factory=list)
    """The dropout masks of this pass so far."""
    ahead: dict[DropoutMask, torch.Tensor] = field(default_factory=dict)
    """Masks that are drawn already."""
    made: list[PlannedDraw] = field(default_factory=list)
    """The draws so far."""
    is_off_plan: bool = False
    """Whether a draw was not the one that was planned."""
    traced_layouts: list[SampleLayout | None] = field(default_factory=list)
    """The layout of the next draw, while the batch is traced."""
    redraw: Callable[[SampleLayout | None], None] | None = None
    """Draws the latest numbers again, with another layout."""
    on_first_draw: Callable[[], None] | None = None
    has_graph: bool = False
    """Whether gradients are enabled around it."""
    key: int | None = None
    """The key of all draws."""
    num_single: int = 0
    """How often a single number was drawn."""
    part: tuple[int, int] | None = None
    """Which part of split layers this rank computes, and how many parts there are; ``None`` if none is split."""
    splits: Sequence[SampleLayout | None] = ()
    """The divided dim of each draw of an earlier forward pass."""
    made_splits: list[SampleLayout | None] = field(default_factory=list)
    traced_splits: list[SampleLayout | None] = field(default_factory=list)
    """That of the next draw, while split layers are traced."""
    is_off_splits: bool = False
    """Whether it was not known for a draw."""
    tracers: list[Tracer] = field(default_factory=list)
    """Those that follow this pass."""

    def note_redraw(self, redraw: Callable[[SampleLayout | None], None] | None) -> None:
        """Note a function that draws the latest numbers again; ``None`` to forget it."""
        self.redraw = redraw

    def next_key(self) -> Key:
        """Return the key of the draw that was noted last: one number of the generator makes those of all draws."""
        if self.key is None:
            self.key = take_key(None)
        return self.key, len(self.made)

    @property
    def is_per_rank(self) -> bool:
        """Whether each rank draws numbers of its own."""
        return self.rows is None or self.randomness == "per_rank"

    def plan_part(self, shape: Sequence[int]) -> PartOfLayer | None:
        """Return which part of a whole layer the numbers of this shape, about to be drawn, are for."""
        if self.part is None:
            return None
        number, split = len(self.made_splits), None
        if self.traced_splits:
            split = self.traced_splits[-1]
        elif number < len(self.splits) and ((split := self.splits[number]) is None or split.fits(shape, 1)):
            pass
        else:
            self.is_off_splits, split = True, None
        self.made_splits.append(split)
        return None if split is None else PartOfLayer(split, *self.part)

    def plan_draw(self, operation: str, shape: Sequence[int], stride: Sequence[int]) -> PlannedDraw:
        """Return the layout of the numbers, of this shape and stride, that ``operation`` is about to draw."""
        if self.on_first_draw is not None:
            self.on_first_draw()
            self.on_first_draw = None
        if self.rows is None or self.randomness == "per_rank":
            # Noted, since the number of the draw makes its numbers differ from those of the others in the pass.
            self.made.append(PlannedDraw(operation, len(shape), None, ()))
            return self.made[-1]
        number, num_samples = len(self.made), self.rows.num
        self.num_single += math.prod(shape) == 1
        if (
            number < len(self.plan)
            and not self.traced_layouts
            and self.plan[number].fits(operation, shape, num_samples)
        ):
            # With its order in memory, which the stride of a dim of size one does not show.
            planned = self.plan[number]
        else:
            self.is_off_plan = not self.traced_layouts
            layout = self.traced_layouts[-1] if self.traced_layouts else layout_of(shape, num_samples)
            planned = PlannedDraw(operation, len(shape), layout, memory_order(stride))
        self.made.append(planned)
        return planned


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of a tensor in the order of memory, the outermost first."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))


integer_kernels: dict[str, Kernel] = {}
"""torch's own kernels that fill tensors with random integers, by type of device, while they are replaced."""


def take_key(generator: torch.Generator | None) -> int:
    """Return a number from a generator, by default the CPU's."""
    device = torch.device("cpu") if generator is None else generator.device
    number = torch.empty(1, dtype=torch.int64, device=device)
    if generator is None or device.type == "cpu":
        return int(integer_kernels[device.type](number, generator=generator))
    # Reading a number from a device would wait for the device; the state is on the CPU.
    state = generator.get_state().numpy().tobytes()
    integer_kernels[device.type](number, generator=generator)
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest()) >> 1


def is_apart(*, has_graph: bool) -> bool:
    """Return whether backward may draw the same again.

    There are hooks on saved tensors, or gradients are disabled within a pass that has a graph.
    """
    return innermost_saved_tensors_hooks() is not None or torch.is_grad_enabled() != has_graph


class _Here(threading.local):
    """The scopes that this thread is in."""

    def __init__(self) -> None:
        self.scopes: list[DrawScope | None] = []
        self.scope: DrawScope | None = None
        self.is_drawing = False


_here = _Here()


def current_scope() -> DrawScope | None:
    """Return the innermost scope of this thread."""
    return _here.scope


def is_drawing() -> bool:
    """Return whether a draw is under way, whose parts are torch's own draws."""
    return _here.is_drawing


def enter(scope: DrawScope | None) -> None:
    """Draw as a scope says from now on; ``None``: as torch does."""
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
