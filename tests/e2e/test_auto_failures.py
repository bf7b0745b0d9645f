# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto`` where something fails: a served call, a server, rank zero, or the user interrupts it."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command
    from tests.warm import Started

SPLIT = {"RANKWISE_AUTO_SPLIT": "always"}
HEAD = """
import os, signal, sys, time
import torch
from torch import nn
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
"""
NET = """
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    loss = model(torch.randn(8, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return f"{loss.item():.9f}"
"""


def _auto(command: Command, *arguments: str, ranks: int = 2) -> Started:
    return command.start("-n", str(ranks), "--auto", "train.py", *arguments, env=SPLIT)


def _as_plain(command: Command, text: str, *arguments: str) -> str:
    """Run a script as it is and with --auto; return what the latter writes to stderr, once the rest is the same."""
    command.write("train.py", text)
    plain = command.python("train.py", *arguments)
    done = command.run("-n", "2", "--auto", "train.py", *arguments, env=SPLIT)
    assert (done.returncode, done.stdout) == (plain.returncode & 0xFF, plain.stdout), done.stderr
    return done.stderr


ERRORS = """
class Odd(Exception):
    def __init__(self, place, size):
        super().__init__(f"row {place} of {size}")
        self.place = place

class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, marks):
        ctx.save_for_backward(marks)
        return x.clone()

    @staticmethod
    def backward(ctx, given):
        marked = ctx.saved_tensors[0].nonzero().flatten().tolist()
        if marked:
            raise Odd(marked[0], len(given))
        return given, None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(10, 6), NORM, nn.Linear(6, 3)

    def forward(self, numbers, marks):
        try:
            return self.last(Back.apply(self.norm(self.table(numbers)), marks))
        except IndexError as error:
            raise Odd(0, len(numbers)) from error

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    numbers, marks = torch.arange(8) + step % 3, torch.zeros(8)
    if step == 5:
        numbers[7] = 10
    if step == 6:
        numbers += 5
    if step == 9:
        marks[5] = 1
    if step == 10:
        marks[:] = 1
    try:
        loss = model(numbers, marks).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, f"{loss.item():.9f}")
    except (IndexError, Odd) as error:
        print(step, type(error).__name__, error, error.__traceback__.tb_lineno, getattr(error, "place", ""))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("norm", ["nn.Identity()", "nn.BatchNorm1d(6)"])
def test_an_error_in_a_served_call_is_the_scripts_own(command: Command, norm: str) -> None:
    said = _as_plain(command, HEAD + ERRORS.replace("NORM", norm))
    assert "its backward fails for a part of the batch" in said


@pytest.mark.timeout(180)
def test_an_uncaught_error_ends_the_job_with_its_traceback_only(command: Command) -> None:
    command.write("train.py", HEAD + NET + "for _ in range(6):\n    step()\nmodel(torch.randn(8, 9))\n")
    done = command.run("-n", "2", "--auto", "train.py", env=SPLIT)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in done.stderr
    assert "rank 1 exited with code 0" in done.stderr


# -- killed ---------------------------------------------------------------------------------------

KILLED = (
    HEAD
    + """
RANK_ZERO = os.getpid()

def die(moment):
    if os.path.exists(moment) and os.getpid() != RANK_ZERO:
        os.kill(os.getpid(), signal.SIGKILL)

class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        die("in forward")
        return x.clone()

    @staticmethod
    def backward(ctx, given):
        die("in backward")
        return given

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(Mark.apply(self.first(x)))

model = Net()
for step in range(12):
    if step == 9:
        open(sys.argv[1], "w").close()
        print(os.getpid(), flush=True)
        while sys.argv[1] == "between calls" and os.path.exists(sys.argv[1]):
            pass
    try:
        loss = model(torch.randn(8, 3)).square().mean()
        loss.backward()
    except Exception as error:
        print(type(error).__name__, flush=True)
        raise
print("not reached", flush=True)
"""
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", ["between calls", "in forward", "in backward"])
def test_a_killed_server_is_named(command: Command, moment: str) -> None:
    command.write("train.py", KILLED)
    started = _auto(command, moment)
    assert started.stdout is not None
    rank_zero = int(started.stdout.readline())
    if moment == "between calls":
        (server,) = command.siblings(rank_zero)
        os.kill(server, signal.SIGKILL)
        (command.folder / moment).unlink()
    said, text = started.communicate(timeout=120)
    assert said.split()[-1] in {"PeerFailed", "PeerMissing"}, text
    assert "rank 1 of 2 (" in text
    assert "failed first: killed by SIGKILL, exit code 137" in text
    assert "runs whole" not in text
    assert started.returncode == 137
    assert command.processes() == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", ["between calls", "in forward", "in backward"])
def test_a_stopped_server_is_named_and_may_go_on(command: Command, moment: str) -> None:
    command.write("train.py", KILLED.replace("SIGKILL", "SIGSTOP").replace('"not reached"', "loss.item()"))
    expected = command.python("train.py", "never").stdout.splitlines()[-1]
    started = _auto(command, moment)
    assert started.stdout is not None
    assert started.stderr is not None
    rank_zero = int(started.stdout.readline())
    (server,) = command.siblings(rank_zero)
    if moment == "between calls":
        os.kill(server, signal.SIGSTOP)
    (line,) = itertools.islice((line for line in started.stderr if "kill -CONT" in line), 1)
    assert line == f"[rankwise] rank 1 has been stopped (SIGSTOP); to resume it: kill -CONT {server}\n"
    (command.folder / moment).unlink()
    os.kill(server, signal.SIGCONT)
    said, text = started.communicate(timeout=120)
    assert started.returncode == 0, text
    assert float(said) == pytest.approx(float(expected), rel=1e-10)


ENDS = """
import atexit
for _ in range(5):
    step()
end = sys.argv[1]
if end == "unraisable":
    @atexit.register
    def fail():
        raise ValueError("in atexit")
elif end == "killed":
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
elif end == "_exit":
    os._exit(4)
elif end == "abort":
    os.abort()
elif end == "error":
    raise ValueError("of the script")
else:
    sys.exit(int(end) if end.isdigit() else end)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("0", 0),
        ("3", 3),
        ("text", 1),
        ("_exit", 4),
        ("error", 1),
        ("unraisable", 0),
        ("abort", 128 + signal.SIGABRT),
        ("killed", 128 + signal.SIGKILL),
    ],
)
def test_the_job_ends_as_rank_zero_does(command: Command, end: str, exit_code: int) -> None:
    command.write("train.py", HEAD + NET + ENDS)
    done = command.run("-n", "3", "--auto", "train.py", end, env=SPLIT)
    assert done.returncode == exit_code, done.stderr
    assert "then also failed" not in done.stderr
    assert ("ValueError: in atexit" in done.stderr) == (end == "unraisable")
    assert done.stderr.count("Traceback") == (end in {"error", "unraisable", "abort"})
    assert command.processes() == []


# -- interrupted ----------------------------------------------------------------------------------

INTERRUPTED = """
class Stopped(Exception):
    pass

def stop(number, frame):
    raise Stopped(number)

if sys.argv[1] == "SIGTERM":
    signal.signal(signal.SIGTERM, stop)
try:
    for number in range(10**9):
        step()
        if number == 4:
            print("ready", flush=True)
except (KeyboardInterrupt, Stopped) as error:
    print(type(error).__name__, flush=True)
finally:
    torch.set_grad_enabled(True)  # torch leaves it off, where an exception comes while no_grad() begins or ends
    torch.manual_seed(1)
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            one.copy_(torch.ones_like(one) / (1 + len(one.shape)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(*(step() for _ in range(3)))
    torch.save(model.state_dict(), "saved.pt")
    print("saved", flush=True)
sys.exit(7)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_the_scripts_which_may_train_on(command: Command, name: str) -> None:
    command.write("train.py", HEAD + NET + INTERRUPTED)
    said = []
    for started in (command.start_python("train.py", name), _auto(command, name)):
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        os.kill(started.pid, signal.Signals[name])
        out, text = started.communicate(timeout=120)
        assert started.returncode == 7, text
        assert "every rank has been terminated" not in text
        said.append(out)
        (command.folder / "saved.pt").unlink()
    assert said[0] == said[1]


TIMED = """
import random

class Stopped(Exception):
    pass

def stop(number, frame):
    arrived.append(number)
    raise Stopped(number)

arrived, caught = [], 0
random.seed(0)
signal.signal(signal.SIGALRM, stop)
while caught < 100:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 2e-2))
        while len(arrived) == caught:
            step()
        break
    except Stopped:
        torch.set_grad_enabled(True)  # torch leaves it off, where an exception comes while no_grad() begins or ends
        caught += 1
torch.set_grad_enabled(True)
print(caught, len(arrived), signal.getsignal(signal.SIGALRM) is stop)
torch.manual_seed(1)
with torch.no_grad():
    for one in (*model.parameters(), *model.buffers()):
        one.copy_(torch.ones_like(one) / (1 + len(one.shape)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(*(step() for _ in range(3)))
"""


@pytest.mark.timeout(180)
def test_what_a_handler_raises_is_never_lost_and_disturbs_no_call(command: Command) -> None:
    text = _as_plain(command, HEAD + NET + TIMED)
    assert "Traceback" not in text
    assert "whole" not in text


TWICE = """
signal.signal(signal.SIGTERM, signal.default_int_handler)
for number in range(2):
    try:
        for count in range(10**9):
            step()
            if count == 4:
                print("ready", flush=True)
    except KeyboardInterrupt:
        torch.set_grad_enabled(True)
        print("interrupted", number, flush=True)
sys.exit(7)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_script_that_goes_on_gets_a_second_signal_too(command: Command, name: str) -> None:
    command.write("train.py", HEAD + NET + TWICE)
    started = _auto(command, name)
    assert started.stdout is not None
    for number in range(2):
        assert started.stdout.readline() == "ready\n"
        os.kill(started.pid, signal.Signals[name])
        assert started.stdout.readline() == f"interrupted {number}\n"
    _, text = started.communicate(timeout=120)
    assert started.returncode == 7, text
    assert command.processes() == []


UNCAUGHT = """
for number in range(10**9):
    step()
    if number == 4:
        print("ready", flush=True)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_the_script_does_not_handle_ends_it(command: Command, name: str) -> None:
    command.write("train.py", HEAD + NET + UNCAUGHT)
    started = _auto(command)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    os.kill(started.pid, signal.Signals[name])
    _, text = started.communicate(timeout=120)
    assert started.returncode == 128 + signal.Signals[name]
    assert text.count("Traceback") == text.count("KeyboardInterrupt\n") == (name == "SIGINT")
    assert command.processes() == []


# -- stdin, and processes of the script -----------------------------------------------------------

PROCESSES = """
import multiprocessing, subprocess

def child(x, queue):
    model.eval()
    with torch.no_grad():
        queue.put(model(x).sum().item())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with torch.no_grad():
            return index, model.eval()(torch.ones(8, 3)).sum().item()

if __name__ == "__main__":
    print(input())
    for _ in range(5):
        print(step())
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(torch.ones(8, 3), queue))
    process.start()
    print(step(), f"{queue.get():.9f}", step())
    process.join()
    for _, values in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2):
        print(step(), [f"{value:.9f}" for value in values.tolist()])
    print(subprocess.run(["cat"], input="through\\n", text=True, capture_output=True).stdout, step())
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        sys.exit(5)  # not by _exit: it leaves the script as rank zero does
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), step())
"""


@pytest.mark.timeout(180)
def test_processes_of_the_script_do_not_disturb_the_servers(command: Command) -> None:
    command.write("train.py", HEAD + NET + PROCESSES)
    said = []
    for words in (["train.py"], ["-m", "rankwise", "run", "-n", "2", "--auto", "train.py"]):
        env = {**SPLIT, "OMP_NUM_THREADS": "1"}  # OpenMP's threads do not survive a fork
        done = command.python(*words, env=env, text="first line\n", seconds=120)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]


LAUNCHES = """
import subprocess
program = "import os, rankwise as rw; world = rw.join(); print(world.rank, world.world_size, world.source, flush=True)"
KEPT = ("TORCH", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "RANKWISE_AUTO_SPLIT")

def started(*words):
    done = subprocess.run([sys.executable, *words], text=True, capture_output=True, check=True)
    print(sorted(done.stdout.splitlines()))

if __name__ == "__main__":
    print(step(), step(), step(), sorted(name for name in os.environ if not name.startswith(KEPT)))
    open("other.py", "w").write(program)
    started("other.py")
    started("-m", "rankwise", "run", "-n", "2", "other.py")
    print(step())
"""


@pytest.mark.timeout(180)
def test_programs_of_the_script_are_started_as_by_plain_python(command: Command) -> None:
    said = _as_plain(command, HEAD + NET + LAUNCHES)
    assert "runs whole" not in said


@pytest.mark.timeout(180)
def test_a_terminal_is_the_scripts(command: Command) -> None:
    command.write("train.py", HEAD + NET + "print(sys.stdin.isatty(), input())\nfor _ in range(5):\n    step()\n")
    ours, theirs = os.openpty()
    words = ("-m", "rankwise", "run", "-n", "2", "--auto", "train.py")
    with command.start_python(*words, env=SPLIT, session=True, stdin=theirs) as started:
        os.close(theirs)
        os.write(ours, b"typed\n")
        said, text = started.communicate(timeout=120)
    os.close(ours)
    assert (started.returncode, said) == (0, "True typed\n"), text
