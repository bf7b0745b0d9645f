# SPDX-License-Identifier: Apache-2.0
"""Saving: a checkpoint is written in stages, each confirmed by every rank; complete or absent.

A process that dies in any stage leaves the folder's checkpoints as they were, or the new one complete. The Checkpointer
runs the same stages, in a thread of each rank.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import shutil
import threading
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankwise import meter
from rankwise.checkpoint import content as contents
from rankwise.checkpoint import files, folder, manifest
from rankwise.checkpoint.folder import make_folder
from rankwise.checkpoint.manifest import FileEntry, Manifest, Written
from rankwise.comm.agreement import SLICE_SECONDS, CollectiveRanks
from rankwise.comm.session import current
from rankwise.errors import CheckpointError, bytes_text
from rankwise.meter import CHECKPOINT
from rankwise.tensors.arrays import memory_of_values
from rankwise.version import VERSION

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from rankwise.checkpoint.content import Content
    from rankwise.comm.agreement import CheckpointRanks
    from rankwise.world.facts import World


_OfRank = tuple[dict[str, Any] | None, dict[str, Any]]
"""What a rank has written, as a file entry, and the states of its generators that differ from those of other ranks."""


@dataclass(kw_only=True)
class SaveJob:
    """One save, as one rank does it."""

    world: World
    """The rank that does this part of the save, and how many save together."""
    content: Content
    target: Path
    """The checkpoint's directory, once it is complete."""
    token: str
    """Of this save only: sixteen hexadecimal digits."""
    sweep: str | None = None
    """The checkpoint whose leftovers are removed first; ``None`` for all numbered ones."""
    data: Callable[[], Iterable[bytes | memoryview]] | None = None
    """Gives the bytes of this rank's tensors, in file order; ``None`` reads the objects' own memory."""
    retire: Callable[[Path, Written], None] | None = None
    """Removes checkpoints older than the one it is given, once that one is complete."""
    written: list[_OfRank] = field(default_factory=list["_OfRank"])
    """By rank; known in the last stage."""

    def __post_init__(self) -> None:
        own = self.content.own
        self.header = files.header_of(own) if own else b""
        self.num_bytes = len(self.header) + sum([tensor.nbytes for tensor in own.values()])
        self.staging = folder.staging_path(self.target, self.token)
        """Where the checkpoint is written before it is complete."""

    def parts(self) -> Iterable[bytes | memoryview]:
        """Return the bytes of this rank's file, ``num_bytes`` of them, each tensor's read when it is its turn."""
        if self.data is not None:
            return chain([self.header], self.data())
        return chain([self.header], map(memory_of_values, self.content.own.values()))


def save(directory: str | os.PathLike[str], /, **objects: object) -> Path:
    """Save objects as one checkpoint: complete and on disk when this returns, or absent.

    Called by: every rank, with the same directory and the same objects.

    Tensors may lie on the ranks in any way: the same on all, as those of a replicated model, in regions, as those of
    a sharded one, or on some ranks only, as those of a pipeline. Each rank writes only what it holds, and what several
    hold is written by one of them. Worker groups (:func:`rankwise.local_sgd`) are averaged first, and the state of
    the first group is written. Everything else must be the same on every rank, and is compared. A checkpoint
    that ``directory`` already holds is replaced at the very end. The states of torch's, NumPy's and Python's global
    generators are saved too, each once if it is the same on all ranks.

    Args:
        directory: of this one checkpoint, on a file system that every rank sees. Only one job at a
            time may write there.
        objects: by the name to load them under. Anything with ``state_dict()``, or a tree of dicts,
            lists, tuples, tensors, NumPy arrays, numbers and strings.

    Returns:
        The checkpoint's absolute path.

    Raises:
        CheckpointError: the state holds other types or differs between ranks, the disk is full,
            the folder cannot be written. What ``directory`` held before is still there.
        PeerFailed: that happened on another rank.
    """
    with meter.current.spending(CHECKPOINT):
        current().prepare_save()
        ranks = CollectiveRanks(current(), "rankwise.save()")
        content = contents.read(ranks, objects)

        def choose() -> list[str]:
            do = 'rankwise.save("runs/best", model=model)'
            if ranks.rank:
                return []
            own = folder.path_of(directory, call="save()", of="folder", do=do)
            return [str(own.absolute()), secrets.token_hex(8)]

        path, token = ranks.confirm("choosing the checkpoint's directory", choose)[0]
        target = Path(path)
        write(ranks, SaveJob(world=current().world, content=content, target=target, token=token, sweep=target.name))
    meter.current.note_event(f"saved {target}")
    return target


def prepare(job: SaveJob) -> None:
    """Create the staging directory; remove those of interrupted saves."""
    if job.world.rank == 0:
        make_folder(job.target.parent)
        folder.refuse_foreign(job.target)
        folder.remove_leftovers(job.target.parent, job.sweep)
        job.staging.mkdir()


def write_tensors(job: SaveJob) -> _OfRank:
    """Write this rank's file; return its entry for the manifest, and what else only this rank has."""
    gathered = job.content.gathered
    states = {name: gathered.states[name] for name in gathered.differing}
    if job.num_bytes == 0:
        return None, states
    return asdict(files.write_file(job.staging / contents.PART_NAME.format(job.world.rank), job.parts())), states


def write_manifest(job: SaveJob) -> Written:
    """Check that every file is complete, then write the manifest. Rank zero only."""
    content, gathered = job.content, job.content.gathered
    entries = [FileEntry(**part) for part, _ in job.written if part is not None]
    for entry in entries:
        damage = files.find_damage(job.staging / entry.name, entry, ())
        if damage is not None:
            raise CheckpointError(
                f"{job.target} was not saved: rank zero found that {damage}.",
                where=str(job.world),
                do="use a folder on a file system that every rank sees",
            )
    # One state for all ranks if it is the same on all, else one of each.
    states: dict[str, Any] = {name: [state] for name, state in gathered.states.items()}
    for name in gathered.differing:
        states[name] = [of_rank.get(name) for _, of_rank in job.written]
    saved = Manifest(
        rankwise_version=VERSION,
        torch_version=str(torch.__version__),
        world_size=job.world.world_size,
        files={entry.name: entry for entry in entries},
        tensors=content.entries,
        objects=gathered.objects,
        generators={"states": states, "in_loop": content.in_loop},
    )
    data = manifest.encode(saved)
    files.write_file(job.staging / manifest.MANIFEST_NAME, [data])
    return Written(digest=hashlib.sha256(data).digest(), files=entries)


def is_as_written(path: Path, written: Written) -> bool:
    """Return whether a checkpoint has the manifest that this process has written, and files of the right sizes.

    Raises:
        CheckpointError: it exists and cannot be read.
    """
    data = files.manifest_bytes(path)
    if data is None or hashlib.sha256(data).digest() != written.digest:
        return False
    for entry in written.files:  # noqa: SIM110 - a generator is one more call per file
        if files.find_damage_to_load(path / entry.name, entry, ()):
            return False
    return True


def complete(job: SaveJob) -> None:
    """Rename the checkpoint to its final name; then remove those that are no longer kept."""
    if job.world.rank == 0:
        written = write_manifest(job)
        folder.commit(job.staging, job.target, job.token)
        if job.retire is not None:
            job.retire(job.target, written)


_WRITING = "writing the tensors of"

STAGES: dict[str, Callable[[SaveJob], Any]] = {
    "preparing": prepare,
    _WRITING: write_tensors,
    "completing": complete,
}
"""The stages of a save, in order. Every rank confirms each stage before any begins the next."""


def write(ranks: CheckpointRanks, job: SaveJob) -> None:
    """Run the stages. After an error on any rank nothing of this save is left.

    Called by: every rank, with the same save.
    """
    try:
        for label, stage in STAGES.items():
            results = ranks.confirm(f"{label} {job.target}", partial(_explained, stage, job))
            if label == _WRITING:
                job.written = results
    except BaseException:
        if job.world.rank == 0:
            shutil.rmtree(job.staging, ignore_errors=True)
        raise


def _explained(stage: Callable[[SaveJob], Any], job: SaveJob) -> Any:
    """Run a stage, and explain its system errors."""
    try:
        return stage(job)
    except OSError as error:
        raise CheckpointError(
            f"{job.target} could not be saved: {error.strerror or error}.",
            where=str(job.world),
            evidence=f"{error}\nthis rank writes {bytes_text(job.num_bytes)}; earlier checkpoints are unchanged",
            do=_what_to_do(error.errno, job),
        ) from error


def _what_to_do(number: int | None, job: SaveJob) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        total = sum(part["size_bytes"] for part, _ in job.written if part is not None)
        needed = max(total, job.num_bytes)
        return f"free {bytes_text(needed)} there, keep fewer checkpoints, or use another folder"
    if number == errno.ENOENT:
        return "use a folder that can be created, on a file system that every rank sees"
    return f"use a folder that this user can write to; this one is {job.target.parent}"


class PendingSave:
    """One save, once its thread has started."""

    def __init__(self, ranks: CheckpointRanks, job: SaveJob) -> None:
        self._error: BaseException | None = None
        # Not a daemon: a process that ends without close() still completes its last checkpoint.
        self._thread = threading.Thread(target=self._run, args=(ranks, job), name="rankwise-checkpoint", daemon=False)
        self._thread.start()

    def _run(self, ranks: CheckpointRanks, job: SaveJob) -> None:
        try:
            write(ranks, job)
        except BaseException as error:  # noqa: BLE001 - raised where the main thread waits
            self._error = error

    def ended(self) -> bool:
        """Return whether the save has ended, after waiting a little for it."""
        self._thread.join(SLICE_SECONDS)
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Return when the save is complete, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
