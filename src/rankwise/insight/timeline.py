# SPDX-License-Identifier: Apache-2.0
"""A timeline of all ranks in one file: every step in detail, from one call to another.

Each rank records its own part in a temporary file without a name, of which nothing is left if the rank is killed; rank
zero collects them over the store when the timeline ends, and waits for no rank that sends none.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rankwise import meter
from rankwise.errors import ConfigurationError
from rankwise.insight.clock_offset import note_clock
from rankwise.insight.measuring import facts_of
from rankwise.insight.step_meter import StepMeter
from rankwise.insight.step_record import RecordFile, parse
from rankwise.insight.trace_events import as_trace, events_of_ranks, origin_of
from rankwise.log import log, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.session import Session
    from rankwise.insight.step_record import Record

WAIT_SECONDS = 10.0
"""How long rank zero waits for the parts of the others, all together."""


class Timeline:
    """The timeline that is being recorded. Created by: every rank.

    Args:
        session: of this rank.
        path: the file that rank zero writes at the end.
        number: of this timeline, the same on every rank.
        hostnames: of all ranks.

    Raises:
        ConfigurationError: rank zero cannot write the file, or steps are not measured (``--report off``).
    """

    def __init__(self, session: Session, path: Path, number: int, hostnames: Sequence[str]) -> None:
        measuring = meter.current
        if not isinstance(measuring, StepMeter):
            raise ConfigurationError(
                "A timeline needs the times of steps, which are not measured.",
                evidence="--report off, or RANKWISE_REPORT=off",
                do="run without that",
            )
        self._meter = measuring
        self._world = session.world
        self._path = path
        self._store = None if session.store is None else session.store.prefixed(f"rankwise/timeline/{number}")
        if self._world.rank == 0:
            _try_to_write(path)
        with TemporaryDirectory(prefix="rankwise-timeline-") as folder:
            path_of_own = Path(folder) / "steps"
            self._record = RecordFile(str(path_of_own), facts_of(self._world))
            self._own = path_of_own.open("rb")
        if self._store is not None:
            try:
                note_clock(self._record, self._store.prefixed("clock"), self._world.rank, hostnames)
            except TimeoutError:
                warn("the clocks of the hosts were not compared: have all ranks started the timeline?", all_ranks=True)
        self._meter.begin_timeline(self._record)

    def stop(self) -> None:
        """End the timeline: rank zero writes the file, the other ranks send it their part. Called by: every rank."""
        self._meter.end_timeline()
        self._record.close()
        with self._own:
            own = self._own.read()
        if self._world.rank != 0:
            if self._store is not None:
                self._store.set(str(self._world.rank), own)
            return
        records = [parse(own, "rank 0"), *self._of_others()]
        missing = self._world.world_size - len(records)
        try:
            self._path.write_text(as_trace(events_of_ranks(records, origin_of(records))), encoding="utf-8")
        except OSError as error:
            warn(f"the timeline {self._path} cannot be written: {error.strerror}")
            return
        log(f"timeline of {len(records)} ranks: {self._path}")
        if missing:
            warn(f"{missing} of {self._world.world_size} ranks are missing in the timeline: have they started it too?")

    def _of_others(self) -> list[Record]:
        if self._store is None:
            return []
        found: list[Record] = []
        deadline = time.monotonic() + WAIT_SECONDS
        for rank in range(1, self._world.world_size):
            try:
                data = self._store.get(str(rank), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                continue
            found.append(parse(data, f"rank {rank}"))
        return found


def _try_to_write(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigurationError(
            f"The timeline {path} cannot be written: {error.strerror}.", do="choose another file"
        ) from error
