# SPDX-License-Identifier: Apache-2.0
"""What becomes of the ranks' lines: through real pipes, into descriptors of our own."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

import pytest

from rankwise.launch.agent import output
from rankwise.launch.agent.output import LONGEST_LINE_BYTES, Output, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Shown:
    """Two files in the place of the launcher's stdout and stderr."""

    def __init__(self, folder: Path) -> None:
        self.paths = {1: folder / "stdout", 2: folder / "stderr"}
        self.descriptors = {
            number: os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for number, path in self.paths.items()
        }

    def fill_stdout(self) -> None:
        """Put a disk that is full behind stdout."""
        os.close(self.descriptors[1])
        self.descriptors[1] = os.open("/dev/full", os.O_WRONLY)

    def pipe_stdout(self) -> int:
        """Put a pipe behind stdout; return its reading end."""
        os.close(self.descriptors[1])
        reader, self.descriptors[1] = os.pipe()
        return reader

    def close_stdout(self) -> None:
        """Close stdout, as the launcher's end does."""
        os.close(self.descriptors.pop(1))

    def __getitem__(self, number: int) -> bytes:
        return self.paths[number].read_bytes()


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """Where the launcher's streams go in these tests."""
    streams = Shown(tmp_path)
    monkeypatch.setattr(output, "Terminal", lambda number: Terminal(streams.descriptors[number]))
    yield streams
    for descriptor in streams.descriptors.values():
        os.close(descriptor)


def _write(carrier: Output, pieces: list[tuple[int, int, bytes]], world_size: int) -> None:
    opened = {rank: carrier.open_rank(rank, world_size) for rank in range(world_size)}
    for rank, number, data in pieces:
        os.write(opened[rank][number], data)
    for descriptors in opened.values():
        for descriptor in descriptors:
            os.close(descriptor)
    carrier.drain(10.0)


def test_a_line_in_pieces_is_shown_whole(shown: Shown) -> None:
    carrier = Output()
    _write(carrier, [(0, 1, b"one "), (1, 1, b"other\n"), (0, 1, b"line\n")], 2)
    assert sorted(shown[1].splitlines()) == [b"one line", b"other"]
    carrier.close()


def test_a_warning_that_names_its_rank_has_no_second_prefix(shown: Shown) -> None:
    carrier = Output()
    named, other = b"[rankwise] warning: [rank 1/2 on gpu] slow\n", b"[rankwise] warning: slow\n"
    _write(carrier, [(1, 2, named), (1, 2, other)], 2)
    assert shown[2] == named + b"[rank 1/2] " + other
    carrier.close()


def test_stderr_has_the_rank_in_front_of_every_line(shown: Shown) -> None:
    carrier = Output()
    _write(carrier, [(2, 2, b"a\n\nb\r\nc")], 3)
    assert shown[2] == b"[rank 2/3] a\n[rank 2/3] \n[rank 2/3] b\r\n[rank 2/3] c"
    carrier.close()


def test_a_progress_bar_stays_in_its_line(shown: Shown) -> None:
    carrier = Output()
    _write(carrier, [(0, 2, b"\r 10%\r 20%\n")], 2)
    assert shown[2] == b"\r[rank 0/2]  10%\r[rank 0/2]  20%\n"
    carrier.close()


def test_a_line_without_end_is_shown_before_it_fills_the_memory(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LINE_WAIT_SECONDS", 1000.0)
    reader = shown.pipe_stdout()
    carrier = Output()
    stdin, stdout, stderr = carrier.open_rank(1, 2)
    os.write(stdout, b"begins: ")
    # As much as fits, and one more: os.write returns once the thread has taken the rest.
    for _ in range(2):
        os.write(stdout, b"x" * LONGEST_LINE_BYTES)
    seen = b""
    try:
        while len(seen) <= LONGEST_LINE_BYTES:
            assert select.select([reader], [], [], 10.0)[0], "the unfinished line is kept back"
            seen += os.read(reader, 1 << 20)
    finally:
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        carrier.drain(10.0)
        carrier.close()
    shown.close_stdout()
    while data := os.read(reader, 1 << 20):
        seen += data
    os.close(reader)
    assert seen == b"begins: " + b"x" * 2 * LONGEST_LINE_BYTES


def test_an_unfinished_line_is_shown_when_nothing_follows(shown: Shown) -> None:
    reader = shown.pipe_stdout()
    carrier = Output()
    stdin, stdout, stderr = carrier.open_rank(1, 2)
    os.write(stdout, b"line\nname? ")
    seen = b""
    try:
        while seen != b"line\nname? ":
            assert select.select([reader], [], [], 10.0)[0], "a question is kept back"
            seen += os.read(reader, 4096)
    finally:
        for descriptor in (stdin, stdout, stderr, reader):
            os.close(descriptor)
        carrier.drain(10.0)
        carrier.close()


def test_the_last_lines_are_kept(shown: Shown) -> None:
    carrier = Output()
    _write(carrier, [(1, 2, b"".join(b"%d\n" % number for number in range(100)))], 2)
    assert carrier.stderr_tail(1) == [str(number) for number in range(80, 100)]
    assert carrier.stderr_tail(0) == []
    assert shown[2].count(b"\n") == 100
    carrier.close()


def test_bytes_that_are_no_text_come_through(shown: Shown) -> None:
    carrier = Output()
    _write(carrier, [(0, 1, b"\xff\x00\n"), (1, 2, b"\xfe\n")], 2)
    assert shown[1] == b"\xff\x00\n"
    assert carrier.stderr_tail(1) == ["\ufffd"]
    carrier.close()


def test_an_unfinished_line_is_ended_before_anothers(shown: Shown) -> None:
    terminal = Terminal(shown.descriptors[1])
    terminal.write(b"50%", "one", ends_line=False)
    terminal.write(b" 60%", "one", ends_line=False)
    terminal.write(b"note\n", "other", ends_line=True)
    terminal.write(b"70%\n", "one", ends_line=True)
    assert shown[1] == b"50% 60%\nnote\n70%\n"


def test_log_files_are_added_to(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "rank-1.err").write_text("of an earlier run\n")
    carrier = Output(str(tmp_path))
    _write(carrier, [(1, 2, b"now\n"), (0, 2, b"zero\n")], 2)
    carrier.append_to_log(1, 0, "Traceback\n")
    assert (tmp_path / "rank-1.err").read_text() == "of an earlier run\nnow\nTraceback\n"
    assert shown[2] == b"zero\n"
    assert carrier.log_path(1, 2) == str(tmp_path / "rank-1.restart-2.err")
    carrier.close()


def test_a_full_disk_ends_the_file_and_not_the_stream(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "rank-0.out").symlink_to("/dev/full")
    carrier = Output(str(tmp_path))
    _write(carrier, [(0, 1, b"one\n"), (0, 1, b"two\n"), (1, 1, b"kept\n")], 2)
    carrier.close()
    assert shown[1] == b"one\ntwo\n"
    assert b"rank-0.out: No space left on device; from now on the output of that rank is shown here" in shown[2]
    assert (tmp_path / "rank-1.out").read_bytes() == b"kept\n"


def test_output_of_a_rank_is_shown_if_its_file_is_full_or_cannot_be_opened(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "rank-1.out").symlink_to("/dev/full")
    (tmp_path / "rank-2.err").mkdir()
    carrier = Output(str(tmp_path))
    _write(carrier, [(1, 1, b"one\n"), (2, 2, b"two\n"), (2, 1, b"kept\n")], 3)
    carrier.close()
    assert shown[1] == b"one\n"
    assert b"[rank 2/3] two\n" in shown[2]
    assert b"rank-2.err: Is a directory; from now on the output of that rank is shown here" in shown[2]
    assert (tmp_path / "rank-2.out").read_bytes() == b"kept\n"


def test_a_full_disk_behind_stdout_is_reported_and_the_log_files_continue(shown: Shown, tmp_path: Path) -> None:
    shown.fill_stdout()
    carrier = Output(str(tmp_path))
    _write(carrier, [(0, 1, b"one\n"), (0, 1, b"two\n"), (1, 2, b"err\n")], 2)
    carrier.close()
    assert shown[2].count(b"No space left on device") == 1
    assert b"[rankwise] /dev/full: No space left on device; the ranks continue" in shown[2]
    assert (tmp_path / "rank-0.out").read_bytes() == b"one\ntwo\n"
    assert carrier.problem() == "", "nothing failed because of it"


def test_a_full_disk_behind_stdout_ends_the_streams_where_no_file_keeps_them(shown: Shown) -> None:
    shown.fill_stdout()
    carrier = Output()
    stdin, writer, stderr = carrier.open_rank(0, 2)
    os.write(writer, b"one\n")
    poll = select.poll()
    poll.register(writer, 0)
    assert poll.poll(10_000), "the other end is still open"
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"two\n")
    for descriptor in (stdin, writer, stderr):
        os.close(descriptor)
    carrier.drain(10.0)
    carrier.close()
    assert carrier.problem() == "/dev/full: No space left on device"
    assert b"[rankwise] /dev/full: No space left on device; from now on writes of the ranks fail" in shown[2]


def test_an_error_that_is_no_text_is_logged_all_the_same(shown: Shown, tmp_path: Path) -> None:
    carrier = Output(str(tmp_path))
    carrier.append_to_log(0, 0, "file \udcff.txt\n")
    carrier.close()
    assert (tmp_path / "rank-0.err").read_text() == "file \\udcff.txt\n"
