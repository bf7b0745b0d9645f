# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a batch lie in a tensor, as far as is known, and how operations move them. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """The dim that holds the samples, of size ``outer * num_samples * inner``: ``outer`` times all samples in order.

    ``[batch * heads, ...]`` has ``inner=heads``; two batches one after another have ``outer=2``.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def fits(self, shape: Sequence[int], num_samples: int) -> bool:
        """Return whether a tensor of that shape can hold ``num_samples`` in this layout."""
        return 0 <= self.dim < len(shape) and shape[self.dim] == self.outer * num_samples * self.inner

    def resized(self, shape: Sequence[int], num_samples: int) -> list[int]:
        """Return a shape with another number of samples."""
        sizes = list(shape)
        sizes[self.dim] = self.outer * num_samples * self.inner
        return sizes

    def by_sample(self, shape: Sequence[int], num_samples: int) -> list[int]:
        """Return the shape ``[num_samples, outer, inner, *other dims]``, in which each sample is one block."""
        return [num_samples, self.outer, self.inner, *shape[: self.dim], *shape[self.dim + 1 :]]

    def from_samples(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return a tensor in this layout from one laid out by sample."""
        return blocks.transpose(0, 1).flatten(0, 2).movedim(0, self.dim)

    def parts(self, whole: torch.Tensor, num_global: int, start: int, num: int) -> torch.Tensor:
        """Return a view of the samples from ``start`` on of a tensor that holds all, with ``dim`` as three dims."""
        unfolded = whole.unflatten(self.dim, (self.outer, num_global, self.inner))
        return unfolded.narrow(self.dim + 1, start, num)

    def part(self, whole: torch.Tensor, num_global: int, start: int, num: int) -> torch.Tensor:
        """Return the samples from ``start`` on of a tensor that holds all."""
        return self.parts(whole, num_global, start, num).flatten(self.dim, self.dim + 2)


OWN_ROWS = SampleLayout(-1)
"""The layout of numbers for rows that are computed from samples, of which it is not known which sample each belongs to,
as nodes of graphs or the tokens that a mask selects: each rank draws its own.
"""


@dataclass(slots=True, eq=False)
class Guess:
    """The assumption about a tensor whose shape was given in numbers, until it meets a tensor that is followed."""

    layouts: list[SampleLayout | None]
    """Its possible layouts, the assumed one first."""
    place: str = ""
    """Where it was drawn; empty if it is not random."""
    number: int = 0
    """The number of the draw."""
    redraw: Callable[[SampleLayout | None], None] | None = None

    def set_draw(self, place: str, number: int, redraw: Callable[[SampleLayout | None], None] | None) -> None:
        """Record which draw it is about, and how to repeat it in another layout."""
        self.place, self.number, self.redraw = place, number, redraw

    def decide(self, layout: SampleLayout | None) -> None:
        """End the guess: the layout is known."""
        self.layouts = [layout]
        self.redraw = None


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """The known layout of a tensor."""

    layout: SampleLayout | None
    guess: Guess | None = None
    """The guess that it depends on."""
    is_direct: bool = False
    """Whether the guess is about this tensor itself, not one that it was computed from."""


@dataclass(frozen=True, slots=True)
class PartOfLayer:
    """A rank's part of a tensor that is divided among the ranks that share layers."""

    layout: SampleLayout
    """The dim that is divided, in which the part counts as one sample."""
    number: int
    count: int
    """Of all parts."""

    def whole(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole tensor from that of the part."""
        return self.layout.resized(shape, self.count)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor."""
        return self.layout.part(whole, self.count, self.number, 1)

    def samples_in_whole(self, samples: SampleLayout | None, num_samples: int) -> SampleLayout | None:
        """Return where samples lie in the whole tensor, from where they lie in the part."""
        if samples is None or samples.dim != self.layout.dim:
            return samples
        if self.layout.outer >= samples.outer * num_samples:  # each sample is divided
            return replace(samples, inner=samples.inner * self.count)
        return replace(samples, outer=samples.outer * self.count)


def layout_of(shape: Sequence[int], num_samples: int) -> SampleLayout | None:
    """Return the likeliest layout of a tensor of which only the shape is known: batch first if possible."""
    return next(iter(layouts_of(shape, num_samples)), None)


def layouts_of(shape: Sequence[int], num_samples: int) -> list[SampleLayout]:
    """Return the possible layouts of a tensor of which only the shape is known, the likeliest first."""
    found = [SampleLayout(dim) for dim, size in enumerate(shape) if size == num_samples]
    if shape and num_samples > 1 and shape[0] > num_samples and shape[0] % num_samples == 0:
        found.append(SampleLayout(0, inner=shape[0] // num_samples))
    return found


def viewed(layout: SampleLayout, old: Sequence[int], new: Sequence[int], num_samples: int) -> SampleLayout | None:
    """Return where samples lie after a view with other sizes; ``None`` if no dim holds whole samples."""
    found = _views(layout, old, new, num_samples)
    # With one sample, any dim of size one can be the one.
    return next(
        (one for one in found if (one.outer, one.inner) == (layout.outer, layout.inner)), next(iter(found), None)
    )


def part_viewed(layout: SampleLayout, old: Sequence[int], new: Sequence[int]) -> SampleLayout | None:
    """Return which dim is divided after a view with other sizes, where the part of a rank counts as one sample.

    Features that are viewed as heads are divided by heads.
    """
    found = _views(layout, old, new, 1)
    below = math.prod(old[layout.dim + 1 :])
    is_of_features = layout.dim == len(old) - 1 and len(new) > len(old)
    kept = [] if is_of_features else [one for one in found if math.prod(new[one.dim + 1 :]) == below]
    alike = [one for one in found if one.outer == layout.outer]
    return next(iter((*reversed(kept), *alike, *found)), None)


def _views(layout: SampleLayout, old: Sequence[int], new: Sequence[int], num_samples: int) -> list[SampleLayout]:
    """Return where samples can lie after a view with other sizes."""
    inner = layout.inner * math.prod(old[layout.dim + 1 :])
    found: list[SampleLayout] = []
    for dim, size in enumerate(new):
        below = math.prod(new[dim + 1 :])
        if below and inner and inner % below == 0 and (size * below) % (num_samples * inner) == 0:
            found.append(SampleLayout(dim, size * below // (num_samples * inner), inner // below))
    return found


def expanded(layout: SampleLayout, old: Sequence[int], new: Sequence[int]) -> SampleLayout | None:
    """Return where samples lie after ``expand``, or in the result of an operation on each element."""
    dim = layout.dim + len(new) - len(old)
    return replace(layout, dim=dim) if dim >= 0 and new[dim] == old[layout.dim] else None


def is_aligned(
    tensor: torch.Tensor,
    option: SampleLayout | None,
    certain: Sequence[tuple[torch.Tensor, SampleLayout]],
    alike: Sequence[torch.Tensor],
) -> bool:
    """Return whether a layout of a tensor fits the other inputs of an operation on each element."""
    for one in alike:
        dim = -1 if option is None else option.dim - tensor.dim() + one.dim()
        if option is not None and dim >= 0 and one.shape[dim] == tensor.shape[option.dim] > 1:
            return False
    for known, layout in certain[:1]:
        dim = layout.dim - known.dim() + tensor.dim()
        has_samples = 0 <= dim < tensor.dim() and tensor.shape[dim] == known.shape[layout.dim]
        expected = SampleLayout(dim, layout.outer, layout.inner) if has_samples else None
        if option != expected:
            return False
    return True


def broadcast_layout(known: list[tuple[torch.Tensor, SampleLayout]], out: torch.Tensor) -> SampleLayout | None:
    """Return where samples lie in the result of an operation on each element, from where they lie in its inputs."""
    found = (expanded(layout, tensor.shape, out.shape) for tensor, layout in known)
    return next((one for one in found if one is not None), None)


def grown_layout(
    now: torch.Size, grown: torch.Size, known: list[tuple[torch.Tensor, SampleLayout]], name: str
) -> SampleLayout | None:
    """Return the dim that grows with one more sample; none if none does, ``OWN_ROWS`` if several do."""
    if len(now) != len(grown):
        return OWN_ROWS
    dims = [dim for dim, (size, more) in enumerate(zip(now, grown, strict=True)) if size != more]
    if len(dims) != 1:
        return OWN_ROWS if dims else None
    dim = dims[0]
    growth = grown[dim] - now[dim]
    for _, layout in known:
        if layout.outer * layout.inner == growth:
            return SampleLayout(dim, layout.outer, layout.inner)
    first = known[0][1]
    per_part = first.outer * first.inner
    if name in {"cat", "repeat", "concat"} and growth % per_part == 0:
        return SampleLayout(dim, first.outer * growth // per_part, first.inner)
    return OWN_ROWS
