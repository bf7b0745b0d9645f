# SPDX-License-Identifier: Apache-2.0
"""Every page of ``docs/`` runs when it is pasted: its set-up, then its blocks of Python in their order.

The folded set-up at the top says how: "Start it with `rankwise run -n 2 page.py`". A page without one is complete by
itself, and runs on two ranks. Blocks continue one another, in one process per rank. Two kinds stand alone, after the
set-ups above them:

- after ``<!-- ranks: 8 -->``, a block that takes another number of ranks; the sentence before it says so;
- the two columns of a table. Each block is a script, and both columns come to the same: what ``<!-- check ... -->``
  before the table sets ``check`` to, or the lines that they print that start with RESULT, on rank 0.

``<!-- not run: needs GPUs -->`` leaves out the next block, and says why. Pages in Chinese show the code of the English
ones: a test compares them.
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
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if path.name not in ELSEWHERE or path.parent != DOCS
    if "zh" not in path.parts and SHOWN.search(path.read_text(encoding="utf-8"))
)
PIECE = re.compile(
    r"<details>\n<summary>(?P<title>Set-up [^<]*)</summary>(?P<setup>.*?)</details>"
    r"|<!-- check\n(?P<check>.*?)-->|<!-- ranks: (?P<ranks>\d+) -->|<!-- not run: (?P<why>[^>]+) -->"
    r"|(?P<table><table>.*?</table>)"
    r"|^```python\n(?P<alone>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"`(?:python|rankwise run -n (?P<ranks>\d+)(?P<module> -m [\w.]+)?) page\.py`")
MOST_LINES = 25
"""Of code in a set-up: more than a reader would paste without reading."""
WARM = {"from-accelerate.md": "import accelerate"}
"""What to import once for all scripts of a page."""
RUNNER = """
import atexit, os, runpy, sys, traceback
WARM
for number in NUMBERS:
    child = os.fork()
    if child == 0:
        # Keys of the job's store are kept apart by attempt, so that scripts do not find those of one another; torch's
        # store has one attempt, so theirs is at a port of their own.
        os.environ["RANKWISE_ATTEMPT"] = str(number)
        os.environ["MASTER_PORT"] = PORTS[number]
        if os.environ["RANK"] == "0":
            os.dup2(os.open(f"{number}.out", os.O_CREAT | os.O_WRONLY), 1)
        code = 1
        try:
            os.chdir(str(number))
            runpy.run_path("page.py", run_name="__main__")
            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"script {number} failed")
"""
"""Runs scripts one after another, each in a process that is forked for it: libraries are imported once."""
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
class Block:
    """One block of a page, or the two of a table."""

    page: str
    """Its path within docs."""
    number: int
    setup: str
    """Of all set-ups above it."""
    check: str
    ranks: int | None
    """If it takes another number of them than the page."""
    codes: tuple[str, ...]

    def __str__(self) -> str:
        """Return what a failing test is named after."""
        return f"{self.page}-{self.number}"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page has to run."""

    words: tuple[str, ...]
    """The arguments of ``rankwise run`` before the name of the script; none: under ``python``."""
    script: str
    """All that is pasted into one file."""
    alone: tuple[Block, ...]
    """Blocks on other numbers of ranks."""
    pairs: tuple[Block, ...]
    """Blocks side by side."""


def read(page: str) -> Page:
    """Return what a page has to run, in its order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    setup, check, ranks, number, is_run = "", "", None, 0, True
    script, alone, pairs = [], [], []
    for piece in PIECE.finditer(text):
        if piece["title"]:
            code = "\n".join(BLOCK.findall(piece["setup"]))
            setup += code
            script.append(code)
        elif piece["check"]:
            check = piece["check"]
        elif piece["ranks"]:
            ranks = int(piece["ranks"])
        elif piece["why"]:
            is_run = False
        else:
            number += 1
            codes = (piece["alone"],) if piece["table"] is None else tuple(BLOCK.findall(piece["table"]))
            block = Block(page=page, number=number, setup=setup, check=check, ranks=ranks, codes=codes)
            if is_run and len(codes) > 1:
                pairs.append(block)
            elif is_run and ranks:
                alone.append(block)
            elif is_run:
                script.append(codes[0])
            check, ranks, is_run = "", None, True
    told = "".join(piece["setup"] or "" for piece in PIECE.finditer(text))
    command = COMMAND.search(" ".join(told.split()))
    assert command or not told, f"the set-up of {page} does not say how to start it"
    words = ("-n", "2") if command is None else ("-n", command["ranks"], *(command["module"] or "").split())
    return Page(
        words=words if command is None or command["ranks"] else (),
        script="" if pairs else "\n".join(script),
        alone=tuple(alone),
        pairs=tuple(pairs),
    )


READ = {page: read(page) for page in PAGES}
PASTED = [page for page in PAGES if READ[page].script]
SIDE_BY_SIDE = [page for page in PAGES if READ[page].pairs]
ALONE = [block for page in PAGES for block in READ[page].alone]


def started(command: Command, page: Page, side: int) -> Started:
    """Start one column of a page's tables, each block as a script in a folder of its own."""
    folder = folder_of(command, side)
    for block in page.pairs:
        place = folder / str(block.number)
        place.mkdir(parents=True)
        # A rank that closes Gloo's group before the others have connected breaks their connection.
        code = textwrap.dedent(block.codes[side]).replace(
            "\ndist.destroy_process", "\ndist.barrier()\ndist.destroy_process"
        )
        script = f"{block.setup}\n{code}\n{block.check}\n{AFTERWARDS}"
        (place / "page.py").write_text(script, encoding="utf-8")
    numbers = [block.number for block in page.pairs]
    ports = dict(zip(numbers, free_ports(len(numbers)), strict=True))
    runner = RUNNER.replace("NUMBERS", repr(numbers)).replace("PORTS", repr(ports))
    (folder / "all.py").write_text(runner.replace("WARM", WARM.get(page.pairs[0].page, "")), encoding="utf-8")
    return command.start_in(folder, *(page.words or ("-n", "1")), "all.py")


def free_ports(count: int) -> list[str]:
    """Return ports that are free, and were held together: no two are the same."""
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(server.getsockname()[1]) for server in servers]


def folder_of(command: Command, side: int) -> Path:
    """Return where one column of a page runs."""
    return command.folder / ("left", "right")[side]


def results(said: str) -> list[Any]:
    """Return what a script came to: each RESULT line as a value, or as text where it is none."""
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
@pytest.mark.parametrize("page", PASTED)
def test_a_page_runs_when_pasted(command: Command, page: str) -> None:
    words = READ[page].words
    command.write("page.py", READ[page].script)
    done = command.run(*words, "page.py") if words else command.python("page.py")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.timeout(110)
@pytest.mark.parametrize("block", ALONE, ids=str)
def test_a_block_on_other_ranks_runs(command: Command, block: Block) -> None:
    command.write("page.py", f"{block.setup}\n{block.codes[0]}")
    done = command.run("-n", str(block.ranks), "page.py")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.timeout(110)
@pytest.mark.parametrize("page", SIDE_BY_SIDE)
def test_both_sides_run_and_give_the_same(command: Command, page: str) -> None:
    pairs = READ[page].pairs
    assert all(len(block.codes) == 2 for block in pairs), "a table has one block of Python per cell, and two cells"
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started(command, READ[page], side)) for side in range(2)]
        for process in running:
            stack.callback(process.terminate)
        said = [process.communicate(timeout=100) for process in running]
    for process, (out, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors + out
    for block in pairs:
        left, right = (_came_to(folder_of(command, side) / f"{block.number}.out") for side in range(2))
        assert len(left) == len(right), f"{block}: one side has a result, and the other has none"
        for one, other in zip(left, right, strict=True):
            expected = pytest.approx(other, rel=1e-5, abs=1e-6) if isinstance(other, list) else other
            assert one == expected, str(block)


def _came_to(output: Path) -> Sequence[Any]:
    return results(output.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_left_out(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    pieces = list(PIECE.finditer(text))
    run = [code for piece in pieces for code in BLOCK.findall(piece["setup"] or piece["table"] or "")]
    run += [piece["alone"] for piece in pieces if piece["alone"]]
    assert len(run) == len(SHOWN.findall(text))


@pytest.mark.parametrize("page", [*PAGES, *sorted(ELSEWHERE)])
def test_a_reader_sees_what_a_page_needs(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert "<!-- setup" not in text, "a set-up is for readers: <details>, as on other pages"
    for piece in PIECE.finditer(text):
        for code in BLOCK.findall(piece["setup"] or ""):
            assert sum(1 for line in code.splitlines() if line) <= MOST_LINES


@pytest.mark.parametrize("block", ALONE, ids=str)
def test_the_sentence_before_a_block_says_how_many_ranks_it_takes(block: Block) -> None:
    before = (DOCS / block.page).read_text(encoding="utf-8").partition(block.codes[0])[0]
    paragraph = before.rpartition(f"<!-- ranks: {block.ranks} -->")[0].rstrip().rpartition("\n\n")[2]
    assert f"`rankwise run -n {block.ranks} page.py`" in " ".join(paragraph.split())
