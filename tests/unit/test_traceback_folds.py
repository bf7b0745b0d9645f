# SPDX-License-Identifier: Apache-2.0
"""A traceback keeps the user's frames, and counts those of torch and rankwise."""

from __future__ import annotations

import traceback

import pytest
import torch

import rankwise as rw
from rankwise.errors import NotJoined
from rankwise.health.traceback_folds import folded
from rankwise.launch.report import failure


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _error() -> Exception:
    try:
        Net()(torch.ones(2, 4))
    except RuntimeError as error:
        try:
            raise ValueError("no batch") from error  # noqa: TRY301 - only to have a traceback
        except ValueError as raised:
            return raised
    raise AssertionError


def test_frames_of_torch_are_counted_between_those_of_the_user() -> None:
    text = failure.from_exception(_error(), 0, 1).traceback
    lines = [line for line in text.splitlines() if line and not line.startswith(("    ", "Trace", "The above"))]
    assert [line.strip() for line in lines] == [
        f'File "{__file__}", line {_error.__code__.co_firstlineno + 2}, in _error',
        "[2 frames of torch hidden]",
        f'File "{__file__}", line {Net.forward.__code__.co_firstlineno + 1}, in forward',
        lines[3].strip(),
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 3x1)",
        f'File "{__file__}", line {_error.__code__.co_firstlineno + 5}, in _error',
        "ValueError: no batch",
    ]
    assert lines[3].endswith(" frames of torch hidden; RANKWISE_TRACEBACK=full shows them]")


def test_all_frames_are_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_TRACEBACK", "full")
    error = _error()
    assert failure.from_exception(error, 0, 1).traceback == "".join(traceback.format_exception(error))


def test_a_call_of_rankwise_ends_with_the_line_that_made_it() -> None:
    with pytest.raises(NotJoined) as caught:
        rw.replicate(Net())
    described = failure.from_exception(caught.value, 0, 1)
    assert "of rankwise hidden; RANKWISE_TRACEBACK=full shows them]\n" in described.traceback
    assert described.line.startswith("test_traceback_folds.py:")


def _even(number: int) -> int:
    return _odd(number)


def _odd(number: int) -> int:
    return _even(number)


@pytest.mark.parametrize("num_frames", [1, 2])
def test_lines_that_recur_are_shown_once(num_frames: int) -> None:
    def again() -> None:
        again()

    with pytest.raises(RecursionError) as caught:
        again() if num_frames == 1 else _even(0)
    text = folded("".join(traceback.format_exception(caught.value)))
    assert text.count(f'  File "{__file__}"') == 1 + num_frames
    assert " frames of the same lines hidden; RANKWISE_TRACEBACK=full shows them]\nRecursionError: " in text
    assert int(text.partition("  [")[2].split()[0]) > 50


RANKWISE, PYTHON = rw.__file__, traceback.__file__
CAUSE = f"""Traceback (most recent call last):
  File "{RANKWISE}", line 1, in read
    source()
  File "{PYTHON}", line 2, in load
    open()
  File "train.py", line 3, in sample
    crop()
ValueError: bad sample

The above exception was the direct cause of the following exception:

"""
ERROR = f"""Traceback (most recent call last):
  File "train.py", line 9, in <module>
    loop()
  File "{RANKWISE}", line 5, in read
    raise DatasetError()
DatasetError: dataset[3] raised %s
"""


def test_an_error_that_rankwise_caught_and_repeats_is_one_traceback_with_it() -> None:
    text = folded(CAUSE + ERROR % "ValueError: bad sample")
    assert text == (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    loop()\n'
        "  [3 frames of rankwise and Python hidden; RANKWISE_TRACEBACK=full shows them]\n"
        '  File "train.py", line 3, in sample\n    crop()\n'
        "DatasetError: dataset[3] raised ValueError: bad sample\n"
    )


@pytest.mark.parametrize("cause", [CAUSE, CAUSE.replace(RANKWISE, "train.py")])
def test_a_cause_that_the_error_does_not_repeat_or_that_the_user_caught_is_shown(cause: str) -> None:
    text = folded(cause + ERROR % ("another" if RANKWISE in cause else "ValueError: bad sample"))
    assert text.count("Traceback") == 2
    assert "ValueError: bad sample\n\nThe above exception was the direct cause of" in text


def test_a_stack_without_a_line_of_the_user_remains() -> None:
    text = f'Traceback (most recent call last):\n  File "{torch.__file__}", line 7, in f\n    g()\nValueError: x\n'
    assert folded(text) == text
