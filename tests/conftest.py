# SPDX-License-Identifier: Apache-2.0
"""Guards around every test: what a test leaves behind fails the test that left it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tqdm

from tests.refusals import is_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tests.warm import WarmPython

END_SECONDS = 5.0
"""How long a thread or process may take to end that a test has already told to end."""
PYTESTS_OWN = {"PYTEST_CURRENT_TEST"}
MARK = "RANKWISE_TEST_RUN"
"""Every process that a test starts inherits this variable, and keeps it when its parent is gone."""
FOLDERS_WITH_RANKS = {"multiprocess", "multihost"}
LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp, as proc(5) numbers it."""

os.environ[MARK] = str(os.getpid())
# A shell has what it starts in the background ignore Ctrl-C, and a test's commands would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Its watching thread stays for the life of the process.
tqdm.tqdm.monitor_interval = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test pass whose strategy this version of torch refuses, if that is what it failed with."""
    report = yield
    if report.when == "call" and report.failed and is_refusal(report.longreprtext):
        report.outcome = "passed"
        report.user_properties.append(("refused", True))
    return report


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Count these tests apart from others: ``12 refused by this torch`` in the last line."""
    is_refused = report.when == "call" and dict(report.user_properties).get("refused", False)
    return ("refused by this torch", "r", "REFUSED") if is_refused else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the process that ranks are forked from with what each would take a second to import for itself.

    Before the first test, whose limit would include it: on a busy machine it takes a minute.
    """
    # The guards below collect garbage after most tests with ranks, which looked at all that is imported each time.
    gc.freeze()
    folders = {item.path.parent.name for item in session.items}
    if session.config.option.collectonly or not folders & FOLDERS_WITH_RANKS:
        return
    # The last two are there already, but where torch has triton.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["pytest", "tests.preloaded", "torch._dynamo", "torch.distributed.pipelining"]
    )
    # Ranks write to where it was started: what a test's ranks write belongs to the test.
    capture: Any = session.config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    # Whichever test is the first with ranks would start it with less.
    forkserver.ensure_running()
    first = multiprocessing.get_context("forkserver").Process()
    first.start()
    first.join()
    capture.suspend_global_capture()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """The process that commands of Python are forked from."""
    # It imports torch, which most runs of a single test have no need of.
    from tests.warm import WarmPython, variables

    ours = WarmPython(variables())
    yield ours
    ours.close()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    # Looking at every process of the machine takes milliseconds, too long for the many tests that
    # start none.
    find_processes = _below_here if "unit" in request.path.parts else _below_here_or_marked
    variables = _variables()
    threads = set(threading.enumerate())
    processes = find_processes()
    sockets = _sockets()
    yield
    leaks = [*_left_world(), *_left_variables(variables), *_left_threads(threads)]
    leaks += [*_left_processes(processes, find_processes), *_left_listeners(sockets)]
    if leaks:
        pytest.fail("the test left behind: " + ", ".join(leaks), pytrace=False)


def _left_world() -> Iterator[str]:
    """A process group, or a session of rankwise; only checked if they were imported."""
    session = sys.modules.get("rankwise.comm.session")
    if session is not None and session.current_or_none() is not None:
        sys.modules["rankwise.comm.leave"].leave()
        yield "a joined world"
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        group.destroy_process_group()
        yield "a process group"


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in PYTESTS_OWN}


def _left_variables(before: dict[str, str]) -> Iterator[str]:
    after = _variables()
    for name in sorted(before.keys() | after.keys()):
        # Numerical libraries set their own when they are first imported, inside a test.
        if before.get(name) == after.get(name) or name.startswith(("KMP_", "TORCHINDUCTOR_")):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
        yield f"the variable {name}={after.get(name)}"


def _left_threads(before: set[threading.Thread]) -> Iterator[str]:
    left = set(threading.enumerate()) - before
    if left:
        # Threads and processes of an iterator nobody holds any more end when it is collected.
        gc.collect()
    for thread in left:
        thread.join(END_SECONDS)
        if thread.is_alive():
            yield f"the thread {thread.name}"


def _below_here() -> set[int]:
    """Numbers of all processes below this one, but for those that multiprocessing keeps."""
    return set(_below(os.getpid())) - _kept()


def _below_here_or_marked() -> set[int]:
    """The same, including those whose parent has exited."""
    mark = f"{MARK}={os.getpid()}\0".encode()
    found = _below_here()
    for entry in Path("/proc").glob("[0-9]*"):
        # Other users' processes are not ours to look at.
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found - _kept() - {os.getpid()}


def _kept() -> set[int | None]:
    """Numbers of multiprocessing's two lasting processes, or ``None`` where they do not run."""
    return {
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    }


def _below(number: int) -> Iterator[int]:
    for children in Path(f"/proc/{number}/task").glob("*/children"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            for word in children.read_text().split():
                yield int(word)
                yield from _below(int(word))


def _left_processes(before: set[int], find_processes: Callable[[], set[int]]) -> Iterator[str]:
    left = find_processes() - before
    if not left:
        return
    gc.collect()
    for number in left:
        ended, command = _wait(number)
        if not ended:
            yield f"the process {number} ({command})"


def _wait(number: int) -> tuple[bool, str]:
    """Wait for any process to end; return whether it did, and its command."""
    try:
        handle = os.pidfd_open(number)
    except ProcessLookupError:
        return True, ""
    with os.fdopen(handle) as ending:
        command = ""
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ").strip()
        return bool(select.select([ending], [], [], END_SECONDS)[0]), command


def _sockets() -> set[str]:
    """Inodes of the sockets this process holds."""
    found: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found


def _left_listeners(before: set[str]) -> Iterator[str]:
    new = _sockets() - before
    if not new:
        return
    gc.collect()
    new &= _sockets()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in new:
                yield f"a server on port {int(fields[1].rpartition(':')[2], 16)}"
