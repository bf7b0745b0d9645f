# SPDX-License-Identifier: Apache-2.0
"""The file in which a rank records its steps: where the time of each went, what it sent, its memory.

The last steps lie in a part of the file that is mapped into memory, so that the kernel keeps them however the process
exits, and others can read them meanwhile. All earlier ones follow in compressed chunks, in which durations, bytes and
counts take two bytes each, as logarithms with an error of at most 0.1 %. Written by the rank, read by the launcher and
by ``rankwise report``. No torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rankwise.errors import ReportError
from rankwise.log import warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PARTS = ("script", "data", "forward", "backward", "exchange", "optimizer", "checkpoint", "evaluation")
"""What a rank spends the time of a step on. ``exchange`` is waiting for other ranks, or for what they send."""
SCRIPT, DATA, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, CHECKPOINT, EVALUATION = range(len(PARTS))

ARRIVED, READ_FOR_EVALUATION = -1, -2
"""In place of a part, without a duration: the gradients of this rank were computed; what was read so far in this step
was for an evaluation."""
_AFTER_EXCHANGE = frozenset((OPTIMIZER, CHECKPOINT))
"""The parts that follow the exchange of gradients: waiting within them is for ranks that take longer for them."""

MAGIC = b"rankwise steps 2\n"
SUFFIX = ".steps"
FAILURE = "failure"
"""The kind of what a rank, or its launcher, notes where it fails."""
FACTS_BYTES = 4096
"""The size of the part that describes the rank, as JSON."""
TAIL_RECORDS = 64
SCALE = 500
"""How many codes there are for each power of e."""
LARGEST_CODE = 2**16 - 1
MICROSECONDS = 1e6
_LAST_OFFSET = 2**32 - 1
"""The start of a step within a chunk must fit into four bytes, in microseconds."""

ARRIVAL, LATE_EXCHANGE, PROCESSOR, QUEUED, SAMPLES, SENT_BYTES, MEMORY_BYTES, MAJOR_FAULTS, START = range(
    len(PARTS), len(PARTS) + 9
)
"""Where the fields of a :class:`Step` lie in its row of numbers, after the time of each part."""
NUM_TIMES, NUM_VALUES = SAMPLES, START + 1
"""How many durations come first in a row, and how many numbers it has."""
_UNITS = (MICROSECONDS,) * NUM_TIMES + (1.0,) * (START - NUM_TIMES)
_ROW = struct.Struct(f"<{NUM_VALUES}d")
_RECORD = struct.Struct(f"<I{START}H")
"""A row in a chunk: the start, in microseconds from the first step of the chunk, and then the other numbers."""
_TAIL = struct.Struct("<IId")
"""Number of steps in memory, number of the first, when the step under way began."""
_NOW_AT, _ENDED_AT, _TAIL_AT, _BEGAN_AT = FACTS_BYTES, FACTS_BYTES + 4, FACTS_BYTES + 8, FACTS_BYTES + 16
"""Where the part is that the rank is in now, how many steps have ended, which also counts those that are not in memory
yet, the steps in memory, and when the step under way began."""
_ENDED = struct.Struct("<I")
_ROWS_AT = _TAIL_AT + _TAIL.size
MOST_VALUES = 16
"""How many names that a script logs values under are kept for readers meanwhile."""
_VALUE = struct.Struct("<31s?dd")
"""A logged value: its name, whether this rank has one of its own, that one, and the mean of all ranks."""
_VALUES_AT = _ROWS_AT + TAIL_RECORDS * _ROW.size
_MAPPED_BYTES = _VALUES_AT + MOST_VALUES * _VALUE.size
_CHUNK = struct.Struct("<cI")
_STEPS = struct.Struct("<IId")
"""Number of records, number of the first, when the chunk began."""
_STEP_CHUNK, _NOTE = b"s", b"n"
LEAST_NOTES_BYTES = 64 * 2**20
MOST_TIMES_PACKED = 50
"""How large all notes may be: as much, and so many times the file. What rankwise writes shrinks to a tenth at most."""
_DAMAGE = (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error, zlib.error)
"""What reading raises where bytes have changed."""


def add_segments(row: list[float], segments: Iterable[tuple[int, float]]) -> None:
    """Add segments of a step, each a part and its seconds, to the numbers of the step so far."""
    total = sum(row[: len(PARTS)])
    around = SCRIPT
    for part, seconds in segments:
        if part == ARRIVED:
            row[ARRIVAL] = total
        elif part == READ_FOR_EVALUATION:
            row[EVALUATION] += row[DATA]
            row[DATA] = 0.0
        else:
            if part != EXCHANGE:
                around = part
            elif around in _AFTER_EXCHANGE:
                row[LATE_EXCHANGE] += seconds
            elif not row[ARRIVAL]:
                row[ARRIVAL] = total
            row[part] += seconds
            total += seconds


class Step(NamedTuple):
    """One step of one rank: from an optimizer's update to the next. Times are in seconds."""

    number: int
    start: float
    """By the monotonic clock of its machine."""
    parts: tuple[float, ...]
    """How long it spent on each of ``PARTS``; the sum is the whole step."""
    arrival: float
    """From its start until this rank had computed its gradients and depended on the other ranks."""
    late_exchange: float
    """The part of the exchange within the optimizer's update or a checkpoint."""
    processor: float
    """Processor time of the process, all threads together."""
    queued: float
    """How long it was ready to run while other processes had the processor."""
    samples: int
    """Samples of this rank, 0 if unknown."""
    sent_bytes: int
    """What this rank gave to collectives."""
    memory_bytes: int
    major_faults: int
    """Pages that had to be read from a disk."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Now:
    """What a rank is doing, by its record."""

    part: int
    step_began: float
    """When the step under way began, by the monotonic clock of its machine."""
    num_steps: int
    """How many steps have ended, also of those that are not recorded yet."""


class LoggedValue(NamedTuple):
    """The last value that a script has logged under a name."""

    own: float | None
    """Of this rank, ``None`` if it had no samples so far."""
    mean: float
    """Over the samples of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """All that a rank has recorded."""

    facts: dict[str, Any]
    steps: list[Step]
    notes: list[dict[str, Any]]
    """What :meth:`RecordFile.note` has added, in order."""
    now: Now
    values: dict[str, LoggedValue] = field(default_factory=dict[str, LoggedValue])
    """By name, cut to 31 bytes: the first 16 names."""


def row_of(step: Step) -> list[float]:
    """Return the ``NUM_VALUES`` numbers of a step as :meth:`RecordFile.add` takes them: parts first, start last."""
    _, start, parts, *others = step
    return [*parts, *others, start]


def value_of(code: int) -> float:
    """Return the number that a code stands for."""
    return math.expm1(code / SCALE)


def record_path(folder: Path, job: str, attempt: int, rank: int) -> Path:
    """Return the file in the folder of a report that holds a rank's record of one attempt of a job."""
    return folder / f"{job or 'job'}-attempt-{attempt}-rank-{rank:05d}{SUFFIX}"


class _Tail(NamedTuple):
    """The steps in memory. Replaced as a whole."""

    num: int
    first: int
    """The number of the first."""


class RecordFile:
    """The writer, for as long as the rank trains.

    ``now[0]``, which the owner sets, is the part that the rank is in, for readers meanwhile.

    Args:
        path: the file, which is created; ``None`` keeps the last steps in memory only.
        facts: what describes the rank, as JSON.

    Raises:
        OSError: it cannot be created, or its disk is full.
    """

    def __init__(self, path: str | None, facts: dict[str, Any]) -> None:
        described = json.dumps(facts).encode()
        if len(described) > FACTS_BYTES - len(MAGIC):
            raise ValueError(f"the facts about a rank take {len(described)} bytes")
        self._file: int | None = None
        size = _MAPPED_BYTES
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            # Another process may still write into the file of that name: to truncate it would kill that with SIGBUS.
            unfinished = f"{path}.{os.getpid()}"
            self._file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                # A page that the disk has no room for would kill this one.
                os.posix_fallocate(self._file, 0, size)
                self._memory = mmap.mmap(self._file, size)
                Path(unfinished).replace(path)
            except OSError:
                os.close(self._file)
                Path(unfinished).unlink()
                raise
            os.lseek(self._file, 0, os.SEEK_END)
        self._memory[: len(MAGIC) + len(described)] = MAGIC + described
        self.now = memoryview(self._memory)[_NOW_AT : _NOW_AT + 1]
        self.now[0] = SCRIPT
        self._num_ended = memoryview(self._memory)[_ENDED_AT:_TAIL_AT].cast("I")
        self._began = memoryview(self._memory)[_BEGAN_AT:_ROWS_AT].cast("d")
        self._tail = _Tail(0, 1)
        self._packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        self._is_writing = False
        self._value_names: list[str] = []
        self._show_count(time.monotonic())

    @property
    def num_steps(self) -> int:
        """How many steps have been added."""
        return self._tail.first + self._tail.num - 1

    def show_step(self, num_ended: int, began: float) -> None:
        """Record how many steps have ended and when the one under way began, for readers meanwhile."""
        self._num_ended[0], self._began[0] = num_ended, began

    def show_values(self, values: Mapping[str, tuple[float | None, float]]) -> None:
        """Record the last values that were logged, by name, for readers meanwhile."""
        for name, (own, mean) in values.items():
            if name not in self._value_names and len(self._value_names) < MOST_VALUES:
                self._value_names.append(name)
            if name in self._value_names:
                place = _VALUES_AT + self._value_names.index(name) * _VALUE.size
                _VALUE.pack_into(self._memory, place, name.encode(), own is not None, own or 0.0, mean)

    def add(self, row: Sequence[float]) -> None:
        """Append a step as its row of ``NUM_VALUES`` numbers. They are numbered from 1, without gaps."""
        if self._tail.num == TAIL_RECORDS:
            self._write_chunk()
        count, first = self._tail
        at = _ROWS_AT + count * _ROW.size
        _ROW.pack_into(self._memory, at, *row)
        # Here it has been added: an interrupt leaves it in the record as a whole, or not at all.
        self._tail = _Tail(count + 1, first)
        self._show_count(row[START] + sum(row[: len(PARTS)]))

    def step(self, number: int) -> Step:
        """Return a step that still lies in memory, such as the one that was added last."""
        at = _ROWS_AT + (number - self._tail.first) * _ROW.size
        return _step(number, _ROW.unpack_from(self._memory, at))

    def revise(self, number: int, start: float, times: Sequence[float]) -> bool:
        """Replace the start of a step and the first numbers of its row.

        Returns whether it still lies in memory; an earlier one keeps what it had.
        """
        place = number - self._tail.first
        if not 0 <= place < self._tail.num:
            return False
        at = _ROWS_AT + place * _ROW.size
        row = _ROW.unpack_from(self._memory, at)
        _ROW.pack_into(self._memory, at, *times, *row[len(times) : START], start)
        return True

    def note(self, note: dict[str, Any]) -> int:
        """Append something that happens rarely, as JSON; return how many bytes it takes."""
        packed = zlib.compress(json.dumps(note, separators=(",", ":")).encode())
        self._append(_NOTE, packed)
        return len(packed)

    def close(self) -> None:
        """Write the last steps as a chunk, and close the file."""
        self._write_chunk()
        for view in (self.now, self._num_ended, self._began):
            view.release()
        self._memory.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _show_count(self, began: float) -> None:
        _TAIL.pack_into(self._memory, _TAIL_AT, *self._tail, began)

    def _write_chunk(self) -> None:
        import numpy as np  # noqa: PLC0415 - torch has imported it; readers of records need not

        if self._is_writing:
            # An interrupt has ended the last attempt: a reader may have its bytes or not, and these refer to neither.
            self._packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        self._is_writing = True
        count, number = self._tail
        rows = np.frombuffer(self._memory, np.float64, count * NUM_VALUES, _ROWS_AT).reshape(-1, NUM_VALUES)
        while len(rows):
            # The clock of a device, which has measured some of them, may be behind that of the host.
            offsets = np.maximum.accumulate((rows[:, START] - rows[0, START]) * MICROSECONDS)
            fitting = int((offsets <= _LAST_OFFSET).sum())
            packed = np.empty((fitting, _RECORD.size), np.uint8)
            packed[:, :4] = offsets[:fitting].astype("<u4").view(np.uint8).reshape(-1, 4)
            values = np.maximum(rows[:fitting, :START], 0.0) * _UNITS
            codes = np.minimum(np.log1p(values) * SCALE + 0.5, LARGEST_CODE).astype("<u2")
            packed[:, 4:] = codes.view(np.uint8).reshape(fitting, -1)
            # Byte by byte over all steps: the upper ones hardly change, so that they compress to almost nothing.
            columns = self._packer.compress(packed.T.tobytes()) + self._packer.flush(zlib.Z_SYNC_FLUSH)
            self._append(_STEP_CHUNK, _STEPS.pack(fitting, number, rows[0, START]) + columns)
            rows = rows[fitting:]
            number += fitting
        self._tail = _Tail(0, number)
        self._is_writing = False
        self._show_count(self._began[0])

    def _append(self, kind: bytes, payload: bytes) -> None:
        if self._file is None:
            return
        chunk = memoryview(_CHUNK.pack(kind, len(payload)) + payload)
        try:
            while chunk:
                chunk = chunk[os.write(self._file, chunk) :]
        except OSError as error:
            # Training is worth more than its record: the last steps stay readable, the others are no longer kept.
            os.close(self._file)
            self._file = None
            warn(f"no more steps are recorded, because the record cannot be written: {error.strerror}")


def read(path: Path) -> Record:
    """Return what a rank has recorded so far, also while it writes, or if it was killed while writing.

    Raises:
        ReportError: the file is no record of a rank.
    """
    return parse(path.read_bytes(), str(path))


def parse(data: bytes, name: str) -> Record:
    """Return the same from the bytes of a file, called ``name``. Raises as :func:`read` does."""
    if not data.startswith(MAGIC) or len(data) < _MAPPED_BYTES:
        raise ReportError(f"{name} is not the record of a rank.", do="pass the folder that --report was given")
    try:
        return _parsed(data)
    except _DAMAGE as error:
        raise ReportError(f"{name} is damaged: {error}.", do="move it out of the folder") from error


def _parsed(data: bytes) -> Record:
    facts = json.loads(data[len(MAGIC) : FACTS_BYTES].rstrip(b"\0"))
    if not isinstance(facts, dict):
        raise TypeError("its header describes no rank")
    steps: list[Step] = []
    notes: list[dict[str, Any]] = []
    unpacker = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    room = LEAST_NOTES_BYTES + MOST_TIMES_PACKED * len(data)
    for kind, payload in _chunks(data, _MAPPED_BYTES):
        if kind == _NOTE:
            text = _unpacked(payload, room)
            room -= len(text)
            notes.append(json.loads(text))
            if not isinstance(notes[-1]["kind"], str):
                raise ValueError("a note is of no kind")
        else:
            count, first, base = _STEPS.unpack_from(payload)
            if count > TAIL_RECORDS or not math.isfinite(base):
                raise ValueError("a chunk is not one of steps")
            # One byte more than it may hold, so that all of the input is used up.
            columns = unpacker.decompress(payload[_STEPS.size :], count * _RECORD.size + 1)
            if len(columns) != count * _RECORD.size:
                raise ValueError(f"a chunk of {count} steps holds {len(columns)} bytes or more")
            rows = bytes(columns[place * count + row] for row in range(count) for place in range(_RECORD.size))
            steps += _after(steps, _steps(rows, first, base))
    tail, now = _tail(data)
    steps += _after(steps, tail)
    return Record(facts=cast("dict[str, Any]", facts), steps=steps, notes=notes, now=now, values=_values(data))


def _after(steps: Sequence[Step], more: Iterable[Step]) -> list[Step]:
    """Return those of more steps that follow. A rank that is ended or interrupted as it writes leaves some twice."""
    last = steps[-1].number if steps else 0
    return [step for step in more if step.number > last]


def _unpacked(payload: bytes, room: int) -> bytes:
    """Return what was compressed.

    Raises:
        ValueError: it takes more than ``room`` bytes, or is incomplete.
    """
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(payload, room + 1)
    if len(text) > room:
        raise ValueError(f"its notes take more than {room} bytes")
    if not unpacker.eof:
        raise ValueError("a note is incomplete")
    return text


def read_latest(path: Path) -> Record:
    """Return the last steps of a rank that is still training, without the earlier ones and the notes.

    Raises:
        ReportError: the file is no record of a rank.
    """
    with path.open("rb") as file:
        return parse(file.read(_MAPPED_BYTES), str(path))


def _tail(data: bytes) -> tuple[list[Step], Now]:
    count, first, began = _TAIL.unpack_from(data, _TAIL_AT)
    rows = _ROW.iter_unpack(data[_ROWS_AT : _ROWS_AT + count * _ROW.size])
    steps = [_step(number, row) for number, row in enumerate(rows, first)]
    (num_ended,) = _ENDED.unpack_from(data, _ENDED_AT)
    if data[_NOW_AT] >= len(PARTS) or not all(math.isfinite(time) for step in steps for time in step[1:2] + step.parts):
        raise ValueError("its last steps are not steps")
    return steps, Now(part=data[_NOW_AT], step_began=began, num_steps=max(num_ended, first + count - 1))


def _values(data: bytes) -> dict[str, LoggedValue]:
    """Return the values that were logged last. A name may have been cut within a character."""
    return {
        name.rstrip(b"\0").decode(errors="ignore"): LoggedValue(own if has_own else None, mean)
        for name, has_own, own, mean in _VALUE.iter_unpack(data[_VALUES_AT:_MAPPED_BYTES])
        if name[0]
    }


def _step(number: int, row: Sequence[float]) -> Step:
    samples, sent_bytes, memory_bytes, major_faults = map(round, row[SAMPLES:START])
    return Step(
        number=number,
        start=row[START],
        parts=tuple(row[: len(PARTS)]),
        arrival=row[ARRIVAL],
        late_exchange=row[LATE_EXCHANGE],
        processor=row[PROCESSOR],
        queued=row[QUEUED],
        samples=samples,
        sent_bytes=sent_bytes,
        memory_bytes=memory_bytes,
        major_faults=major_faults,
    )


def _chunks(data: bytes, place: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks that were written whole."""
    while place + _CHUNK.size <= len(data):
        kind, length = _CHUNK.unpack_from(data, place)
        place += _CHUNK.size
        if place + length > len(data):
            return
        yield kind, data[place : place + length]
        place += length


def _steps(rows: bytes, first: int, base: float) -> list[Step]:
    found: list[Step] = []
    for number, (offset, *codes) in enumerate(_RECORD.iter_unpack(rows), first):
        values = [value_of(code) / unit for code, unit in zip(codes, _UNITS, strict=True)]
        found.append(_step(number, [*values, base + offset / MICROSECONDS]))
    return found
