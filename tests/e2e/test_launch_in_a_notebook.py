# SPDX-License-Identifier: Apache-2.0
"""``rankwise.launch`` from the cells of a real Jupyter kernel."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import Command

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Notebook:
    """A kernel, and what each cell shows."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.manager = KernelManager()
        self.manager.start_kernel(env=command.environment(), cwd=str(command.folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=30)

    def run(self, cell: str, on_text: Callable[[str], None] = lambda text: None) -> dict[str, str]:
        """Run a cell and return what it wrote, by the name of the stream; an error is a stream too.

        Args:
            cell: the code.
            on_text: called with all of stdout so far, as it comes.
        """
        shown = {"stdout": "", "stderr": "", "error": ""}

        def note(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown[content["name"]] += content["text"]
                on_text(shown["stdout"])
            elif message["msg_type"] == "error":
                shown["error"] += COLOUR.sub("", "\n".join(content["traceback"]))

        self.client.execute_interactive(textwrap.dedent(cell), timeout=80, output_hook=note)
        return shown

    def close(self) -> None:
        """Kill the kernel, as "Restart" does."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.context.destroy()
        ensure_event_loop().close()


@pytest.fixture
def notebook(command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(command.folder / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(command.folder / "ipython"))
    ours = Notebook(command)
    yield ours
    ours.close()


CELL = """
import sys, threading
import rankwise as rw, torch

class Odd(Exception):
    def __init__(self, code, why):
        super().__init__(f"{code}: {why}")

class Box:
    def __init__(self, value):
        self.value = value
    def scale(self):
        return scale

def train(data):
    with rw.join() as world:
        print("out", world.rank)
        print("err", world.rank, file=sys.stderr)
        if data is None:
            if world.rank == 1:
                raise Odd(1, "no")
            rw.barrier()
        torch.manual_seed(0)
        model = rw.replicate(torch.nn.Linear(3, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = rw.DataLoader(data, global_batch_size=8, shuffle=True)
        for _ in range(2):
            for x, y in loader:
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return Box(torch.cat([p.detach().flatten() for p in model.parameters()]))

def waits():
    try:
        # An interrupt may follow at once.
        print("ready")
        threading.Event().wait()
    finally:
        print("cleaned")

scale, method = 1, Box.scale
data = torch.utils.data.TensorDataset(torch.randn(29, 3).double(), torch.randn(29, 1).double())
# Torch's threads run in this process from now on.
_ = torch.ones(600, 600) @ torch.ones(600, 600)
"""


def test_cells_launch_ranks(notebook: Notebook) -> None:
    assert notebook.run(CELL) == {"stdout": "", "stderr": "", "error": ""}

    shown = notebook.run("values = rw.launch(train, data, ranks=2)")
    assert sorted(shown["stdout"].splitlines()) == ["out 0", "out 1"], shown
    errors = shown["stderr"].splitlines()
    assert errors[0].startswith("[rankwise] 2 ranks on this machine")
    assert {"[rank 0/2] err 0", "[rank 1/2] err 1"} <= set(errors)
    shown = notebook.run(
        """
        scale = 2
        alone = train(data).value
        for value in values:
            print(type(value) is Box, torch.allclose(value.value, alone, rtol=1e-10, atol=0), value.scale())
        print(Box.scale is method)
        """
    )
    assert shown["stdout"] == "out 0\nTrue True 2\nTrue True 2\nTrue\n", shown

    shown = notebook.run("rw.launch(train, None, ranks=2)")
    *_, last = shown["error"].partition("Odd: 1: no\n[rank 1/2 on ")
    assert re.search(r'in train\n    raise Odd\(1, "no"\)\nOdd: 1: no$', last), shown["error"]
    assert notebook.run("isinstance(sys.last_value, Odd) or 1 / 0")["error"] == ""

    kernel = notebook.manager.provisioner.pid  # type: ignore[union-attr]

    def interrupt(text: str) -> None:
        if text == "ready\nready\n":
            # As the interrupt button does it: the whole group of the kernel hears of it.
            os.killpg(kernel, signal.SIGINT)

    shown = notebook.run("rw.launch(waits, ranks=2)", interrupt)
    assert sorted(shown["stdout"].split()) == ["cleaned", "cleaned", "ready", "ready"], shown
    assert shown["error"].rstrip().endswith("KeyboardInterrupt:"), shown["error"]
    assert notebook.command.processes() == [kernel]


def test_the_ranks_end_with_a_killed_kernel(notebook: Notebook) -> None:
    notebook.run(CELL)
    notebook.client.execute("rw.launch(waits, ranks=2)")
    text = ""
    while text != "ready\nready\n":
        message = notebook.client.get_iopub_msg(timeout=80)
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            text += message["content"]["text"]
    pids = notebook.command.processes()
    assert len(pids) >= 5
    notebook.manager.shutdown_kernel(now=True)
    assert notebook.command.wait_until_gone(pids, 5.0) == []
