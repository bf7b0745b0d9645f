# SPDX-License-Identifier: Apache-2.0
"""The content of a checkpoint: the state of the user's objects, read and agreed on by the ranks.

Writes no file and copies no tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.checkpoint import files, manifest, state
from rankwise.checkpoint.generators import digests_of, generator_states, in_loop
from rankwise.checkpoint.layouts import (
    Reports,
    StateReport,
    TensorLayout,
    bounds,
    differs,
    is_elsewhere,
    layouts_of,
    local,
    region_of,
    report_of,
    united_entries,
)
from rankwise.checkpoint.manifest import ObjectEntry, Region, TensorEntry, TensorPart
from rankwise.comm.session import current_or_none
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.torch_private.compiler import module_within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.checkpoint.manifest import Json
    from rankwise.comm.agreement import CheckpointRanks


PART_NAME = "part-{:05d}.safetensors"
"""Names of a checkpoint's files of tensors, by the rank that writes each."""

_Reported = tuple[str, str | None, dict[str, str]]
"""A rank's message about its state: a digest, one of its report if the state is spread over ranks, and digests of the
states of its random number generators, which may differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """The state of objects as the ranks hold it together; the same on every rank but for ``held`` and ``states``."""

    objects: dict[str, ObjectEntry]
    """Skeleton of each object, by name."""
    layouts: dict[str, TensorLayout]
    """Of each tensor, by name."""
    held: dict[str, torch.Tensor]
    """This rank's part of each tensor, by name, in the objects' memory."""
    states: dict[str, Json]
    """The states of this rank's random number generators."""
    differing: list[str]
    """Which of them are not the same on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The content of a checkpoint; the same on every rank, except for ``own`` and what ``gathered`` has of one rank."""

    gathered: Gathered
    entries: dict[str, TensorEntry]
    """The manifest's entry of each tensor."""
    own: dict[str, torch.Tensor]
    """The tensors that this rank writes, by name in its file and in the order of its file, in the objects' memory."""
    in_loop: list[str]
    """The objects over which a loop is running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OwnState:
    skeletons: dict[str, Json]
    kinds: dict[str, str]
    """The class of each object."""
    tensors: dict[str, torch.Tensor]
    report: StateReport
    is_spread: bool
    """Whether some of it lies on other ranks."""
    states: dict[str, Json]
    """Of the random number generators."""

    @property
    def frames(self) -> dict[str, Json]:
        """The skeletons of optimizers, without the entries of their parameters: the same on every rank."""
        return {name: _with_entries(self.skeletons[name], []) for name in self.report.entries}


def read(ranks: CheckpointRanks, objects: Mapping[str, object]) -> Content:
    """Read the state of ``objects``, and divide writing it among the ranks.

    Called by: every rank.

    Raises:
        ConfigurationError: there are no objects.
        CheckpointError: something cannot be saved, or differs between ranks.
    """
    if not objects:
        raise ConfigurationError(
            "save() was called without objects.",
            do="pass them by name: save(..., model=model, optimizer=optimizer)",
        )
    gathered = gather(ranks, objects)
    size_bytes_of: dict[tuple[str, tuple[int, ...]], int] = {}
    holders_of: dict[tuple[str, tuple[int, ...]], Sequence[int]] = {}
    order: list[tuple[bool, str, tuple[int, ...], Region]] = []
    for name, layout in gathered.layouts.items():
        num_bytes = files.dtype_of(layout.dtype).itemsize
        for region, holders in layout.holders.items():
            size_bytes_of[name, region.offsets] = math.prod(region.shape) * num_bytes
            holders_of[name, region.offsets] = holders
            order.append((region.shape != layout.shape, name, region.offsets, region))
    rank_of = manifest.assign(size_bytes_of, holders_of)
    taken: set[tuple[int, str]] = set()
    parts: dict[str, list[TensorPart]] = {}
    own: dict[str, torch.Tensor] = {}
    # Whole tensors first: they keep their names. Then regions, those of one tensor in the order of their offsets.
    for is_part, name, offsets, region in sorted(order, key=itemgetter(0, 1, 2)):
        rank = rank_of[name, offsets]
        inside = f"{name}[{bounds(region)}]" if is_part else name
        while (rank, inside) in taken:
            inside += "'"
        taken.add((rank, inside))
        parts.setdefault(name, []).append(TensorPart(PART_NAME.format(rank), inside, region))
        if rank == ranks.rank:
            own[inside] = gathered.held[name]
    entries = {
        name: TensorEntry(dtype=layout.dtype, shape=layout.shape, parts=tuple(parts[name]))
        for name, layout in gathered.layouts.items()
    }
    return Content(gathered=gathered, entries=entries, own=files.in_file_order(own), in_loop=in_loop(objects))


def gather(ranks: CheckpointRanks, objects: Mapping[str, object]) -> Gathered:
    """Read the state of ``objects``, and learn which rank holds which parts of it.

    Called by: every rank.

    Tensors may lie on the ranks in any way: whole and equal, in regions (DTensors), or on some ranks only, the
    others having meta tensors in their place. Everything else must be the same on every rank, except for the state of
    an optimizer, whose entries lie where their parameters lie. With several worker groups, whose optimizers each have
    a state, those of the first group count.

    Raises:
        CheckpointError: something cannot be saved, differs between ranks, or lies on none of them.
    """
    num_counting = _num_counting(ranks)
    own: list[_OwnState] = []

    def read_own() -> _Reported:
        own.append(_read_own(objects))
        return _reported(own[0], is_spread=own[0].is_spread or num_counting < ranks.world_size)

    digests, reports, of_generators = zip(*ranks.confirm("reading the state to save", read_own), strict=True)
    mine = own[0]
    if any(reports) and not all(reports):
        again = ranks.confirm("comparing which rank holds what", lambda: _reported(mine, is_spread=True))
        digests, reports, of_generators = zip(*again, strict=True)
    frames = mine.frames if any(reports) else {}
    if len(set(digests)) > 1:
        raise _difference(ranks, mine, frames)
    if any(reports):
        counting = _exchanged(ranks, mine, reports[:num_counting])
        united = {name: _with_entries(frame, united_entries(name, counting)) for name, frame in frames.items()}
        skeletons = mine.skeletons | united
        layouts = layouts_of(counting)
    else:
        everywhere = range(ranks.world_size)
        layouts = {
            name: TensorLayout(dtype=dtype, shape=shape, holders={region: everywhere})
            for name, (dtype, shape, region) in mine.report.tensors.items()
            if region is not None
        }
        skeletons = mine.skeletons
    return Gathered(
        objects={name: ObjectEntry(kind=mine.kinds[name], state=skeleton) for name, skeleton in skeletons.items()},
        layouts=layouts,
        held={name: one if type(one) is torch.Tensor else local(one) for name, one in mine.tensors.items()},
        states=mine.states,
        differing=[name for name in mine.states if len({*map(methodcaller("get", name), of_generators)}) > 1],
    )


def _exchanged(ranks: CheckpointRanks, own: _OwnState, digests: Sequence[str | None]) -> Reports:
    """Return the reports of the ranks that count: one rank of those with equal reports sends it to all."""
    firsts: dict[str | None, int] = {}
    of_rank = [firsts.setdefault(digest, rank) for rank, digest in enumerate(digests)]

    def report() -> list[Any]:
        return list(own.report) if ranks.rank < len(of_rank) and of_rank[ranks.rank] == ranks.rank else []

    sent = ranks.confirm("reporting which rank holds what", report)
    return Reports(of_rank, {first: report_of(sent[first]) for first in firsts.values()})


def _num_counting(ranks: CheckpointRanks) -> int:
    """Return how many ranks, from the first, hold what is saved: those of the first worker group."""
    session = current_or_none()
    axes = None if session is None else session.axes
    return ranks.world_size if axes is None else ranks.world_size // axes.worker_groups


def _read_own(objects: Mapping[str, object]) -> _OwnState:
    trees: dict[str, object] = {}
    kinds: dict[str, str] = {}
    elsewhere: dict[str, list[int]] = {}
    for name, item in objects.items():
        inner = unwrapped(item)
        kinds[name], trees[name] = kind_of(inner), state_of(inner)
        if isinstance(inner, torch.optim.Optimizer):
            elsewhere[name] = parameters_elsewhere(inner)
            trees[name] = _without_numbers(trees[name], elsewhere[name])
    skeletons, tensors = state.flatten(trees)
    reported: dict[str, tuple[str, tuple[int, ...], Region | None]] = {}
    is_spread = any(elsewhere.values())
    for name, tensor in tensors.items():
        if type(tensor) is torch.Tensor:
            region = None if tensor.is_meta else Region((0,) * tensor.ndim, tuple(tensor.shape))
        else:
            region = region_of(tensor, name)
        reported[name] = files.dtype_name(tensor.dtype), tuple(tensor.shape), region
        is_spread = is_spread or region is None or region.shape != tensor.shape
    return _OwnState(
        skeletons=skeletons,
        kinds=kinds,
        tensors=tensors,
        report=StateReport(
            tensors=reported,
            entries={name: found for name in elsewhere if (found := _entries(skeletons[name])) is not None},
            elsewhere=elsewhere,
        ),
        is_spread=is_spread,
        states=generator_states(),
    )


def parameters_elsewhere(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the numbers, as ``state_dict()`` counts, of the parameters that have no memory on this rank."""
    parameters = chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))
    return [
        number
        for number, parameter in enumerate(parameters)
        if (parameter.is_meta if type(parameter) is torch.nn.Parameter else is_elsewhere(parameter))
    ]


def unwrapped(item: object) -> object:
    """Return the module inside torch.compile's or torch's data-parallel wrapper, or the argument itself."""
    if isinstance(item, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return unwrapped(item.module)
    if isinstance(item, torch.nn.Module):
        inner = module_within(item)
        return item if inner is None else inner
    return item


def refuse_lazy(name: str, tensor: torch.Tensor) -> None:
    """Raise if a weight has no shape yet.

    Raises:
        ConfigurationError: see above.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigurationError(
            f"{name} has no shape yet: it belongs to a lazy module.", do="run one batch through the model first"
        )


def state_of(inner: object) -> object:
    """Return the state tree of an unwrapped object: the object itself if it has no ``state_dict()``."""
    state_dict = getattr(inner, "state_dict", None)
    return state_dict() if callable(state_dict) else inner


def kind_of(inner: object) -> str:
    """Return the class of an unwrapped object as ``module.name``."""
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def _reported(own: _OwnState, *, is_spread: bool) -> _Reported:
    """Return a digest of what must be the same on every rank; and of the report if the state is spread."""
    if is_spread:
        compared: object = own.skeletons | own.frames
    else:
        compared = [{name: about[:2] for name, about in own.report.tensors.items()}, own.skeletons]
    digest = _digest(compared)
    return digest, _digest(own.report) if is_spread else None, digests_of(own.states)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _difference(ranks: CheckpointRanks, own: _OwnState, frames: Mapping[str, Json]) -> CheckpointError:
    """Return the error for state that differs between ranks. Called by: every rank."""

    def leaves() -> dict[str, str]:
        texts = {name: f"{dtype}{list(shape)}" for name, (dtype, shape, _) in own.report.tensors.items()}
        found: dict[str, str] = {}
        for name, skeleton in {**own.skeletons, **frames}.items():
            found.update(state.leaves(skeleton, name, texts))
        return found

    leaves_of = dict(enumerate(ranks.confirm("comparing the state to save", leaves)))
    paths = dict.fromkeys(path for leaves in leaves_of.values() for path in leaves)
    for path in paths:
        texts = {rank: leaves.get(path, "absent") for rank, leaves in leaves_of.items()}
        if len(set(texts.values())) > 1:
            return differs(path, texts)
    return CheckpointError(
        "The state to save differs between ranks in the order of its entries, or in which of them share memory.",
        evidence="nothing was written",
        do="build the same objects in the same order on every rank",
    )


# -- the skeleton of an optimizer's state ------------------------------------------------------------


def _without_numbers(tree: object, numbers: list[int]) -> object:
    """Return an optimizer's state tree without the entries of some parameters."""
    entries = cast("dict[str, Any]", tree).get("state") if isinstance(tree, dict) else None
    if not numbers or not isinstance(entries, dict):
        return tree
    left = {number: entry for number, entry in cast("dict[Any, Any]", entries).items() if number not in numbers}
    return {**cast("dict[str, Any]", tree), "state": left}


def _entries(skeleton: Json) -> list[Any] | None:
    """Return the entries of an optimizer's parameters as pairs; ``None`` if its state is not of that form."""
    tree: Any = skeleton
    for key in ("dict", "state", "dict"):
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = cast("dict[str, Any]", tree)[key]
    return list(map(list, tree.items())) if isinstance(tree, dict) else tree


def _with_entries(frame: Json, entries: list[Any]) -> Json:
    tree: Any = frame
    all_text = all(isinstance(key, str) for key, _ in entries)
    encoded = dict(entries) if all_text else entries
    return {**tree, "dict": {**tree["dict"], "state": {**tree["dict"]["state"], "dict": encoded}}}
