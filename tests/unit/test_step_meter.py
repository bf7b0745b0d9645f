# SPDX-License-Identifier: Apache-2.0
"""What counts as which part of a step, and where a step ends."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from rankwise.health.flight_recorder import EVERYONE, FlightRecorder, Ticket
from rankwise.insight.step_meter import FIRST_DETAILED, MOST_SLICES, StepMeter, StepRecorder
from rankwise.insight.step_record import Record, RecordFile, Step, read, read_latest
from rankwise.meter import BACKWARD, CHECKPOINT, DATA, EVALUATION, EXCHANGE, FORWARD, OPTIMIZER, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; a test moves it."""
    now = [1000.0]
    for module in ("step_meter", "device_times"):
        monkeypatch.setattr(f"rankwise.insight.{module}.monotonic", lambda: now[0])
    return now


class Measured:
    """A meter whose parts take whole seconds."""

    def __init__(self, folder: Path, clock: list[float]) -> None:
        self.path = folder / "a.steps"
        self.clock = clock
        self.meter = StepMeter(StepRecorder(RecordFile(str(self.path), {}), lambda: 7, folder))
        self.flight = FlightRecorder()
        self.meter.recorder.follow_collectives(self.flight)

    def spend(self, part: int, seconds: float, *, inside: tuple[int, float] | None = None) -> None:
        """Enter a part, with another one inside it, and resume what was before."""
        before = self.meter.enter(part)
        self.clock[0] += seconds
        if inside is not None:
            self.spend(*inside)
        self.meter.resume(before)

    def update(self) -> None:
        """Note an optimizer's update."""
        self.spend(OPTIMIZER, 1.0)
        self.meter.resume(SCRIPT, has_updated=True)

    def ended(self) -> Record:
        """Return what was recorded."""
        self.meter.close()
        return read(self.path)


def parts_of(step: Step) -> dict[int, int]:
    """Return the seconds of each part that took any."""
    return {part: round(seconds) for part, seconds in enumerate(step.parts) if seconds > 0.5}


def test_a_step_lasts_from_the_first_part_after_an_update_to_the_next_such_part(
    tmp_path: Path, clock: list[float]
) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(2):
        measured.spend(DATA, 1.0)
        measured.spend(FORWARD, 2.0)
        measured.spend(BACKWARD, 3.0, inside=(EXCHANGE, 4.0))
        measured.update()
        clock[0] += 5.0  # a scheduler
        measured.spend(CHECKPOINT, 6.0, inside=(EXCHANGE, 2.0))
    steps = measured.ended().steps
    whole = {SCRIPT: 5, DATA: 1, FORWARD: 2, BACKWARD: 3, EXCHANGE: 6, OPTIMIZER: 1, CHECKPOINT: 6}
    assert [parts_of(step) for step in steps] == [whole, whole]
    assert [round(step.start) for step in steps] == [1000, 1024]
    assert [round(step.arrival) for step in steps] == [6, 6]
    assert [round(step.late_exchange) for step in steps] == [2, 2], "of the checkpoint, not of backward"


def test_the_last_step_ends_with_its_last_part_and_not_with_the_end_of_the_script(
    tmp_path: Path, clock: list[float]
) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(2):
        measured.spend(FORWARD, 1.0)
        measured.update()
        measured.spend(CHECKPOINT, 2.0)
        clock[0] += 30.0
    first, last = measured.ended().steps
    assert parts_of(first) == {FORWARD: 1, OPTIMIZER: 1, CHECKPOINT: 2, SCRIPT: 30}
    assert parts_of(last) == {FORWARD: 1, OPTIMIZER: 1, CHECKPOINT: 2}


def test_microsteps_belong_to_the_step_that_updates(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(3):
        measured.spend(FORWARD, 1.0)
        measured.spend(BACKWARD, 1.0)
    measured.update()
    assert [parts_of(step) for step in measured.ended().steps] == [{FORWARD: 3, BACKWARD: 3, OPTIMIZER: 1}]


def test_data_of_an_evaluation_belong_to_it_and_its_samples_to_nobody(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(2):
        measured.spend(DATA, 1.0)
        measured.meter.resume(SCRIPT, samples=8)
        measured.spend(EVALUATION, 2.0)
    measured.spend(DATA, 1.0)
    measured.meter.resume(SCRIPT, samples=5)
    measured.spend(FORWARD, 1.0)
    measured.spend(BACKWARD, 1.0)
    measured.update()
    (step,) = measured.ended().steps
    assert parts_of(step) == {EVALUATION: 6, DATA: 1, FORWARD: 1, BACKWARD: 1, OPTIMIZER: 1}
    assert step.samples == 5


def test_a_forward_pass_without_gradients_inside_a_step_takes_none_of_its_data(
    tmp_path: Path, clock: list[float]
) -> None:
    measured = Measured(tmp_path, clock)
    measured.spend(DATA, 1.0)
    measured.spend(FORWARD, 1.0)
    measured.spend(EVALUATION, 2.0)  # a teacher
    measured.spend(BACKWARD, 1.0)
    measured.update()
    assert parts_of(measured.ended().steps[0]) == {DATA: 1, FORWARD: 1, EVALUATION: 2, BACKWARD: 1, OPTIMIZER: 1}


def test_other_threads_change_nothing(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    before = measured.meter.enter(FORWARD)
    other = threading.Thread(target=measured.spend, args=(EXCHANGE, 3.0))
    other.start()
    other.join()
    measured.meter.resume(before)
    measured.update()
    assert parts_of(measured.ended().steps[0]) == {FORWARD: 3, OPTIMIZER: 1}


def test_what_never_updates_is_no_step_and_takes_no_memory(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(3 * MOST_SLICES):
        measured.spend(EVALUATION, 1.0)
    assert len(measured.meter.recorder._sum.slices) == MOST_SLICES
    assert measured.ended().steps == []


def test_details_hold_the_collectives_of_their_step_only(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    recent = measured.flight.recent
    for number in range(1, 131):
        measured.spend(FORWARD, 1.0)
        recent.append(Ticket(number, f"sum {number}", sequence=number, since=clock[0] - 0.5, ended=clock[0] - 0.25))
        measured.spend(BACKWARD, 1.0)
        measured.update()
    details = {note["step"]: note for note in measured.ended().notes if note["kind"] == "detail"}
    assert list(details) == [*range(1, FIRST_DETAILED + 1), 128]
    for step, detail in details.items():
        assert detail["collectives"] == [[f"sum {step}", 500_000, 250_000, EVERYONE, step]]
        assert [part for part, *_ in detail["slices"] if part != SCRIPT] == [FORWARD, BACKWARD, OPTIMIZER]


def test_a_step_that_takes_twice_as_long_as_usual_is_recorded_in_detail_and_not_those_right_after(
    tmp_path: Path, clock: list[float]
) -> None:
    measured = Measured(tmp_path, clock)
    for number in range(1, 101):
        measured.spend(FORWARD, 20.0 if number in {50, 55, 80} else 1.0)
        measured.update()
    details = [note["step"] for note in measured.ended().notes if note["kind"] == "detail"]
    assert details == [*range(1, FIRST_DETAILED + 1), 50, 80]


def test_steps_that_are_added_up_together_keep_what_is_their_own(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    for number in range(1, 31):
        before = measured.meter.enter(FORWARD)
        clock[0] += number / 1000
        measured.meter.resume(before)
        measured.meter.resume(SCRIPT, samples=number)
        measured.flight.begin("sum", sent_bytes=2 * number)
        measured.meter.resume(SCRIPT, has_updated=True)
    steps = measured.ended().steps
    assert [step.samples for step in steps] == list(range(1, 31))
    assert [step.sent_bytes for step in steps] == pytest.approx([2 * step.number for step in steps], rel=1e-3)
    assert [step.parts[FORWARD] for step in steps] == pytest.approx([step.number / 1000 for step in steps], rel=1e-3)


def test_steps_are_recorded_twice_per_second(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(FIRST_DETAILED):
        measured.spend(FORWARD, 1.0)
        measured.update()
    for _ in range(3):  # within half a second, which has to pass first
        measured.meter.enter(FORWARD)
        clock[0] += 0.01
        measured.meter.resume(SCRIPT)
        measured.meter.resume(SCRIPT, has_updated=True)
    assert len(read(measured.path).steps) == FIRST_DETAILED
    measured.meter.enter(FORWARD)
    clock[0] += 0.6
    measured.meter.resume(SCRIPT)
    measured.meter.resume(SCRIPT, has_updated=True)
    measured.meter.enter(FORWARD)
    assert len(read(measured.path).steps) == FIRST_DETAILED + 4


def test_those_who_look_meanwhile_see_steps_that_are_not_recorded_yet(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(FIRST_DETAILED):
        measured.spend(FORWARD, 1.0)
        measured.update()
    for _ in range(5):
        clock[0] += 0.001
        measured.spend(FORWARD, 0.001)
        measured.meter.resume(SCRIPT, has_updated=True)
    clock[0] += 0.001
    measured.spend(FORWARD, 0.001)
    looked = read_latest(measured.path)
    assert (len(looked.steps), looked.now.num_steps) == (FIRST_DETAILED, FIRST_DETAILED + 5)
    assert looked.now.step_began == pytest.approx(clock[0] - 0.001)
    measured.meter.close()


def test_data_that_are_used_without_gradients_first_and_then_for_training_are_data(
    tmp_path: Path, clock: list[float]
) -> None:
    measured = Measured(tmp_path, clock)
    for _ in range(2):  # microsteps with a teacher
        measured.spend(DATA, 2.0)
        measured.meter.resume(SCRIPT, samples=8)
        measured.spend(EVALUATION, 1.0)
        measured.spend(FORWARD, 1.0)
        measured.spend(BACKWARD, 1.0)
    measured.update()
    (step,) = measured.ended().steps
    assert parts_of(step) == {DATA: 4, EVALUATION: 2, FORWARD: 2, BACKWARD: 2, OPTIMIZER: 1}
    assert step.samples == 16


def test_updates_and_samples_of_other_threads_are_not_those_of_this_one(tmp_path: Path, clock: list[float]) -> None:
    measured = Measured(tmp_path, clock)

    def train() -> None:
        measured.meter.resume(SCRIPT, samples=8)
        measured.meter.resume(SCRIPT, has_updated=True)

    other = threading.Thread(target=train)
    other.start()
    other.join()
    measured.spend(FORWARD, 1.0)
    assert measured.ended().steps == []


FORKS = """
import os
from rankwise import meter

class Meter(meter.Meter):
    def __init__(self):
        pass

    def __del__(self):
        os.write(1, b"destroyed")

meter.start(Meter())
child = os.fork()
if not child:
    os.write(1, b"measures nothing" if meter.is_silent() else b"measures")
    os._exit(0)
os.waitpid(child, 0)
os._exit(int(meter.is_silent()))
"""


def test_a_forked_process_measures_nothing_and_keeps_the_meter_whose_events_it_cannot_destroy() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "measures nothing", "")


class Stopped(Exception):
    """What a handler of a signal raises."""


class Interruption:
    """Calls ``act`` at one line of the meter's code: a handler may run before any."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.left = at
        self._act = act

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if "rankwise/insight" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._act()
        return self._trace


@pytest.mark.timeout(200)  # thousands of steps
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of an interrupt: the object closes it
@pytest.mark.parametrize("way", ["raises", "trains on"])
def test_an_interrupt_at_any_line_of_a_step_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, way: str
) -> None:
    clock = itertools.count(1000.0)
    at_once = 3
    monkeypatch.setattr("rankwise.insight.step_record.TAIL_RECORDS", at_once)
    monkeypatch.setattr("rankwise.insight.step_meter.monotonic", lambda: next(clock))
    seen: list[int] = []
    files = Path("/proc/self/fd")
    looked_at = socket.socket()
    request.addfinalizer(looked_at.close)
    num_open = len(list(files.iterdir()))

    def step(measured: Measured) -> None:
        measured.spend(DATA, 0.0)
        measured.meter.resume(SCRIPT, samples=1)
        measured.spend(FORWARD, 0.0)
        measured.spend(BACKWARD, 0.0, inside=(EXCHANGE, 0.0))
        measured.update()

    def act() -> None:
        if way == "raises":
            raise Stopped
        step(measured)
        step(measured)

    for at in itertools.count(1):
        measured = Measured(tmp_path, [0.0])
        measured.meter.recorder.report_steps_to(lambda one: seen.append(one.number))
        for _ in range(at_once):  # before the next one these are written as a chunk
            step(measured)
        with contextlib.suppress(Stopped), Interruption(at, act) as interruption:
            step(measured)
            step(measured)
        if interruption.left > 0:
            break
        for _ in range(at_once):
            step(measured)
        steps = measured.ended().steps
        assert len(list(files.iterdir())) <= num_open, at
        assert len(steps) == measured.meter.step - 1 >= 2 * at_once, at
        assert [one.number for one in steps] == list(range(1, len(steps) + 1)), at
        for one, following in itertools.pairwise(steps):
            assert min(one.parts) >= 0, at
            if way == "raises":
                assert one.start + one.seconds == pytest.approx(following.start, abs=0.1), at
    assert len(seen) > 100
