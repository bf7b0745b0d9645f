# SPDX-License-Identifier: Apache-2.0
"""What rank zero and the servers send one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rankwise.auto.connection import Place, Ticket
    from rankwise.auto.settings import GeneratorStates, Settings


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A parameter or buffer that a server has not seen yet."""

    number: int
    kind: Literal["parameter", "buffer"]
    requires_grad: bool
    is_on_cpu: bool
    """Or on the device of each rank."""
    place: Place
    memory: Ticket | None
    """Where all ranks see its values, at that place; ``None``: they are sent."""


@dataclass(frozen=True, slots=True)
class Values:
    """Parameters and buffers before a call."""

    new: list[TensorFacts]
    sent: list[int]
    """Numbers of those whose values come from rank zero."""
    by_broadcast: bool
    """Whether they come in a broadcast after the message, not with it."""
    dropped: list[int]
    """Numbers of those that no longer exist."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor in a message, sent with it: the rows of one rank, or a tensor that has none."""

    requires_grad: bool = False
    is_on_cpu: bool = True
    """Or on the device of each rank."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute the rows of one call of a module."""

    call: int
    module: int
    kind: int
    """Calls of one kind draw random numbers alike."""
    pickled: bytes | None
    """The module, if a server has not seen it as it is."""
    values: Values
    forgotten: list[int]
    """Calls that no backward will follow."""
    structure: bytes | None
    """Of the arguments, if a server has not seen this kind of call."""
    leaves: list[Any]
    dims: tuple[int | None, ...]
    num_global: int
    has_graph: bool
    meets: bool
    """Whether ranks exchange statistics within the call: then each tells the others how it ended."""
    settings: Settings
    generators: GeneratorStates | None
    """``None``: the call draws nothing."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The rows of the outputs of a call, flat, or the gradients of what it was called with."""

    leaves: list[Any]


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute the gradients of the rows of a call."""

    call: int
    keeps_graph: bool
    given: list[int]
    """Numbers of the outputs whose gradients are sent with the message."""
    meets: bool
    """Whether ranks exchange something in it: then each tells the others how its part ended."""
    adds: bool
    """Whether all ranks add the gradients of parameters; otherwise rank zero gets them, and adds them."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a server was asked for has raised."""

    kind: str
    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class End:
    """The script has ended."""
