# SPDX-License-Identifier: Apache-2.0
"""The calls of a forward pass, and the tensors between them, as values.

Recorded by traced, cut by stages, run by stage_executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankwise.replicate.loss.batch_statistics import Statistic
    from rankwise.replicate.random_numbers.scope import PlannedDraw


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference, within arguments, to the value of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The properties of a tensor, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    """Equal for views of the same memory."""
    is_plain: bool


@dataclass(eq=False, slots=True)
class TracedCall:
    """One call of a block, or of a function between blocks."""

    target: str | Callable[..., Any]
    """The name of the block, or the function."""
    leaves: list[Any]
    """Of the arguments, a :class:`Ref` in place of each tensor."""
    spec: pytree.TreeSpec
    """Of ``(args, kwargs)``."""
    reads: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    """(leaf of the result, number of the value) per tensor of the result."""
    is_whole: bool
    """Whether the result is one tensor."""
    changes: tuple[int, ...]
    """Values that were changed in place."""
    in_grad_mode: bool
    is_random: bool
    first_draw: int = 0
    """How many random draws come before it."""
    num_args: int = 0
    names: tuple[str, ...] | None = None
    """Of arguments by name, where no argument is a tree."""

    def __post_init__(self) -> None:
        numbers = list(range(len(self.leaves)))
        args, kwargs = pytree.tree_unflatten(numbers, self.spec)
        if [*args, *kwargs.values()] == numbers:
            self.num_args, self.names = len(args), tuple(kwargs)

    def arguments(self, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)``, with values in place of their numbers."""
        leaves = [values[leaf.number] if type(leaf) is Ref else leaf for leaf in self.leaves]
        if self.names is not None:
            return tuple(leaves[: self.num_args]), dict(zip(self.names, leaves[self.num_args :], strict=True))
        return pytree.tree_unflatten(leaves, self.spec)

    def __str__(self) -> str:
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", repr(self.target))


@dataclass(eq=False)
class Program:
    """A forward pass, for inputs of one shape."""

    calls: list[TracedCall] = field(default_factory=list[TracedCall])
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    """From the number of a value to its leaf of ``(args, kwargs)``."""
    states: dict[int, str] = field(default_factory=dict[int, str])
    """From the number of a value to its parameter or buffer."""
    changed_states: tuple[str, ...] = ()
    """Parameters and buffers that forward changes, also within blocks."""
    constants: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    kinds: dict[int, TensorKind] = field(default_factory=dict[int, TensorKind])
    output: list[Any] = field(default_factory=list[Any])
    """Leaves of the result of forward, a :class:`Ref` in place of each tensor."""
    output_spec: pytree.TreeSpec | None = None
    drawn_shapes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """Of random numbers, in order."""
    has_draws_apart: bool = False
    """Whether some are made again in backward, or without gradients."""
    draws: Sequence[PlannedDraw] = ()
    """Random numbers, in order, if the samples were followed."""
    statistics: tuple[Statistic | None, ...] = ()
    """Of the tensors of the output: the statistic of several samples that each depends on."""

    def end(self, output: list[Any], spec: pytree.TreeSpec) -> None:
        """Set the leaves of the output, a :class:`Ref` in place of each tensor, and their tree."""
        self.output = output
        self.output_spec = spec

    def note_changed(self, states: Iterable[str]) -> None:
        """Note which parameters and buffers forward changes."""
        self.changed_states = tuple(states)

    @property
    def num_draws(self) -> int:
        """How often forward draws random numbers."""
        return len(self.drawn_shapes)

    def note_draw(self, shape: tuple[int, ...], *, is_apart: bool) -> None:
        """Note a random draw."""
        self.drawn_shapes.append(shape)
        self.has_draws_apart |= is_apart

    def note_samples(self, draws: Sequence[PlannedDraw], statistics: Iterable[Statistic | None]) -> None:
        """Note which random numbers the samples have, and where they met."""
        self.draws = draws
        self.statistics = tuple(statistics)

    def output_reads(self) -> list[int]:
        """Return the values that the output consists of."""
        return [leaf.number for leaf in self.output if isinstance(leaf, Ref)]

    def output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors of the output."""
        return [self.kinds[number].shape for number in self.output_reads()]
