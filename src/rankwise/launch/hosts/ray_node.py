# SPDX-License-Identifier: Apache-2.0
"""One node's end of a job on Ray: an actor, which starts this node's launcher as a process and relays what it says.

The kernel kills the launcher when the actor's process ends, however it ends, and the ranks with it. Nothing of the
user's is unpickled here. Imported by ``on_ray`` and ``ray_cluster``, and by its name in the actor.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.launch.agent.output import STDERR, STDOUT
from rankwise.launch.function.launcher_process import LauncherProcess
from rankwise.version import VERSION
from rankwise.world import processes
from rankwise.world.environments.reading import SECRET_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.launch.function.call import CallerContext

MOST_CHUNKS = 256
"""How many chunks of output wait for the driver, before the ranks wait."""
Chunk = tuple[int, str]
"""A stream's number, and text from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpec:
    """What a node must run."""

    rankwise: str
    """The version of the driver."""
    context: CallerContext
    folder: str | None
    """The working directory; ``None`` for the one that Ray has copied to each node."""
    secret: str = field(repr=False)
    """The job's secret, generated for it."""
    variables: Mapping[str, str]
    """Environment variables of the launcher and the ranks."""


class RayNode:
    """The actor. Its methods run in threads: one runs the launcher while others read its output."""

    def __init__(self) -> None:
        # Ray's own workers may outlive the daemon of their node by half a minute, which Ray takes for lost meanwhile.
        processes.die_with_parent()
        self._output: queue.Queue[Chunk | None] = queue.Queue(MOST_CHUNKS)
        self._process: LauncherProcess | None = None

    def run(self, spec: NodeSpec, call: bytes) -> list[tuple[dict[str, object], bytes | None]]:
        """Run the ranks of this node; return the messages of the launcher and of the ranks, as headers and bodies.

        ``call`` is what ``function.call.write`` writes after the context; it stays as it is.

        Raises:
            ConfigurationError: this node lacks the folder, or this version of rankwise.
        """
        try:
            _prepare(spec)
            path = [*spec.context.path, *(entry for entry in sys.path if entry not in spec.context.path)]
            out, err = _Stream(STDOUT, self._output), _Stream(STDERR, self._output)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                process = LauncherProcess()
            with process, tempfile.TemporaryFile(prefix="rankwise-") as file:
                self._process = process
                pickle.dump(replace(spec.context, path=path), file)
                file.write(call)
                file.flush()
                process.give(file)
                process.wait()
                return [(message.header, message.data()) for message in process.messages]
        finally:
            self._process = None
            self._output.put(None)

    def read(self) -> list[Chunk]:
        """Return output that was not read before, waiting for some; an empty list once there will be no more."""
        first = self._output.get()
        found = [] if first is None else [first]
        with contextlib.suppress(queue.Empty):
            while found:
                more = self._output.get_nowait()
                if more is None:
                    self._output.put(None)
                    break
                found.append(more)
        return found

    def signal(self, name: str) -> None:
        """Send the launcher a signal; does nothing if there is none yet, or no longer."""
        process = self._process
        if process is not None:
            process.signal(signal.Signals[name])


class _Stream:
    """The part of a text stream that the launcher's output is written to."""

    def __init__(self, number: int, output: queue.Queue[Chunk | None]) -> None:
        self._number = number
        self._output = output

    def write(self, text: str) -> int:
        self._output.put((self._number, text))
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is kept."""


def _prepare(spec: NodeSpec) -> None:
    hostname = socket.gethostname()
    if spec.rankwise != VERSION:
        raise ConfigurationError(
            f"This node has rankwise {VERSION}, but the driver has {spec.rankwise}.",
            where=hostname,
            do=f"install rankwise=={spec.rankwise} on every node of the cluster",
        )
    if spec.folder is not None:
        try:
            os.chdir(spec.folder)
        except OSError as error:
            raise ConfigurationError(
                f"The working directory {spec.folder} cannot be entered: {error.strerror}.",
                where=hostname,
                do="use a folder that every node has at this path, or have Ray copy it to the nodes: "
                "ray job submit --working-dir . -- rankwise run --ray ...",
            ) from None
    os.environ.update({**spec.variables, SECRET_NAME: spec.secret, "PWD": str(Path.cwd())})
    importlib.invalidate_caches()
