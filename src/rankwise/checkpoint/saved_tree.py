# SPDX-License-Identifier: Apache-2.0
"""Saved state trees, compared with the objects here and read as those are distributed: whole, in regions, not at all.

First a tree has stand-ins for its tensors, which take no memory and can be compared; then each rank reads the regions
that it needs. Changes no object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from rankwise.checkpoint import files, layouts, state
from rankwise.checkpoint.content import kind_of, parameters_elsewhere, state_of, unwrapped
from rankwise.checkpoint.manifest import MANIFEST_NAME, Region, whole
from rankwise.checkpoint.state import child
from rankwise.errors import CheckpointError
from rankwise.torch_private.dtensor import placed_as_shaped
from rankwise.torch_private.modules import EXTRA_STATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rankwise.checkpoint.manifest import Manifest, TensorEntry


@dataclass(eq=False, slots=True)
class _SavedTensor:
    """One place of a tensor in a saved tree."""

    name: str
    entry: TensorEntry
    stand_in: torch.Tensor
    """On the meta device, of the saved dtype and whole shape."""
    template: torch.Tensor | None = None
    """The DTensor here whose placements the saved tensor gets; a meta tensor for one on other ranks."""
    is_elsewhere: bool = False
    """Whether only other ranks hold the tensor to load into."""

    def region(self) -> Region | None:
        """Return which region this rank reads; ``None`` for nothing."""
        everything = whole(self.entry.shape)
        if self.is_elsewhere:
            return None
        if self.template is None or tuple(self.template.shape) != self.entry.shape:
            return everything
        # A rank without elements of a DTensor still has its own DTensor, with empty memory.
        held = tuple(layouts.local(self.template).shape)
        return layouts.region_of(self.template, self.name) or Region((0,) * len(held), held)


class SavedTree:
    """The saved state of one object.

    Attributes:
        tree: with a stand-in for each tensor until :func:`read` has filled it.
        elsewhere: paths of tensors that have no memory on this rank to load into.
    """

    def __init__(self, name: str, saved: Manifest) -> None:
        """Build the tree of the object ``name`` from the manifest; nothing is read."""
        self.name = name
        self.elsewhere: list[str] = []
        self._skeleton = saved.objects[name].state
        self._tensors = saved.tensors
        self._places: list[_SavedTensor] = []
        self._place_of: dict[int, _SavedTensor] = {}
        self._dropped: set[int] = set()
        self.tree: Any = state.unflatten(self._skeleton, self._stand_in)

    def _stand_in(self, name: str) -> torch.Tensor:
        entry = self._tensors[name]
        stand_in = torch.empty(entry.shape, dtype=files.dtype_of(entry.dtype), device="meta")
        place = _SavedTensor(name, entry, stand_in)
        self._places.append(place)
        self._place_of[id(stand_in)] = place
        return stand_in

    def fit(self, item: object) -> None:
        """Note how the object to load into lies on this rank. Call after the two have been compared."""
        inner = unwrapped(item)
        for path, saved, here, _ in _places(self.name, self.tree, state_of(inner)):
            place = self._place_of.get(id(saved))
            # A lazy parameter has no shape yet; it takes the saved one whole.
            if place is None or not isinstance(here, torch.Tensor) or torch.nn.parameter.is_lazy(here):
                continue
            if layouts.is_elsewhere(here):
                place.is_elsewhere, place.template = True, here
                self.elsewhere.append(path)
            elif layouts.as_dtensor(here) is not None and tuple(here.shape) == place.entry.shape:
                place.template = here
        if isinstance(inner, torch.optim.Optimizer):
            self._fit_optimizer(inner)

    def _fit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Place the state of each parameter like the parameter: a fresh optimizer has no state to copy from."""
        tree = cast("dict[str, Any]", self.tree) if isinstance(self.tree, dict) else {}
        entries: dict[Any, Any] = tree.get("state", {})
        self._dropped = set(parameters_elsewhere(optimizer)) & set(entries)
        parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        for number, entry in entries.items():
            if not (isinstance(number, int) and number < len(parameters) and isinstance(entry, Mapping)):
                continue
            for value in cast("Mapping[str, object]", entry).values():
                place = self._place_of.get(id(value))
                if place is None:
                    continue
                if number in self._dropped:
                    place.is_elsewhere = True
                # Scalars (steps) are plain; a row of factors belongs to a whole parameter, and is replicated.
                elif (
                    place.entry.shape and place.template is None and layouts.as_dtensor(parameters[number]) is not None
                ):
                    place.template = parameters[number]

    def regions(self) -> dict[tuple[str, Region], TensorEntry]:
        """Return what this rank has to read."""
        return {(place.name, region): place.entry for place in self._places if (region := place.region()) is not None}

    def fill(self, memory_of: Mapping[tuple[str, Region], torch.Tensor]) -> None:
        """Put what was read into the tree; a tensor on other ranks keeps its stand-in, or is removed."""
        places = iter(self._places)

        def value(_: str) -> torch.Tensor:
            place = next(places)
            region = place.region()
            if region is None:
                return place.stand_in if place.template is None else place.template
            memory = memory_of[place.name, region]
            return memory if place.template is None else placed_as_shaped(place.template, memory, place.entry.shape)

        self.tree = state.unflatten(self._skeleton, value)
        for number in self._dropped:
            del self.tree["state"][number]


def check(saved: Manifest) -> None:
    """Raise unless the state of every object can be built from its manifest entry.

    Raises:
        CheckpointError: it cannot.
    """
    _check_sizes(saved)
    for name in saved.objects:
        try:
            SavedTree(name, saved)
        except CheckpointError:
            pass  # the error is raised when that object is loaded
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"{MANIFEST_NAME} cannot be read: the state of {name} is malformed: {type(error).__name__}: {error}"
            ) from error


def _check_sizes(saved: Manifest) -> None:
    """Raise if tensors are larger than the files that hold them: their memory is allocated before they are read."""
    num_bytes = dict.fromkeys(saved.files, 0)
    for name, entry in saved.tensors.items():
        # Without a dtype nothing is allocated: it is an error when the tensor is loaded.
        for part in entry.parts if isinstance(getattr(torch, entry.dtype, None), torch.dtype) else ():
            num_bytes[part.file] += part.region.num_elements * files.dtype_of(entry.dtype).itemsize
            if num_bytes[part.file] > (size := saved.files[part.file].size_bytes):
                raise CheckpointError(
                    f"{MANIFEST_NAME} cannot be read: {part.file} has {size} bytes, too few for {name} of "
                    f"{entry.dtype}{list(entry.shape)}"
                )


def read(folder: Path, trees: Sequence[SavedTree]) -> None:
    """Fill trees from a checkpoint's files; a tensor that was shared is shared again.

    Raises:
        CheckpointError: a file does not match the manifest, or something here has placements that cannot be
            loaded into.
    """
    wanted: dict[tuple[str, Region], TensorEntry] = {}
    for tree in trees:
        wanted.update(tree.regions())
    memory = files.read_regions(folder, [(entry, region) for (_, region), entry in wanted.items()])
    memory_of = dict(zip(wanted, memory, strict=True))
    for tree in trees:
        tree.fill(memory_of)


# -- whether saved state fits an object --------------------------------------------------------------

_ABSENT = object()


class StateDifference(NamedTuple):
    """The first place where saved state does not fit an object, and the texts of both."""

    path: str
    """The key, as ``model.fc.weight``."""
    saved: str
    here: str


def first_difference(name: str, item: object, saved: object, saved_kind: str) -> StateDifference | None:
    """Return the first place where ``saved`` does not fit ``item``, or ``None``.

    A module must have the same keys, and tensors of the same shape and dtype. An optimizer must be
    of the same class, with as many parameters in each group; the parameters of a torch optimizer must have the
    shapes of its saved state. A scheduler must be of the same class. For any other object only the
    tensors that both sides have are compared: rankwise does not know the meaning of other keys.
    """
    inner = unwrapped(item)
    if isinstance(inner, torch.nn.Module):
        return _compare(name, saved, inner.state_dict(), strict=True)
    of_one_class = isinstance(inner, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)
    if of_one_class and saved_kind.rpartition(".")[2] != type(inner).__name__:
        return StateDifference(f"the class of {name}", saved_kind, kind_of(inner))
    if isinstance(inner, torch.optim.Optimizer):
        return (
            _compare_groups(name, saved, inner)
            or _compare_shapes(name, saved, inner)
            or _compare(name, saved, inner.state_dict(), strict=False)
        )
    if callable(getattr(inner, "state_dict", None)):
        return _compare(name, saved, cast("Any", inner).state_dict(), strict=False)
    if isinstance(inner, torch.Tensor):
        return _compare(name, saved, inner, strict=True)
    kinds = _text(saved), _text(item)
    if any(isinstance(inner, kind) and not isinstance(saved, kind) for kind in (dict, list)):
        return StateDifference(name, *kinds)
    return None


def _compare(path: str, saved: object, here: object, *, strict: bool) -> StateDifference | None:
    for place, theirs, ours, is_free in _places(path, saved, here):
        if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
            differs = not torch.nn.parameter.is_lazy(ours) and _text(theirs) != _text(ours)
        else:
            is_one_sided = any(one is _ABSENT or isinstance(one, torch.Tensor) for one in (theirs, ours))
            differs = strict and not is_free and is_one_sided
        if differs:
            return StateDifference(place, _text(theirs), _text(ours))
    return None


def _places(
    path: str, saved: object, here: object, *, is_free: bool = False
) -> Iterator[tuple[str, object, object, bool]]:
    """Yield the path of each place where one of two trees ends, and what both have there.

    The last item tells whether it is within a module's extra state, which is a value of its own, of any form.
    """
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        theirs, ours = cast("Mapping[Any, object]", saved), cast("Mapping[Any, object]", here)
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            is_extra = key in theirs and key in ours and str(key).endswith(EXTRA_STATE)
            both = theirs.get(key, _ABSENT), ours.get(key, _ABSENT)
            yield from _places(child(path, key), *both, is_free=is_free or is_extra)
    elif isinstance(saved, list | tuple) and isinstance(here, list | tuple):
        pairs = zip(cast("Sequence[object]", saved), cast("Sequence[object]", here), strict=False)
        for index, both in enumerate(pairs):
            yield from _places(f"{path}[{index}]", *both, is_free=is_free)
    else:
        yield path, saved, here, is_free


def _compare_groups(name: str, saved: object, optimizer: torch.optim.Optimizer) -> StateDifference | None:
    tree = cast("dict[str, Any]", saved) if isinstance(saved, dict) else {}
    groups: list[dict[str, Any]] = tree.get("param_groups", [])
    path = f"{name}.param_groups"
    if not (isinstance(cast("object", groups), list) and all(map(_is_group, groups))):
        return StateDifference(path, "something else", "groups of parameters")
    if len(groups) != len(optimizer.param_groups):
        return StateDifference(path, f"{len(groups)} groups", f"{len(optimizer.param_groups)} groups")
    for index, (theirs, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        counts = len(theirs["params"]), len(ours["params"])
        if counts[0] != counts[1]:
            return StateDifference(f"{path}[{index}].params", *(f"{count} parameters" for count in counts))
    return None


def _is_group(group: object) -> bool:
    numbers: object = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(isinstance(one, int) for one in cast("list[object]", numbers))


def _compare_shapes(name: str, saved: object, optimizer: torch.optim.Optimizer) -> StateDifference | None:
    """Compare state with the parameters that it belongs to: a fresh optimizer has no state to compare it with."""
    # Other optimizers may keep matrices of other shapes, as LBFGS keeps all parameters in one vector.
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return None
    tree = cast("dict[str, Any]", saved)
    entries: dict[int, dict[str, Any]] = tree.get("state", {})
    if not (isinstance(cast("object", entries), dict) and all(isinstance(one, dict) for one in entries.values())):
        return StateDifference(f"{name}.state", "something else", "entries of parameters")
    numbers = [number for group in tree["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if torch.nn.parameter.is_lazy(parameter):
            continue
        for key, value in entries.get(number, {}).items():
            if not isinstance(value, torch.Tensor) or value.ndim != parameter.ndim:
                continue
            # Adafactor keeps the means of rows and of columns.
            if any(size not in (1, here) for size, here in zip(value.shape, parameter.shape, strict=True)):
                return StateDifference(f"{name}.state[{number}].{key}", _text(value), f"a parameter {_text(parameter)}")
    return None


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{files.dtype_name(value.dtype)}{list(value.shape)}"
    return "nothing" if value is _ABSENT else type(value).__name__
