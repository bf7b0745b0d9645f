# SPDX-License-Identifier: Apache-2.0
"""A module as it is sent to servers: by value where it is the script's own, and without its parameters and buffers."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import warnings
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from rankwise.auto.code_reads import is_of_script

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rankwise.torch_private.tensors import TreeSpec

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


def dumped_tree(tree: TreeSpec) -> bytes:
    """Return the structure of arguments as bytes. Its classes may be the script's, as named tuples are."""
    return cast("bytes", importlib.import_module("cloudpickle").dumps(tree))


def loaded_tree(data: bytes) -> TreeSpec:
    """Return what :func:`dumped_tree` was given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about a class of its own
        return cast("TreeSpec", pickle.loads(data))  # noqa: S301 - rank zero holds the job's secret


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
