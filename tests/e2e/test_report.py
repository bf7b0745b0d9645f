# SPDX-License-Identifier: Apache-2.0
"""What a run records of itself, and what ``rankwise report`` and ``rankwise top`` make of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections import Counter
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankwise.insight.run_records import read_run
from rankwise.insight.step_record import read
from rankwise.insight.step_table import speed_of, table_of
from rankwise.meter import EXCHANGE

sys.path.insert(0, str(Path(__file__).parents[1] / "slowdowns"))
from run import SAYS

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

TRAIN = str(Path(__file__).parents[1] / "slowdowns" / "train.py")


def recorded(command: Command, *words: str, num_ranks: int = 2) -> str:
    """Run the script that one rank slows down, into ``records``, and return what it prints."""
    ended = command.run("-n", str(num_ranks), "--report", "records", TRAIN, *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def reported(command: Command, *words: str) -> str:
    """Return the first line that ``rankwise report records`` prints."""
    told = command.rankwise("report", "records", *words)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()[0]


# Those that other processes on the same cores hardly change; `make slowdowns` has all, on a quiet machine.
@pytest.mark.parametrize(("kind", "slow"), [("data", 1), ("script", 0), ("disk", 0), ("uneven", 1)])
def test_the_first_sentence_names_the_slow_rank_and_why(command: Command, kind: str, slow: int) -> None:
    recorded(command, kind, str(slow), "4")
    sentence = reported(command)
    assert f"all wait for rank {slow}, {SAYS[kind] if SAYS[kind].startswith('whose') else 'which ' + SAYS[kind]}" in (
        sentence
    )


def test_parts_add_up_to_steps_that_agree_with_another_clock(command: Command) -> None:
    printed = recorded(command, "script", "1")
    begun = np.array(re.findall(r"\d+\.\d+", printed), dtype=np.float64)
    table = table_of(read_run(command.folder / "records").ranks)
    assert len(begun) == table.num_steps == 40
    outside = np.diff(begun[1:])
    # The median: another process may run between the readings of the two clocks, and make one step differ.
    assert np.median(abs(np.diff(table.start[0, 1:]) / outside - 1)) < 0.02
    assert np.median(abs(table.seconds[0, 1:-1] / outside - 1)) < 0.02
    assert table.seconds[:, 1:-1] == pytest.approx(table.start[:, 2:] - table.start[:, 1:-1], rel=0.05)


def test_the_page_shows_what_was_recorded(command: Command) -> None:
    recorded(command, "data", "1")
    sentence = reported(command, "-o", "page.html", "--trace", "trace.json")
    page = (command.folder / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", page), "the page loads nothing"
    shown = unescape(page)
    assert sentence in shown
    sections = re.findall(r'<section id="([^"]+)"', shown)
    assert sections == ["change", "parts", "steps", "heat", "who", "values-loss", "memory", "events", "environment"]
    for name in ("parts", "steps", "heat", "values-loss", "memory"):
        section = shown[shown.index(f'<section id="{name}"') :]
        chart = section[section.index("<svg") : section.index("</svg>")]
        assert 'role="img" aria-label="' in chart
        assert len(re.findall(r"<rect|<polyline", chart)) >= 1, name
        assert section.index("<table") > section.index("</svg>"), "a table stands behind the chart"
    records = read_run(command.folder / "records").ranks
    logged = [note for note in records[0].notes if note["kind"] == "values"]
    assert sum(len(note["values"]) for note in logged) == len(records[0].steps) == 40
    assert_trace_fits(json.loads((command.folder / "trace.json").read_text()), num_ranks=2, num_steps=40)
    chinese = reported(command, "--language", "zh")
    assert "所有 rank 都在等待 rank 1" in chinese


def assert_trace_fits(trace: dict[str, list[dict[str, object]]], num_ranks: int, num_steps: int) -> None:
    """Check that a trace has every step, that parts lie within them, and that arrows have two ends."""
    events = trace["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(steps) == num_ranks * num_steps
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
    begun = {event["id"]: event for event in events if event["ph"] == "s"}
    ended = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begun.keys() == ended.keys()
    assert begun
    for number, event in begun.items():
        assert ended[number]["pid"] != event["pid"]
        assert ended[number]["ts"] >= event["ts"], "who waits, waits for the past"


IN_PAIRS = """
import torch, rankwise as rw
world = rw.join()
rw.mesh(worker_groups=2, dp_replicate=2)
model = rw.replicate(torch.nn.Linear(4, 4))
outer = rw.local_sgd(model, every=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(1, 4)).mean().backward()
    optimizer.step()
outer.synchronize()
"""


def test_arrows_of_collectives_of_some_ranks_are_between_these(command: Command) -> None:
    script = command.write("train.py", IN_PAIRS)
    assert command.run("-n", "4", "--report", "records", str(script)).returncode == 0
    told = command.rankwise("report", "records", "--trace", "trace.json")
    assert told.stdout.splitlines()[-2:] == ["records/report.html", "trace.json"], told.stderr
    events = json.loads((command.folder / "trace.json").read_text())["traceEvents"]
    of_gradients = [event for event in events if event.get("cat", "").startswith("gradients of Linear")]
    begun, ended = ({e["id"]: e["pid"] for e in of_gradients if e["ph"] == kind} for kind in "sf")
    # Whichever of the two ranks of a worker group comes last, the other one waits for it.
    pairs = Counter(tuple(sorted((begun[number], ended[number]))) for number in begun)
    assert pairs.keys() == {(0, 1), (2, 3)}
    assert pairs[0, 1] == pairs[2, 3] >= 4


SCALED = """
import time, torch, rankwise as rw
world = rw.join()
model = rw.replicate(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(320, 4))
for (x,) in rw.DataLoader(samples, global_batch_size=8):
    time.sleep(0.004 * len(x))
    model(x).sum().backward()
    optimizer.step()
"""


def test_runs_on_more_ranks_are_compared_with_one(command: Command) -> None:
    script = command.write("train.py", SCALED)
    for num_ranks in ("1", "2"):
        assert command.run("-n", num_ranks, "--report", f"runs/{num_ranks}", str(script)).returncode == 0
    told = command.rankwise("report", "runs/2", "--compare", "runs/1", "-o", "page.html")
    times = re.search(r"2 ranks, 40 steps of .* ms, (\d\.\d) times as fast as one rank; ", told.stdout)
    assert times is not None, told.stdout
    one, two = (speed_of(read_run(command.folder / "runs" / name)) for name in ("1", "2"))
    assert float(times[1]) == pytest.approx(two.samples_per_second / one.samples_per_second, abs=0.06)
    assert one.samples_per_second * one.step_seconds == pytest.approx(8.0, rel=1e-3)
    page = (command.folder / "page.html").read_text()
    section = page[page.index('<section id="compare">') :]
    assert section.count("<polyline") >= 2
    told = command.rankwise("report", "runs/2", "--compare", "runs/2")
    assert "times as fast" not in told.stdout


PROFILED = """
import sys, torch, rankwise as rw
world = rw.join()
model = rw.replicate(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.profiler.profile() as profile:
    for step in range(6):
        with torch.profiler.record_function(f"forward {step}"):
            loss = model(torch.ones(512, 256)).square().sum()
        loss.backward()
        optimizer.step()
profile.export_chrome_trace(f"profile-{world.rank}.json")
"""


def test_traces_of_torchs_profiler_are_put_on_the_same_time(command: Command) -> None:
    script = command.write("train.py", PROFILED)
    ended = command.run("-n", "2", "--report", "records", str(script))
    assert ended.returncode == 0, ended.stderr
    reported(command, "--trace", "trace.json", "--with", "profile-1.json", "profile-0.json")
    events = json.loads((command.folder / "trace.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for rank in (0, 1):
        measured = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] == 2]
        forward = [e for e in measured if e["name"] == "forward"]
        (seen,) = [
            e
            for e in events
            if e.get("name") == "forward 3" and e["ph"] == "X" and named.get(e["pid"], "").startswith(f"rank {rank}:")
        ]
        # By the same clock, read a moment later: the pass of the model lies within what the script has marked.
        assert seen["ts"] - 1000 < forward[3]["ts"] < seen["ts"] + seen["dur"] + 1000


def test_a_file_that_is_no_trace_is_an_error(command: Command) -> None:
    script = command.write("train.py", KILLED.replace("step == 70", "step == 700"))
    assert command.run("-n", "1", "--report", "records", str(script)).returncode == 0
    command.write("profile-7.json", '{"baseTimeNanoseconds": 1, "traceEvents": []}')
    for words, says in (
        (("--with", "train.py"), "--with is for a timeline."),
        (("--trace", "records/report.html"), "records/report.html would be the report and its timeline."),
        (("--trace", "t.json", "--with", "train.py"), "train.py is no trace of torch's profiler."),
        (("--trace", "t.json", "--with", "profile-7.json"), "does not say of which of the 1 ranks it is."),
    ):
        ended = command.rankwise("report", "records", *words)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert says in ended.stderr


HAND_WRITTEN = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(320, 64), torch.randint(10, (320,)))
sampler = torch.utils.data.distributed.DistributedSampler(data)
for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
    if dist.get_rank() == 1:
        time.sleep(0.02)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_script_of_torchs_own_is_measured_as_far_as_it_can_be_seen(command: Command) -> None:
    script = command.write("train.py", HAND_WRITTEN)
    ended = command.run("-n", "2", "--report", "records", str(script))
    assert ended.returncode == 0, ended.stderr
    sentence = reported(command)
    assert "all wait for rank 1, which spends longer in the script" in sentence
    page = (command.folder / "records" / "report.html").read_text()
    assert "The script exchanges gradients itself" in page
    assert f"rankwise report: {script}" in unescape(page)


KILLED = """
import os, signal, time, torch, rankwise as rw
world = rw.join()
model = rw.replicate(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    if step == 70 and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 69:
        time.sleep(0.2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


def test_what_a_killed_rank_has_done_is_reported_with_the_failure(command: Command) -> None:
    script = command.write("train.py", KILLED)
    ended = command.run("-n", "2", "--report", "records", str(script))
    assert ended.returncode == 128 + 9
    run = read_run(command.folder / "records")
    # A step ends where the next one begins: the killed rank was between its 70th update and that. What has ended is
    # recorded at intervals, so after the step that took longer.
    assert len(run.ranks[1].steps) == 69
    assert [event["rank"] for event in run.events if event["kind"] == "failure"] == [1]
    assert re.match(r"2 ranks, \d+ steps of \S+ \S+, then rank 1 failed; ", reported(command))
    page = (command.folder / "records" / "report.html").read_text()
    assert "rank 1" in page[page.index('<section id="events">') :]
    assert "SIGKILL" in page


def test_a_failure_under_another_launcher_is_reported_by_its_rank(command: Command) -> None:
    body = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('of the script')")
    script = command.write("train.py", body.replace("rw.join()", "rw.join(report='records')"))
    ended = command.python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    assert ended.returncode == 1, ended.stderr
    assert ", then rank 1 failed; " in reported(command)
    assert "然后 rank 1 失败" in reported(command, "--language", "zh")
    events = _events_shown(command)
    assert "rank 1: Traceback (most recent call last):" in events
    assert "ValueError: of the script" in events


def test_a_killed_rank_without_a_launcher_is_reported_by_the_others(command: Command) -> None:
    joined = "rw.join(init_method='file://' + os.path.abspath('store'), rank=int(os.environ['OWN']), world_size=2, "
    script = command.write("train.py", KILLED.replace("rw.join(", joined + "report='records'"))
    with (
        command.start_python(str(script), env={"OWN": "0"}) as first,
        command.start_python(str(script), env={"OWN": "1"}) as killed,
    ):
        _, told = first.communicate(timeout=60)
        killed.communicate(timeout=60)
    assert (first.returncode, killed.returncode) == (1, -signal.SIGKILL), told
    assert ", then rank 1 failed; " in reported(command)
    assert "rank 0: PeerMissing: " in _events_shown(command)


def _events_shown(command: Command) -> str:
    page = unescape((command.folder / "records" / "report.html").read_text())
    return page[page.index('<section id="events">') :]


def test_a_report_has_no_events_of_other_jobs_in_its_folder(command: Command) -> None:
    broken = command.write("broken.py", "import rankwise as rw\nrw.join()\nraise ValueError('of the script')\n")
    killed = command.write("killed.py", KILLED)
    mended = command.write("train.py", KILLED.replace("step == 70", "step == 700"))
    for script in (broken, killed):
        assert command.run("-n", "2", "--report", "records", str(script)).returncode != 0
    text = "".join(event["text"] for event in read_run(command.folder / "records").events)
    assert "SIGKILL" in text
    assert "of the script" not in text
    assert command.run("-n", "2", "--report", "records", str(mended)).returncode == 0
    text = "".join(event["text"] for event in read_run(command.folder / "records").events)
    assert "2 ranks on this machine" in text
    assert "SIGKILL" not in text


def test_a_start_without_a_step_leaves_the_report_of_the_one_before(command: Command) -> None:
    again = KILLED.replace(
        "world = rw.join()", "world = rw.join()\nif os.path.exists('again'):\n    raise SystemExit(3)"
    )
    script = command.write("train.py", again.replace("step == 70", "step == 30"))
    script.write_text(script.read_text().replace("os.kill(", "open('again', 'w'); os.kill("))
    assert command.run("-n", "2", "--max-restarts", "1", "--report", "records", str(script)).returncode == 3
    run = read_run(command.folder / "records")
    assert (run.is_followed, run.num_restarts) == (True, 0)
    assert re.match(r"2 ranks, \d+ steps of ", reported(command))
    assert "A later start has completed no step" in (command.folder / "records" / "report.html").read_text()


def test_a_plain_python_process_records_itself(command: Command) -> None:
    script = command.write(
        "train.py", KILLED.replace("rw.join()", "rw.join(report='records')").replace("step == 70", "step == 700")
    )
    assert command.python(str(script)).returncode == 0
    record = read(next((command.folder / "records").glob("*.steps")))
    assert len(record.steps) == 100
    assert record.facts["source"] == "nobody"
    assert max(step.parts[EXCHANGE] for step in record.steps) == 0.0
    assert reported(command).startswith("1 rank, 100 steps of ")


def test_measuring_can_be_turned_off(command: Command) -> None:
    script = command.write("train.py", KILLED.replace("step == 70", "step == 700"))
    assert command.run("-n", "2", "--report", "off", str(script)).returncode == 0
    assert [path.name for path in command.folder.iterdir()] == ["train.py"]
    script.write_text(script.read_text().replace("rw.join()", "rw.join(report='records')"))
    assert command.run("-n", "2", "--report", "off", str(script)).returncode == 0
    assert [path.name for path in command.folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("report", "nothing"), "nothing does not exist"),
        (("report", "."), ". has no record of a run"),
        (("run", "--report", "train.py/records", "train.py"), "train.py/records, cannot be created: Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_used_is_an_error(command: Command, words: tuple[str, ...], says: str) -> None:
    command.write("train.py", "print('started')")
    ended = command.rankwise(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr


def test_records_of_two_runs_with_other_numbers_of_ranks(command: Command) -> None:
    script = command.write("train.py", KILLED.replace("step == 70", "step == 700"))
    assert command.run("-n", "2", "--report", "records", str(script)).returncode == 0
    assert command.run("-n", "1", "--report", "records", str(script)).returncode == 0
    assert reported(command).startswith("1 rank, 100 steps of ")


LONG = """
import sys, torch, rankwise as rw
world = rw.join()
model = rw.replicate(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    loss = model(torch.ones(1, 4)).square().sum()
    rw.log_value("loss", loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20 and world.rank == 0:
        print("training", flush=True)
"""


def test_top_shows_the_pace_of_a_running_job(command: Command) -> None:
    script = command.write("train.py", LONG)
    with command.start("-n", "2", str(script)) as running:
        assert running.stdout.readline() == "training\n"
        shown = command.rankwise("top", "--once", "--job", str(running.pid))
        assert shown.returncode == 0, shown.stderr
        head, *rows = shown.stdout.splitlines()
        assert head.split()[:4] == ["rank", "steps", "steps/s", "step"]
        assert head.split()[-1] == "loss"
        assert [row.split()[0] for row in rows[:2]] == ["0", "1"]
        assert all(int(row.split()[1]) >= 20 for row in rows[:2])
        assert rows[-1].startswith("loss ")
        asked = json.loads(command.rankwise("top", "--json", "--job", str(running.pid)).stdout)
        assert asked["ranks"].keys() == {"0", "1"}
        running.terminate()
        running.communicate()


def test_keys_of_top_show_stacks_and_the_table_again(command: Command) -> None:
    script = command.write("train.py", LONG)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    with command.start("-n", "2", str(script)) as running:
        assert running.stdout.readline() == "training\n"
        words = [sys.executable, "-m", "rankwise", "top", "--job", str(running.pid)]
        with subprocess.Popen(words, env=command.environment(), stdin=theirs, stdout=theirs) as top:
            os.close(theirs)
            for expected, key in (("q: quit", "s"), ("any key: back", "x"), ("q: quit", "q")):
                shown = ""
                while expected not in shown:
                    shown += os.read(ours, 65536).decode()
                assert ("train.py" in shown) == (key == "x"), "the stacks name lines of the script"
                os.write(ours, key.encode())
            assert top.wait(50) == 0
        running.terminate()
        running.communicate()
    os.close(ours)


def test_a_rank_that_stays_slow_is_named_once(command: Command) -> None:
    script = command.write("train.py", LONG.replace("10**9", "260").replace("    loss =", "    SLOWER\n    loss ="))
    text = script.read_text().replace("SLOWER", "if world.rank == 1: __import__('time').sleep(0.004)")
    script.write_text(text)
    ended = command.run("-n", "2", "--report", "runs", str(script))
    assert ended.returncode == 0, ended.stderr
    named = [line for line in ended.stderr.splitlines() if "longer than the others" in line]
    assert len(named) == 1, ended.stderr
    assert "rank 1/2" in named[0]
    assert "it spends that in the script" in named[0]
    assert command.rankwise("report", "runs").returncode == 0
    events = (
        (command.folder / "runs" / "report.html").read_text().partition('id="events"')[2].partition("</section>")[0]
    )
    assert len(re.findall(r"rank 1: this rank works \d+% longer than the others", events)) == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_one_line_about_the_job(command: Command, is_terminal: bool) -> None:
    script = command.write("train.py", LONG.replace("10**9", "1500"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with subprocess.Popen(
        command.words("-n", "2", "--progress", str(script)),
        cwd=command.folder,
        env=command.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs if is_terminal else subprocess.PIPE,
        text=True,
    ) as running:
        os.close(theirs)
        shown = written_to(ours) if is_terminal else running.communicate(timeout=80)[1]
        assert running.wait(50) == 0
        os.close(ours)
    line = r"step \d+, \d+\.\d steps/s, loss [\d.e+-]+, slowest: rank [01]"
    if is_terminal:
        # The last of 24 lines is kept for it, redrawn in its place, and given back at the end.
        assert "\x1b[1;23r" in shown
        assert len(re.findall(rf"\x1b7\x1b\[24;1H\x1b\[2K{line}\x1b8", shown)) >= 1
        assert shown.index("\x1b[r") > shown.rindex("\x1b[1;23r")
    else:
        assert len(re.findall(rf"^\[rankwise\] {line}$", shown, re.MULTILINE)) == 1
        assert "\x1b" not in shown


def written_to(descriptor: int) -> str:
    """Return all that is written to a terminal until its other end is closed."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(descriptor, 65536):
            parts.append(part)
    return b"".join(parts).decode()


PLAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(160, 4)), batch_size=8)
for epoch in range(3):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for (x,) in loader:
            model(x)
"""


def test_a_plain_script_records_all_its_steps_and_counts_samples_of_training_only(command: Command) -> None:
    ended = command.run("-n", "1", "--report", "records", str(command.write("train.py", PLAIN)))
    assert ended.returncode == 0, ended.stderr
    (record,) = read_run(command.folder / "records").ranks
    assert len(record.steps) == 60
    assert [step.samples for step in record.steps] == [8] * 60


IN_BACKWARD = """
import torch, rankwise as rw
world = rw.join()
model = rw.replicate(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), one_copy_per_host=False)
optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}
def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
if world.world_size == 1:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
for _ in range(10):
    model(torch.randn(256, 64)).square().mean().backward()
"""


def test_updates_within_backward_leave_the_rest_of_it_backward(command: Command) -> None:
    ended = command.run("-n", "1", "--report", "records", str(command.write("train.py", IN_BACKWARD)))
    assert ended.returncode == 0, ended.stderr
    means = table_of(read_run(command.folder / "records").ranks).steady().mean_parts()
    assert means["optimizer"][0] > 0.0
    assert means["backward"][0] > 2 * means["script"][0]


ONLY_ONE = """
import torch, rankwise as rw
world = rw.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10 if world.rank == 0 else 0):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_ranks_without_steps_and_files_that_are_no_records_are_left_out(command: Command) -> None:
    ended = command.run("-n", "2", "--report", "records", str(command.write("train.py", ONLY_ONE)))
    assert ended.returncode == 0, ended.stderr
    records = command.folder / "records"
    (records / "foreign.steps").write_text("nothing of ours")
    (records / "folder.steps").mkdir()
    damaged = next(records.glob("*rank-00001.steps")).read_bytes()
    (records / "damaged.steps").write_bytes(damaged[:20] + b"\xff\xff" + damaged[22:])
    with (records / "events.jsonl").open("ab") as events:
        events.write(b"bad{}\n{}\n\xff\n")
    ended = command.rankwise("report", "records")
    assert ended.returncode == 0, ended.stderr
    assert "1 rank, 10 steps" in ended.stdout
    for name in ("foreign.steps", "folder.steps", "damaged.steps"):
        assert f"{name}" in ended.stderr
    page = (records / "report.html").read_text()
    assert "There is no record of a step of rank 1." in page
