# SPDX-License-Identifier: Apache-2.0
"""A report from a damaged folder: what can be read is shown, the rest is named, and no memory is filled."""

from __future__ import annotations

import contextlib
import json
import random
import tracemalloc
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from test_step_record import some_step

from rankwise.errors import ReportError
from rankwise.insight import step_record
from rankwise.insight.page import page_of
from rankwise.insight.run_records import read_run
from rankwise.insight.step_record import FACTS_BYTES, MAGIC, RecordFile, read, read_latest, row_of

if TYPE_CHECKING:
    from pathlib import Path

FACTS: dict[str, Any] = {
    "job": "a",
    "launcher": "here:1:1",
    "rank": 0,
    "world_size": 1,
    "hostname": "here",
    "node_rank": 0,
    "device": "cpu",
    "attempt": 0,
    "script": "train.py",
    "started": 1_700_000_000.0,
    "monotonic": 100.0,
}
EVENT = {"time": 1_700_000_001.0, "launcher": "here:1:1", "kind": "notice", "text": "one that is whole"}
DAMAGED_EVENTS: list[Any] = [
    {"time": 1_700_000_001.0},
    {**EVENT, "text": None},
    {**EVENT, "text": ["x"]},
    {**EVENT, "time": float("nan")},
    {**EVENT, "time": 1e300},
    {**EVENT, "time": "now"},
    {**EVENT, "launcher": {}},
    {**EVENT, "kind": "failure"},
    {**EVENT, "kind": "failure", "rank": "0"},
    {"kind": "notice", "text": "without a time"},
    [EVENT],
    None,
    7,
]


def _record(folder: Path, facts: dict[str, Any]) -> Path:
    path, draw, start = folder / f"a-rank-{facts.get('rank', 0)}.steps", random.Random(0), 1000.0
    record = RecordFile(str(path), facts)
    for number in range(1, 101):
        step = some_step(number, start, draw)
        start += step.seconds
        record.add(row_of(step))
    record.note({"kind": "event", "time": 1_700_000_001.0, "text": "saved"})
    record.close()
    return path


def _shown(folder: Path) -> str:
    return page_of(read_run(folder), "en").html


@pytest.mark.parametrize("event", DAMAGED_EVENTS, ids=repr)
def test_a_damaged_event_is_left_out(tmp_path: Path, event: object, caplog: pytest.LogCaptureFixture) -> None:
    _record(tmp_path, FACTS)
    lines = [json.dumps(EVENT), json.dumps(event), json.dumps(EVENT)[:-4], "[" * 100_000]
    (tmp_path / "events.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\0\n")
    assert "one that is whole" in _shown(tmp_path)
    assert "left out of the report: 4 damaged lines" in caplog.text


def test_events_that_cannot_be_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _record(tmp_path, FACTS)
    (tmp_path / "events.jsonl").mkdir()
    _shown(tmp_path)
    assert "events.jsonl cannot be read: Is a directory" in caplog.text


@pytest.mark.parametrize("name", ["job", "rank", "world_size", "hostname", "attempt", "script", "started", "monotonic"])
@pytest.mark.parametrize("wrong", [None, [], 10**15, -1, "x", float("nan"), "removed"], ids=str)
def test_a_damaged_header_is_an_error_or_left_out(
    tmp_path: Path, name: str, wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    facts = {key: value for key, value in {**FACTS, name: wrong}.items() if value != "removed"}
    path = _record(tmp_path, facts)
    is_right = isinstance(wrong, str) and wrong == "x" and name in {"job", "hostname", "script"}
    is_right = is_right or (name == "attempt" and wrong == 10**15)
    is_right = is_right or (name == "monotonic" and isinstance(wrong, int | float))
    if is_right:
        _shown(tmp_path)
        return
    with pytest.raises(ReportError, match="its header does not describe a rank"):
        _shown(tmp_path)
    path.rename(tmp_path / "damaged.steps")
    _record(tmp_path, FACTS)
    _shown(tmp_path)
    assert f"left out of the report: {tmp_path / 'damaged.steps'} is damaged" in caplog.text


@pytest.mark.parametrize("text", [b"[]", b"null", b"7", b'"x"', b"{", b"[" * 4000, b"\xff\xff"])
def test_a_header_that_is_no_description_is_an_error(tmp_path: Path, text: bytes) -> None:
    path = _record(tmp_path, FACTS)
    data = bytearray(path.read_bytes())
    data[len(MAGIC) : FACTS_BYTES] = text.ljust(FACTS_BYTES - len(MAGIC), b"\0")
    path.write_bytes(data)
    for call in (read, read_latest):
        with pytest.raises(ReportError, match="is damaged"):
            call(path)


def test_any_changed_byte_is_shown_or_an_error(tmp_path: Path) -> None:
    path = _record(tmp_path, FACTS)
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        for value in (0, 127, 255):
            altered = bytearray(data)
            altered[place] = value
            path.write_bytes(altered)
            for call in (read, read_latest, lambda path: read_run(path.parent)):
                with contextlib.suppress(ReportError):
                    call(path)


@pytest.mark.parametrize("kind", ["note", "steps"])
def test_what_inflates_without_bounds_is_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    path = _record(tmp_path, FACTS)
    with path.open("ab") as file:
        if kind == "note":
            packer, payload, letter = zlib.compressobj(), b"", b"n"
        else:
            packer, payload, letter = (
                zlib.compressobj(wbits=-zlib.MAX_WBITS),
                step_record._STEPS.pack(64, 101, 0.0),
                b"s",
            )
        payload += b"".join(packer.compress(b" " * 10**6) for _ in range(400)) + packer.flush()
        file.write(step_record._CHUNK.pack(letter, len(payload)) + payload)
    assert path.stat().st_size < 500_000
    tracemalloc.start()
    try:
        with pytest.raises(ReportError, match="is damaged"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()
