# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of one draw come from, in a forward pass and when a checkpoint draws them again in backward.

A forward pass or a block takes one number from the generator, the key of all its draws; inside a checkpoint each draw
takes one, whatever its shape. So generators agree on all ranks afterwards, also on a rank without samples, and a
checkpoint draws the same numbers again. With ``randomness="torch"`` a draw takes as many numbers as torch would take
for the whole batch.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rankwise.replicate.random_numbers.counter import mixed
from rankwise.replicate.random_numbers.sample_layout import OWN_ROWS
from rankwise.replicate.random_numbers.scope import drawing, is_apart, take_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.comm.session import CurrentBatch
    from rankwise.replicate.random_numbers.counter import Key
    from rankwise.replicate.random_numbers.sample_layout import PartOfLayer, SampleLayout
    from rankwise.replicate.random_numbers.scope import DrawScope

MOST_REMEMBERED = 2**14
"""Draws of forward passes that a recomputation in backward may ask for."""


@dataclass(slots=True)
class NumberSource:
    """The numbers of one draw."""

    layout: SampleLayout | None
    """Where the samples lie; ``None`` if every rank draws the same."""
    rows: CurrentBatch | None
    """Which samples this rank has, where there is a layout."""
    salt: int
    """Makes a rank's numbers differ from the others'; 0 if they belong to one batch."""
    key: Key | None
    """The numbers are a function of it; ``None``: of the state of the generator."""
    generator: torch.Generator | None
    """The generator that torch draws with, if it does."""
    order: tuple[int, ...] = ()
    """The dims in the order of memory, for torch to fill."""
    part: PartOfLayer | None = None
    """The part of a layer that the numbers are for, where ranks share layers."""

    @property
    def is_part(self) -> bool:
        """Whether other ranks have samples that numbers are drawn for."""
        return self.rows is not None and self.rows.num != self.rows.num_global

    def own_generator(self, device: torch.device) -> torch.Generator | None:
        """Return the generator to draw the whole batch with."""
        if self.key is None and not self.salt:
            return self.generator
        first, second = self.full_key
        return torch.Generator(device).manual_seed((first ^ (mixed(second) if second else 0)) & (2**63 - 1))

    @property
    def full_key(self) -> Key:
        """The key, combined with the salt."""
        first, second = self.key or (0, 0)
        return first ^ self.salt, second


_remembered: dict[int, NumberSource] = {}
"""The latest sources of forward passes: by their keys, or by the state of the generator."""
_remembered_longer: dict[int, NumberSource] = {}
"""The sources before them."""


def forget() -> None:
    """Forget all draws."""
    _remembered.clear()
    _remembered_longer.clear()


@contextmanager
def draws_forgotten() -> Generator[None]:
    """Forget the draws inside the block after it: no backward will repeat them."""
    before, before_longer = dict(_remembered), dict(_remembered_longer)
    try:
        yield
    finally:
        for kept, state in ((_remembered, before), (_remembered_longer, before_longer)):
            kept.clear()
            kept.update(state)


def _remember(known_by: int, source: NumberSource) -> None:
    if len(_remembered) >= MOST_REMEMBERED:
        # Dropping single sources, the oldest first, would take longer with each.
        _remembered_longer.clear()
        _remembered_longer.update(_remembered)
        _remembered.clear()
    _remembered[known_by] = source


def _recall(known_by: int) -> NumberSource | None:
    return _remembered.get(known_by) or _remembered_longer.get(known_by)


def source_in(scope: DrawScope, operation: str, like: torch.Tensor, generator: torch.Generator | None) -> NumberSource:
    """Return the source of a draw in a scope, and remember it.

    Args:
        scope: that the draw is in.
        operation: the name of the draw's operation.
        like: the tensor to fill, or one of its shape.
        generator: the user's.
    """
    device = like.device
    planned = scope.plan_draw(operation, like.shape, like.stride())
    layout, part = planned.layout, scope.plan_part(like.shape)
    is_own = scope.is_per_rank or layout == OWN_ROWS
    layout = None if is_own else layout
    rows = None if layout is None else scope.rows
    if scope.randomness == "torch" and not is_own:
        known_by, source = (
            _state_of(generator, device),
            NumberSource(layout, rows, 0, None, generator, planned.order, part),
        )
    else:
        salt = mixed(scope.rank) if is_own else 0
        if generator is None and not is_apart(has_graph=scope.has_graph):
            return NumberSource(layout, rows, salt, scope.next_key(), None, planned.order, part)
        known_by = take_key(generator)
        source = NumberSource(layout, rows, salt, (known_by, 0), None, planned.order, part)
    _remember(known_by, source)
    return source


def source_again(generator: torch.Generator | None, device: torch.device) -> NumberSource | None:
    """Return the source of a draw that a checkpoint repeats; if there is none, ``None``, and nothing is taken."""
    if not _remembered:
        return None
    by_state = _recall(_state_of(generator, device))
    if by_state is not None:
        return replace(by_state, generator=generator)
    used = generator or torch.default_generator
    state = used.get_state()
    found = _recall(take_key(generator))
    if found is None:
        used.set_state(state)
    return found


def source_by_key(source: NumberSource) -> NumberSource:
    """Return a source by key for a draw that cannot have torch's numbers."""
    return replace(source, key=(take_key(source.generator), 0))


def generator_before(
    scope: DrawScope | None, generator: torch.Generator | None, device: torch.device
) -> torch.Tensor | None:
    """Return the state of a generator, if the draw may have to be repeated with another layout."""
    if scope is None or not scope.traced_layouts or scope.randomness != "torch":
        return None
    return (generator or default_generator(device) or torch.default_generator).get_state()


def redrawing(
    source: NumberSource,
    scope: DrawScope,
    before: torch.Tensor | None,
    draw: Callable[[NumberSource], object],
    device: torch.device,
) -> Callable[[SampleLayout | None], None]:
    """Return a function that repeats a draw with another layout.

    Args:
        source: of the draw.
        scope: of the draw.
        before: state of the generator before the draw, if the numbers depend on it.
        draw: repeats it.
        device: of the numbers.
    """

    def redraw(layout: SampleLayout | None) -> None:
        again = replace(source, layout=layout, rows=None if layout is None else scope.rows)
        with drawing():
            if before is not None and source.key is None:
                used = source.generator or default_generator(device) or torch.default_generator
                used.set_state(before)
            draw(again)

    return redraw


def _state_of(generator: torch.Generator | None, device: torch.device) -> int:
    used = generator or default_generator(device) or torch.default_generator
    # Keys are not negative, so this is never a key.
    return -1 - (hash(used.get_state().numpy().tobytes()) & (2**63 - 1))


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return torch's default generator of a device; ``None`` if torch does not show it."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = getattr(torch.get_device_module(device), "default_generators", ())
    return next((one for one in generators if one.device == device), None)
