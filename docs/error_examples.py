# SPDX-License-Identifier: Apache-2.0
"""Runs the snippets of docs/errors.md, and writes below each the error that it raises.

``python docs/error_examples.py`` does this; a test runs each snippet and compares. A comment before a snippet says how
it runs: ``<!-- ranks: 2 -->`` under ``rankwise run``, ``<!-- processes: 2 -->`` as processes that another launcher
started, else alone. Where several ranks raise the error of the section, that of the lowest is shown.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent / "errors.md"
SECTION = re.compile(
    r"^#+ `(?P<error>\w+)`\n(?:(?!^#).)*?(?:<!-- (?P<mode>ranks|processes): (?P<count>\d) -->\n\n)?"
    r"```python\n(?P<code>(?:(?!^#).)*?)^```\n\n```text\n(?P<shown>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
SETUP = re.compile(r"<details>.*?```python\n(.*?)```", re.DOTALL)
LIMIT_SECONDS = 60
AROUND = """
import runpy, warnings
warnings.simplefilter("error", UserWarning)
try:
    runpy.run_path("train.py", run_name="__main__")
except (Exception, UserWarning) as error:
    if type(error).__name__ == ERROR:
        import os
        from pathlib import Path
        kind = type(error)
        shown = Path("shown." + os.environ.get("RANK", "0"))
        shown.with_suffix(".part").write_text(f"{kind.__module__}.{kind.__name__}: {error}\\n")
        shown.with_suffix(".part").rename(shown)
    raise
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A section of the page with a snippet."""

    error: str
    mode: str
    count: int
    code: str
    shown: str


def examples() -> list[Example]:
    """Return those of the page, in its order."""
    page = PAGE.read_text(encoding="utf-8")
    setup = "\n".join(SETUP.findall(page))
    return [
        Example(
            error=found["error"],
            mode=found["mode"] or "alone",
            count=int(found["count"] or 1),
            code=setup + found["code"],
            shown=found["shown"],
        )
        for found in SECTION.finditer(page)
    ]


def raised(example: Example) -> str:
    """Run a snippet, and return the error as text, with what differs between machines and runs replaced.

    Raises:
        RuntimeError: no rank raised the error of the section.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        (folder / "train.py").write_text(example.code, encoding="utf-8")
        (folder / "around.py").write_text(AROUND.replace("ERROR", repr(example.error)), encoding="utf-8")
        with (folder / "output").open("w+", encoding="utf-8") as output:
            processes = [
                subprocess.Popen(
                    command, cwd=folder, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
                )
                for command, variables in _commands(example)
            ]
            for process in processes:
                running.callback(process.wait)
                running.callback(process.kill)
            deadline = time.monotonic() + LIMIT_SECONDS
            # Of ranks that another launcher started, those that wait for one that was refused wait for long.
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if example.mode == "processes" and any(folder.glob("shown.[0-9]")):
                    break
                time.sleep(0.05)
            found = sorted(folder.glob("shown.[0-9]"))
            if not found:
                output.seek(0)
                raise RuntimeError(f"no rank raised {example.error}:\n{output.read()}")
        return _plain(found[0].read_text(encoding="utf-8"), folder)


def _commands(example: Example) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands of a snippet, each with its variables."""
    if example.mode == "ranks":
        return [([sys.executable, "-m", "rankwise", "run", "-n", str(example.count), "around.py"], {})]
    if example.mode == "alone":
        return [([sys.executable, "around.py"], {})]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    same = {"WORLD_SIZE": str(example.count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        ([sys.executable, "around.py"], same | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(example.count)
    ]


def _plain(text: str, folder: Path) -> str:
    """Return the text as on a machine called gpu-01, in the folder /home/me, with ports and times that are the same."""
    text = text.replace(str(folder), "/home/me").replace(sys.executable, "python")
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "gpu-01", text)
    text = re.sub(r"(?<=\.)\w+/(?=train\.py)", "", text)
    text = re.sub(r"(127\.0\.0\.1|sport = ):\d+", r"\1:29500", text)
    text = re.sub(r"\b(after|for) \d+\.\d+ s\b", r"\1 0.1 s", text)
    return re.sub(r"\b2\.\d+\.\d+\+\w+", "2.15.0", text)


def write() -> None:
    """Run all snippets, and write what they raise into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for example in examples():
        print(example.error, flush=True)
        shown = raised(example)
        old = SECTION.search(page, re.search(rf"^#+ `{example.error}`$", page, re.MULTILINE).start())  # type: ignore[union-attr]
        page = page[: old.start("shown")] + shown + page[old.end("shown") :]  # type: ignore[union-attr]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write()
