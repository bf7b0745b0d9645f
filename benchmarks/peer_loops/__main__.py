# SPDX-License-Identifier: Apache-2.0
"""One rank of one library: ``python -m peer_loops NAME ADDRESS``. Started by benchmarks/peer_group.py."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from functools import partial

import psutil

from peer_loops.serving import serve


def follow_the_coordinator() -> None:
    """Hold (``-``) and release (``+``) all that this process has started, as standard input says; end where it ends.

    It ends with the coordinator, whatever becomes of that, also in the middle of a step that never comes to its end.
    """
    while word := os.read(0, 1):
        signal_descendants("suspend" if word == b"-" else "resume")
    signal_descendants("kill")
    os._exit(1)


def signal_descendants(method: str) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            getattr(process, method)()


if __name__ == "__main__":
    threading.Thread(target=follow_the_coordinator, daemon=True).start()
    importlib.import_module(f"peer_loops.{sys.argv[1]}").train(partial(serve, sys.argv[2]))
