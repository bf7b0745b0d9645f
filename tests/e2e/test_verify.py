# SPDX-License-Identifier: Apache-2.0
"""``rankwise verify`` on whole scripts: correct ones, ones with a mistake, and ones that cannot be compared."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.run import cases

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

pytestmark = pytest.mark.timeout(150)
LIMIT_SECONDS = 140
CORPUS = Path(__file__).parents[1] / "corpus"
CASES = {(case.script, case.name): case for case in cases()}
CORRECT = [
    ("rankwise_conv", "rankwise_conv"),
    ("ddp", "dropout, seeded by rank"),
    ("all_reduce", "all_reduce"),
    ("with_accelerate", "with_accelerate"),
    ("with_horovod", "with_horovod"),
    ("rankwise_average", "a reference trained before joining"),
    ("rankwise_pipeline", "rankwise_pipeline"),
    ("rankwise_kept", "rankwise_kept"),
    ("rankwise_mlp", "sharded parameters"),
    ("rankwise_mlp", "split layers"),
]
MISTAKES = [
    ("rankwise_mlp", "local SGD"),
    ("rankwise_pipeline", "a statistic of the targets in loss_fn"),
    ("rankwise_pipeline", "gradients scaled by the norm of a rank's own stages"),
    ("rankwise_kept", "a queue of a rank's own keys"),
    ("rankwise_kept", "a baseline of a rank's own rewards"),
    ("rankwise_resume", "the optimizer not saved"),
    ("rankwise_resume", "a checkpoint of each rank"),
    ("rankwise_mlp", "stop after a rank's own loss"),
    ("rankwise_conv", "a log that all ranks write"),
    ("rankwise_average", "statistics of an average that is not replicated"),
    ("rankwise_average", "plateau of a rank's own validation"),
    ("rankwise_average", "gradients of torch.autograd.grad"),
    ("rankwise_average", "an activation's hook that clips"),
    ("ddp", "BatchNorm in DistributedDataParallel"),
    ("ddp", "equal augmentations in workers"),
    ("all_reduce", "mean of means"),
    ("with_accelerate", "not seeded"),
    ("with_horovod", "gradients added up"),
]


def verdict_of(command: Command, *words: str) -> tuple[int, dict[str, Any]]:
    """Verify ``train.py``; return the exit code and the verdict on two ranks."""
    done = command.rankwise("verify", "--json", "-", *words, "train.py", seconds=LIMIT_SECONDS)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["verdicts"][0]


@pytest.mark.parametrize("case", CORRECT, ids=" ".join)
def test_a_correct_script_is_equal(command: Command, case: tuple[str, str]) -> None:
    command.write("train.py", CASES[case].text)
    exit_code, verdict = verdict_of(command, "--steps", "8")
    assert (exit_code, verdict["status"]) == (0, "equal"), verdict
    assert verdict["num_steps"] == 8
    # Everything that the script wrote is in the copies.
    assert [path.name for path in command.folder.iterdir()] == ["train.py"]


# torch computes these gradients by vmap, in which no value can be read.
BATCHED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(6, 3, requires_grad=True)
    out = model(x)
    directions = torch.eye(2)[:, None].expand(2, 6, 2)
    wanted = (x, model[0].weight)
    jacobian, _ = torch.autograd.grad(out, wanted, directions, is_grads_batched=True, create_graph=True)
    optimizer.zero_grad()
    (out.square().sum() + jacobian.square().sum()).backward()
    optimizer.step()
"""


def test_gradients_computed_at_once_are_recorded(command: Command) -> None:
    command.write("train.py", BATCHED)
    exit_code, verdict = verdict_of(command, "--auto")
    assert (exit_code, verdict["status"], verdict["num_steps"]) == (0, "equal", 3), verdict


# Fails on the ranks that may compute the same product in two ways.
DETERMINISTIC = """
import os
import torch
torch.backends.cudnn.benchmark = True
class Net(torch.nn.Linear):
    def forward(self, x):
        found = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()
        assert found == (":4096:8", True), found
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        return super().forward(x)
torch.manual_seed(0)
model = Net(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(6, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_every_run_is_deterministic_whatever_the_script_sets(command: Command) -> None:
    command.write("train.py", DETERMINISTIC)
    exit_code, verdict = verdict_of(command, "--auto")
    assert (exit_code, verdict["status"], verdict["num_steps"]) == (0, "equal", 2), verdict


# 9 samples in batches of 8: rank 1 has no sample of the last one.
EMPTY_SHARE = """
import torch
import rankwise as rw
torch.manual_seed(0)
with rw.join() as world:
    model = rw.replicate(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(9, 5), torch.randint(4, (9, 1)))
    for x, y in rw.DataLoader(data, global_batch_size=8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y.to(x.dtype)).backward()
        optimizer.step()
"""


def test_a_rank_without_samples_is_recorded(command: Command) -> None:
    command.write("train.py", EMPTY_SHARE)
    exit_code, verdict = verdict_of(command)
    assert (exit_code, verdict["status"], verdict["num_steps"]) == (0, "equal", 2), verdict


def test_a_crash_on_one_rank_names_the_rank_and_the_line(command: Command) -> None:
    step = "        optimizer.step()\n"
    assert step in EMPTY_SHARE
    text = EMPTY_SHARE.replace(step, f"        assert world.rank != 1 or len(x), 'no samples'\n{step}")
    command.write("train.py", text)
    exit_code, verdict = verdict_of(command)
    cause, line = verdict["cause"], text[: text.index("assert")].count("\n") + 1
    assert (exit_code, cause["key"], cause["line"]) == (1, "failed", f"train.py:{line}"), verdict
    assert cause["words"] == "it runs on one rank and fails on 2 ranks: AssertionError: no samples, on rank 1"


@pytest.mark.parametrize("case", MISTAKES, ids=" ".join)
def test_a_mistake_is_found_with_its_cause(command: Command, case: tuple[str, str]) -> None:
    command.write("train.py", CASES[case].text)
    exit_code, verdict = verdict_of(command, *CASES[case].options)
    assert exit_code == 1, verdict
    assert verdict["cause"]["key"] == CASES[case].cause
    assert verdict["cause"]["fix"]


def test_it_is_shown_as_text_and_as_a_page(command: Command) -> None:
    text = CASES["all_reduce", "gradients divided twice"].text
    command.write("train.py", text)
    words = ["--steps", "2", "-n", "2,3", "--json", "report.json", "--html", "report.html"]
    done = command.rankwise("verify", *words, "train.py", seconds=LIMIT_SECONDS)
    assert done.returncode == 1
    assert "2 ranks do not compute what one rank computes" in done.stdout
    assert "every gradient is 1/3 of that of one rank" in done.stdout
    line = next(number for number, line in enumerate(text.splitlines(), start=1) if ".backward()" in line)
    assert f"(train.py:{line})" in done.stdout
    report = json.loads((command.folder / "report.json").read_text())
    assert [verdict["num_ranks"] for verdict in report["verdicts"]] == [2, 3]
    assert "3 ranks do not compute" in (command.folder / "report.html").read_text()


SPAWN = """
import torch
def work(rank):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            SPAWN,
            (
                "it starts processes of its own (train.py:9), which verify does not see: it starts the ranks itself. "
                "Call the function that they run as each rank, "
                '`work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))` in place of '
                "torch.multiprocessing.spawn, without setting MASTER_ADDR and MASTER_PORT"
            ),
        ),
        ("print('no training')", "it takes no step of a torch optimizer"),
        ("raise ValueError('no data')", "it fails on one rank: ValueError: no data"),
    ],
)
def test_what_cannot_be_compared_says_why(command: Command, text: str, why: str) -> None:
    command.write("train.py", text)
    exit_code, verdict = verdict_of(command)
    assert (exit_code, verdict["status"], verdict["why"]) == (2, "not compared", why)


def test_an_interrupted_run_continues_as_one_rank(command: Command) -> None:
    text = CASES["rankwise_resume", "rankwise_resume"].text
    command.write("train.py", text)
    exit_code, verdict = verdict_of(command, "--resume")
    # Three epochs of six steps, interrupted in the second.
    assert (exit_code, verdict["status"], verdict["num_steps"]) == (0, "equal", 12), verdict
    assert verdict["notes"][-1].startswith("uninterrupted, they are equal over 18 steps"), verdict
    command.write("train.py", text.replace("checkpoints.restore", "(lambda **_: None)"))
    exit_code, verdict = verdict_of(command, "--resume", "--steps", "14")
    assert (exit_code, verdict["status"]) == (2, "not compared"), verdict
    assert "when it is run again, it starts from its first step" in verdict["why"]


AUTO = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(50, 1, 8, 8), torch.randint(0, 4, (50,)))
net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(216, 4))
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
for images, labels in DataLoader(data, batch_size=15, shuffle=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    torch.save(net.state_dict(), "net.pt")
"""


def test_a_script_for_one_device_is_equal_as_auto_runs_it(command: Command) -> None:
    command.write("train.py", AUTO)
    exit_code, verdict = verdict_of(command, "--auto")
    assert (exit_code, verdict["status"], verdict["num_steps"]) == (0, "equal", 4), verdict
    # Rank zero alone runs the script.
    assert verdict["num_ranks"] == 2
    # Without it, each rank trains on all samples.
    exit_code, verdict = verdict_of(command, "--steps", "2")
    assert (exit_code, verdict["cause"]["key"]) == (1, "same samples")


AUTO_RUNS = (
    "center_loss",
    "byol",
    "stripes_gan",
    "multihead_weights",
    "neural_ode",
    "jit_traced",
    "old_weight_norm",
    "two_views",
    "vmap_ensemble",
    "progan_minibatch_std",
)


@pytest.mark.parametrize("name", AUTO_RUNS)
def test_scripts_that_auto_runs_are_equal(command: Command, name: str) -> None:
    """Where calls run whole on every rank, a model computes another's input, or calls are traced or transformed."""
    command.write("train.py", (CORPUS / f"{name}.py").read_text(encoding="utf-8"))
    exit_code, verdict = verdict_of(command, "--auto")
    assert (exit_code, verdict["status"]) == (0, "equal"), verdict


def test_a_script_elsewhere_is_copied_too(command: Command) -> None:
    text = CASES["all_reduce", "all_reduce"].text
    command.write("elsewhere/train.py", f"import beside\n{text}")
    command.write("elsewhere/beside.py", "")
    command.write("here/data.txt", "")
    script = command.folder / "here" / ".." / "elsewhere" / "train.py"
    done = command.rankwise("verify", "--steps", "2", str(script), seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in (command.folder / "elsewhere").iterdir()) == ["beside.py", "train.py"]


@pytest.mark.parametrize(
    "text", ["open('../data/points.txt')", "import sys\nsys.path.append('../data')\nimport points"]
)
def test_a_file_that_only_the_users_folder_has_beside_it_is_named(command: Command, text: str) -> None:
    name = f"data/points.{'txt' if 'open' in text else 'py'}"
    command.write(name, "")
    here = command.inside("here")
    here.write("train.py", text)
    done = here.rankwise("verify", "train.py", seconds=LIMIT_SECONDS)
    assert done.returncode == 2
    assert f"../{name} is outside the working folder" in done.stdout


def test_a_learning_rate_that_grows_with_the_ranks_is_noted(command: Command) -> None:
    command.write("train.py", CASES["ddp", "learning rate times ranks, batch per rank"].text)
    exit_code, verdict = verdict_of(command, "--steps", "2")
    assert (exit_code, verdict["status"]) == (0, "equal"), verdict
    assert any("lr is 0.02 on 2 ranks and 0.01 on one" in note for note in verdict["notes"]), verdict["notes"]


def test_a_script_that_needs_its_own_precision(command: Command) -> None:
    text = CASES["all_reduce", "all_reduce"].text
    loss = "loss = nn.functional.mse_loss(model(mine), wanted)"
    assert loss in text
    command.write("train.py", text.replace(loss, f"{loss}\n        assert loss.dtype == torch.float32"))
    done = command.rankwise("verify", "--steps", "3", "train.py", seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout
    assert "fails in float64" in done.stdout
    assert "in its own precision" in done.stdout


ENDLESS = """
import itertools, time, torch
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in itertools.count():
    parameter.square().sum().backward()
    optimizer.step()
    if step == 3:
        open({path!r}, "w").close()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_one_that_is_stopped(command: Command, number: signal.Signals) -> None:
    reached = command.folder / "reached"
    temporary = command.folder / "temporary"
    temporary.mkdir()
    os.mkfifo(reached)
    command.write("here/train.py", ENDLESS.format(path=str(reached)))
    words = ["-m", "rankwise", "verify", "--steps", "100000", str(command.folder / "here/train.py")]
    with command.start_python(*words, env={"TMPDIR": str(temporary)}) as running:
        reached.read_bytes()
        os.kill(running.pid, number)
        _, said = running.communicate(timeout=LIMIT_SECONDS)
    if number == signal.SIGKILL:
        assert running.returncode == -number
    else:
        assert running.returncode == 128 + number
        assert said.splitlines()[-1] == f"[rankwise] {number.name}: ending the run; its files are removed"
        assert list(temporary.iterdir()) == []
    assert command.wait_until_gone(command.processes(), 10.0) == []


@pytest.mark.parametrize("words", [["-n", "1"], ["-n", "two"], ["--steps", "0"]])
def test_numbers_are_checked_first(command: Command, words: list[str]) -> None:
    done = command.rankwise("verify", *words, "train.py")
    assert done.returncode == 2
    assert "is not a" in done.stderr
