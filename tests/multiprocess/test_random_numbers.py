# SPDX-License-Identifier: Apache-2.0
"""Random numbers along the batch: N ranks draw what one rank draws, inside replicated models and in training loops."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from on_ranks import one_rank
from random_models import DRAWING, LENGTH, WIDTH
from replicas import TOLERANCE, Parameters, largest_difference
from said import check_said, listening
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.world.facts import World

SIZES = ((23, 12), (LENGTH * 2, LENGTH * 2), (2, 4))
"""Samples of an epoch, and of its global batches: shares as long as a sequence, and ranks without samples."""
NOT_TORCHS = {"rrelu", "poisson"}
"""What takes as many numbers as its values need: no rank knows how many the others' samples need."""


def _samples(size: int) -> torch.Tensor:
    return torch.randn(size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def _train(model: nn.Module, epochs: Iterable[Iterable[torch.Tensor]]) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in epochs:
        for x in epoch:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    after = {"generator": torch.rand(2, dtype=torch.float64)}
    return after | {key: value.detach().clone() for key, value in model.state_dict().items()}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return DRAWING[name]().double()


def _on_ranks(_: World, randomness: str) -> dict[str, Parameters]:
    return {
        name: _train(
            rw.replicate(_model(name), randomness=randomness),  # type: ignore[arg-type]
            [rw.DataLoader(_samples(size), global_batch_size=batch) for size, batch in SIZES],
        )
        for name in DRAWING
        if randomness == "counter" or name not in NOT_TORCHS
    }


def _apart(got: dict[str, Parameters], expected: dict[str, Parameters]) -> dict[str, float]:
    parts = {name: largest_difference(one, expected[name]) for name, one in got.items()}
    return {name: apart for name, apart in parts.items() if apart > TOLERANCE}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_models_draw_as_on_one_rank(world_size: int) -> None:
    expected = one_rank(_on_ranks, "counter")
    for result in testing.run_ranks(_on_ranks, world_size, "counter"):
        assert _apart(result.get(), expected) == {}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_models_draw_torchs_own_numbers(world_size: int) -> None:
    expected = {name: _train(_model(name), [_samples(size).split(batch) for size, batch in SIZES]) for name in DRAWING}
    for result in testing.run_ranks(_on_ranks, world_size, "torch"):
        assert _apart(result.get(), expected) == {}


# -- noise in training loops ---------------------------------------------------------------------------


class _Layers(nn.Module):
    """Linear layers with a normalised input, as Hinton's forward-forward trains them: each separately."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for layer in self.layers:
            x = torch.relu(layer(functional.normalize(x.detach(), dim=-1)))
            outputs.append(x)
        return outputs


def _forward_forward(spread: Callable[[nn.Module], nn.Module], batches: Iterable[torch.Tensor]) -> Parameters:
    torch.manual_seed(0)
    model = spread(_Layers().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in batches:
        with _block(spread):
            wrong = torch.randint(0, WIDTH, (len(x),))
        negative = x.clone()
        negative[torch.arange(len(x)), 0, wrong] += 1
        optimizer.zero_grad()
        good, bad = model(x), model(negative)
        sum(
            (
                functional.softplus(-g.square().mean((1, 2)) + 1) + functional.softplus(b.square().mean((1, 2)) - 1)
            ).mean()
            for g, b in zip(good, bad, strict=True)
        ).backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _adversarial(spread: Callable[[nn.Module], nn.Module], batches: Iterable[torch.Tensor]) -> Parameters:
    torch.manual_seed(0)
    generator = spread(nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double())
    critic = spread(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 1)).double())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (generator, critic)]
    loss_fn = functional.binary_cross_entropy_with_logits
    for x in batches:
        real = x[:, 0]
        with _block(spread):
            noise = torch.randn(real.size(0), 3, dtype=torch.float64)
        fake = generator(noise)
        optimizers[1].zero_grad()
        loss_fn(critic(real), torch.ones(len(real), 1, dtype=torch.float64)).backward()
        loss_fn(critic(fake.detach()), torch.zeros(len(real), 1, dtype=torch.float64)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss_fn(critic(fake), torch.ones(len(real), 1, dtype=torch.float64)).backward()
        optimizers[0].step()
    state = {f"generator.{key}": value.detach().clone() for key, value in generator.state_dict().items()}
    return state | {f"critic.{key}": value.detach().clone() for key, value in critic.state_dict().items()}


def _noisy_inputs(spread: Callable[[nn.Module], nn.Module], batches: Iterable[torch.Tensor]) -> Parameters:
    torch.manual_seed(0)
    model = spread(nn.Sequential(nn.Linear(WIDTH, 5), nn.Dropout(0.2), nn.Linear(5, WIDTH)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in batches:
        with _block(spread):
            noisy = x + 0.1 * torch.randn_like(x)
            level = torch.rand(1, dtype=torch.float64)
        optimizer.zero_grad()
        functional.mse_loss(model(noisy * level), x).backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


LOOPS = {"forward-forward": _forward_forward, "adversarial": _adversarial, "noisy inputs": _noisy_inputs}


def _plain(model: nn.Module) -> nn.Module:
    return model


def _spread(model: nn.Module) -> nn.Module:
    return rw.replicate(model, randomness="torch")


def _spread_by_counter(model: nn.Module) -> nn.Module:
    return rw.replicate(model)


def _block(spread: object) -> _Block:
    return _Block({_spread: "torch", _spread_by_counter: "counter"}.get(spread))  # type: ignore[call-overload]


class _Block:
    """``as_one_rank()`` where the loop is trained on ranks, nothing where it is the plain one."""

    def __init__(self, randomness: str | None) -> None:
        self._inner = None if randomness is None else rw.as_one_rank(randomness=randomness)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        if self._inner is not None:
            self._inner.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._inner is not None:
            self._inner.__exit__(None, None, None)


def _loops_on_ranks(_: World, randomness: str) -> dict[str, Parameters]:
    spread = _spread if randomness == "torch" else _spread_by_counter
    return {name: loop(spread, rw.DataLoader(_samples(23), global_batch_size=12)) for name, loop in LOOPS.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loops_draw_as_the_plain_script(world_size: int) -> None:
    expected = {name: loop(_plain, _samples(23).split(12)) for name, loop in LOOPS.items()}
    for result in testing.run_ranks(_loops_on_ranks, world_size, "torch"):
        assert _apart(result.get(), expected) == {}


@pytest.mark.parametrize("world_size", [2, 3])
def test_loops_draw_as_on_one_rank(world_size: int) -> None:
    expected = one_rank(_loops_on_ranks, "counter")
    for result in testing.run_ranks(_loops_on_ranks, world_size, "counter"):
        assert _apart(result.get(), expected) == {}


def _whole_model_checkpointed(_: World) -> Parameters:
    model = rw.replicate(_model("dropout"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in rw.DataLoader(_samples(23), global_batch_size=12):
        optimizer.zero_grad()
        output = checkpoint(model, x.requires_grad_(), use_reentrant=False)
        output.square().mean().backward()  # type: ignore[union-attr]
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def test_a_checkpointed_model_draws_again_what_it_drew() -> None:
    expected = one_rank(_whole_model_checkpointed)
    for result in testing.run_ranks(_whole_model_checkpointed, 2):
        assert largest_difference(result.get(), expected) < TOLERANCE


# -- what is not as on one rank, and is said -----------------------------------------------------------


def _drawn(world: World, randomness: str) -> tuple[list[torch.Tensor], list[str]]:
    """Train on batches of the script's own; return what dropout made of ones, and what was said."""
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1)), randomness=randomness)  # type: ignore[arg-type]
    drawn: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda _, __, out: drawn.append(out.detach().clone()))
    with listening() as said:
        for _ in range(2):
            model(torch.ones(16, 8) * (1 + world.rank)).mean().backward()
    return [one / (1 + world.rank) for one in drawn], [text for text in said if "random" in text]


@pytest.mark.parametrize(("randomness", "expected"), [("counter", ["draws random numbers"]), ("per_rank", [])])
def test_ranks_draw_other_numbers_where_no_loader_tells_their_rows(randomness: str, expected: list[str]) -> None:
    (first, said), (second, _) = (one.get() for one in testing.run_ranks(_drawn, 2, randomness))
    check_said(said, expected)
    assert not any(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def _noise_without_a_block(_: World) -> list[str]:
    with listening() as said:
        rw.replicate(nn.Linear(2, 1))
        for x in rw.DataLoader(torch.ones(16, 2), global_batch_size=8):
            torch.randn(3, 4)  # noise of another size
            torch.randn(len(x), 3)
    return [text for text in said if "normal" in text]


def test_noise_along_the_batch_without_a_block_is_named_once() -> None:
    first, other = (one.get() for one in testing.run_ranks(_noise_without_a_block, 2))
    check_said(first, ["draws 4 rows, as many as this rank has samples"])
    assert "test_random_numbers.py" in first[0]
    assert "with rankwise.as_one_rank()" in first[0]
    assert other == []


def _labels_one_by_one(_: World) -> list[str]:
    with listening() as said:
        rw.replicate(nn.Linear(2, 1))
        for x in rw.DataLoader(torch.ones(16, 2), global_batch_size=8):
            [torch.randint(9, (1,)).item() for _ in x]
            torch.rand(1)  # once per batch
        for x in rw.DataLoader(torch.ones(16, 2), global_batch_size=8):
            with rw.as_one_rank():
                [torch.randint(9, (1,)).item() for _ in x]
    return [text for text in said if "one at a time" in text]


def test_numbers_that_are_drawn_one_by_one_are_named_once() -> None:
    first, other = (one.get() for one in testing.run_ranks(_labels_one_by_one, 2))
    check_said(first, ["drew 4 random numbers one at a time", "drew 4 random numbers one at a time"])
    assert other == []


def _mixup(_: World) -> None:
    for x in rw.DataLoader(torch.ones(16, 2), global_batch_size=8):
        with rw.as_one_rank():
            torch.randperm(len(x))


def test_a_permutation_of_a_part_of_the_batch_is_an_error() -> None:
    testing.run_ranks(_mixup, 1)[0].get()
    for result in testing.run_ranks(_mixup, 2):
        with pytest.raises(ConfigurationError, match=r"permutes this rank's samples among themselves(.|\n)*4 of 8"):
            result.get()


def _mixup_of_all(world: World, gathers: bool) -> Parameters:
    """Mix samples of the whole batch: gathered, or as the plain script has them."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1).double()
    model = rw.replicate(model, randomness="torch") if gathers else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = _samples(23)[:, 0]
    for x in rw.DataLoader(data, global_batch_size=12) if gathers else data.split(12):
        if gathers:
            parts = rw.all_gather_uneven(x)
            everything, first = torch.cat(parts), sum(map(len, parts[: world.rank]))
        else:
            everything, first = x, 0
        others = everything[torch.randperm(len(everything))][first : first + len(x)]
        optimizer.zero_grad()
        model(0.7 * x + 0.3 * others).square().mean().backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def test_mixup_of_the_gathered_batch_is_that_of_one_rank() -> None:
    expected = one_rank(_mixup_of_all, False)
    for result in testing.run_ranks(_mixup_of_all, 3, True):
        assert largest_difference(result.get(), expected) < TOLERANCE


def _numpys_rows(world: World) -> list[list[object]]:
    np.random.seed(0)  # noqa: NPY002 - public scripts use it
    drawn: list[list[object]] = []
    for x in rw.DataLoader(torch.ones(7, 1), global_batch_size=5):
        n = len(x)
        with rw.as_one_rank():
            rows = [np.random.randn(n, 2), np.random.randint(0, 9, n), np.random.normal(1.0, 2.0, size=(n, 1))]  # noqa: NPY002
            rows += [np.random.uniform(size=n), np.random.beta(0.5, 0.5, n), np.random.choice(9, n)]  # noqa: NPY002
            drawn.append([one.tolist() for one in rows] + [[np.random.rand()]])  # noqa: NPY002
            if n and world.world_size > 1:
                with rw.as_one_rank(), pytest.raises(ConfigurationError, match="permutes this rank's samples"):
                    np.random.permutation(n)  # noqa: NPY002
                with rw.as_one_rank(), pytest.raises(ConfigurationError, match="draws from arrays of this rank's"):
                    np.random.normal(np.zeros(n), 1.0)  # noqa: NPY002
    return drawn


def test_numpys_functions_draw_the_rows_of_one_rank() -> None:
    (whole,) = (one.get() for one in testing.run_ranks(_numpys_rows, 1))
    parts = [one.get() for one in testing.run_ranks(_numpys_rows, 3)]
    for number, batch in enumerate(whole):
        for index, rows in enumerate(batch[:-1]):
            assert [row for part in parts for row in part[number][index]] == rows
        assert all(part[number][-1] == batch[-1] for part in parts)


def _seeded_apart(world: World, seed: int) -> tuple[list[str], int]:
    torch.manual_seed(seed + world.rank)
    with listening() as said:
        rw.replicate(nn.Linear(2, 1))
    return [text for text in said if "different seeds" in text], hash(torch.get_rng_state().numpy().tobytes())


@pytest.mark.parametrize(("seed", "expected"), [(7, ["had different seeds on different ranks"]), (2**40, [])])
def test_generators_agree_after_replicate(seed: int, expected: list[str]) -> None:
    (said, state), (_, other) = (one.get() for one in testing.run_ranks(_seeded_apart, 2, seed))
    check_said(said, expected)
    assert state == other


def _pictures_on_rank_zero(world: World) -> tuple[list[str], int]:
    """Draw noise for a picture on one rank, as scripts do under ``if world.rank == 0``."""
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with listening() as said:
        for number, x in enumerate(rw.DataLoader(torch.ones(40, 8), global_batch_size=8)):
            if world.rank == 0 and number == 2:
                torch.randn(3, 3)
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return [text for text in said if "differed between ranks" in text], hash(torch.get_rng_state().numpy().tobytes())


def test_a_generator_that_parts_takes_rank_zeros_state() -> None:
    (said, state), (_, other) = (one.get() for one in testing.run_ranks(_pictures_on_rank_zero, 2))
    check_said(said, ["the state of torch's random number generator differed between ranks"])
    assert state == other


def _wrong_blocks(_: World) -> None:
    with pytest.raises(ConfigurationError, match="cannot tell how many samples the ranks have"), rw.as_one_rank():
        pass
    with pytest.raises(ConfigurationError, match='one of "counter", "torch", "per_rank"'):
        rw.replicate(nn.Linear(1, 1), randomness="own")  # type: ignore[arg-type]


def test_a_block_needs_samples_and_a_known_randomness() -> None:
    for result in testing.run_ranks(_wrong_blocks, 2):
        result.get()


def _blocks(world: World, numbers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    with rw.as_one_rank(num_samples=numbers[world.rank]):
        return torch.rand(numbers[world.rank], 2), torch.rand(7)


@pytest.mark.parametrize("numbers", [(1, 2, 3), (4, 0, 2)])
def test_a_block_takes_the_number_of_samples(numbers: tuple[int, ...]) -> None:
    rows, other = one_rank(_blocks, (6,))
    results = [one.get() for one in testing.run_ranks(_blocks, 3, numbers)]
    assert torch.equal(torch.cat([own for own, _ in results]), rows)
    assert all(torch.equal(one, other) for _, one in results)


def _after_leaving(_: World) -> bool:
    torch.manual_seed(0)
    before = torch.rand(4)
    rw.replicate(nn.Linear(1, 1))
    rw.leave()
    torch.manual_seed(0)
    return torch.equal(torch.rand(4), before)


def test_torch_draws_as_ever_outside_and_afterwards() -> None:
    assert all(one.get() for one in testing.run_ranks(_after_leaving, 2))


def _interrupted(_: World) -> bool:
    """Break off a forward pass that is followed, and one that is not, as Ctrl-C does."""
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1)))
    x = next(iter(rw.DataLoader(torch.ones(8, 8), global_batch_size=8)))
    for _ in range(2):
        handle = model[0].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
        model(x).mean().backward()
    torch.manual_seed(0)
    drawn = torch.rand(8, 3)
    torch.manual_seed(0)
    rw.leave()
    return torch.equal(torch.rand(8, 3), drawn)


def test_a_forward_pass_that_is_broken_off_leaves_nothing_behind() -> None:
    assert all(one.get() for one in testing.run_ranks(_interrupted, 2))


def _sharded(_: World) -> tuple[dict[str, Parameters], list[str]]:
    trained = {}
    with listening() as said:
        for name in DRAWING:
            model = rw.shard(_model(name), blocks="1GiB" if name.startswith("noise") else None)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for x in rw.DataLoader(_samples(23), global_batch_size=12):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            trained[name] = {key: one.full_tensor().detach() for key, one in model.named_parameters()}
    return trained, [text for text in said if "rows" in text or "draws" in text]


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_models_draw_as_on_one_rank(world_size: int) -> None:
    expected, _ = one_rank(_sharded)
    for result in testing.run_ranks(_sharded, world_size):
        trained, said = result.get()
        assert _apart(trained, expected) == {}
        assert said == []


class _ElsewhereDropout(nn.Dropout):
    """Draws where torch's kernels do not, as compiled code and fused kernels do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = np.random.default_rng(0).random(tuple(x.shape)) > self.p
        return x * torch.from_numpy(kept)


def _compiled(_: World, layer: type[nn.Module], order: str = "compiled before") -> tuple[Parameters, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), layer(0.5), nn.Linear(5, 1)).double()
    with listening() as said:
        is_after = order == "compiled after"
        if is_after:
            rw.replicate(model)
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
        trained = _train(
            model if is_after else rw.replicate(model), [rw.DataLoader(_samples(23), global_batch_size=12)]
        )
    return trained, [text for text in said if "dropout" in text]


@pytest.mark.parametrize("order", ["compiled before", "compiled after"])
def test_a_compiled_model_draws_as_on_one_rank(order: str) -> None:
    expected, _ = one_rank(_compiled, nn.Dropout, order)
    for result in testing.run_ranks(_compiled, 2, nn.Dropout, order):
        got, said = result.get()
        assert largest_difference(got, expected) < TOLERANCE
        assert said == []


def test_dropout_that_is_drawn_elsewhere_is_named_once() -> None:
    (_, said), (_, other) = (one.get() for one in testing.run_ranks(_compiled, 2, _ElsewhereDropout))
    check_said(said, ["1 draws its own mask on each rank (dropout)"])
    assert other == []


class _DrawsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(1, 1), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.drop(self.layer(x)), self.drop(self.layer(x))])


def _masks_of_one_pass(_: World, randomness: str) -> bool:
    model = rw.replicate(_DrawsTwice(), randomness=randomness)  # type: ignore[arg-type]
    first, second = model(torch.ones(100, 1)).detach()
    return torch.equal(first, second)


@pytest.mark.parametrize("randomness", ["counter", "per_rank"])
def test_two_layers_draw_two_masks_without_a_loader(randomness: str) -> None:
    assert one_rank(_masks_of_one_pass, randomness) is False
