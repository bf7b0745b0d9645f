# SPDX-License-Identifier: Apache-2.0
"""The numbers of one draw: where they come from, in a forward pass and when a checkpoint draws them again in backward.

A forward pass or a block takes one number from the generator, the key of all its draws; inside a checkpoint each draw
takes one, whatever its shape. So generators agree on all ranks afterwards, also on a rank without samples, and a
checkpoint draws the same numbers again. With ``randomness="torch"`` a draw takes as many numbers as torch would take
for the whole batch. In order: the source; this rank's rows of the numbers that one rank would draw for the whole batch.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.random_numbers.counter import SAMPLERS, mixed
from rankwise.replicate.random_numbers.sample_layout import OWN_ROWS
from rankwise.replicate.random_numbers.scope import drawing, is_apart, take_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.current_batch import CurrentBatch
    from rankwise.replicate.random_numbers.counter import Key
    from rankwise.replicate.random_numbers.sample_layout import PartOfLayer, SampleLayout
    from rankwise.replicate.random_numbers.scope import DrawScope
    from rankwise.torch_private.kernels import Kernel


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


_PASSED_AT_ONCE = 2**14
"""Numbers that stay in the cache of a core."""


def fill(operation: str, kernel: Kernel, out: torch.Tensor, args: Sequence[Any], source: NumberSource) -> None:
    """Fill a tensor with random numbers of ``source``: by position if that is possible, else with torch's kernel."""
    if source.key is None or operation not in SAMPLERS or out.is_complex():
        with drawing():
            if operation != "bernoulli_.float" or not _fill_own(kernel, out, args, source):
                _fill_whole(kernel, out, args, source)
    elif out.numel():
        out.copy_(_by_position(operation, out, args, source))


def _by_position(operation: str, like: torch.Tensor, args: Sequence[Any], source: NumberSource) -> torch.Tensor:
    """Return numbers of the shape of ``like``, which has elements."""
    if source.part is not None:
        # All parts: the positions of one are not consecutive.
        everything = like.new_empty(source.part.whole(like.shape))
        return source.part.of(_by_position(operation, everything, args, _of_whole_layer(source)))
    layout, rows, count = source.layout, source.rows, like.numel()
    first = 0 if rows is None else rows.start * (count // rows.num)
    numbers = SAMPLERS[operation](source.full_key, range(first, first + count), like.dtype, args, like.device)
    if layout is None or rows is None or (layout.dim == 0 and layout.outer == 1):
        return numbers.view(like.shape)
    return layout.from_samples(numbers.view(layout.by_sample(like.shape, rows.num)))


def _fill_own(kernel: Kernel, out: torch.Tensor, args: Sequence[Any], source: NumberSource) -> bool:
    """Draw this rank's rows of a mask, and pass over the numbers of the others: in less time than drawing them takes.

    Returns:
        Whether it could: the rows must lie in memory one after the other, and torch must draw as it is known to.
    """
    layout, rows = source.layout, source.rows
    if layout is None or rows is None or not source.is_part or source.part is not None or not rows.num:
        return False
    is_in_order = layout.outer == 1 and source.order[:1] == (layout.dim,) and out.movedim(layout.dim, 0).is_contiguous()
    if not is_in_order or out.device.type != "cpu" or not _takes_two_words(out.dtype):
        return False
    generator, each = source.own_generator(out.device), out.numel() // rows.num
    _pass_over(each * rows.start, generator)
    kernel(out, *args, generator=generator)
    _pass_over(each * (rows.num_global - rows.start - rows.num), generator)
    return True


def _pass_over(num: int, generator: torch.Generator | None) -> None:
    """Advance a generator of the CPU by the numbers of a mask of ``num`` elements."""
    passed = torch.empty(min(num, _PASSED_AT_ONCE), dtype=torch.int64)
    for _ in range(num // _PASSED_AT_ONCE):
        passed.random_(generator=generator)
    passed[: num % _PASSED_AT_ONCE].random_(generator=generator)


@cache
def _takes_two_words(dtype: torch.dtype) -> bool:
    """Return whether torch takes as many random bits for an element of a mask as for an integer of 64 bits."""
    states: list[torch.Tensor] = []
    for filled in (torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=torch.int64)):
        generator = torch.Generator().manual_seed(0)
        filled.bernoulli_(0.5, generator=generator) if filled.is_floating_point() else filled.random_(
            generator=generator
        )
        states.append(generator.get_state())
    return torch.equal(*states)


def _fill_whole(kernel: Kernel, out: torch.Tensor, args: Sequence[Any], source: NumberSource) -> None:
    """Draw for the whole batch; keep this rank's rows."""
    if source.part is not None:
        refuse_part(source, args)
        everything = _like(out, source.part.whole(out.shape), source.order or range(out.dim()))
        _fill_whole(kernel, everything, args, _of_whole_layer(source))
        out.copy_(source.part.of(everything))
        return
    generator, layout, rows = source.own_generator(out.device), source.layout, source.rows
    if layout is None or rows is None or not source.is_part:
        kernel(out, *args, generator=generator)
        return
    whole = _like(out, layout.resized(out.shape, rows.num_global), source.order)
    kernel(whole, *[_widened(one, out.shape, source) for one in args], generator=generator)
    out.copy_(layout.part(whole, rows.num_global, rows.start, rows.num))


def _of_whole_layer(source: NumberSource) -> NumberSource:
    """Return the source of the numbers of all parts of a layer."""
    part, layout, rows = source.part, source.layout, source.rows
    if part is not None and rows is not None:
        layout = part.samples_in_whole(layout, rows.num)
    return replace(source, layout=layout, part=None)


def refuse_part(source: NumberSource, args: Sequence[Any]) -> None:
    """Raise if numbers for a part of a layer depend on values, which other ranks have for the other parts."""
    if source.part is not None and any(isinstance(one, torch.Tensor) for one in args):
        raise ConfigurationError(
            f"Random numbers at {words(user_call_site())} depend on the values of a layer that is split.",
            evidence=f"this rank has part {source.part.number} of {source.part.count}",
            do='draw them from whole values, or leave that layer whole: tensor_parallel(model, {..., "name": '
            '"replicate"})',
        )


def main_of(args: Sequence[Any]) -> torch.Tensor:
    """Return the tensor of an operation's arguments that has the shape of the drawn numbers."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    return max(tensors, key=lambda one: one.dim())


def draw_by_sample(kernel: Kernel, args: Sequence[Any], source: NumberSource) -> torch.Tensor:
    """Return the numbers of an operation that takes as many random numbers as the values of its arguments need.

    Each sample has a generator of its own, since this rank does not know how many the samples of other ranks need.
    """
    refuse_part(source, args)
    main, layout, rows = main_of(args), source.layout, source.rows
    if layout is None or rows is None:
        drawn: torch.Tensor = kernel(*args, generator=source.own_generator(main.device))
        return drawn
    out = torch.empty_like(main)
    places = layout.parts(out, rows.num, 0, rows.num)
    parts = [_as_parts(one, main.shape, layout, rows) for one in args]
    for number in range(rows.num):
        own = [one.select(layout.dim + 1, number) if is_part else one for one, is_part in parts]
        generator = replace(source, salt=source.salt ^ mixed(rows.start + number)).own_generator(main.device)
        places.select(layout.dim + 1, number).copy_(kernel(*own, generator=generator))
    return out


def _as_parts(value: Any, shape: Sequence[int], layout: SampleLayout, rows: CurrentBatch) -> tuple[Any, bool]:
    if not isinstance(value, torch.Tensor) or value.shape != torch.Size(shape):
        return value, False
    return layout.parts(value, rows.num, 0, rows.num), True


def draw_from_tensors(kernel: Kernel, args: Sequence[Any], source: NumberSource) -> torch.Tensor:
    """Return the numbers of an operation that draws from tensors of probabilities, means or counts."""
    refuse_part(source, args)
    main, layout, rows = main_of(args), source.layout, source.rows
    generator = source.own_generator(main.device)
    if layout is None or rows is None or not source.is_part:
        alone: torch.Tensor = kernel(*args, generator=generator)
        return alone
    drawn: torch.Tensor = kernel(*[_widened(one, main.shape, source) for one in args], generator=generator)
    return layout.part(drawn, rows.num_global, rows.start, rows.num).clone()


def draw_dropout(
    kernel: Kernel, inputs: torch.Tensor, probability: float, source: NumberSource
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the mask of a fused dropout."""
    layout, rows = source.layout, source.rows
    if source.key is None:
        refuse_part(source, [inputs])
        if layout is None or rows is None or not source.is_part:
            alone: tuple[torch.Tensor, torch.Tensor] = kernel(inputs, probability, True)
            return alone
        both = kernel(_widened(inputs, inputs.shape, source), probability, True)
        dropped, keeps = (layout.part(one, rows.num_global, rows.start, rows.num).clone() for one in both)
        return dropped, keeps
    keeps = torch.empty_like(inputs, dtype=torch.bool)
    if keeps.numel():
        keeps = _by_position("bernoulli_.float", keeps, (1 - probability,), source)
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    # The same product as in backward: of three factors, in one kernel.
    return torch.ops.aten.native_dropout_backward(inputs, keeps, scale), keeps


def _widened(value: Any, shape: Sequence[int], source: NumberSource) -> Any:
    """Return an argument for the whole batch: this rank's rows in their place, ones elsewhere."""
    layout, rows = source.layout, source.rows
    if not isinstance(value, torch.Tensor) or value.shape != torch.Size(shape) or layout is None or rows is None:
        return value
    whole = _like(value, layout.resized(value.shape, rows.num_global), source.order).fill_(1)
    own = layout.parts(whole, rows.num_global, rows.start, rows.num)
    own.copy_(value.unflatten(layout.dim, (layout.outer, rows.num, layout.inner)))
    return whole


def _like(tensor: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return a tensor of another shape with its dims in memory in ``order``, in which torch fills it."""
    whole = torch.empty([shape[dim] for dim in order], dtype=tensor.dtype, device=tensor.device)
    return whole.permute([order.index(dim) for dim in range(tensor.dim())])
