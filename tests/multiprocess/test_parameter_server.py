# SPDX-License-Identifier: Apache-2.0
"""Parameter servers on real ranks: sync computes what one rank computes, async waits only where necessary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise import testing
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, PeerFailed, PeerMissing
from rankwise.parameter_server import messages

if TYPE_CHECKING:
    from replicas import Parameters

    from rankwise.comm.backends.mapping import Mapping
    from rankwise.world.facts import World

NUM_WORDS = 50


class Net(nn.Module):
    """Rows that are looked up, tied layers, a layer that is frozen and one that is never used."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 6, sparse=is_sparse)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.never = nn.Linear(2, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.frozen(torch.tanh(self.tied(torch.tanh(self.first(self.words(words))))))


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, NUM_WORDS, (35,), generator=generator)
    return TensorDataset(words, torch.randn(35, 6, generator=generator, dtype=torch.float64))


def _build(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(current().world.rank)  # the first rank's values count
    model = Net(is_sparse=kind != "Adam").double()
    if kind == "Adam":
        return model, torch.optim.Adam([*model.parameters()][::-1], lr=0.01, weight_decay=0.1)
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1)


def _train(world: World, num_servers: int, kind: str, accumulates: bool) -> tuple[Parameters, Parameters]:
    model, optimizer = _build(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    server = rw.parameter_server(model, optimizer, servers=num_servers)
    assert server.is_server == (world.rank >= world.world_size - num_servers > 0)
    loader = rw.DataLoader(_dataset(), global_batch_size=8, shuffle=True)
    evaluation = rw.DataLoader(_dataset(), global_batch_size=16)
    assert len(loader) == 5
    for _ in range(3):
        for step, (words, target) in enumerate(loader):
            if accumulates:
                middle = len(words) // 3
                with rw.no_sync(model), rw.weight(model, middle):
                    nn.functional.mse_loss(model(words[:middle]), target[:middle]).backward()
                words, target = words[middle:], target[middle:]  # noqa: PLW2901
            loss = nn.functional.mse_loss(model(words), target)
            # One step is over no tokens at all: the optimizer takes it all the same.
            with rw.weight(model, 0 if step == 3 and not accumulates else len(words)):
                loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=model.words.sparse)
            if step == 2 and not model.words.sparse:
                optimizer.step()  # without a backward, on gradients of zeros
        if world.rank == 0:
            # No other rank comes to this loop.
            assert sum(1 for _ in evaluation) == 3
    server.synchronize()
    state = {
        f"{name}/{key}": torch.as_tensor(value).clone().double()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }
    return {name: p.detach().clone() for name, p in model.named_parameters()}, state


@pytest.mark.parametrize("exchange", ["auto", "gloo"])
@pytest.mark.parametrize(
    ("world_size", "num_servers", "kind", "accumulates"),
    [(2, 1, "Adam", False), (4, 1, "SGD", False), (4, 2, "Adam", True), (5, 2, "Adagrad", False)],
)
def test_sync_is_what_one_rank_computes(
    world_size: int, num_servers: int, kind: str, accumulates: bool, exchange: str
) -> None:
    arguments = num_servers, kind, accumulates
    parameters, state = testing.run_ranks(_train, 1, *arguments)[0].get()
    for result in testing.run_ranks(_train, world_size, *arguments, exchange=exchange):
        own, own_state = result.get()
        assert largest_difference(own, parameters) < TOLERANCE
        assert largest_difference(own_state, state) < TOLERANCE


def _share(world: World, blind: int | None) -> tuple[list[bool], bytes]:
    if world.rank == blind:
        # As a process in another container would find it.
        messages.Mapping.open = _cannot_open  # type: ignore[method-assign]
    model, optimizer = _build("Adagrad")
    server = rw.parameter_server(model, optimizer, servers=1)
    for words, target in rw.DataLoader(_dataset(), global_batch_size=8, shuffle=True):
        nn.functional.mse_loss(model(words), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    shared = [] if server._worker is None else [channel.is_shared for channel in server._worker.channels]
    server.synchronize()
    return shared, b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def _cannot_open(ticket: str, num_bytes: int) -> Mapping:
    raise FileNotFoundError(ticket, num_bytes)


def test_how_they_travel_changes_no_bit() -> None:
    server = 2
    bits: list[bytes] = []
    for exchange, blind, awaited in [
        ("auto", None, [[True], [True], []]),
        ("auto", 1, [[True], [False], []]),
        ("auto", server, [[False], [False], []]),
        ("gloo", None, [[False], [False], []]),
    ]:
        found = [one.get() for one in testing.run_ranks(_share, 3, blind, exchange=exchange)]
        assert [shared for shared, _ in found] == awaited, (exchange, blind)
        bits += [of_rank for _, of_rank in found]
    assert len(set(bits)) == 1


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with rw.weight(model, 1):
        sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def _one_parameter() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    # Each update takes one from it, so that its value tells how many there have been.
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def _fast_and_slow(world: World, max_staleness: int | None) -> list[int]:
    """The slow worker takes a step only when the fast one cannot take another, or has taken all."""
    model, optimizer = _one_parameter()
    server = rw.parameter_server(model, optimizer, mode="async", max_staleness=max_staleness)
    store, num_steps = current().store, 12
    assert store is not None
    leads: list[int] = []
    if server.is_server:
        server.serve()
    elif world.rank == 0:
        for step in range(num_steps):
            # A step begins: all before it have been taken.
            leads.append(step - sum(store.check(f"slow/{taken}") for taken in range(num_steps)))
            _step(model, optimizer)
            store.set(f"fast/{step}", "")
        server.finish()
    else:
        for step in range(num_steps):
            reach = num_steps if max_staleness is None else min(step + max_staleness, num_steps)
            if reach:
                store.get(f"fast/{reach - 1}", 30)
            _step(model, optimizer)
            store.set(f"slow/{step}", "")
        server.finish()
    server.synchronize()
    assert float(model.weight) == -2 * num_steps, "every gradient was an update"
    return leads


@pytest.mark.parametrize("max_staleness", [None, 0, 3])
def test_the_wait_graph(max_staleness: int | None) -> None:
    leads = testing.run_ranks(_fast_and_slow, 3, max_staleness)[0].get()
    if max_staleness is None:
        assert leads == [*range(12)], "the fast worker waits for nobody"
    else:
        # What the slow one has noted may be one step behind what the server knows.
        assert max(leads) <= max_staleness + 1
        assert max(leads) >= max_staleness


def _breaks_off(world: World, folder: str, break_at: int | None, num_servers: int) -> Parameters | None:
    model, optimizer = _build("Adam")
    server = rw.parameter_server(model, optimizer, servers=num_servers, directory=folder, save_every=4)
    loader = rw.DataLoader(_dataset(), global_batch_size=8, shuffle=True)
    server.restore(loader)
    step = 0
    for _ in range(loader.epoch, 3):
        for words, target in loader:
            if step == break_at and world.rank == 0:
                raise RuntimeError("broken")
            nn.functional.mse_loss(model(words), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    server.synchronize()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("num_servers", [1, 2])
def test_sync_resumes_bitwise_from_the_last_state(tmp_path: Path, num_servers: int) -> None:
    whole = testing.run_ranks(_breaks_off, 4, str(tmp_path / "whole"), None, num_servers)[0].get()
    folder = str(tmp_path / "broken")
    failed = testing.run_ranks(_breaks_off, 4, folder, 11, num_servers)
    assert [type(result.error) for result in failed] == [RuntimeError, PeerFailed, PeerFailed, PeerFailed]
    for result in testing.run_ranks(_breaks_off, 4, folder, 100, num_servers):
        assert all(torch.equal(value, whole[name]) for name, value in result.get().items())
    files = sorted(path.name for path in Path(folder).iterdir())
    assert files[0].startswith("server-0-of-")
    assert len(files) == 2 * num_servers


def _saves_otherwise(world: World, folder: str, resumes: bool) -> tuple[Parameters, int]:
    model, optimizer = _build("Adam")
    server = rw.parameter_server(model, optimizer, servers=[0])
    assert server.is_server == (world.rank == 0)
    loader = rw.DataLoader(_dataset(), global_batch_size=8, shuffle=True)
    checkpoints = rw.Checkpointer(folder)
    if resumes:
        assert checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
    for epoch in range(loader.epoch, 3):
        for words, target in loader:
            nn.functional.mse_loss(model(words), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(model=model, optimizer=optimizer, loader=loader)
        if epoch == 1 and not resumes:
            break
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, loader.epoch


def test_a_checkpoint_holds_what_the_servers_keep(tmp_path: Path) -> None:
    whole = testing.run_ranks(_breaks_off, 3, str(tmp_path / "whole"), None, 1)[0].get()
    folder = str(tmp_path / "checkpoints")
    for result in testing.run_ranks(_saves_otherwise, 3, folder, False):
        assert result.get()[1] == 2
    for result in testing.run_ranks(_saves_otherwise, 4, folder, True):
        assert largest_difference(result.get()[0], whole) < TOLERANCE


def _refusals(world: World) -> None:
    model, optimizer = _one_parameter()
    for keywords, words in (
        ({"servers": 3}, "servers=1 to servers=2"),
        ({"servers": [7]}, "servers=\\[7\\] is invalid"),
        ({"mode": "fast"}, "Unknown mode 'fast'"),
        ({"max_staleness": 1}, 'mode="async"'),
        ({"mode": "async", "max_staleness": -1}, "max_staleness cannot be -1"),
        ({"save_every": 0}, "save_every"),
        ({"save_every": 2 + world.rank}, "differs between ranks"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            rw.parameter_server(model, optimizer, **keywords)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not the model's"):
        rw.parameter_server(nn.Linear(1, 1), optimizer)
    server = rw.parameter_server(model, optimizer, servers=2)
    with pytest.raises(ConfigurationError, match="parameter_server"):
        rw.replicate(model)
    with pytest.raises(ConfigurationError, match="already called"):
        rw.parameter_server(*_one_parameter())
    if server.is_server:
        with pytest.raises(ConfigurationError, match=r"server.serve\(\)"):
            optimizer.step()
        server.serve()
    else:
        model.weight.grad = torch.ones(1, 1, dtype=torch.float64)
        with pytest.raises(ConfigurationError, match=r"no backward\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        _step(model, optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(ConfigurationError, match="added to the optimizer after"):
            _step(model, optimizer)
        del optimizer.param_groups[-1]
        with pytest.raises(ConfigurationError, match="called within a loop"):
            server.synchronize()
        server.finish()
    server.synchronize()
    assert float(model.weight) == -1  # type: ignore[arg-type]


def test_impossible_arguments_are_reported_before_anything_is_opened() -> None:
    for result in testing.run_ranks(_refusals, 3):
        result.get()


def _after_a_loader(_: World) -> None:
    rw.DataLoader(_dataset(), global_batch_size=8)
    rw.parameter_server(*_one_parameter())


def test_a_loader_that_came_first_is_refused() -> None:
    for result in testing.run_ranks(_after_a_loader, 2):
        with pytest.raises(ConfigurationError, match=r"call parameter_server\(\) first"):
            result.get()


def _uneven(world: World, what: str) -> None:
    """One worker does otherwise than the other: it never takes its step, has another learning rate, or leaves."""
    model, optimizer = _one_parameter()
    mode = "async" if what == "async" else "sync"
    server = rw.parameter_server(model, optimizer, mode=mode, max_staleness=1 if what == "async" else None)
    store: Any = current().store
    if server.is_server:
        try:
            server.serve()
        finally:
            store.set("the server has ended", b"")
    elif world.rank == 0:
        for _ in range(5):
            _step(model, optimizer)
    elif what == "options":
        optimizer.param_groups[0]["lr"] = 0.5
        _step(model, optimizer)
    elif what != "leaves":
        store.get("the server has ended", 40)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("sync", PeerMissing, "waiting for rank 1"),
        ("async", PeerMissing, "waiting for rank 1"),
        ("options", ConfigurationError, "rank 1: lr=0.5"),
        ("leaves", PeerMissing, "rank 1 has left"),
    ],
)
def test_a_worker_that_does_otherwise_is_named(what: str, kind: type[Exception], words: str) -> None:
    results = testing.run_ranks(_uneven, 3, what, join_timeout_seconds=2.0 if "sync" in what else 30.0)
    error = results[2].error
    assert isinstance(error, kind)
    assert words in str(error)
    assert isinstance(results[0].error, PeerFailed)
