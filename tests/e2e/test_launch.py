# SPDX-License-Identifier: Apache-2.0
"""``rankwise.launch`` and ``@rankwise.launcher`` as a person uses them: from scripts, pipes, threads and commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command


def _python(command: Command, *words: str, text: str | None = None, **variables: str) -> str:
    """Run Python in the test's folder and return what it printed."""
    if text is None:
        done = command.python(*words, env=variables)
    else:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=command.folder,
            env=command.environment(**variables),
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=80,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_script(command: Command, text: str, **variables: str) -> str:
    command.write("train.py", text)
    return _python(command, "train.py", **variables)


EVERYTHING = """
import functools, os, pickle, sys, tempfile
import rankwise as rw

print("the script runs")
offset = 10

class Box:
    def __init__(self, value):
        self.value = value
    def offset(self):
        return offset
    def collect(self, square, power):
        import torch
        main = sys.modules["__main__"]
        with rw.join() as world:
            total = rw.all_reduce(torch.ones(2))
            # What is sent may be large, and takes its space as long as its file is open.
            files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
            kept = [name for name in files if name.startswith(tempfile.gettempdir()) and name.endswith("(deleted)")]
            facts = [world.rank, total.tolist(), square(self.value) ** power, sys.argv[1:], os.getcwd() == cwd,
                     sys.path == path, hasattr(main, "__file__"), pickle.loads(pickle.dumps(self)).value, kept]
            return Box(facts)

def outer():
    inner = 3
    return lambda x: x * inner

cwd, path, method = os.getcwd(), sys.path, Box.offset
values = rw.launch(functools.partial(Box(5).collect, power=2), outer(), ranks=2, device="cpu")
# Classes come back as the very classes they were, untouched.
print([type(value) is Box for value in values], Box.offset is method)
offset = 11
print([value.offset() for value in values])
for value in values:
    print(value.value)
"""


@pytest.mark.parametrize("way", ["script", "-", "-c"])
def test_a_function_of_main_runs_on_ranks_and_nothing_runs_twice(command: Command, way: str) -> None:
    if way == "script":
        command.write("sub/train.py", EVERYTHING)
        words, text = ["sub/train.py"], None
    else:
        words, text = (["-"], EVERYTHING) if way == "-" else (["-c", EVERYTHING], None)
    shown = _python(command, *words, "a", "-b", text=text)
    assert shown.splitlines() == [
        "the script runs",
        "[True, True] True",
        "[11, 11]",
        *[str([rank, [2.0, 2.0], 225, ["a", "-b"], True, True, False, 5, []]) for rank in range(2)],
    ]


def test_a_decorated_function_of_a_module_trains_to_the_one_rank_result(command: Command) -> None:
    command.write(
        "training.py",
        """
        import torch, rankwise as rw
        from torch.utils.data import TensorDataset

        def fit(seed, *, epochs):
            torch.manual_seed(seed)
            data = TensorDataset(torch.randn(101, 3).double(), torch.randn(101, 1).double())
            with rw.join() as world:
                model = rw.replicate(torch.nn.Linear(3, 1).double())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                loader = rw.DataLoader(data, global_batch_size=16, shuffle=True)
                for _ in range(epochs):
                    for x, y in loader:
                        torch.nn.functional.mse_loss(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                return world.world_size, model.state_dict()

        one = rw.launcher(fit)

        @rw.launcher(ranks=2, device="cpu")
        def main(seed, *, epochs):
            "Say what it is."
            return fit(seed, epochs=epochs)
        """,
    )
    shown = _run_script(
        command,
        """
        import torch, training
        (world_size, alone), = training.one(3, epochs=3)
        print(world_size, training.main.__name__, training.main.__doc__)
        for world_size, state in training.main(3, epochs=3):
            same = all(torch.allclose(state[name], alone[name], rtol=1e-10, atol=0) for name in alone)
            print(world_size, list(state), same)
        """,
    )
    assert shown.splitlines() == ["1 main Say what it is.", *["2 ['weight', 'bias'] True"] * 2]


FAILING = """
import os, signal, sys, threading
import rankwise as rw

class Odd(Exception):
    def __init__(self, code, why):
        super().__init__(f"{code}: {why}")

@rw.launcher(ranks=2)
def fails():
    import torch
    rank = int(os.environ["RANK"])
    with rw.join():
        if rank == 1:
            HERE
        rw.all_reduce(torch.ones(2))
        return rank

try:
    fails()
except BaseException as error:
    print(type(error) is Odd, type(error).__name__, error, *getattr(error, "__notes__", []), sep="\\n")
"""
FAILURES = {
    "its own exception": (
        'raise Odd(3, "no")',
        r"""
        True
        Odd
        3: no
        \[rank 1/2 on .*\] Traceback \(most recent call last\):
          File ".*/train.py", line 15, in fails
            raise Odd\(3, "no"\)
        Odd: 3: no
        """,
    ),
    "an exception that cannot be pickled": (
        'error = Odd(3, "no"); error.lock = threading.Lock(); raise error',
        r"""
        False
        RankFailed
        Rank 1 failed: Odd: 3: no
          on        \[rank 1/2 on .*\]
          evidence  Traceback \(most recent call last\):
                      File ".*/train.py", line 15, in fails
        (?s:.*)
                    Odd: 3: no
        """,
    ),
    "a value that cannot be pickled": (
        "return threading.Lock()",
        r"""
        False
        RankFailed
        The lock that fails returned on rank 1 cannot be pickled.
          on        \[rank 1/2 on .*\]
          evidence  TypeError: cannot pickle '_thread.lock' object
          do        return values that can be pickled(?s:.*)
        """,
    ),
    "a signal": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        r"""
        False
        RankFailed
        Rank 1 failed: killed by SIGKILL, (?s:.*)
        """,
    ),
    "an exit": (
        "print('last words', file=sys.stderr); sys.exit(7)",
        r"""
        False
        RankFailed
        Rank 1 failed: called sys\.exit\(7\) at .*\.
          on        \[rank 1/2 on .*\]
          evidence  7
        """,
    ),
    "an end without a value": (
        "rw.all_reduce(torch.ones(2)); os._exit(0)",
        r"""
        False
        RankFailed
        Rank 1 exited with code 0 before the function returned.(?s:.*)
        """,
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_the_first_failing_rank_is_what_is_raised(command: Command, kind: str) -> None:
    statement, expected = FAILURES[kind]
    shown = _run_script(command, FAILING.replace("HERE", statement))
    assert re.fullmatch(textwrap.dedent(expected).strip() + r"\s*", shown), shown


def test_restarts_are_reported_and_only_the_last_attempt_counts(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, rankwise as rw
        def flaky():
            attempt = os.environ["RANKWISE_ATTEMPT"]
            if attempt == "0" and os.environ["RANK"] == "1":
                raise ValueError("at first")
            return attempt
        print(rw.launch(flaky, ranks=2, max_restarts=1, log_dir="logs"))
        """,
    )
    done = command.python("train.py")
    assert done.stdout == "['1', '1']\n", done.stderr
    assert "ValueError: at first\n[rankwise] restart 1 of 1\n" in done.stderr
    assert (command.folder / "logs" / "rank-1.restart-1.err").exists()


def test_output_goes_where_the_callers_goes_from_any_thread_and_nothing_is_left(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    shown = _run_script(
        command,
        """
        import contextlib, gc, io, os, sys, tempfile, threading, torch
        import rankwise as rw

        def speaks(value):
            print("h\N{LATIN SMALL LETTER E WITH DIAERESIS}llo", flush=True)
            print("trouble", file=sys.stderr)
            sys.stdout.write("no end")
            return value

        # Torch's own threads run, and a fork of this process would hang in its next product.
        torch.ones(600, 600) @ torch.ones(600, 600)
        found, out, err = [], io.StringIO(), io.StringIO()
        before = sorted(os.listdir("/proc/self/fd"))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            thread = threading.Thread(target=lambda: found.extend(rw.launch(speaks, torch.ones(2), ranks=2)))
            thread.start()
            thread.join()
        print([value.tolist() for value in found])
        print(sorted(out.getvalue().replace("no end", "").split()), out.getvalue().count("no end"))
        print(sorted(line for line in err.getvalue().splitlines() if "trouble" in line))
        gc.collect()
        print(sorted(os.listdir("/proc/self/fd")) == before, os.listdir(tempfile.gettempdir()))
        """,
        TMPDIR=str(tmp_path / "temporary"),
    )
    assert shown.splitlines() == [
        "[[1.0, 1.0], [1.0, 1.0]]",
        "['h\N{LATIN SMALL LETTER E WITH DIAERESIS}llo', 'h\N{LATIN SMALL LETTER E WITH DIAERESIS}llo'] 2",
        "['[rank 0/2] trouble', '[rank 1/2] trouble']",
        "True []",
    ]


WAITING = """
import os, threading
import rankwise as rw

def waits():
    try:
        print("ready", os.getpid(), flush=True)
        threading.Event().wait()
    finally:
        print("cleaned", flush=True)

try:
    rw.launch(waits, ranks=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_the_caller_is_ended_the_ranks_end(command: Command, number: signal.Signals) -> None:
    command.write("train.py", WAITING)
    # As a terminal does it: the whole group hears of Ctrl-C.
    started = command.start_python("train.py", session=True)
    assert started.stdout is not None
    assert [started.stdout.readline().split()[0] for _ in range(2)] == ["ready"] * 2
    pids = [pid for pid in command.processes() if pid != started.pid]
    assert len(pids) >= 4
    os.killpg(started.pid, number)
    assert command.wait_until_gone(pids, 5.0) in ([], [started.pid])
    shown, told = started.communicate()
    if number == signal.SIGINT:
        assert shown.splitlines() == ["cleaned", "cleaned", "interrupted"]
        assert "Traceback" not in told
        assert started.returncode == 0


def test_the_page_runs_as_written(command: Command) -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-a-function.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert _run_script(command, block[1]) == "[0, 1]\n"


def test_a_rank_launches_no_others(command: Command) -> None:
    command.write(
        "train.py",
        """
        import sys, rankwise as rw
        if sys.argv[1:]:
            rw.join()
        try:
            rw.launch(print, "never")
        except ValueError as error:
            print(str(error).splitlines()[0])
        """,
    )
    ended = command.run("train.py")
    assert ended.stdout == "This process is already a rank and cannot launch others.\n", ended.stderr
    assert _python(command, "train.py", "joined") == (
        "This process has joined a world and cannot launch ranks of another.\n"
    )


def test_a_launched_function_raises_what_a_rank_raised_that_the_others_went_on_without(command: Command) -> None:
    shown = _run_script(
        command,
        """
    import os, signal, rankwise as rw
    from rankwise.errors import RankFailed
    from rankwise.health.event_log import post_expendable
    from rankwise.comm.session import current

    class Bad(Exception):
        pass

    def train(how):
        world = rw.join()
        post_expendable(current().store, [1, 2])
        rw.barrier()
        if world.rank == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Bad("sample 17")
        detector = current().detector
        with detector.changed:
            assert detector.changed.wait_for(lambda: detector.departed(2), 40)
        print("went on")
        return world.rank

    for how in ("raise", "kill"):
        try:
            rw.launch(train, how, ranks=3, device="cpu")
        except (Bad, RankFailed) as error:
            notes = "".join(getattr(error, "__notes__", ()))
            print(type(error).__name__, str(error).splitlines()[0], "in train" in notes)
    """,
    )
    lines = shown.splitlines()
    assert lines.count("went on") == 4
    raised, killed = (line for line in lines if line != "went on")
    assert raised == "Bad sample 17 True"
    assert killed.startswith("RankFailed Rank 2 failed: killed by SIGKILL, exit code 137")
