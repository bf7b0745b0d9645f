# SPDX-License-Identifier: Apache-2.0
"""An accelerator that is not NVIDIA's: what rankwise does there is what it does on CPUs.

Through each exchange of host memory, and on a backend of its own that is as asynchronous and unforgiving as NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import one_rank
from on_standin import NUM_DEVICES, build_standin, on_standin, python_with_standin
from replicas import TOLERANCE, Net, Parameters, batches, built, largest_difference, part
from torch import nn
from torch.utils.data import TensorDataset
from trained_otherwise import train_in_words, train_seldom

import rankwise as rw
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError
from rankwise.insight.run_records import read_run
from rankwise.insight.step_table import table_of
from rankwise.testing import run_ranks
from rankwise.world.device.accelerator import random_state, set_random_state
from rankwise.world.device.choice import choose_backend, choose_device

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World

pytestmark = pytest.mark.timeout(240)  # the first of these tests may have to compile the device and its backend

CARRIERS = {
    "shared memory": {"exchange": "shared_memory"},
    "gloo": {"exchange": "gloo"},
    "strict": {"backend": "strict"},
}
"""What carries tensors of the device."""
OnDevices = Callable[..., list[Any]]
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "strict"])


@pytest.fixture(scope="module", autouse=True)
def _standin_is_built() -> None:
    build_standin(strict=True)


@pytest.fixture(params=CARRIERS)
def carried(request: pytest.FixtureRequest) -> OnDevices:
    """``on_standin`` with each of the carriers."""
    return partial(on_standin, **CARRIERS[request.param])


def _on_cpu(tensors: dict[str, torch.Tensor]) -> Parameters:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _net(device: str, *, batchnorm: bool = False) -> nn.Module:
    model = built(lambda: Net(batchnorm=batchnorm)).to(device)
    # On a device of torch's PrivateUse1, to() makes new parameters, one for each name.
    model.tied.weight = model.second.weight
    return model


def _place(world: World) -> tuple[str, str, int, str]:
    exchange = type(getattr(current().exchange, "inner", None)).__name__
    return world.device, world.backend, torch.accelerator.current_device_index(), exchange


@pytest.mark.parametrize(("exchange", "inner"), [("auto", "SharedMemory"), ("gloo", "TorchGroup")])
def test_each_rank_has_a_device_of_its_own(exchange: str, inner: str) -> None:
    found = on_standin(_place, 3, exchange=exchange)
    assert found == [(f"standin:{rank}", "gloo", rank, inner) for rank in range(3)]
    assert on_standin(_place, 1)[0][:3] == ("standin:0", "none", 0)


class _NotesTheDevice:
    """A function whose rank notes which device is the current one when torch's group opens."""

    def __init__(self) -> None:
        self.current, self.bound = -1, ""

    def __setstate__(self, _: dict[str, Any]) -> None:
        opens = dist.init_process_group

        def noting(*args: Any, **options: Any) -> None:
            self.current = torch.accelerator.current_device_index()
            self.bound = options["device_id"]
            opens(*args, **options)

        dist.init_process_group = noting

    def __call__(self, world: World) -> tuple[int, int, object]:
        return world.rank, self.current, self.bound


def test_the_device_is_set_before_torchs_group_opens() -> None:
    # Not bound: its tensors travel through host memory.
    assert on_standin(_NotesTheDevice(), 3) == [(rank, rank, None) for rank in range(3)]


def _state_under_a_default_device(world: World) -> tuple[str, bool]:
    with torch.device(world.device):
        state = random_state(world.device)
        drawn = torch.rand(3)
        set_random_state(world.device, state)
        return state.device.type, bool((torch.rand(3) == drawn).all())


def test_the_state_of_a_generator_is_on_the_cpu_whatever_the_default_device_is() -> None:
    # CUDA's generators take no other.
    assert on_standin(_state_under_a_default_device, 1) == [("cpu", True)]


def _choices(_: World) -> dict[str, str]:
    with pytest.raises(ConfigurationError) as no_device:
        choose_device(None, None, NUM_DEVICES)
    with pytest.raises(ConfigurationError) as not_for_it:
        choose_backend("nccl", "standin:0")
    with pytest.raises(ConfigurationError) as unknown:
        choose_backend("standin", "standin:0")
    return {
        "no device": str(no_device.value),
        "not for it": str(not_for_it.value),
        "unknown": str(unknown.value),
        "with gloo": choose_device(None, "gloo", 0),
        "asked for": choose_device("standin:3", "gloo", 0),
    }


def test_choices_that_cannot_be_had_are_errors_with_numbers_and_a_fix() -> None:
    (found,) = on_standin(_choices, 1)
    assert "Local rank 4 has no device: this machine has 4." in found["no device"]
    assert "join(device='cpu')" in found["no device"]
    assert "needs a GPU, but this rank's device is standin:0" in found["not for it"]
    assert "use one of gloo" in found["unknown"]
    assert (found["with gloo"], found["asked for"]) == ("cpu", "standin:3")


def _collectives(world: World) -> list[Any]:
    rank, device = world.rank, world.device
    own = torch.arange(3.0, device=device) + rank
    tensors = [
        rw.all_reduce(own),
        rw.all_reduce(own, "mean"),
        rw.all_reduce(own.bool(), "max"),
        *rw.all_gather(own),
        rw.broadcast(own, 1),
        rw.reduce_scatter(torch.ones(world.world_size, 2, device=device)),
        *rw.all_to_all([own + other for other in range(world.world_size)]),
    ]
    assert {str(tensor.device) for tensor in tensors} == {device}
    gathered = rw.all_gather_uneven(torch.ones(rank + 1, device=device))
    tensors += [gathered] if isinstance(gathered, torch.Tensor) else gathered
    rw.barrier()
    if rank == 0:
        rw.send(own, 1)
    if rank == 1:
        received = rw.recv(0)
        assert received.device == own.device
        tensors.append(received)
    group = rw.new_group(list(range(world.world_size - 1)))
    if rank < world.world_size - 1:
        tensors.append(rw.all_reduce(own, group=group))
    return [tensor.tolist() for tensor in tensors]


def test_collectives_take_and_give_tensors_of_the_device(carried: OnDevices) -> None:
    assert carried(_collectives, 3) == [result.get() for result in run_ranks(_collectives, 3)]


def _train(world: World, sizes: tuple[int, ...], micro: int, batchnorm: bool) -> Parameters:
    model = rw.replicate(_net(world.device, batchnorm=batchnorm), sync_batchnorm=batchnorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches(sizes)):
        for index in range(micro):
            x_own, y_own = (
                part(part(tensor, index, micro), world.rank, world.world_size).to(world.device) for tensor in (x, y)
            )
            if index < micro - 1:
                with rw.no_sync(model):
                    nn.functional.mse_loss(model(x_own), y_own).backward()
            else:
                nn.functional.mse_loss(model(x_own), y_own).backward()
        assert model.never.weight.grad is None
        assert str(model.last.weight.grad.device) == world.device
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return _on_cpu(model.state_dict())


@pytest.mark.parametrize(
    ("sizes", "micro", "batchnorm"),
    [((12, 7, 2, 5), 1, False), ((12, 7, 13), 3, False), ((12, 9, 13), 2, True)],
    ids=["uneven", "accumulated", "BatchNorm"],
)
def test_replicate_is_exact(carried: OnDevices, sizes: tuple[int, ...], micro: int, batchnorm: bool) -> None:
    reference = one_rank(_train, sizes, micro, batchnorm)
    for world_size in (1, 3):
        for found in carried(_train, world_size, sizes, micro, batchnorm):
            assert largest_difference(found, reference) < TOLERANCE


def _compressed(world: World, method: str) -> Parameters:
    model = rw.replicate(_net(world.device), compress=method)
    for x, y in batches((8, 8, 8)):
        x_own, y_own = (part(tensor, world.rank, world.world_size).to(world.device) for tensor in (x, y))
        nn.functional.mse_loss(model(x_own), y_own).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    return _on_cpu(model.state_dict())


@BACKENDS
@pytest.mark.parametrize("method", ["bf16", "int8", "powersgd", "top-k"])
def test_compressed_gradients_are_those_of_cpu_ranks(method: str, backend: str) -> None:
    expected = run_ranks(_compressed, 2, method)[0].get()
    for found in on_standin(_compressed, 2, method, backend=backend):
        assert largest_difference(found, expected) < TOLERANCE


@BACKENDS
@pytest.mark.parametrize(
    ("train", "how"),
    [
        (train_in_words, "horovod"),
        (train_in_words, "megengine"),
        (train_seldom, "parameter server"),
        (train_seldom, "worker_groups"),
    ],
    ids=["horovod", "megengine", "parameter server", "worker_groups"],
)
def test_other_ways_of_training_are_exact(train: Callable[..., Parameters], how: str, backend: str) -> None:
    expected = one_rank(train, how, 2)
    for found in on_standin(train, 2, how, 2, backend=backend):
        assert largest_difference(found, expected) < TOLERANCE


def _batches(world: World, num_workers: int) -> list[list[float]]:
    data = TensorDataset(torch.arange(37.0), torch.arange(37.0) * 2)
    # Without columns: a dataset that workers read.
    dataset = [data[index] for index in range(len(data))] if num_workers else data
    loader = rw.DataLoader(dataset, global_batch_size=7, shuffle=True, num_workers=num_workers)
    seen = []
    for x, y in loader:
        assert str(x.device) == str(y.device) == world.device
        assert torch.equal(x * 2, y)
        seen.append(x.tolist())
    return seen


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_puts_batches_on_the_device(num_workers: int) -> None:
    parts = on_standin(_batches, 2, num_workers)
    assert [a + b for a, b in zip(*parts, strict=True)] == one_rank(_batches, 0)


def _pinned(world: World) -> tuple[bool, bool, bool]:
    from rankwise.data.batches import pin, to_device
    from rankwise.world.device.streams import new_stream, pins

    device = torch.device(world.device)
    moved = [
        (mark, batch.tolist(), str(batch.device))
        for mark, batch in to_device(iter([(number, pin(torch.ones(2) * number)) for number in range(3)]), device)
    ]
    assert moved == [(number, [number, number], world.device) for number in range(3)]
    return pins(device), pin(torch.ones(2)).is_pinned(), new_stream(device) is not None


def test_batches_are_pinned_and_travel_on_a_stream_of_their_own() -> None:
    assert on_standin(_pinned, 1) == [(True, True, True)]


EPOCHS = 3


def _resumable(world: World, folder: str, stop_after: int, asynchronous: bool) -> Parameters:
    torch.manual_seed(3)
    x, y = torch.randn(37, 5, dtype=torch.float64), torch.randn(37, 2, dtype=torch.float64)
    # No bias before BatchNorm: its gradient is rounding, which AdamW would scale up.
    layers = [nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2)]
    model = nn.Sequential(*layers).double().to(world.device)
    rw.replicate(model, sync_batchnorm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = rw.DataLoader(TensorDataset(x, y), global_batch_size=8, shuffle=True)
    num_steps = 0
    with rw.Checkpointer(folder, asynchronous=asynchronous) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
        for _epoch in range(loader.epoch, EPOCHS):
            for x_part, y_part in loader:
                nn.functional.mse_loss(model(x_part), y_part).backward()
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
                if num_steps == stop_after:
                    checkpoints.save(model=model, optimizer=optimizer, loader=loader)
                    # What is saved is what was there at that moment.
                    with torch.no_grad():
                        model[0].weight.zero_()
                    return {}
    return _on_cpu(model.state_dict())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    return run_ranks(_resumable, 1, str(tmp_path_factory.mktemp("undisturbed")), -1, False)[0].get()


@pytest.mark.parametrize(
    ("backend", "ranks", "asynchronous"),
    [
        ("gloo", (2, 3), False),
        ("gloo", (3, 1), True),
        ("gloo", (2, "2 CPUs"), True),
        ("strict", (2, 3), False),
        ("strict", (2, 3), True),
    ],
)
def test_a_checkpoint_is_resumed_anywhere(
    tmp_path: Path, undisturbed: Parameters, backend: str, ranks: tuple[int, int | str], asynchronous: bool
) -> None:
    saves_on, resumes_on = ranks
    folder = str(tmp_path / "run")
    on_standin(_resumable, saves_on, folder, 7, asynchronous, backend=backend)
    if isinstance(resumes_on, int):
        found = on_standin(_resumable, resumes_on, folder, -1, asynchronous, backend=backend)
    else:
        found = [result.get() for result in run_ranks(_resumable, 2, folder, -1, asynchronous)]
    for one in found:
        assert largest_difference(one, undisturbed) < TOLERANCE


def test_a_checkpoint_of_the_cpu_is_resumed_on_the_device(tmp_path: Path, undisturbed: Parameters) -> None:
    folder = str(tmp_path / "run")
    for result in run_ranks(_resumable, 2, folder, 7, True):
        result.get()
    for found in on_standin(_resumable, 3, folder, -1, False):
        assert largest_difference(found, undisturbed) < TOLERANCE


def _autocast(world: World) -> tuple[str, Parameters]:
    torch.manual_seed(0)
    model = rw.replicate(nn.Linear(6, 3).to(world.device))
    x, y = (part(t.float(), world.rank, world.world_size).to(world.device) for t in batches([10])[0])
    with torch.autocast(torch.device(world.device).type, dtype=torch.bfloat16):
        output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
    loss.backward()
    return str(output.dtype), _on_cpu({name: p.grad for name, p in model.named_parameters()})


def test_autocast_on_the_device() -> None:
    _, reference = one_rank(_autocast)
    for dtype, found in on_standin(_autocast, 2):
        assert dtype == "torch.bfloat16"
        assert largest_difference(found, reference) < 0.02


def _placed(world: World, plan: dict[str, str] | None) -> tuple[Parameters, set[str], Parameters]:
    def trained(model: nn.Module) -> Parameters:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches([5, 6]):
            output = model(x)
            nn.functional.mse_loss(output, y.to(output.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return _on_cpu(dict(model.named_parameters()))

    expected = trained(built(Net))
    model = rw.place(built(Net), **({} if plan is None else {"plan": plan}))
    used = {str(parameter.device) for parameter in model.parameters()}
    return expected, used, trained(model)


@pytest.mark.parametrize(
    ("plan", "used"),
    [
        (None, {"standin:0"}),
        ({"": "standin:2", "last": "standin:3", "first": "cpu"}, {"standin:2", "standin:3", "cpu"}),
    ],
    ids=["by what is free", "by hand"],
)
def test_a_model_is_placed_on_devices(plan: dict[str, str] | None, used: set[str]) -> None:
    expected, found_used, found = on_standin(_placed, 1, plan)[0]
    assert used <= found_used
    assert largest_difference(found, expected) < TOLERANCE


STRATEGIES: dict[str, Callable[[nn.Module], object]] = {
    "shard": rw.shard,
    "tensor_parallel": lambda model: rw.tensor_parallel(model, {"first": "column"}),
    "pipeline": lambda model: rw.pipeline(model, nn.functional.mse_loss, example=torch.zeros(2, 6)),
}


def _refused(world: World, strategy: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        STRATEGIES[strategy](Net().to(world.device))
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_that_need_a_backend_of_the_device_raise_an_error(strategy: str) -> None:
    for text in on_standin(_refused, 2, strategy):
        assert f"{strategy}() needs a torch backend that supports standin tensors, and gloo does not." in text
        assert "rankwise.replicate()" in text


def _left_on_cpu(_: World, strategy: str, device: str | None) -> str:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy == "local_sgd":
        rw.mesh(worker_groups=-1)
        rw.local_sgd(model, every=2)
    elif strategy == "parameter_server":
        rw.parameter_server(model, optimizer, servers=1)
    else:
        rw.replicate(model)
    data = (torch.ones(12, 6), torch.ones(12, 3))
    for x, y in rw.DataLoader(data, global_batch_size=4, device=device):
        if device is None:
            with pytest.raises(ConfigurationError) as caught:
                model(x)
            return str(caught.value)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return ""


@pytest.mark.parametrize("strategy", ["replicate", "local_sgd", "parameter_server"])
def test_a_model_on_the_cpu_is_named_when_its_inputs_are_on_the_device(strategy: str) -> None:
    found = on_standin(_left_on_cpu, 2, strategy, None, backend="strict")
    named = [(rank, text) for rank, text in enumerate(found) if text]
    assert len(named) == (1 if strategy == "parameter_server" else 2), "a server has no batches"
    for rank, text in named:
        assert text.startswith(f"Net is on cpu, but this rank's device is standin:{rank}, and so is that of its inputs")
        assert f"{strategy}() at test_accelerator.py:" in text
        assert f"rankwise.{strategy}(Net(...).to(world.device)), before the optimizer" in text


@pytest.mark.parametrize("strategy", ["replicate", "local_sgd"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_script_that_trains_on_the_cpu_of_such_a_machine_is_not_refused(strategy: str, num_ranks: int) -> None:
    assert on_standin(_left_on_cpu, num_ranks, strategy, "cpu", backend="strict") == [""] * num_ranks


def _random(world: World) -> bool:
    from rankwise.world.device.accelerator import kept_random_states

    torch.manual_seed(5)
    device = torch.device(world.device)
    with kept_random_states(device):
        first = torch.rand(3, device=device), torch.rand(3)
    again = torch.rand(3, device=device), torch.rand(3)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, again, strict=True))


def test_random_numbers_of_the_device_are_put_back() -> None:
    assert on_standin(_random, 2) == [True, True]


SCRIPT = """
import torch, rankwise as rw
with rw.join() as world:
    print(world.device, world.backend, rw.all_reduce(torch.ones(1, device=world.device)).item(), flush=True)
"""


@pytest.mark.parametrize(
    ("words", "strict", "expected"),
    [
        (["-n", "2"], False, {"standin:0 gloo 2.0", "standin:1 gloo 2.0"}),
        ([], False, {f"standin:{rank} gloo 4.0" for rank in range(NUM_DEVICES)}),
        (["-n", "2", "--device", "cpu"], False, {"cpu gloo 2.0"}),
        (["-n", "2"], True, {"standin:0 strict 2.0", "standin:1 strict 2.0"}),
    ],
    ids=["two", "one per device", "on the CPU", "with the backend of the device"],
)
def test_rankwise_run_gives_each_rank_a_device(
    tmp_path: Path, words: list[str], strict: bool, expected: set[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = python_with_standin("-m", "rankwise", "run", *words, str(script), strict=strict)
    assert ended.returncode == 0, ended.stderr
    assert "No backend of type" not in ended.stderr
    found = {line.partition("] ")[2] or line for line in ended.stdout.splitlines()}
    assert {line for line in found if " gloo " in line or " strict " in line} == expected


def test_rankwise_run_counts_no_devices_where_the_variable_says_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("RANKWISE_DEVICE", "cpu")
    ended = python_with_standin("-m", "rankwise", "run", str(script))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["cpu none 1.0"]


def test_rankwise_run_refuses_more_ranks_than_devices(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = python_with_standin("-m", "rankwise", "run", "-n", "5", str(script))
    assert ended.returncode != 0
    assert "5 ranks were requested on a machine with 4 devices." in ended.stderr
    assert "pass -n 4, or --device cpu" in ended.stderr


def test_doctor_sees_the_devices() -> None:
    ended = python_with_standin("-m", "rankwise", "doctor", "--json", "--port", "0")
    report = json.loads(ended.stdout)
    (rank,) = report["ranks"]
    assert rank["machine"]["device_type"] == "standin"
    assert rank["machine"]["gpus"] == ["stand-in on the CPU"] * NUM_DEVICES
    (told,) = [finding for finding in report["findings"] if finding["check"] == "GPUs"]
    assert told["what"].startswith("4x stand-in on the CPU; ")


TIMED = """
import time, torch, rankwise as rw
world = rw.join()
model = rw.replicate(torch.nn.Linear(4, 4).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(2, 4, device=world.device)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def test_the_parts_of_a_step_are_timed_by_events_of_the_device(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TIMED)
    records = tmp_path / "records"
    ended = python_with_standin("-m", "rankwise", "run", "-n", "2", "--report", str(records), str(script))
    assert ended.returncode == 0, ended.stderr
    run = read_run(records)
    assert [(record.facts["times"], record.facts["device"]) for record in run.ranks] == [
        ("device", "standin:0"),
        ("device", "standin:1"),
    ]
    table = table_of(run.ranks)
    assert table.num_steps == 20
    means = table.steady().mean_parts()
    assert (means["script"] > 0.009).all(), "the pause"
    assert all((means[part] > 0.0).all() for part in ("forward", "backward", "optimizer"))
    whole = table.start[:, -1] - table.start[:, 0]
    assert whole == pytest.approx(table.seconds[:, :-1].sum(axis=1), rel=0.02), "steps follow one another"
