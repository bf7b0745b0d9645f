# SPDX-License-Identifier: Apache-2.0
"""Every block of Python in ``docs/`` runs, and the two sides of a table give the same.

What a page hides in comments before a table or block is run with it: ``<!-- setup ... -->`` before both sides (until
the next one), ``<!-- check ... -->`` after both; ``<!-- ranks: 2 -->`` says how many ranks it takes, else one on pages
``from-*.md`` and two on others. Where both sides have set ``check`` in the end, or print lines that start with RESULT,
rank 0's are compared. ``<!-- not run: needs GPUs -->`` leaves out the next block, and says why.

Pages other than ``from-*.md`` find ``Net``, ``train_set`` and ``loss_fn``; where a page has no setup before a block
that does not join, a world, a model, an optimizer, a loader and a batch too. Pages in Chinese show the code of the
English ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from conftest import Command, Started

ELSEWHERE = {"errors.md", "from-a-function.md"}
"""One raises, one starts its ranks itself; each has a test of its own."""
DOCS = Path(__file__).parents[2] / "docs"
SHOWN = re.compile(r"^ *```(?:python|py)\b", re.MULTILINE)
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.name not in ELSEWHERE and "zh" not in path.parts and SHOWN.search(path.read_text(encoding="utf-8"))
)
LEFT = {"from-horovod.md": ("-m", "rankwise.compat.horovod")}
"""What runs the left side, where that is not `rankwise run` alone."""
PIECE = re.compile(
    r"<!-- (?P<kind>setup|check)\n(?P<code>.*?)-->|<!-- ranks: (?P<ranks>\d+) -->|<!-- not run: (?P<why>[^>]+) -->"
    r"|(?P<table><table>.*?</table>)"
    r"|^```python\n(?P<alone>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ALL_PAGES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import rankwise as rw
torch.manual_seed(0)
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
train_set = TensorDataset(torch.randn(130, 3), torch.randn(130, 1))
loss_fn = nn.functional.mse_loss
"""
JOINED = """
world = rw.join()
model = rw.replicate(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = rw.DataLoader(train_set, global_batch_size=65)
x, y = next(iter(loader))
"""
WARM = {"from-accelerate.md": "import accelerate"}
"""What to import once for all snippets of a page."""
RUNNER = """
import atexit, os, runpy, sys, traceback
WARM
for number in NUMBERS:
    child = os.fork()
    if child == 0:
        # Keys of the job's store are kept apart by attempt, so that snippets do not find those of one another; torch's
        # store has one attempt, so theirs is at a port of their own.
        os.environ["RANKWISE_ATTEMPT"] = str(number)
        os.environ["MASTER_PORT"] = PORTS[number]
        if os.environ["RANK"] == "0":
            os.dup2(os.open(f"{number}.out", os.O_CREAT | os.O_WRONLY), 1)
        code = 1
        try:
            os.chdir(str(number))
            runpy.run_path("train.py", run_name="__main__")
            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"snippet {number} failed")
"""
"""Runs snippets one after another, each in a process that is forked for it: libraries are imported once."""
AFTERWARDS = """
def _plain(value):
    import torch
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [_plain(one) for one in value.values()]
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value

import json as _json, os as _os
if "check" in globals() and _os.environ.get("RANK", "0") == "0":
    print("RESULT", _json.dumps(_plain(check)), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """One table of a page, or one block outside of tables."""

    page: str
    """Its path within docs."""
    number: int
    setup: str
    check: str
    ranks: int
    sides: tuple[str, ...]

    def __str__(self) -> str:
        """Return what a failing test is named after."""
        return f"{self.page}-{self.number}"


def snippets_of(path: Path) -> Iterator[Snippet]:
    """Return what a page has to run, in its order."""
    page = str(path.relative_to(DOCS))
    moves_in = page.startswith("from-")
    fewest = 1 if moves_in else 2
    setup, check, ranks, number, is_run = None, "", fewest, 0, True
    for piece in PIECE.finditer(path.read_text(encoding="utf-8")):
        if piece["kind"] == "setup":
            setup = piece["code"]
        elif piece["kind"] == "check":
            check = piece["code"]
        elif piece["ranks"]:
            ranks = int(piece["ranks"])
        elif piece["why"]:
            is_run = False
        else:
            number += 1
            blocks = (piece["alone"],) if piece["table"] is None else tuple(BLOCK.findall(piece["table"]))
            if is_run:
                found = JOINED if setup is None and not any("rw.join(" in block for block in blocks) else setup or ""
                before = found if moves_in else ALL_PAGES + found
                yield Snippet(page=page, number=number, setup=before, check=check, ranks=ranks, sides=blocks)
            check, ranks, is_run = "", fewest, True


GROUPS: dict[tuple[str, int, int], list[Snippet]] = {}
"""The snippets that run one after another in the same ranks."""
for one in (snippet for path in PAGES for snippet in snippets_of(path)):
    GROUPS.setdefault((one.page, one.ranks, len(one.sides)), []).append(one)


def started(command: Command, snippets: Sequence[Snippet], side: int) -> Started:
    """Start one side of snippets that take equally many ranks, each as a script in a folder of its own."""
    first = snippets[0]
    folder = folder_of(command, first, side)
    for snippet in snippets:
        place = folder / str(snippet.number)
        place.mkdir(parents=True)
        # A rank that closes Gloo's group before the others have connected breaks their connection.
        code = textwrap.dedent(snippet.sides[side]).replace(
            "\ndist.destroy_process", "\ndist.barrier()\ndist.destroy_process"
        )
        parts = (snippet.setup, code, snippet.check, AFTERWARDS)
        (place / "train.py").write_text("\n".join(parts), encoding="utf-8")
    numbers = str([snippet.number for snippet in snippets])
    ports = free_ports(len(snippets))
    by_number = repr({snippet.number: port for snippet, port in zip(snippets, ports, strict=True)})
    runner = RUNNER.replace("NUMBERS", numbers).replace("PORTS", by_number).replace("WARM", WARM.get(first.page, ""))
    (folder / "all.py").write_text(runner, encoding="utf-8")
    before = LEFT.get(first.page, ()) if side == 0 and len(first.sides) > 1 else ()
    return command.start_in(folder, "-n", str(first.ranks), *before, "all.py")


def free_ports(count: int) -> list[str]:
    """Return ports that are free, and were held together: no two are the same."""
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(server.getsockname()[1]) for server in servers]


def folder_of(command: Command, snippet: Snippet, side: int) -> Path:
    """Return where one side of the snippets runs that go with this one."""
    return command.folder / f"{snippet.ranks}-{len(snippet.sides)}-{('left', 'right')[side]}"


def results(said: str) -> list[Any]:
    """Return what a side came to: each RESULT line as a value, or as text where it is none."""
    found: list[Any] = []
    for text in re.findall(r"^RESULT (.*)$", said, re.MULTILINE):
        try:
            found.append(list(_numbers(json.loads(text))))
        except ValueError:
            found.append(text.strip())
    return found


def _numbers(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    else:
        yield value


@pytest.mark.timeout(110)
@pytest.mark.parametrize(("page", "ranks", "num_sides"), GROUPS)
def test_both_sides_run_and_give_the_same(command: Command, page: str, ranks: int, num_sides: int) -> None:
    assert 1 <= num_sides <= 2, "a table has one block of Python per cell, and two cells"
    snippets = GROUPS[page, ranks, num_sides]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started(command, snippets, side)) for side in range(num_sides)]
        for process in running:
            stack.callback(process.terminate)
        said = [process.communicate(timeout=100) for process in running]
    for process, (out, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors + out
    for snippet in snippets:
        came_to = [
            results((folder_of(command, snippet, side) / f"{snippet.number}.out").read_text())
            for side in range(num_sides)
        ]
        for other in came_to[1:]:
            assert len(came_to[0]) == len(other), f"{snippet}: one side has a result, and the other has none"
            for left, right in zip(came_to[0], other, strict=True):
                expected = pytest.approx(right, rel=1e-5, abs=1e-6) if isinstance(right, list) else right
                assert left == expected, str(snippet)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_no_block_is_left_out(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    left_out = text.count("<!-- not run: ")
    assert sum(len(snippet.sides) for snippet in snippets_of(path)) + left_out == len(SHOWN.findall(text))
