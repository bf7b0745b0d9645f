# SPDX-License-Identifier: Apache-2.0
"""Which failure is to blame, and the text that says so."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankwise.errors import PeerFailed
from rankwise.launch.fork_server import worker
from rankwise.launch.fork_server.worker import threads_per_rank
from rankwise.launch.messages import ReportFailure, decode, encode
from rankwise.launch.report import exit_code, failure, failure_report
from rankwise.launch.report.failure import FailedAttempt

if TYPE_CHECKING:
    from pathlib import Path


def _chained() -> RuntimeError:
    error = RuntimeError("could not save")
    error.__cause__ = PeerFailed("rank 1 failed", rank=1)
    return error


def _while_handling(first: Exception, error: Exception) -> Exception:
    try:
        try:
            raise first
        except type(first):
            raise error  # noqa: B904 - as code in an except block that itself fails
    except type(error) as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "is_echo"),
    [
        (ValueError("boom"), False),
        (PeerFailed("rank 1 failed", rank=1), True),
        (_chained(), True),
        (_while_handling(PeerFailed("rank 1 failed", rank=1), KeyError("state")), True),
        (_while_handling(ValueError("boom"), KeyError("state")), False),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_an_echo_is_distinguished_from_a_cause(error: Exception, *, is_echo: bool) -> None:
    assert failure.from_exception(error, 0, 1).secondary is is_echo


def test_the_first_failure_is_to_blame_and_echoes_are_not() -> None:
    echo = failure.from_exception(PeerFailed("rank 2 failed", rank=2), 0, 1)
    killed = failure.from_exit(2, -9, echo.time + 1)
    later = failure.from_exit(1, 1, echo.time + 2)
    assert failure.causes_first([echo, later, killed]) == (killed, later, echo)


class Odd(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_exception_that_cannot_be_read_is_described_all_the_same() -> None:
    with pytest.raises(Odd) as caught:
        raise Odd
    described = failure.from_exception(caught.value, 0, 1)
    assert described.type == "Odd"
    assert "cannot be read: ValueError" in described.message
    assert "raise Odd" in described.traceback


def test_a_text_too_long_to_read_keeps_its_beginning_and_its_end() -> None:
    described = failure.from_exception(ValueError("a" * 10_000_000 + "the end"), 0, 1)
    assert len(described.message) < 70_000
    assert described.message.startswith("aaa")
    assert described.message.endswith("the end")
    assert "characters omitted" in described.message


def test_written_files_are_read_back(tmp_path: Path) -> None:
    written = failure.from_exception(ValueError("bo\udc80m \N{SNOWMAN}"), 3, 1)
    failure.write(written, str(tmp_path / "error.json"))
    assert failure.read(str(tmp_path / "error.json")) == written
    assert failure.read(str(tmp_path / "nothing.json")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_the_report_ends_with_the_first_traceback() -> None:
    first = failure.from_exception(ValueError("boom"), 1, 1)
    echo = failure.from_exception(PeerFailed("rank 1 failed", rank=1), 0, 1)
    attempt = FailedAttempt(
        attempt=0,
        world_size=5,
        failures=(first, echo),
        ends={
            2: "had to be killed by the launcher",
            3: "had to be killed by the launcher",
            4: "left",
        },
        hostname="gpu-01",
        stderr_tail=("unused",),
        log_path="l.err",
    )
    message = ReportFailure(failed=attempt)
    assert decode(encode(message), "a") == message
    assert failure_report.whole(attempt) == (
        "[rankwise] rank 1 of 5 (gpu-01) failed first: ValueError: boom\n"
        "[rankwise] its stderr is in l.err\n"
        "[rankwise] rank 0 then also failed: PeerFailed: rank 1 failed\n"
        "[rankwise] ranks 2-3 had to be killed by the launcher\n"
        "[rankwise] rank 4 left\n"
        "[rankwise] the error of rank 1:\n"
        "ValueError: boom\n"
    )


def test_those_that_failed_too_are_in_the_order_they_did_with_what_they_say() -> None:
    first = failure.from_exit(2, -9, 0.0, at="in all_reduce")
    later = failure.from_exception(ValueError("late\nand long"), 5, 1)
    killed = failure.from_exit(4, -9, 1.0, at="in barrier")
    echoes = [failure.from_exception(PeerFailed("rank 2 failed", rank=2), rank, 1) for rank in (3, 0)]
    attempt = FailedAttempt(
        attempt=0, world_size=7, failures=(first, killed, later, *echoes), ends={1: "left", 6: "left"}, tolerated=(4,)
    )
    assert failure_report.whole(attempt) == (
        "[rankwise] rank 2 of 7 failed: killed by SIGKILL, exit code 137; "
        "if no one killed it, the machine was out of memory (see `dmesg`)\n"
        "[rankwise] it was last seen in all_reduce\n"
        "[rankwise] rank 4 failed earlier: SIGKILL, last seen in barrier\n"
        "[rankwise] rank 5 then also failed: ValueError: late\n"
        "[rankwise] ranks 0, 3 then also failed: PeerFailed: rank 2 failed\n"
        "[rankwise] ranks 1, 6 left\n"
    )


def test_the_report_of_a_signal_shows_the_last_lines() -> None:
    killed = failure.from_exit(0, -9, 0.0)
    attempt = FailedAttempt(
        attempt=0, world_size=1, failures=(killed,), ends={}, hostname="here", stderr_tail=("one", "two")
    )
    assert failure_report.whole(attempt) == (
        "[rankwise] rank 0 of 1 (here) failed: killed by SIGKILL, exit code 137; "
        "if no one killed it, the machine was out of memory (see `dmesg`)\n"
        "[rankwise] the last lines rank 0 wrote to stderr:\n"
        "  one\n"
        "  two\n"
    )


CRASH = f"""Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "{np.__file__}", line 3 in inner
  File "train.py", line 9 in step
  File "train.py", line 20 in <module>
  File "{worker.__file__}", line 60 in run_rank
  File "/venv/bin/rankwise", line 8 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


@pytest.mark.parametrize("log_path", [None, "l.err"])
def test_a_crash_is_shown_from_the_line_of_the_script_on(log_path: str | None) -> None:
    crashed = failure.from_exit(0, -11, 0.0, crash=CRASH)
    attempt = FailedAttempt(
        attempt=0, world_size=1, failures=(crashed,), ends={}, stderr_tail=("terminate called",), log_path=log_path
    )
    tail = "[rankwise] the last lines rank 0 wrote to stderr:\n  terminate called\n"
    assert failure_report.whole(attempt) == (
        "[rankwise] rank 0 of 1 failed: killed by SIGSEGV, exit code 139\n"
        + ("[rankwise] its stderr is in l.err\n" if log_path else "")
        + "Traceback (most recent call last):\n"
        '  File "train.py", line 20, in <module>\n'
        '  File "train.py", line 9, in step\n'
        f'  File "{np.__file__}", line 3, in inner\n'
        "Fatal Python error: Segmentation fault\n" + (tail if log_path else "")
    )
    assert crashed.brief == "SIGSEGV"


def test_a_crash_without_a_line_of_python_is_shown() -> None:
    assert failure.from_exit(0, -11, 0.0, crash="Fatal Python error: Segmentation fault\n\n").traceback == (
        "Fatal Python error: Segmentation fault"
    )


def test_exit_codes_are_a_shells() -> None:
    assert [exit_code.shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert exit_code.signal_name(64 + 63) == "signal 127"


@pytest.mark.parametrize(("ranks", "chosen", "expected"), [(1, None, 6), (4, None, 1), (2, None, 3), (9, None, 1)])
def test_the_cores_are_shared(monkeypatch: pytest.MonkeyPatch, ranks: int, chosen: str | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)))
    assert threads_per_rank(ranks, chosen) == expected


@pytest.mark.parametrize(("chosen", "expected"), [("2", 2), ("4,2", 4), ("", 6), ("0", 6), ("x", 6)])
def test_the_users_threads_win(monkeypatch: pytest.MonkeyPatch, chosen: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)))
    assert threads_per_rank(1, chosen) == expected


def test_numpy_draws_other_numbers_in_each_rank() -> None:
    """Where something has imported numpy.random before the fork."""
    np.random.seed(0)  # noqa: NPY002 - the state that all of a program shares
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    worker._reseed_numpy()
    assert np.random.get_state()[1].tolist() != before  # noqa: NPY002


def _failed_alike(*errors: BaseException) -> str:
    failures = tuple(failure.from_exception(error, rank, 1) for rank, error in enumerate(errors))
    return failure_report.whole(FailedAttempt(attempt=0, world_size=2, failures=failures, ends={}, hostname="gpu-01"))


def _raised(error: BaseException) -> BaseException:
    try:
        raise error  # noqa: TRY301 - only to have a traceback
    except BaseException as raised:  # noqa: BLE001 - any error, with a traceback
        return raised


def test_an_error_that_all_ranks_raise_is_no_single_ranks() -> None:
    line = _raised.__code__.co_firstlineno + 2
    text = _failed_alike(_raised(ValueError("boom")), _raised(ValueError("boom")))
    first = f"[rankwise] all 2 ranks failed with the same error: ValueError: boom, at test_launch_failure.py:{line}\n"
    assert text.startswith(f"{first}Traceback")
    other = _failed_alike(_raised(ValueError("boom")), _raised(ValueError("bang")))
    assert other.startswith("[rankwise] rank 0 of 2 (gpu-01) failed first: ValueError: boom, at ")
    assert "rank 1 then also failed: ValueError: bang" in other


def test_a_call_of_exit_is_shown_with_its_line() -> None:
    described = failure.from_exception(_raised(SystemExit("no data")), 1, 1)
    line = _raised.__code__.co_firstlineno + 2
    assert described.words == f"called sys.exit('no data') at test_launch_failure.py:{line} in _raised"
    assert described.brief == described.words
