# SPDX-License-Identifier: Apache-2.0
"""The file of a rank's steps: what is written is read, however the writer ended, and in few bytes."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.errors import ReportError
from rankwise.insight.step_record import (
    MOST_VALUES,
    TAIL_RECORDS,
    LoggedValue,
    RecordFile,
    Step,
    read,
    read_latest,
    row_of,
)
from rankwise.meter import EXCHANGE, PARTS


def some_step(number: int, start: float, draw: random.Random) -> Step:
    return Step(
        number=number,
        start=start,
        parts=tuple(abs(draw.gauss(0.002, 0.0003)) for _ in PARTS),
        arrival=abs(draw.gauss(0.005, 0.001)),
        late_exchange=0.0,
        processor=abs(draw.gauss(0.006, 0.001)),
        queued=abs(draw.gauss(0.0001, 0.0001)),
        samples=32,
        sent_bytes=1_234_567,
        memory_bytes=300 * 2**20 + draw.randrange(2**20),
        major_faults=0,
    )


def write(path: Path | None, num_steps: int, rank: int = 0) -> list[Step]:
    draw, start = random.Random(rank), 1000.0
    record = RecordFile(None if path is None else str(path), {"rank": rank, "world_size": 2})
    steps = []
    for number in range(1, num_steps + 1):
        steps.append(some_step(number, start, draw))
        start += steps[-1].seconds
        record.add(row_of(steps[-1]))
    record.close()
    return steps


def assert_close(found: Step, step: Step) -> None:
    assert found.number == step.number
    assert found.start == pytest.approx(step.start, abs=2e-6)
    for name in ("parts", "arrival", "late_exchange", "processor", "queued", "sent_bytes", "memory_bytes"):
        assert getattr(found, name) == pytest.approx(getattr(step, name), rel=1e-3, abs=1e-6), name
    assert (found.samples, found.major_faults) == (step.samples, step.major_faults)


@pytest.mark.parametrize("value", [0, 1, 2, 3, 400, 12_345, 10**6, 10**9, 10**12])
def test_numbers_are_kept_to_a_tenth_of_a_percent(tmp_path: Path, value: int) -> None:
    record = RecordFile(str(tmp_path / "a.steps"), {})
    step = some_step(1, 1.0, random.Random(0))._replace(sent_bytes=value, samples=min(value, 400))
    record.add(row_of(step))
    record.close()
    (found,) = read(tmp_path / "a.steps").steps
    assert found.sent_bytes == pytest.approx(value, rel=1e-3)
    assert found.samples == min(value, 400)


@pytest.mark.parametrize("num_steps", [0, 1, TAIL_RECORDS - 1, TAIL_RECORDS, TAIL_RECORDS + 1, 3 * TAIL_RECORDS + 5])
def test_what_is_written_is_read(tmp_path: Path, num_steps: int) -> None:
    written = write(tmp_path / "a.steps", num_steps)
    record = read(tmp_path / "a.steps")
    assert record.facts == {"rank": 0, "world_size": 2}
    assert record.now.num_steps == len(record.steps) == num_steps
    for found, step in zip(record.steps, written, strict=True):
        assert_close(found, step)


def test_notes_lie_between_steps(tmp_path: Path) -> None:
    record = RecordFile(str(tmp_path / "a.steps"), {})
    draw = random.Random(0)
    for number in range(1, 200):
        record.add(row_of(some_step(number, 10.0 + number, draw)))
        if number % 50 == 0:
            record.note({"kind": "event", "number": number})
    record.close()
    found = read(tmp_path / "a.steps")
    assert [note["number"] for note in found.notes] == [50, 100, 150]
    assert [step.number for step in found.steps] == list(range(1, 200))


def test_a_step_that_begins_hours_after_the_last_one_keeps_its_time(tmp_path: Path) -> None:
    record = RecordFile(str(tmp_path / "a.steps"), {})
    draw = random.Random(0)
    starts = [100.0, 101.0, 101.0 + 7200.0, 101.0 + 14400.0]
    for number, start in enumerate(starts, 1):
        record.add(row_of(some_step(number, start, draw)))
    record.close()
    assert [step.start for step in read(tmp_path / "a.steps").steps] == pytest.approx(starts, abs=2e-6)


KILLED = """
import os, random, signal, sys
sys.path.insert(0, {tests!r})
from test_step_record import some_step
from rankwise.insight.step_record import RecordFile, row_of
from rankwise.meter import DATA
record = RecordFile({path!r}, {{"rank": 3}})
draw = random.Random(0)
for number in range(1, 131):
    record.add(row_of(some_step(number, float(number), draw)))
record.now[0] = DATA
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_has_recorded_its_last_step(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    code = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    record = read(path)
    assert [step.number for step in record.steps] == list(range(1, 131))
    assert (PARTS[record.now.part], record.now.num_steps) == ("data", 130)
    assert record.now.step_began == pytest.approx(130.0 + record.steps[-1].seconds)


def test_a_chunk_that_was_written_in_part_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    write(path, 3 * TAIL_RECORDS)
    whole = path.read_bytes()
    before = 0
    for cut in range(len(whole) - 3500, len(whole), 97):
        path.write_bytes(whole[:cut])
        numbers = [step.number for step in read(path).steps]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= before
        before = len(numbers)


def test_last_steps_are_read_while_the_rank_trains(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    record = RecordFile(str(path), {"rank": 1})
    draw = random.Random(0)
    for number in range(1, TAIL_RECORDS + 4):
        record.add(row_of(some_step(number, float(number), draw)))
    record.now[0] = EXCHANGE
    latest = read_latest(path)
    assert [step.number for step in latest.steps] == [TAIL_RECORDS + 1, TAIL_RECORDS + 2, TAIL_RECORDS + 3]
    assert (latest.facts, latest.now.part) == ({"rank": 1}, EXCHANGE)
    record.close()


def test_last_values_are_read_while_the_rank_trains_and_after_it(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    record = RecordFile(str(path), {})
    assert read_latest(path).values == {}
    record.show_values({"loss": LoggedValue(2.0, 3.0), "accuracy": LoggedValue(None, 0.5)})
    for number in range(1, 2 * TAIL_RECORDS):
        record.add(row_of(some_step(number, float(number), random.Random(0))))
    record.show_values({"loss": LoggedValue(math.inf, math.nan)})
    for look in (read_latest, read):
        values = look(path).values
        assert list(values) == ["loss", "accuracy"]
        assert (values["loss"].own, math.isnan(values["loss"].mean)) == (math.inf, True)
        assert values["accuracy"] == LoggedValue(None, 0.5)
    record.close()
    assert read(path).values["accuracy"] == LoggedValue(None, 0.5)


def test_long_names_of_values_are_cut_and_many_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    record = RecordFile(str(path), {})
    record.show_values({"x" + 20 * "损": LoggedValue(1.0, 1.0), **{f"{n}": LoggedValue(n, n) for n in range(20)}})
    record.show_values({"0": LoggedValue(7.0, 7.0), "19": LoggedValue(7.0, 7.0)})
    found = read_latest(path).values
    assert list(found) == ["x" + 10 * "损", *(str(n) for n in range(MOST_VALUES - 1))]
    assert (found["0"].own, found["1"].own) == (7.0, 1.0)
    record.close()


def test_ten_thousand_steps_of_eight_ranks_take_at_most_two_megabytes(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.steps", 10_000, rank)
    own = max(path.stat().st_size for path in tmp_path.iterdir())
    details_of_a_rank = 40_000
    assert 8 * (own + details_of_a_rank) <= 2 * 10**6


FULL = """
import random, resource, sys
sys.path.insert(0, {tests!r})
from test_step_record import some_step
from rankwise.insight.step_record import RecordFile, row_of
record = RecordFile({path!r}, {{}})
resource.setrlimit(resource.RLIMIT_FSIZE, (16000, 16000))
draw = random.Random(0)
for number in range(1, 1001):
    record.add(row_of(some_step(number, float(number), draw)))
record.close()
print("trained on")
"""


def test_a_full_disk_ends_the_record_and_not_the_training(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    code = FULL.format(tests=str(Path(__file__).parent), path=str(path))
    ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout == "trained on\n"
    assert ended.stderr.count("no more steps are recorded") == 1
    assert "File too large" in ended.stderr
    numbers = [step.number for step in read(path).steps]
    assert numbers[:64] == list(range(1, 65))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    path.write_bytes(os.urandom(20_000))
    with pytest.raises(ReportError, match="is not the record of a rank"):
        read(path)
    with pytest.raises(ReportError, match="is not the record of a rank"):
        read_latest(path)


def test_two_processes_that_write_the_same_record_leave_each_other_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    first = RecordFile(str(path), {"rank": 0})
    second = RecordFile(str(path), {"rank": 1})
    draw = random.Random(0)
    for number in range(1, 2 * TAIL_RECORDS):
        first.add(row_of(some_step(number, float(number), draw)))
    second.add(row_of(some_step(1, 1.0, draw)))
    first.close()
    second.close()
    record = read(path)
    assert (record.facts["rank"], len(record.steps)) == (1, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.steps"]
