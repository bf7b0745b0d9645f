# SPDX-License-Identifier: Apache-2.0
"""A process that serves the job's store: how its end is noticed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from stranger import LOOPBACK, SECRET

from rankwise.store.client import StoreLost
from rankwise.store.opening import connect

SERVER = """
import os, sys, torch
from rankwise.store import client
from rankwise.store.opening import serve
store, port = serve(secret=sys.argv[1].encode())
reader = store.clone()
print(port, flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    try:
        store.get("x", 1)
    except ConnectionError as error:
        print(error, flush=True)
    sys.stdin.read()
    os._exit(0)
if sys.argv[2] == "fork":
    sys.stdin.read()
else:
    # A connection that goes after the names of its module have gone, in the order that an interpreter may choose.
    torch.kept = reader
    client.suppress = None
"""


def start_server(how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER, SECRET.decode(), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_serves_ends_in_silence() -> None:
    with start_server("exit") as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.strip().isdecimal()


def test_a_killed_server_is_noticed_though_a_fork_of_it_lives() -> None:
    with start_server("fork") as process:
        assert process.stdout is not None
        store = connect(LOOPBACK, int(process.stdout.readline()), 10, secret=SECRET)
        assert "belongs to the process that this one was forked from" in process.stdout.readline()
        process.kill()
        with pytest.raises(StoreLost):
            store.wait(["never"], 50)
