# SPDX-License-Identifier: Apache-2.0
"""What rank zero and the servers send one another: messages, and modules and structures of arguments as bytes."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from rankwise.auto.code_reads import is_of_script

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rankwise.auto.connection import Place, Ticket
    from rankwise.auto.settings import GeneratorStates, Settings
    from rankwise.torch_private import tree as pytree


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


_by_value: set[str] = set()


def dumped(module: nn.Module, number_of: Callable[[object], int | None]) -> bytes:
    """Return a module as bytes.

    Args:
        module: to send.
        number_of: returns the number of a tensor that servers have a copy of.

    Raises:
        Exception: it cannot be pickled: its classes may run any code.
    """
    cloudpickle = importlib.import_module("cloudpickle")
    for name, loaded in list(sys.modules.items()):
        if name not in _by_value and name != "__main__":
            _by_value.add(name)
            if is_of_script(name):
                cloudpickle.register_pickle_by_value(loaded)
    file = io.BytesIO()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def persistent_id(self, obj: object) -> int | None:
            return number_of(obj)

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, nn.Module) and is_parametrized(obj):
                # Torch refuses to pickle these: their class exists in this process only, and cloudpickle sends it.
                return object.__new__, (type(obj),), vars(obj)
            return super().reducer_override(obj)

    Pickler(file).dump(module)
    return file.getvalue()


def dumped_tree(tree: pytree.TreeSpec) -> bytes:
    """Return the structure of arguments as bytes. Its classes may be the script's, as named tuples are."""
    return cast("bytes", importlib.import_module("cloudpickle").dumps(tree))


def loaded_tree(data: bytes) -> pytree.TreeSpec:
    """Return what :func:`dumped_tree` was given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about a class of its own
        return cast("pytree.TreeSpec", pickle.loads(data))  # noqa: S301 - rank zero holds the job's secret


def loaded(data: bytes, tensor: Callable[[int], torch.Tensor]) -> Any:
    """Return the module that :func:`dumped` was given, with a server's own copies of its tensors."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int, /) -> torch.Tensor:
            return tensor(pid)

    module = Unpickler(io.BytesIO(data)).load()
    # torch.compile looks for the globals of the script's functions in __main__.
    for part in module.modules():
        of_forward = getattr(type(part).forward, "__globals__", {})
        if of_forward.get("__name__") == "__main__":
            vars(sys.modules["__main__"]).update(of_forward)
    return module
