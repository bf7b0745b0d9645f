# SPDX-License-Identifier: Apache-2.0
"""``hvd.elastic``: killed ranks and launchers, damaged commits, failed operations. Results are as if undisturbed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import rankwise
import rankwise.compat.horovod as hvd
from rankwise import testing
from rankwise.compat.horovod.elastic.state import Commits
from rankwise.compat.horovod.exceptions import HostsUpdatedInterrupt
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.store.wire import listen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from on_ranks import RunRanks

    from rankwise.world.facts import World
    from tests.warm import Started, WarmPython

TRAIN = """
    import os, signal, sys
    from pathlib import Path
    import torch
    import torch.nn.functional as F
    import horovod.torch as hvd
    from torch.utils.data import DataLoader, TensorDataset

    hvd.init()
    folder, when, who = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(hvd.rank())
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(24, 2).sin()
    data = TensorDataset(torch.arange(24), x)
    model = torch.nn.Linear(2, 3).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    if hvd.rank():
        model.weight.data.zero_()  # sync() must restore it
    else:
        torch.nn.init.ones_(model.weight)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 2:
            for batch, (numbers, part) in enumerate(DataLoader(data, sampler=state.sampler, batch_size=2)):
                if state.steps == when - 1:
                    hvd.barrier()  # every rank has committed
                    hurt()
                while who == "launcher" and hvd.size() == 1 and state.steps == when:
                    state.check_host_updates()  # until another machine has joined
                optimizer.zero_grad()
                F.mse_loss(model(part), part.sum(1, keepdim=True).expand(-1, 3)).backward()
                optimizer.step()
                state.sampler.record_batch(batch, len(part))
                state.steps += 1
                state.seen = state.seen + hvd.allgather(numbers).tolist()
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    def hurt():
        mark = folder / "hurt"
        if not mark.exists() and hvd.rank() == hvd.size() - 1:
            mark.touch()
            if who == "torn":
                (commits,) = {Path(os.environ["RANKWISE_ERROR_FILE"]).parent}
                newest = max(commits.glob("elastic-*.pt"), key=lambda one: int(one.stem.rpartition("-")[2]))
                newest.write_bytes(newest.read_bytes()[:-100])
                (commits / "elastic-0-0-99.part").write_bytes(b"half")
            if who == "launcher":
                print("ready", flush=True)
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)

    sampler = hvd.elastic.ElasticSampler(data, seed=3)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0, seen=[])
    resets = []
    note = lambda: resets.append((state.steps, hvd.size()))
    state.register_reset_callbacks([note, lambda: print(resets, flush=True)])
    train(state)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": state.seen, "resets": resets},
        folder / f"ended-{when}-{hvd.rank()}.pt",
    )
"""
VARIABLES = {"OMP_NUM_THREADS": "1", "RANKWISE_SECRET": "of these tests"}


def start(warm_python: WarmPython, folder: Path, *words: str) -> Started:
    """Start ``rankwise run`` with the training; its temporary folders are below ``folder``."""
    script = folder / "train.py"
    if not script.exists():  # Ranks of another launcher may be reading it.
        script.write_text(textwrap.dedent(TRAIN))
    (folder / "tmp").mkdir(exist_ok=True)
    variables = {**warm_python.environment, **VARIABLES, "TMPDIR": str(folder / "tmp")}
    return warm_python.start(["-m", "rankwise", "run", *words], folder, variables)


def command(folder: Path, when: int, who: str) -> list[str]:
    return ["-m", "rankwise.compat.horovod", "train.py", str(folder), str(when), who]


def ended(folder: Path, when: int, rank: int = 0) -> dict[str, Any]:
    return torch.load(folder / f"ended-{when}-{rank}.pt", weights_only=True)


@pytest.fixture(scope="module")
def undisturbed(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks comes to where nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    calm = start(warm_python, folder, "-n", "2", *command(folder, 99, "nobody"))
    assert "elastic" not in calm.communicate(timeout=80)[1]
    return [ended(folder, 99, rank) for rank in range(2)]


@pytest.mark.parametrize("who", ["rank", "torn"])
def test_a_killed_rank_changes_nothing(
    warm_python: WarmPython, tmp_path: Path, who: str, undisturbed: list[dict[str, Any]]
) -> None:
    hurt = start(warm_python, tmp_path, "-n", "2", "--max-restarts", "2", *command(tmp_path, 5, who))
    _, said = hurt.communicate(timeout=80)
    assert hurt.returncode == 0, said
    taken = 4 if who == "rank" else 3
    assert f"commit {taken} of attempt 0 is restored" in said
    assert ("is skipped" in said) == (who == "torn")
    for rank in range(2):
        was = ended(tmp_path, 5, rank)
        assert was["resets"] == [(taken, 2)]
        torch.testing.assert_close({**was, "resets": []}, undisturbed[rank], rtol=0, atol=0)
        assert sorted(was["seen"]) == sorted([*range(24)] * 2)
    assert list((tmp_path / "tmp").glob("rankwise-*")) == []


def _continue_from_commits(world: World, folder: str, states: tuple[str, str]) -> object:
    """Each rank is the first of a machine of its own, whose commits are in a state."""
    own, state = Path(folder) / str(world.rank), states[world.rank]
    own.mkdir()
    first = Commits(own, run=0, attempt=0, is_writer=True)
    for number in (1, 2):
        first.write({"values": {"n": number}})
    newest = own / "elastic-0-0-2.pt"
    if state == "not readable":
        newest.unlink()
        newest.symlink_to(newest)
    for path in [newest] * (state == "torn") or [*own.iterdir()] * (state == "all torn"):
        path.write_bytes(path.read_bytes()[:-100])
    try:
        taken = Commits(own, run=0, attempt=1, is_writer=True).take_newest()
    except CheckpointError as error:
        return str(error)
    return taken and taken["values"]["n"]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("torn", "torn"), 1),
        (("not readable", "whole"), 2),
        (("all torn", "whole"), 2),
        (("not readable", "not readable"), "Too many levels of symbolic links"),
        (("not readable", "torn"), "Too many levels of symbolic links"),
        (("all torn", "all torn"), "cannot continue from the elastic state"),
    ],
)
def test_commits_that_cannot_be_read_are_an_error_on_all_ranks(
    tmp_path: Path, states: tuple[str, str], expected: object
) -> None:
    for result in testing.run_ranks(_continue_from_commits, 2, str(tmp_path), states):
        found = result.get()
        assert found == expected if isinstance(expected, int) else str(expected) in str(found)


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


class Launchers:
    """Launchers of one job, each as if on a machine of its own."""

    def __init__(self, warm_python: WarmPython, folder: Path, port: int) -> None:
        self._warm_python = warm_python
        self.processes: list[Started] = []
        self._folder = folder
        self._words = ("--rendezvous", f"127.0.0.1:{port}", "--nodes", "1:2", "-n", "1")

    def start(self, node_rank: int) -> Started:
        words = (*self._words, "--node-rank", str(node_rank))
        words = (*words, *command(self._folder, 4, "launcher"))
        self.processes.append(start(self._warm_python, self._folder, *words))
        return self.processes[-1]


@pytest.fixture
def launchers(warm_python: WarmPython, tmp_path: Path, port: int) -> Iterator[Launchers]:
    started = Launchers(warm_python, tmp_path, port)
    yield started
    for process in started.processes:
        process.kill()
        process.communicate()


def test_remaining_ranks_go_to_the_available_machines(tmp_path: Path, launchers: Launchers) -> None:
    first, second = launchers.start(0), launchers.start(1)
    assert second.stdout is not None
    assert second.stdout.readline() == "ready\n"
    second.kill()
    assert first.stdout is not None
    # Both had done 3 batches of 2 samples.
    assert first.stdout.readline() == "[(3, 1)]\n"
    again = launchers.start(1)
    said = first.communicate(timeout=80)[1] + again.communicate(timeout=80)[1]
    assert (first.returncode, again.returncode) == (0, 0), said
    assert "elastic: committed for the next attempt" in said
    assert "stopped early because of" in said
    for rank in range(2):
        was = ended(tmp_path, 4, rank)
        # Alone, the first did one more batch before the other was there again.
        assert was["resets"] == [(4, 2)]
        assert sorted(was["seen"][:24]) == list(range(24))
        assert sorted(was["seen"][24:]) == list(range(24))


def commit_and_take(world: rankwise.World, folders: list[str], numbers: list[int], attempt: int) -> Any:
    """Write as the only rank of a machine, or take what there is."""
    commits = Commits(Path(folders[world.rank]), run=0, attempt=attempt, is_writer=True)
    for number in range(numbers[world.rank]):
        commits.write({"number": number, "from": world.rank, "array": np.arange(5.0), "best": np.float64(number)})
    return commits.take_newest()


def test_the_newest_commit_of_any_machine_is_every_ranks(tmp_path: Path, run_ranks: RunRanks) -> None:
    folders = [str(tmp_path / name) for name in "abc"]
    for folder in folders:
        Path(folder).mkdir()
    for result in run_ranks(commit_and_take, 3, folders, [3, 5, 4], 0):
        assert (result.get()["number"], result.get()["from"]) == (4, 1)
        assert (result.get()["array"].tolist(), type(result.get()["best"])) == ([0, 1, 2, 3, 4], np.float64)
    assert sorted(path.name for path in Path(folders[1]).iterdir()) == ["elastic-0-0-4.pt", "elastic-0-0-5.pt"]
    # A later attempt's commit is newer, whatever its number; ranks that have none get it too.
    for result in run_ranks(commit_and_take, 2, [folders[2], folders[0]], [1, 0], 1):
        assert (result.get()["number"], result.get()["from"]) == (0, 0)
    (tmp_path / "empty").mkdir()
    for result in run_ranks(commit_and_take, 2, [str(tmp_path / "empty")] * 2, [0, 0], 1):
        assert result.get() is None


def commit(_: rankwise.World, folder: str, kind: str) -> dict[str, Any] | None:
    values = {"code": Path("x"), "function": commit, "plain": [{1, 2}, (1.5, None), b"x", "y", {3: 1j}, 2**70]}
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, value=values[kind])
    state.commit_to(Commits(Path(folder), run=0, attempt=0, is_writer=True))
    state.commit()
    return Commits(Path(folder), run=0, attempt=1, is_writer=True).take_newest()


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [("code", f"{type(Path()).__module__}.PosixPath"), ("function", "test_horovod_elastic.commit")],
)
def test_state_that_would_have_to_run_code_is_refused_at_commit(tmp_path: Path, kind: str, evidence: str) -> None:
    (result,) = testing.run_ranks(commit, 1, str(tmp_path), kind)
    with pytest.raises(ConfigurationError, match="cannot be read back without running code") as error:
        result.get()
    assert error.value.evidence == evidence
    assert list(tmp_path.iterdir()) == []


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    (result,) = testing.run_ranks(commit, 1, str(tmp_path), "plain")
    assert result.get() == {"values": {"value": [{1, 2}, (1.5, None), b"x", "y", {3: 1j}, 2**70]}}


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (result,) = testing.run_ranks(commit, 1, str(tmp_path / "gone"), "plain")
    with pytest.raises(CheckpointError, match="cannot be committed to") as error:
        result.get()
    assert "TMPDIR" in str(error.value.do)


def fail_within(world: rankwise.World, rank: int, kind: str) -> list[Any]:
    """Make one rank's operation fail after a commit, then continue."""
    hvd.init()
    model = torch.nn.Linear(1, 1).double()
    torch.nn.init.constant_(model.weight, 1.0 + world.rank)
    state = hvd.elastic.TorchState(model, steps=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.steps)])
    seen: list[float] = []

    @hvd.elastic.run
    def train(state: Any, last: int) -> str:
        while state.steps < last:
            state.steps += 1
            state.model.weight.data += hvd.allreduce(torch.ones(1, 1, dtype=torch.float64))
            seen.append(state.model.weight.item())
            if state.steps == 3 and not resets and kind == "interrupt":
                raise HostsUpdatedInterrupt(skip_sync=False)
            if state.steps == 3 and not resets and (rank == world.rank or kind == "everywhere"):
                raise hvd.HorovodInternalError("as an operation would")
            if state.steps != 3:
                state.commit()
        return "ended"

    return [train(state, 4), seen, resets, state.model.weight.item()]


@pytest.mark.parametrize(
    ("kind", "seen", "resets"),
    [
        ("everywhere", [2, 3, 4, 4, 5], [2]),
        # Uncommitted values go back to the commit's; the model is synchronised as it is.
        ("interrupt", [2, 3, 4, 5, 6], [3]),
    ],
)
def test_a_failed_operation_goes_back_to_the_commit(
    run_ranks: RunRanks, kind: str, seen: list[float], resets: list[int]
) -> None:
    for result in run_ranks(fail_within, 2, 1, kind):
        assert result.get() == ["ended", seen, resets, seen[-1]]


def test_one_ranks_failed_operation_takes_the_others_along(run_ranks: RunRanks) -> None:
    for result in run_ranks(fail_within, 3, 1, "here"):
        assert (result.get()[1], set(result.get()[2])) == ([2, 3, 4, 4, 5], {2})


def fail_forever(_: rankwise.World) -> None:
    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, steps=0)
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(1)
        raise hvd.HorovodInternalError(f"call {len(calls)}")

    train(state)


def test_a_job_that_fails_repeatedly_ends(run_ranks: RunRanks) -> None:
    for result in run_ranks(fail_forever, 2):
        assert "call 5" in str(result.error)
