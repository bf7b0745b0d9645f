# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint will hold: the state of the user's objects, read and agreed on by the ranks.

Writes nothing and copies no tensor. Imported by the saving and the loading of this room.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankwise.checkpoint import files, manifest, state
from rankwise.checkpoint.manifest import ObjectEntry, TensorEntry
from rankwise.errors import CheckpointError, ConfigurationError, fold_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.checkpoint.confirm import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a checkpoint will hold; the same on every rank."""

    objects: dict[str, ObjectEntry]
    """Skeleton of each object, by name."""
    tensors: dict[str, torch.Tensor]
    """By name. The objects' own memory."""
    rank_of: dict[str, int]
    """The rank that writes each tensor."""

    def of_rank(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that ``rank`` writes, in the order of its file."""
        return files.in_file_order(
            {name: tensor for name, tensor in self.tensors.items() if self.rank_of[name] == rank}
        )

    def entries(self) -> dict[str, TensorEntry]:
        """Return what the manifest says about each tensor."""
        return {
            name: TensorEntry(
                file=part_name(self.rank_of[name]),
                dtype=files.dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
            )
            for name, tensor in self.tensors.items()
        }

    def leaves(self) -> dict[str, str]:
        """Return what must be the same on every rank, by path; of tensors dtype and shape."""
        tensors = {name: f"{entry.dtype}{list(entry.shape)}" for name, entry in self.entries().items()}
        found: dict[str, str] = {}
        for name, entry in self.objects.items():
            found.update(state.leaves(entry.state, name, tensors))
        return found


def part_name(number: int) -> str:
    """Return the name of one of a checkpoint's files of tensors."""
    return f"part-{number:05d}.safetensors"


def read(ranks: Ranks, objects: Mapping[str, object]) -> Content:
    """Read the state of ``objects`` and make sure that it is the same on every rank.

    Called by: every rank.

    Raises:
        ConfigurationError: there are no objects.
        CheckpointError: something cannot be saved, or differs between ranks.
    """
    if not objects:
        raise ConfigurationError(
            "There is nothing to save.",
            do="name the objects: save(..., model=model, optimizer=optimizer)",
        )
    own: list[Content] = []

    def read_own() -> str:
        own.append(_read_own(objects, ranks.world_size))
        return _digest(own[0]) if ranks.world_size > 1 else ""

    digests = ranks.confirm("reading the state to save", read_own)
    if len(set(digests)) > 1:
        raise _difference(ranks, own[0])
    return own[0]


def _read_own(objects: Mapping[str, object], world_size: int) -> Content:
    skeletons, tensors = state.flatten({name: state_of(thing) for name, thing in objects.items()})
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    return Content(
        objects={
            name: ObjectEntry(kind=kind_of(objects[name]), state=skeleton) for name, skeleton in skeletons.items()
        },
        tensors=tensors,
        rank_of=manifest.assign(sizes, world_size),
    )


def unwrapped(thing: object) -> object:
    """Return the module inside ``torch.compile``'s, or what was given."""
    if isinstance(thing, torch.nn.Module):
        return dict(thing.named_children()).get("_orig_mod", thing)
    return thing


def state_of(thing: object) -> object:
    """Return the state tree of an object: itself, where it has no ``state_dict()``."""
    state_dict = getattr(unwrapped(thing), "state_dict", None)
    return state_dict() if callable(state_dict) else thing


def kind_of(thing: object) -> str:
    """Return the class of an object as ``module.name``."""
    kind = type(unwrapped(thing))
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(content: Content) -> str:
    entries = {name: (entry.dtype, entry.shape, entry.file) for name, entry in content.entries().items()}
    skeletons = {name: entry.state for name, entry in content.objects.items()}
    return hashlib.sha256(json.dumps([entries, skeletons], sort_keys=True).encode()).hexdigest()


def _difference(ranks: Ranks, content: Content) -> CheckpointError:
    """Return the error for state that differs between ranks. Called by: every rank."""
    leaves_of = dict(enumerate(ranks.confirm("comparing the state to save", content.leaves)))
    paths = dict.fromkeys(path for leaves in leaves_of.values() for path in leaves)
    for path in paths:
        texts = {rank: leaves.get(path, "absent") for rank, leaves in leaves_of.items()}
        if len(set(texts.values())) > 1:
            return CheckpointError(
                f"The state to save differs between ranks: {path}.",
                evidence=f"{fold_values(texts)}\nnothing was written",
                do="save what belongs to samples, parameters and steps; "
                "all_reduce() a rank's own number first, or leave it out",
            )
    return CheckpointError(
        "The state to save differs between ranks in the order or the sharing of its entries.",
        evidence="nothing was written",
        do="build the same objects in the same order on every rank",
    )
