# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto``: what is refused and in which words, what runs whole, and other ways to start it.

That results are those of plain Python is shown with the scripts of ``tests/corpus``.
"""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

TRAIN = """
import sys, torch
from torch import nn
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.randn(7, 3)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), *sys.argv[1:])
"""
STEP = """
import torch
from torch import nn
torch.manual_seed(0)
{before}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    optimizer.zero_grad()
    {call}.square().sum().backward()
    optimizer.step()
"""


ALWAYS = {"RANKWISE_AUTO_SPLIT": "always"}
"""Split calls of small models too, which saves no time."""


def _numbers(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines()]


def test_other_launchers_start_it_too(command: Command) -> None:
    command.write("train.py", TRAIN)
    alone = _numbers(command.python("train.py").stdout)
    assert len(alone) == 5
    for words in (
        ("-m", "rankwise", "run", "-n", "2", "--auto", "-m", "train", "a", "--b"),
        ("-m", "rankwise", "run", "-n", "2", "-m", "rankwise.auto", "train.py", "a", "--b"),
        ("-m", "rankwise.auto", "-m", "train", "a", "--b"),
    ):
        done = command.python(*words, env=ALWAYS)
        assert done.returncode == 0, done.stderr
        assert _numbers(done.stdout) == pytest.approx(alone, rel=1e-10)
        assert all(line.endswith(" a --b") for line in done.stdout.splitlines())


ALONE = """
import argparse, atexit, os, sys
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
print(parser.parse_args().local_rank, [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ])
print(dist.is_available(), dist.is_initialized())
try:
    dist.get_rank()
except ValueError as error:
    print(error)
atexit.register(print, "at the end")
print("an error of its own", file=sys.stderr)
sys.exit(3)
"""


def test_the_script_sees_one_process(command: Command) -> None:
    command.write("train.py", ALONE)
    done = command.run("-n", "2", "--auto", "train.py")
    assert done.returncode == 3
    no_group = "Default process group has not been initialized, please make sure to call init_process_group."
    assert done.stdout.splitlines() == ["-1 []", "True False", no_group, "at the end"]
    assert [line for line in done.stderr.splitlines() if "of its own" in line] == ["an error of its own"]


def test_a_missing_script_is_named(command: Command) -> None:
    done = command.python("-m", "rankwise.auto")
    assert "ConfigurationError: A script is missing." in done.stderr
    done = command.run("-n", "2", "--auto", "nowhere.py")
    assert done.returncode == 2
    assert "Script 'nowhere.py' does not exist." in done.stderr


CALL = "model(torch.randn(4, 3))"
LINEAR = "model = nn.Linear(3, 2)"
LATER = """
calls = iter(range(99))
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0) if next(calls) > 8 else x)
model = Net(3, 2)
"""
REFUSED = {
    "later": (LATER, CALL, "ConfigurationError: Net no longer treats the samples of a batch separately"),
    "group": (
        "torch.distributed.init_process_group('gloo')",
        CALL,
        "ConfigurationError: The script opens a process group of its own",
    ),
    "joined": (
        "import rankwise; rankwise.join()",
        CALL,
        "ConfigurationError: This process has already joined a world.",
    ),
    "error": (
        LINEAR,
        "model(torch.randn(4, 3 + (step == 2)))",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x4 and 3x2)",
    ),
}
"""By name: lines before the training loop, the call of the model in it, and words of the error."""


@pytest.mark.parametrize(("before", "call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_in_words(command: Command, before: str, call: str, words: str) -> None:
    command.write("train.py", STEP.format(before=before, call=call))
    done = command.run("-n", "2", "--auto", "train.py", env=ALWAYS)
    assert done.returncode == 1
    assert words in done.stderr
    # The script's own lines come first.
    trace = done.stderr.partition("Traceback")[2]
    assert trace.splitlines()[1].strip().startswith(f'File "{command.folder}/train.py"')


NET = """
class Net(nn.Linear):
    def forward(self, x):
        return super().forward({})
model = Net(3, 2)
"""
WHOLE = {
    "samples": (
        NET.format("x - x.mean(0)"),
        "Net runs whole on one rank: the output depends on the rest of the batch (compared on 2 of 4 rows)",
    ),
    "hooks": (
        f"{LINEAR}; model.register_forward_hook(lambda *_: None)",
        "Linear runs whole on one rank: it has hooks, which would see a part of the batch",
    ),
    "prints": (NET.format("x + len(str(print('here')))"), "Net runs whole on one rank: it prints"),
    "counts": (
        "steps = []\n" + NET.format("x + len(steps.append(1) or steps)"),
        "Net runs whole on one rank: it changes the global steps",
    ),
    "pairs": (
        NET.format("(x @ x.T).softmax(1) @ x"),
        "Net runs whole on one rank: the output depends on the rest of the batch (compared on 2 of 4 rows)",
    ),
    "rarely": (NET.format("x.clamp(max=x.max() + 9)"), "Net runs whole on one rank: samples meet in max at train.py"),
    "sizes": (
        NET.format("x.view(4, 3)"),
        "Net runs whole on one rank: it fails for a part of the batch (RuntimeError: shape '[4, 3]' is invalid",
    ),
}
"""By name: lines before the training loop, and words of the log."""


@pytest.mark.parametrize(("before", "words"), WHOLE.values(), ids=WHOLE)
def test_a_model_that_runs_whole_is_named_once_with_the_reason(command: Command, before: str, words: str) -> None:
    command.write("train.py", STEP.format(before=before, call=CALL))
    done = command.run("-n", "2", "--auto", "train.py", env=ALWAYS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(words) == 1


def test_the_report_shows_which_calls_were_split_and_why_others_were_not(command: Command) -> None:
    before = NET.format("x - x.mean()") + "\ninner = nn.Linear(4, 3)"
    command.write("train.py", STEP.format(before=before, call="model(inner(torch.randn(4, 4)))"))
    done = command.run("-n", "2", "--auto", "--report", "records", "train.py", env=ALWAYS)
    assert done.returncode == 0, done.stderr
    told = command.rankwise("report", "records", "-o", "page.html")
    assert told.returncode == 0, told.stderr
    page = (command.folder / "page.html").read_text(encoding="utf-8")
    section = page[page.index('<section id="calls"') :]
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>.*?</tr>", section)]
    assert ["Linear", "5", "all ranks", ""] in [[unescape(cell) for cell in row] for row in rows]
    assert any(
        row[0] == "Net" and row[2] == "one rank" and "depends on the rest of the batch" in row[3] for row in rows if row
    )
    assert "rank 1 computed rows of its calls" in page


UNSEEN = """
import atexit, gc, logging, os, torch
import numpy as np
from torch import nn
import helper
torch.manual_seed(0)
prompt = nn.Parameter(torch.zeros(4))
logging.basicConfig(level=logging.INFO, format="%(message)s", filename="train.log")
class Stats:
    calls = 0
class Trains(nn.Linear):
    def forward(self, x):
        return super().forward(x + prompt)
class Counts(nn.Linear):
    def forward(self, x):
        Stats.calls += 1
        return super().forward(x)
class CountsBeside(nn.Linear):
    def forward(self, x):
        helper.seen.append(len(x))
        return super().forward(x + helper.noise())
class Logs(nn.Linear):
    def forward(self, x):
        logging.info("rows %d", len(x))
        return super().forward(x)
def closed_over():
    draws, rows = np.random.default_rng(0), []
    class Draws(nn.Linear):
        def forward(self, x):
            rows.append(len(x))
            return super().forward(x) * draws.random()
    return Draws(4, 4), rows
draws, rows = closed_over()
model = nn.ModuleList([Trains(4, 4), Counts(4, 4), CountsBeside(4, 4), Logs(4, 4), draws]).double()
optimizer = torch.optim.SGD([prompt, *model.parameters()], lr=0.1)
torch.set_default_dtype(torch.float64)
for step in range(9):
    x = torch.randn(6, 4)
    loss = sum(one(x).square().mean() for one in model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
print(prompt.tolist(), Stats.calls, helper.seen, rows)
helper.note("end")
@atexit.register
def never():
    print("never")
atexit.unregister(never)
with open("named.txt", "w") as file:
    print(file.name, file.mode)
array = np.memmap("array.bin", dtype="int64", mode="w+", shape=(9,))
array[:] = range(9)
array.flush()
assert np.fromfile("array.bin", dtype="int64").tolist() == list(range(9))
class Log:
    def __init__(self):
        self.file, self.own = open("cycle.txt", "w"), self
for number in range(300):
    Log()
    if number % (3 + os.getpid() % 4) == 0:
        gc.collect()  # as it may happen at any moment
    with open("last.txt", "w") as last:
        print(number, file=last)
"""
BESIDE = """
import numpy as np
draws = np.random.default_rng(1)
seen = []
def noise():
    return draws.random()
def note(text):
    with open(".notes.txt", "a") as notes:
        print(text, file=notes)
"""


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_beside_the_module_stays_what_it_is_in_plain_python(command: Command, num_ranks: int) -> None:
    plain, auto = command.inside("plain"), command.inside("auto")
    for one in (plain, auto):
        one.write("train.py", UNSEEN)
        one.write("helper.py", BESIDE)
    expected = plain.python("train.py", env={"OMP_NUM_THREADS": "1"})
    assert expected.returncode == 0, expected.stderr
    found = auto.run("-n", str(num_ranks), "--auto", "train.py", env=ALWAYS)
    assert found.returncode == 0, found.stderr
    lines = zip(expected.stdout.splitlines(), found.stdout.splitlines(), strict=True)
    for one, other in lines:
        numbers = [[float(word) for word in re.findall(r"-?[0-9][0-9.e-]*", line)] for line in (one, other)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-10)
    assert (auto.folder / ".notes.txt").read_text() == "end\n"
    assert (auto.folder / "train.log").read_text().count("rows 6\n") == 9
    assert "rows 3" not in (auto.folder / "train.log").read_text()
