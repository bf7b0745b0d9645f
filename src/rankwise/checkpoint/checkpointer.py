# SPDX-License-Identifier: Apache-2.0
"""The Checkpointer: a folder of numbered checkpoints, of which the newest good one is restored.

Decides on numbers, on which checkpoints are kept, and on when a save runs in the background; ``save`` and ``load``
write and read one checkpoint.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from rankwise import meter
from rankwise.checkpoint import content as contents
from rankwise.checkpoint import files, folder, folder_lock
from rankwise.checkpoint.folder_lock import FolderLock
from rankwise.checkpoint.load import examine, load_into, verify
from rankwise.checkpoint.save import PendingSave, SaveJob, is_as_written, write
from rankwise.comm.agreement import CollectiveRanks, StoreRanks
from rankwise.comm.session import current, current_or_none
from rankwise.errors import CheckpointError, ConfigurationError, RankwiseError
from rankwise.health.preemption import StepSource
from rankwise.log import log, warn
from rankwise.meter import CHECKPOINT
from rankwise.tensors.arrays import memory_of
from rankwise.world.device.kinds import is_accelerator
from rankwise.world.device.streams import pins, wait_for_copies

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

    from rankwise.checkpoint.manifest import Written
    from rankwise.comm.agreement import CheckpointRanks
    from rankwise.comm.session import Session

_START_FRESH = "To start from scratch, use another folder, or pass restore(fresh=True). Nothing was removed"


class Checkpointer:
    """Saves and restores numbered checkpoints in one folder.

    Each is a directory ``checkpoint-000012`` that is complete or absent, whatever dies while it is
    written. All methods but :meth:`latest` communicate: every rank calls them, in the same order.

    **Stopping early.** A job may be asked to stop: by Slurm ahead of its time limit, or when it is preempted. All
    ranks then stop before the same step: the loader passed to :meth:`restore` or :meth:`save` saves
    the objects passed with it, and raises ``SystemExit(75)``. A resumed job continues with that same step. With no
    rankwise loader, or several, call :meth:`stop_if_asked` between steps.

    Example::

        checkpoints = rankwise.Checkpointer("runs/net", keep=3)
        checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
        ...
        checkpoints.save(model=model, optimizer=optimizer, loader=loader)

    Its many fields belong together: its settings, what it knows of the checkpoints in its folder, and the one save that
    may be running.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = 3, asynchronous: bool = False) -> None:
        """Set the folder; nothing is read or written yet.

        Args:
            directory: the folder, on a file system that every rank sees. Only one job at a time may
                save there, and holds a lock from its first save until :meth:`close` or its end.
            keep: how many of the newest good checkpoints are kept; older ones are removed once a new
                one is complete. ``None`` keeps all.
            asynchronous: let :meth:`save` return as soon as the state is copied, and write in the
                background. The copy takes memory as large as this rank's share of the state, kept
                between saves; the first save takes longer, since it allocates it.

        Raises:
            ConfigurationError: ``keep`` is less than one.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigurationError(
                f"keep must be a positive integer or None, got {keep!r}.",
                do="pass keep=1 or more, or keep=None to keep all",
            )
        own = folder.path_of(directory, call="Checkpointer()", of="folder", do='rankwise.Checkpointer("runs/net")')
        self.directory = own.absolute()
        self.keep = keep
        self.asynchronous = asynchronous
        self._memory = files.StagingMemory()
        self._pending: PendingSave | None = None
        self._talk: StoreRanks | None = None
        self._damaged: set[Path] = set()
        self._own: dict[Path, Written | None] = {}
        """What this one has saved; ``None`` for one that was to be kept."""
        self._restored = -1
        self._ignored = -1
        """The newest checkpoint of an earlier run, if this one starts from scratch."""
        self._names_foreign = True
        self._lock = FolderLock(self.directory)
        self._session: Session | None = None
        """That of the last save."""

    def save(self, *, step: int | None = None, **objects: object) -> Path:
        """Save objects as the next checkpoint.

        Called by: every rank, with the same objects.

        With ``asynchronous`` it returns when the state is copied: the objects may change from then
        on. Only one save runs at a time; a second one first waits for the first.

        Args:
            step: number of the checkpoint; by default one more than the highest in the folder. One
                of that number is replaced.
            objects: as for :func:`rankwise.save`, which also says what state may hold.

        Returns:
            The checkpoint's directory; with ``asynchronous`` it appears when the save is complete.

        Raises:
            CheckpointError: as :func:`rankwise.save`, from this save or the previous one in the
                background. Or another job saves into the folder; the error names it.
            PeerFailed: another rank failed in either of these.
        """
        if step is not None and (type(step) is not int or step < 0):
            raise ConfigurationError(f"step must be a non-negative integer, got {step!r}.", do="pass step >= 0")
        target = self._save(current(), step, objects, asynchronous=self.asynchronous)
        self._save_at_stop(objects, is_restored=False)
        return target

    def restore(self, *, fresh: bool = False, **objects: object) -> Path | None:
        """Load the newest checkpoint that is complete and undamaged.

        Called by: every rank, with the same objects; any number of ranks.

        Newer ones whose files are missing or differ from their checksums are reported and skipped. Checkpoints that
        exist and cannot be read are an error, never a reason to start from scratch. Objects as for
        :func:`rankwise.load`, but each must be mutable: put a number in a dict. Call it right before the loop, since it
        restores the states of random number generators too.

        Args:
            fresh: start from scratch, whatever an earlier run has left in the folder. Its checkpoints are ignored and
                kept. A restart by ``rankwise run --max-restarts`` continues from what its own job has saved.
            objects: what to restore, by the names they were saved under.

        Returns:
            The checkpoint's directory; ``None`` when there is none, and nothing has changed.

        Raises:
            CheckpointError: a checkpoint cannot be read on some rank, or needs a later rankwise; all are damaged; the
                newest good one is from another model; or a loader is restored from a folder where another job saves.
                Nothing has changed.
            PeerFailed: that happened on another rank.
        """
        _refuse_immutable(objects)
        self.wait()
        ranks = CollectiveRanks(current(), "Checkpointer.restore()")
        folder_lock.refuse_other_job(ranks, self._lock, objects.values())
        numbers = folder.numbers_on_ranks(ranks, self.directory)
        if fresh:
            self._ignored = folder.newest_to_ignore(ranks, self.directory, numbers)
        elif not numbers and folder.were_here(ranks, self.directory):
            raise CheckpointError(
                f"An earlier attempt of this job used the checkpoints in {self.directory}, and none is there any more.",
                do=f"restore or mount the folder.\n{_START_FRESH}",
            )
        path = self._restore(ranks, [number for number in numbers if number > self._ignored], objects)
        if path is None and numbers:
            log(f"starting from scratch: the checkpoints of earlier runs in {self.directory} are ignored, and kept")
        self._save_at_stop(objects, is_restored=True)
        return path

    def stop_if_asked(self, **objects: object) -> None:
        """Save and end the process, if the job has been asked to stop and this is the step all ranks agreed on.

        Called by: every rank, between steps, with the same objects. Returns at once while no stop is requested. A
        loader given to :meth:`restore` or :meth:`save` does the same before each step; do not do both.

        Args:
            objects: what to save, as for :meth:`save`.

        Raises:
            SystemExit: with 75, after saving. ``with rankwise.join()`` exits as after a normal end.
            CheckpointError, PeerFailed: as :meth:`save`.
        """
        session = current()
        if session.preemption.is_here():
            self._save(session, None, objects, asynchronous=False)
            session.preemption.stop()

    def _restore(self, ranks: CheckpointRanks, found: list[int], objects: dict[str, object]) -> Path | None:
        damages: dict[str, str] = {}
        for number in found:
            path = folder.find(self._path(number))
            try:
                saved, seen = verify(ranks, path)
            except CheckpointError as error:
                raise error.supplement(do=f"{error.do}.\n{_START_FRESH}") from None
            if saved is None:
                self._damaged.add(path)
                damages[path.name] = seen
                warn(f"skipping {path}: {seen}")
                continue
            load_into(ranks, path, saved, objects)
            self._restored = number
            folder.note_use(self.directory)
            log(f"restored {path}")
            return path
        if damages:
            raise _all_damaged(self.directory, damages)
        return None

    def latest(self) -> Path | None:
        """Return the newest checkpoint with a manifest and files of the right sizes; ``None`` if there is none.

        Called by: any rank, alone. Checksums are compared by :meth:`restore` only.

        Raises:
            CheckpointError: one that may be the newest cannot be read, or all are damaged.
        """
        damages: dict[str, str] = {}
        for number, path in self._list().items():
            if number > self._ignored:
                saved, seen = (None, "as restore() reported") if path in self._damaged else examine(path)
                if saved is not None:
                    return path
                damages[path.name] = seen
        if damages:
            raise _all_damaged(self.directory, damages)
        return None

    def wait(self) -> None:
        """Return when the save in the background is complete; raise its error on every rank.

        Called by: every rank.

        Raises:
            CheckpointError: it failed on this rank. It is absent, earlier checkpoints are
                untouched.
            PeerFailed: it failed on another rank.
        """
        pending = self._pending
        if pending is None:
            return
        ranks = CollectiveRanks(current(), "Checkpointer.wait()")
        try:
            # Only collectives notice a rank that died, so they continue while the threads write.
            while not all(ranks.confirm("waiting for the background save", pending.ended)):
                pass
        except RankwiseError:
            # The thread ends by itself; only the thread uses its resources now.
            self._pending, self._talk, self._memory = None, None, files.StagingMemory()
            raise
        self._pending = None
        ranks.confirm("the background save", pending.finish)

    def close(self) -> None:
        """Wait as :meth:`wait` does; free the copy's memory and release the folder's lock. May be used again.

        Called by: every rank.
        """
        try:
            self.wait()
        finally:
            self._memory.release()
            self._lock.release()
            session = current_or_none()
            if session is not None:
                session.preemption.forget(str(self.directory))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error other ranks may not reach this; the save continues by itself.
        if error is None:
            self.close()

    # -- saving ------------------------------------------------------------------------------

    def _save(self, session: Session, step: int | None, objects: dict[str, object], *, asynchronous: bool) -> Path:
        with meter.current.spending(CHECKPOINT):
            self.wait()
            session.prepare_save()
            ranks = CollectiveRanks(session, "Checkpointer.save()")
            content = contents.read(ranks, objects)
            if self._session is not session:
                session.on_leave(self._finish_at_leave)
                session.at_end(self._unlock)
                self._session, self._talk = session, None
            path, token = folder_lock.acquire_for_job(ranks, self._lock, lambda: self._choose(step))
            job = SaveJob(world=session.world, content=content, target=Path(path), token=token, retire=self._retire)
            if asynchronous:
                self._save_in_background(session, ranks, job)
            else:
                write(ranks, job)
        meter.current.note_event(f"{'saving' if asynchronous else 'saved'} {job.target}")
        return job.target

    def _unlock(self) -> None:
        # After an error a save may still be running in the background: the lock is then released when the process ends.
        if self._pending is None:
            self._lock.release()

    def _save_at_stop(self, objects: dict[str, object], *, is_restored: bool) -> None:
        """Have these objects saved when the job stops before a step of the loader among them.

        It saves where the job resumes from: a folder of the best checkpoints is not touched.
        """
        loaders = [item for item in objects.values() if isinstance(item, StepSource)]
        # Of several, the one that yields its batch first is unknown: the others' positions would be one ahead.
        if len(loaders) == 1:
            session = current()
            save = partial(self._save, session, None, objects, asynchronous=False)
            session.preemption.save_with(str(self.directory), loaders[0], save, is_restored=is_restored)

    # -- saving in the background ------------------------------------------------------------

    def _save_in_background(self, session: Session, ranks: CheckpointRanks, job: SaveJob) -> None:
        data: list[Callable[[], list[memoryview]]] = []
        # Confirmed, so that a rank that has no memory for the copy does not keep the others waiting.
        ranks.confirm("copying the state", lambda: data.append(self._copy(job.content.own)))
        self._pending = PendingSave(self._background_ranks(session, job.token), replace(job, data=data[0]))

    def _copy(self, own: dict[str, torch.Tensor]) -> Callable[[], list[memoryview]]:
        """Copy tensors and return what gives their bytes, once copies from GPUs have arrived."""
        devices = {tensor.device for tensor in own.values() if is_accelerator(tensor.device.type)}
        memory = self._memory.reserve(sum(tensor.nbytes for tensor in own.values()), pinned=any(map(pins, devices)))
        files.copy_into(memory, own)
        copied = [wait_for_copies(device) for device in devices]

        def data() -> list[memoryview]:
            for wait in copied:
                wait()
            return [memory_of(memory)]

        return data

    def _background_ranks(self, session: Session, token: str) -> CheckpointRanks:
        if session.store is None:
            return CollectiveRanks(None, "Checkpointer.save()")
        # Every rank has reached this save, so none still reads this rank's reports on the last one.
        if self._talk is not None:
            self._talk.forget()
        store = session.store.clone() if self._talk is None else self._talk.store
        self._talk = StoreRanks(session, store, token)
        return self._talk

    def _finish_at_leave(self) -> None:
        """Let the last save end before the world does. The save's threads agree among themselves."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.finish()
        except Exception as error:
            warn(f"the last background save failed: {error}", all_ranks=True)
            raise

    # -- the folder --------------------------------------------------------------------------

    def _choose(self, step: int | None) -> tuple[str, str]:
        """Return the path of the next checkpoint, and a token for its save."""
        numbers = list(self._list())
        highest = max(numbers, default=0)
        number = highest + 1 if step is None else step
        if number in numbers and number <= self._ignored:
            raise CheckpointError(
                f"Checkpoint {number} in {self.directory} is of an earlier run and was ignored: it is not replaced.",
                do=f"save with a step above {self._ignored}, or use another folder",
            )
        if number < highest and self._path(highest) not in self._damaged:
            warn(f"saving checkpoint {number}, but restore() will load checkpoint {highest}, the newest")
        return str(self._path(number)), secrets.token_hex(8)

    def _path(self, number: int) -> Path:
        return self.directory / folder.checkpoint_name(number)

    def _list(self) -> dict[int, Path]:
        try:
            return folder.list_numbered(self.directory)
        except NotADirectoryError:
            return {}  # the save reports it
        except OSError as error:
            raise CheckpointError(f"The checkpoints in {self.directory} cannot be listed: {error}") from error

    def _retire(self, newest: Path, written: Written) -> None:
        """Remove checkpoints older than the newest ``keep`` good ones; never ``newest``, and none that was not read."""
        if not self._own:
            folder.note_use(self.directory)
        self._own[newest] = None if self.keep is None else written
        if self.keep is None:
            return
        num_good, foreign = 0, list[str]()
        for number, path in self._list().items():
            is_ours = path in self._own or path in self._damaged or self._ignored < number <= self._restored
            if not is_ours:
                foreign.append(path.name)
                continue
            try:
                # The stages of the save have just looked at every file of the newest.
                own = self._own.get(path)
                is_good = path == newest or (own is not None and is_as_written(path, own))
                is_good = is_good or examine(path)[0] is not None
            except CheckpointError as error:
                warn(f"the old checkpoint {path} is kept: {error.what}")
                continue
            if num_good >= self.keep and path != newest:
                try:
                    folder.remove(path, secrets.token_hex(8))
                    self._own.pop(path, None)
                except OSError as error:
                    warn(f"the old checkpoint {path} could not be removed: {error}")
            elif is_good and path not in self._damaged:
                num_good += 1
        if foreign and self._names_foreign:
            self._names_foreign = False
            warn(f"keep={self.keep} removes no checkpoint that this job has not restored: {', '.join(foreign)} remain")


def _all_damaged(directory: Path, damages: dict[str, str]) -> CheckpointError:
    return CheckpointError(
        f"{directory} holds checkpoints, and all are damaged.",
        evidence="\n".join(f"{name}: {damage}" for name, damage in damages.items()),
        do=f"restore their files from a copy.\n{_START_FRESH}",
    )


def _refuse_immutable(objects: dict[str, object]) -> None:
    if not objects:
        raise ConfigurationError("restore() was called without objects.", do="pass them by name: restore(model=model)")
    for name, item in objects.items():
        stateful = hasattr(item, "load_state_dict")
        if not (stateful or isinstance(item, dict | list | torch.Tensor)):
            raise ConfigurationError(
                f"{name} is a {type(cast('Any', item)).__name__} and cannot be restored in place.",
                do=f"put it in a dict: restore({name}={{'value': ...}})",
            )
