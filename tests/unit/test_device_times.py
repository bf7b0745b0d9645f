# SPDX-License-Identifier: Apache-2.0
"""What is made of a device's events: the queue of the device is played here, as no test machine has one that lags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import pytest

from rankwise.insight.device_times import MOST_WAITING, DeviceTimes
from rankwise.insight.step_meter import StepMeter, StepRecorder
from rankwise.insight.step_record import ARRIVAL, ARRIVED, LATE_EXCHANGE, READ_FOR_EVALUATION, RecordFile, Step, read
from rankwise.meter import BACKWARD, DATA, EVALUATION, EXCHANGE, FORWARD, OPTIMIZER, PARTS, SCRIPT

if TYPE_CHECKING:
    from pathlib import Path


class Device:
    """A device that works through its queue while the host's clock advances; ``work`` queues seconds of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = 1000.0
        self.idle_at = 1000.0
        self.num_events = 0
        self.is_capturing = self.has_failed = False
        for module in ("step_meter", "device_times"):
            monkeypatch.setattr(f"rankwise.insight.{module}.monotonic", lambda: self.host)

    def work(self, seconds: float) -> None:
        self.idle_at = max(self.idle_at, self.host) + seconds

    def new_event(self) -> Event:
        self.num_events += 1
        return Event(self)


class Event:
    """A point in the queue."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> bool:
        if self.device.has_failed:
            raise RuntimeError("an illegal memory access was encountered")
        if not self.device.is_capturing:
            self.at = max(self.device.idle_at, self.device.host)
        return not self.device.is_capturing

    def query(self) -> bool:
        if self.device.has_failed:
            raise RuntimeError("an illegal memory access was encountered")
        return self.at <= self.device.host

    def elapsed_time(self, end: Self, /) -> float:
        assert self.query()
        assert end.query(), "the device has not reached it"
        return (end.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def parts(times: list[float]) -> dict[int, float]:
    return {part: round(seconds, 6) for part, seconds in enumerate(times[: len(PARTS)]) if seconds}


def test_a_step_takes_what_the_device_takes_and_not_what_queueing_takes(device: Device) -> None:
    times = DeviceTimes(device.new_event)
    for part, seconds in ((FORWARD, 2.0), (BACKWARD, 3.0), (EXCHANGE, 1.0), (OPTIMIZER, 0.5)):
        device.host += 0.001
        device.work(seconds)
        times.end_part(part)
        if part == BACKWARD:
            times.note(ARRIVED)
    times.end_step(1, device.host)
    assert list(times.finished()) == [], "the device is still at work"
    device.host += 100.0
    ((number, start, found),) = times.finished()
    assert (number, start) == (1, 1000.0)
    assert parts(found) == {FORWARD: 2.001, BACKWARD: 3.0, EXCHANGE: 1.0, OPTIMIZER: 0.5}
    assert found[ARRIVAL] == pytest.approx(5.001)


def test_waiting_for_data_is_when_the_device_has_nothing_to_do(device: Device) -> None:
    times = DeviceTimes(device.new_event)
    device.work(2.0)
    times.end_part(FORWARD)
    device.host += 1.5  # the loader, while the device is at work
    times.end_part(DATA)
    times.end_step(1, device.host)
    device.host += 4.5  # the loader, and the device has been idle for 4 seconds
    times.end_part(DATA)
    times.end_step(2, device.host)
    first, second = times.finished()
    assert (parts(first.times), parts(second.times)) == ({FORWARD: 2.0}, {DATA: 4.0})
    assert (first.start, second.start) == (1000.0, 1002.0)


def test_late_exchange_and_data_of_an_evaluation_are_told_apart_as_on_the_host(device: Device) -> None:
    times = DeviceTimes(device.new_event)
    for part in (DATA, EVALUATION, DATA, FORWARD, OPTIMIZER, EXCHANGE):
        device.work(1.0)
        times.end_part(part)
        if part == DATA and device.idle_at < 1002.0:
            times.note(READ_FOR_EVALUATION)
    times.end_step(1, device.host)
    device.host += 10.0
    (step,) = times.finished()
    assert parts(step.times) == {EVALUATION: 2.0, DATA: 1.0, FORWARD: 1.0, OPTIMIZER: 1.0, EXCHANGE: 1.0}
    assert step.times[LATE_EXCHANGE] == 1.0


@pytest.mark.parametrize("drift", [0.999, 1.001])
def test_errors_of_the_devices_clock_do_not_add_up(
    device: Device, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Event.elapsed_time
    monkeypatch.setattr(Event, "elapsed_time", lambda self, end: exact(self, end) * drift)
    times = DeviceTimes(device.new_event)
    for number in range(1, 2001):
        device.work(1.0)
        times.end_part(FORWARD)
        device.host = device.idle_at  # as where the script reads the loss
        times.end_step(number, device.host)
        for step in times.finished():
            assert step.start == pytest.approx(999.0 + step.number, abs=0.002)


def test_events_are_used_again_and_looked_at_although_no_step_ends(device: Device) -> None:
    times = DeviceTimes(device.new_event)
    for _ in range(20 * MOST_WAITING):
        device.host += 0.01
        times.end_part(EVALUATION)
    assert device.num_events <= MOST_WAITING + 2


def test_while_a_graph_is_captured_nothing_is_queued(device: Device) -> None:
    times = DeviceTimes(device.new_event)
    device.is_capturing = True
    times.end_part(FORWARD)
    device.is_capturing = False
    device.work(3.0)
    times.end_part(BACKWARD)
    times.end_step(1, device.host)
    device.host += 5.0
    (step,) = times.finished()
    assert parts(step.times) == {BACKWARD: 3.0}


def one_step(meter: StepMeter, device: Device) -> None:
    for part in (FORWARD, BACKWARD, OPTIMIZER):
        before = meter.enter(part)
        device.host += 0.05
        device.work(0.1)
        meter.resume(before, has_updated=part == OPTIMIZER)


def meter_of(device: Device, path: Path) -> StepMeter:
    return StepMeter(StepRecorder(RecordFile(str(path), {}), lambda: 7, None, DeviceTimes(device.new_event)))


def test_the_devices_times_take_the_place_of_the_hosts_in_the_record(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    meter, told = meter_of(device, path), list[Step]()
    meter.recorder.report_steps_to(told.append)
    for _ in range(20):
        one_step(meter, device)
    meter.close()
    steps = read(path).steps
    assert [step.number for step in told] == list(range(1, len(told) + 1))
    assert 5 <= len(told) < 20, "the host is ahead"
    for step in steps[1 : len(told)]:
        assert step.parts[BACKWARD] == pytest.approx(0.1, rel=1e-3)
    for step in steps[len(told) :]:
        assert step.parts[BACKWARD] == pytest.approx(0.05, rel=1e-3), "the device has not told"
    assert [step.start for step in steps] == sorted(step.start for step in steps)


def test_a_device_that_fails_leaves_the_hosts_times(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    meter = meter_of(device, path)
    one_step(meter, device)
    device.has_failed = True
    for _ in range(3):
        one_step(meter, device)
    meter.close()
    steps = read(path).steps
    assert len(steps) == 4
    assert steps[-1].parts[BACKWARD] == pytest.approx(0.05, rel=1e-3)
    assert steps[-1].parts[SCRIPT] == pytest.approx(0.0, abs=1e-6)
