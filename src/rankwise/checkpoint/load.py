# SPDX-License-Identifier: Apache-2.0
"""Loading: a checkpoint is verified by all ranks together, compared with the objects, then loaded.

Changes no object before everything has been checked on every rank, and never a file.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.checkpoint import files, folder, manifest, saved_tree
from rankwise.checkpoint.content import unwrapped
from rankwise.checkpoint.generators import generators_restorer
from rankwise.checkpoint.layouts import on_no_rank
from rankwise.comm.agreement import CollectiveRanks
from rankwise.comm.session import current_or_none
from rankwise.errors import CheckpointError, ConfigurationError, RankwiseError, fold_values

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rankwise.checkpoint.manifest import Manifest
    from rankwise.comm.agreement import CheckpointRanks


def load(directory: str | os.PathLike[str], /, **objects: object) -> dict[str, Any]:
    """Load a checkpoint into objects, on any number of ranks.

    Called by: every rank, with the same directory and the same objects. Works without a joined
    world too.

    Sizes and checksums of all files are verified first, then every object is compared with its
    saved state; only then objects change. Objects with ``load_state_dict()`` receive their state through it; a
    dict or list becomes what was saved, in place. Its tensors, like a tensor passed directly, are
    copied into if shape and dtype are the same. Each rank reads only what the objects hold on it, however
    they are distributed now and were when saved: replicated, sharded, split by tensor parallelism, in a pipeline.
    With an optimizer, a loader or a sampler among the objects, the global generators get their saved states, last.

    Args:
        directory: of one checkpoint, as :func:`save` returned it.
        objects: by the names they were saved under; not all of them need be given. An immutable
            value (a number, a string) only names the one to return.

    Returns:
        The objects by name; a saved immutable value in place of the one given. Without any objects,
        the saved state of all as trees, with tensors on the CPU.

    Raises:
        CheckpointError: the checkpoint is absent, unfinished or damaged, lacks an object, or is of
            another model; the first key that differs is named, and no object has changed. Or the
            ``load_state_dict()`` of an object raises: modules come last and optimizers before them, so
            objects of other classes may have changed by then, and the object that raised may have on other ranks.
        ConfigurationError: the objects differ between ranks; none has changed.
        PeerFailed: that happened on another rank.
    """
    ranks = CollectiveRanks(current_or_none(), "rankwise.load()")
    own = folder.path_of(directory, call="load()", of="folder", do='rankwise.load("runs/best", model=model)')
    path = folder.find(own.absolute())
    saved, damage = verify(ranks, path)
    if saved is None:
        raise CheckpointError(
            f"{path} cannot be loaded: {damage}.",
            do="load another checkpoint, or let Checkpointer.restore() pick the newest good one",
        )
    return load_into(ranks, path, saved, objects)


def verify(ranks: CheckpointRanks, path: Path) -> tuple[Manifest | None, str]:
    """Check a checkpoint's files, each rank a share of their bytes; all reach the same verdict.

    Called by: every rank.

    Returns:
        The manifest; or ``None`` and how the files are damaged, the same on every rank.

    Raises:
        CheckpointError: it exists, but a rank cannot read it, or ranks see different files; on every rank.
    """
    own: list[Manifest] = []

    def check_share() -> list[Any]:
        try:
            saved, seen = examine(path)
            if saved is None:
                return [seen, None, None]
            own.append(saved)
            pieces_of = manifest.pieces_to_check(saved.files, ranks.rank, ranks.world_size)
            damages = (files.find_damage_to_load(path / name, saved.files[name], pieces_of[name]) for name in pieces_of)
            return [seen, next(filter(None, damages), None), None]
        except CheckpointError as error:
            return [None, None, [error.what.rstrip("."), error.do or files.TRY_AGAIN]]

    reports = ranks.confirm(f"verifying {path}", check_share)
    unread = {rank: why for rank, (_, _, why) in enumerate(reports) if why is not None}
    if unread:
        reasons = {rank: what for rank, (what, _) in unread.items()}
        is_same = len(unread) == ranks.world_size and len(set(reasons.values())) == 1
        raise CheckpointError(
            f"{path} cannot be loaded: {reasons[0]}." if is_same else f"{path} cannot be read on every rank.",
            evidence=None if is_same else fold_values(reasons),
            do=min(unread.items())[1][1],
        )
    seen = {rank: what for rank, (what, _, _) in enumerate(reports)}
    if len(set(seen.values())) > 1:
        raise CheckpointError(
            f"{path} cannot be loaded: ranks see different files there.",
            evidence=fold_values(seen),
            do="use a folder on a file system that every rank sees",
        )
    if not own:
        return None, str(seen[0])
    damages = {rank: damage for rank, (_, damage, _) in enumerate(reports) if damage is not None}
    if damages:
        return None, fold_values(damages) if len(set(damages.values())) > 1 else min(damages.items())[1]
    return own[0], str(seen[0])


def examine(path: Path) -> tuple[Manifest | None, str]:
    """Return a checkpoint's manifest and what identifies it; ``None`` and the damage if it is seen to be damaged.

    Compares the manifest with its checksum, and the files with their sizes.

    Raises:
        CheckpointError: it exists and cannot be read, or not by this rankwise: nothing is known about its bytes.
    """
    data = files.manifest_bytes(path)
    if data is None:
        return None, f"{manifest.MANIFEST_NAME} is missing: it is unfinished or not a checkpoint"
    damage = manifest.find_damage(data)
    if damage is not None:
        return None, damage
    saved = manifest.decode(data)
    saved_tree.check(saved)
    damages = (files.find_damage_to_load(path / name, entry, ()) for name, entry in saved.files.items())
    damage = next(filter(None, damages), None)
    if damage is not None:
        return None, damage
    return saved, f"complete, with the manifest {hashlib.sha256(data).hexdigest()[:16]}"


def read_manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest, without a look at its other files.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    data = files.manifest_bytes(path)
    if data is None:
        raise CheckpointError(f"{path} has no {manifest.MANIFEST_NAME}.", do="pass the directory of a checkpoint")
    return manifest.decode(data)


def load_into(ranks: CheckpointRanks, path: Path, saved: Manifest, objects: Mapping[str, object]) -> dict[str, Any]:
    """Load a verified checkpoint into objects, as :func:`load`. Called by: every rank."""
    trees: dict[str, saved_tree.SavedTree] = {}
    restore_generators: list[Callable[[], None]] = []

    def compare_and_read() -> tuple[list[str], list[str]]:
        names = objects or saved.objects
        for name in names:
            if name not in saved.objects:
                raise CheckpointError(
                    f"{path} holds no {name!r}.",
                    evidence="it holds " + ", ".join(saved.objects),
                    do="leave it out, or load a checkpoint that was saved with it",
                )
            trees[name] = saved_tree.SavedTree(name, saved)
        for name, item in objects.items():
            _refuse_if_different(path, name, item, trees[name].tree, saved.objects[name].kind)
            trees[name].fit(item)
        # Those most likely to raise come first; modules last, as they were compared in full.
        order = sorted(objects, key=lambda name: _late(objects[name]))
        elsewhere = [place for tree in trees.values() for place in tree.elsewhere]
        saved_tree.read(path, list(trees.values()))
        restore_generators.append(generators_restorer(ranks, saved.generators, objects))
        return order, elsewhere

    reported = ranks.confirm(f"comparing {path} with the objects and reading it", compare_and_read)
    _refuse_different_objects([names for names, _ in reported])
    # A tensor of a pipeline stage is on the meta device on other ranks; one that is on all ranks is loaded nowhere.
    nowhere = on_no_rank([places for _, places in reported])
    if nowhere:
        raise CheckpointError(
            f"{path} cannot be loaded: {nowhere[0]} is on the meta device on every rank.",
            evidence=f"so are {len(nowhere) - 1} more\nno object has changed",
            do="allocate the model first: model.to_empty(device=...)",
        )
    results: dict[str, Any] = {name: tree.tree for name, tree in trees.items()}
    done: list[str] = []

    def change(name: str) -> None:
        results[name] = _load_one(path, name, objects[name], trees[name].tree, done)

    # One by one: when an object raises on one rank, no rank continues past it.
    for name in reported[0][0]:
        ranks.confirm(f"loading {name} from {path}", partial(change, name))
        done.append(name)
    restore_generators[0]()
    return results


def _refuse_different_objects(names_of: Sequence[list[str]]) -> None:
    given = {rank: ", ".join(sorted(names)) or "none, for the whole state" for rank, names in enumerate(names_of)}
    if len(set(given.values())) > 1:
        raise ConfigurationError(
            "The objects to load into differ between ranks.",
            evidence=f"{fold_values(given)}\nno object has changed",
            do="pass the same objects on every rank",
        )


def _late(item: object) -> int:
    inner = unwrapped(item)
    return 2 if isinstance(inner, torch.nn.Module) else 1 if isinstance(inner, torch.optim.Optimizer) else 0


def _refuse_if_different(path: Path, name: str, item: object, tree: object, kind: str) -> None:
    if callable(getattr(item, "state_dict", None)) and not callable(getattr(item, "load_state_dict", None)):
        raise ConfigurationError(f"{name} has state_dict() but no load_state_dict().", do="add it to its class")
    difference = saved_tree.first_difference(name, item, tree, kind)
    if difference is not None:
        raise CheckpointError(
            f"{path} was saved from another model: the first difference is at {difference.path}.",
            evidence=f"checkpoint: {difference.saved}\nhere: {difference.here}\nno object has changed",
            do="build the objects as they were when it was saved, or load another checkpoint",
        )


def _load_one(path: Path, name: str, item: object, tree: object, done: list[str]) -> object:
    """Load one object and return it; for an immutable value return the saved one."""
    load_state_dict = getattr(unwrapped(item), "load_state_dict", None)
    if not callable(load_state_dict):
        return replaced_in_place(item, tree)
    try:
        load_state_dict(tree)
    except RankwiseError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name} rejected its state from {path}: {type(error).__name__}: {error}",
            evidence=f"already loaded, on every rank: {', '.join(done) or 'nothing'}\n"
            f"{name} itself may be loaded on other ranks",
            do="build the objects as they were when it was saved, or load another checkpoint",
        ) from error
    return item


def replaced_in_place(item: object, tree: object) -> object:
    """Make ``item`` equal to ``tree`` if it is mutable, and return the result.

    Tensors of the same shape and dtype keep their memory and device; dicts and lists stay the same objects.
    """
    if isinstance(item, torch.Tensor) and isinstance(tree, torch.Tensor):
        if (item.shape, item.dtype) != (tree.shape, tree.dtype):
            return tree
        with torch.no_grad():
            item.copy_(tree)
        return item
    if isinstance(item, dict) and isinstance(tree, dict):
        entries, saved = cast("dict[Any, object]", item), cast("dict[Any, object]", tree)
        old = dict(entries)
        entries.clear()
        for key, value in saved.items():
            entries[key] = replaced_in_place(old[key], value) if key in old else value
        return entries
    if isinstance(item, list) and isinstance(tree, list):
        old_items, new_items = cast("list[object]", item), cast("list[object]", tree)
        num_both = min(len(old_items), len(new_items))
        both = [replaced_in_place(old_items[i], new_items[i]) for i in range(num_both)]
        old_items[:] = both + new_items[num_both:]
        return old_items
    return tree
