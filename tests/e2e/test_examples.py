# SPDX-License-Identifier: Apache-2.0
"""Every example, in a short form, by the command its docstring gives; those of the course are in test_course.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(command: Command, *words: str) -> str:
    """Run a program of Python to its end and return what it printed."""
    # One thread: tests share the machine, and two threads that wait for one another on a busy one take minutes.
    done = command.python(*words, env={"OMP_NUM_THREADS": "1"}, seconds=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on(command: Command, ranks: str, *words: str) -> str:
    """Run ``rankwise run -n RANKS ...`` to its end and return what it printed."""
    done = command.rankwise("run", "-n", ranks, *words, seconds=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_digits_on_one_rank_and_on_two(command: Command) -> None:
    text = run(command, str(EXAMPLES / "compare_ranks.py"))
    accuracies = re.search(r"test accuracy +([0-9.]+) +([0-9.]+)", text)
    assert accuracies is not None
    assert float(accuracies[1]) >= 0.97
    assert accuracies[1] == accuracies[2]
    difference = re.search(r"largest difference +(\S+)", text)
    assert difference is not None
    assert float(difference[1]) <= 1e-10


def test_digits_resumes(command: Command, tmp_path: Path) -> None:
    words = [str(EXAMPLES / "digits.py"), "--checkpoints", str(tmp_path)]
    whole = run_on(command, "2", str(EXAMPLES / "digits.py"), "--epochs", "2")
    first = run_on(command, "2", *words, "--epochs", "1")
    second = run(command, *words, "--epochs", "2")
    losses = [re.findall(r"loss (\S+)", text) for text in (whole, first + second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_digits_write_a_report_with_their_loss(command: Command, tmp_path: Path) -> None:
    run_on(command, "2", "--report", str(tmp_path / "runs"), str(EXAMPLES / "digits.py"), "--epochs", "2")
    done = command.rankwise("report", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    assert re.match(r"2 ranks, \d+ steps of ", done.stdout)
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert '<polyline class="curve curve0"' in page.partition('id="values-loss"')[2].partition("</section>")[0]


@pytest.mark.parametrize("compress", ["bf16", "fp16", "int8", "powersgd", "top-k"])
def test_digits_are_learned_from_compressed_gradients(command: Command, compress: str) -> None:
    words = ("--dtype", "float32", "--epochs", "6", "--compress", compress)
    text = run_on(command, "2", str(EXAMPLES / "digits.py"), *words)
    accuracy = re.search(r"accuracy (\S+)", text)
    assert accuracy is not None
    # 0.953 without; of top-k's hundredth of the gradients some are a hundred steps old.
    assert float(accuracy[1]) > (0.8 if compress == "top-k" else 0.9)


def test_jax_digits_learn_the_same_on_one_rank_and_on_two(command: Command) -> None:
    texts = [run_on(command, ranks, str(EXAMPLES / "jax_digits.py"), "--epochs", "4") for ranks in ("1", "2")]
    losses = [[float(loss) for loss in re.findall(r"loss (\S+)", text)] for text in texts]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert len(losses[0]) == 4
    accuracies = [re.findall(r"accuracy (\S+)", text) for text in texts]
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0][0]) > 0.9


@pytest.mark.parametrize("options", [[], ["--use-adasum"], ["--fp16-allreduce", "--batches-per-allreduce", "2"]])
def test_a_script_for_horovod(command: Command, options: list[str]) -> None:
    text = run_on(
        command, "2", "-m", "rankwise.compat.horovod", str(EXAMPLES / "horovod_mnist.py"), "--epochs", "6", *options
    )
    accuracy = re.search(r"epoch  6 .*accuracy (\S+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85


def test_fashion_mnist(command: Command, tmp_path: Path) -> None:
    text = run_on(
        command, "2", str(EXAMPLES / "fashion_mnist.py"), "--limit", "2000", "--epochs", "2",
        "--checkpoints", str(tmp_path),
    )  # fmt: skip
    accuracy = re.search(r"epoch 2 .*accuracy (\S+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]


def largest_differences(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"largest difference.*?(\d\.\d+e[+-]\d+)", text)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "ranks"), [("replicate", "2"), ("shard", "3"), ("tensor_parallel", "2"), ("pipeline", "2")]
)
def test_llama_on_ranks(command: Command, how: str, ranks: str) -> None:
    text = run_on(command, ranks, str(EXAMPLES / "llama.py"), "--how", how, "--small")
    (difference,) = largest_differences(text)
    assert difference <= 1e-10


@pytest.mark.timeout(120)
def test_llama_in_one_process(command: Command) -> None:
    (difference,) = largest_differences(run(command, str(EXAMPLES / "llama.py"), "--how", "place", "--small"))
    assert difference <= 1e-10


@pytest.mark.timeout(120)
def test_megengine_s_data_parallel_tutorial(command: Command) -> None:
    text = run(command, str(EXAMPLES / "megengine_lenet.py"), "--ranks", "2", "--epochs", "2")
    accuracies = re.search(r"accuracy (\S+), on one rank (\S+)", text)
    assert accuracies is not None
    assert float(accuracies[1]) >= 0.9
    assert accuracies[1] == accuracies[2]
    (difference,) = largest_differences(text)
    assert difference <= 1e-10


@pytest.mark.timeout(120)
def test_megengine_s_model_parallel_tutorial(command: Command) -> None:
    (difference,) = largest_differences(run(command, str(EXAMPLES / "megengine_two_parts.py")))
    assert difference <= 1e-10
