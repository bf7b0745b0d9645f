# SPDX-License-Identifier: Apache-2.0
"""Count the calls of rankwise's Python functions in a piece of code."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import rankwise

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SOURCES = f"{Path(rankwise.__file__).parent}/"


class Function(NamedTuple):
    """A function of rankwise: its file below ``src/rankwise``, its name and first line."""

    file: str
    name: str
    line: int


Calls = Counter[Function]


def counted(run: Callable[[], object]) -> Calls:
    """Return how often ``run`` calls each function of rankwise on this thread; a generator counts each resumption."""
    calls: Calls = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES):
            file = code.co_filename.removeprefix(SOURCES)
            calls[Function(file, code.co_qualname, code.co_firstlineno)] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def files(calls: Calls) -> Counter[str]:
    """Return the number of calls into each file."""
    per_file: Counter[str] = Counter()
    for function, count in calls.items():
        per_file[function.file] += count
    return per_file


def table(title: str, calls: Calls) -> str:
    """Return a table: the files, most calls first, and the functions of each."""
    per_file = files(calls)
    lines = [f"{title}: {calls.total()} calls of {len(calls)} functions in {len(per_file)} files"]
    for file, count in per_file.most_common():
        lines.append(f"{count:6}  {file}")
        own = Counter({function: number for function, number in calls.items() if function.file == file})
        lines.extend(f"{number:12}  {function.name}:{function.line}" for function, number in own.most_common())
    return "\n".join(lines)
