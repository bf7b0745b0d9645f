# SPDX-License-Identifier: Apache-2.0
"""`pipeline`: what the micro-batches' losses are means or sums over is read, and the result is that of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import said
from losses import CLASS_WEIGHTS, COUPLED, EXACT, MEANS, SUMS, kept, labels
from staged_models import difference, drawn
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError, PeerFailed
from rankwise.pipeline.schedule import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from losses import Loss

    from rankwise.world.facts import World

    OfTarget = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = (
    EXACT
    | {name: loss for name, (loss, _) in COUPLED.items()}
    | {"four_times": lambda o, t, _: 4 * functional.mse_loss(o, t)}
)
ALL = (*MEANS, *SUMS, "two_means")
SOME = ("mse", "class_weights", "ignore_index", "masked", "masked_by_index", "mse_sum", "sum_over_a_constant", "vae")
WARNED = {
    "rmse": "is neither a mean nor a sum over samples because of Sqrt",
    "contrastive": "is neither a mean nor a sum over samples because of Mm of two outputs",
    "means_over_unlike_numbers": "adds terms that are means over different numbers, or means and sums",
    "mean_and_sum": "adds terms that are means over different numbers, or means and sums",
}
SIZES = (9, 11, 2, 5)
"""Of the batches: in micro-batches of equal and of unequal size, in fewer, and with few tokens or none."""
MICRO_BATCHES = 3


def _deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(7) for m in (nn.Linear(4, 4), nn.Tanh())], nn.Linear(4, 4)).double()


def _of(loss: Loss) -> OfTarget:
    # Gives the loss the outputs in the place of the inputs, which losses have only to know how many they are.
    return lambda output, target: loss(output, target, output.detach())


def _batches(num_copies: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return for each step the batch of each copy; in the third only one has samples."""
    steps = []
    for number, size in enumerate(SIZES):
        sizes = [size] if num_copies == 1 else [size // 3, size - size // 3]
        pairs = zip(drawn(size, 4, seed=number).split(sizes), drawn(size, 4, seed=9 + number).split(sizes), strict=True)
        steps.append(list(pairs))
    return steps


def _train(world: World, names: tuple[str, ...], mesh: dict[str, int], schedule: str) -> dict[str, tuple[float, int]]:
    """Return of each loss how far gradients and values are from one device, and how many warnings there were."""
    rw.mesh(**mesh)
    num_copies = mesh.get("dp_replicate", 1)
    found = {}
    for name in names:
        loss_fn = _of(LOSSES[name])
        model, plain = _deep(), _deep()
        worst = 0.0
        with said() as lines:
            step = rw.pipeline(model, loss_fn, example=drawn(8, 4), micro_batches=MICRO_BATCHES, schedule=schedule)
            for number, copies in enumerate(_batches(num_copies)):
                value = step(*copies[world.rank % num_copies]).item()
                expected = loss_fn(plain(torch.cat([x for x, _ in copies])), torch.cat([y for _, y in copies]))
                expected.backward()
                off = abs(value - expected.item()) if num_copies == 1 else 0.0
                worst = max(worst, off, difference(model, plain))
                if number == 2:  # the steps before add up
                    model.zero_grad()
                    plain.zero_grad()
        found[name] = worst, sum("the loss of the pipeline" in line for line in lines)
    return found


def _assert_exact(num_ranks: int, names: tuple[str, ...], mesh: dict[str, int], schedule: str = "1f1b") -> None:
    for result in testing.run_ranks(_train, num_ranks, names, mesh, schedule):
        assert {name: off for name, (off, _) in result.get().items() if not off < 1e-10} == {}
        assert not any(num_lines for _, num_lines in result.get().values())


@pytest.mark.parametrize("names", [ALL[first : first + 8] for first in range(0, len(ALL), 8)])
def test_means_and_sums_are_exact(names: tuple[str, ...]) -> None:
    _assert_exact(2, names, {"pp": 2})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_means_and_sums_are_exact_with_every_schedule(schedule: str) -> None:
    _assert_exact(2, SOME, {"pp": 2}, schedule)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_means_and_sums_are_exact_on_any_number_of_stages(num_ranks: int) -> None:
    _assert_exact(num_ranks, SOME, {"pp": num_ranks})


def test_means_and_sums_are_exact_with_copies_of_unequal_and_empty_shares() -> None:
    _assert_exact(4, SOME, {"pp": 2, "dp_replicate": 2})


def test_means_and_sums_are_exact_with_copies_of_one_stage() -> None:
    _assert_exact(2, SOME, {"dp_replicate": 2}, "gpipe")


class _Language(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 7))


def _next_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def _train_language(world: World) -> float:
    rw.mesh(pp=2, dp_replicate=2)
    torch.manual_seed(0)
    model, plain = _Language().double(), _Language().double()
    plain.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    step = rw.pipeline(model, _next_tokens, example=torch.ones(4, 9, dtype=torch.long), micro_batches=3)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.05) for one in (model, plain)]
    for _ in range(4):
        lengths = torch.randint(1, 9, (7, 1), generator=generator)
        tokens = torch.randint(1, 7, (7, 9), generator=generator) * (torch.arange(9) < lengths)
        own = tokens.split((2, 5))[world.rank % 2]
        step(own, own)
        _next_tokens(plain(tokens), tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return difference(model, plain, "value")


def test_a_mean_over_tokens_of_sequences_of_unequal_lengths_is_exact() -> None:
    for result in testing.run_ranks(_train_language, 4):
        assert result.get() < 1e-10


def _train_with_and_without_weight(_: World, mesh: dict[str, int]) -> bool:
    rw.mesh(**mesh)
    gradients = []
    for weight in (None, len):
        model = _deep()
        step = rw.pipeline(
            model,
            _of(EXACT["two_means"]),
            example=drawn(8, 4),
            micro_batches=MICRO_BATCHES,
            split=["8"] if mesh["pp"] > 1 else None,
            weight=weight,
        )
        values = [step(drawn(size, 4, seed=size), drawn(size, 4)) for size in (11, 5)]
        gradients.append(values + [one.grad for one in model.parameters() if one.grad is not None])
    return len(gradients[0]) > 2 and all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 1, "dp_replicate": 2}])
def test_a_mean_over_samples_is_to_the_bit_what_weights_by_samples_make_of_it(mesh: dict[str, int]) -> None:
    for result in testing.run_ranks(_train_with_and_without_weight, 2, mesh):
        assert result.get()


@pytest.mark.parametrize("name", WARNED)
def test_the_last_stage_warns_once_of_a_loss_that_is_neither_mean_nor_sum(name: str) -> None:
    results = [result.get()[name] for result in testing.run_ranks(_train, 2, (name,), {"pp": 2}, "1f1b")]
    assert [num_lines for _, num_lines in results] == [0, 1]
    assert results[0][0] > 1e-6


def _warnings(world: World, name: str, micro_batches: int, mesh: dict[str, int], size: int = 8) -> list[str]:
    rw.mesh(**mesh)
    seed = world.rank if "dp_replicate" in mesh else 0
    with said() as lines:
        step = rw.pipeline(_deep(), _of(LOSSES[name]), example=drawn(8, 4), micro_batches=micro_batches)
        step(drawn(size, 4, seed=seed), drawn(size, 4, seed=seed + 2))
    return [line for line in lines if "the loss of the pipeline" in line]


@pytest.mark.parametrize("name", WARNED)
def test_a_warning_names_the_operation_and_the_line(name: str) -> None:
    (line,) = testing.run_ranks(_warnings, 2, name, 3, {"pp": 2})[1].get()
    assert WARNED[name] in line
    assert "test_pipeline_losses.py:" in line


def test_a_batch_in_one_micro_batch_is_exact_whatever_its_loss() -> None:
    assert testing.run_ranks(_warnings, 2, "rmse", 1, {"pp": 2})[1].get() == []


def test_a_sum_over_the_elements_of_equal_micro_batches_is_a_mean() -> None:
    # Eight, which is a multiple of the four samples.
    assert testing.run_ranks(_warnings, 1, "sum_over_its_elements", 2, {"pp": 1}, 4)[0].get() == []


def test_terms_over_unlike_numbers_in_two_copies_are_warned_of() -> None:
    name = "means_over_unlike_numbers"
    (line,) = testing.run_ranks(_warnings, 2, name, 1, {"pp": 1, "dp_replicate": 2})[0].get()
    assert WARNED[name] in line


@pytest.mark.parametrize(("size", "num_lines"), [(8, 1), (7, 0)])
def test_a_mean_times_the_size_of_every_micro_batch_is_warned_of(size: int, num_lines: int) -> None:
    result = testing.run_ranks(_warnings, 1, "four_times", 2, {"pp": 1}, size)[0].get()
    assert ["is multiplied by a number that is also" in line for line in result] == [True] * num_lines


def test_one_copy_of_a_pipeline_reports_for_all() -> None:
    results = testing.run_ranks(_train, 4, ("rmse",), {"pp": 2, "dp_replicate": 2}, "1f1b")
    assert sum(result.get()["rmse"][1] for result in results) == 1


def _with_weights(_: World) -> float:
    rw.mesh(pp=2)
    model, plain = _deep(), _deep()
    x, y = drawn(11, 4), drawn(11, 4, seed=2)
    # Counts something else than the loss does: what is said counts.
    step = rw.pipeline(
        model, _of(EXACT["masked"]), example=x, micro_batches=2, weight=lambda t: CLASS_WEIGHTS[labels(t)].sum()
    )
    step(x, y)
    parts = list(zip(x.split((6, 5)), y.split((6, 5)), strict=True))
    weights = [CLASS_WEIGHTS[labels(one)].sum() for _, one in parts]
    for (one, target), weight in zip(parts, weights, strict=True):
        (_of(EXACT["masked"])(plain(one), target) * weight / sum(weights)).backward()
    return difference(model, plain)


def test_a_given_weight_overrides_the_reading_of_the_loss() -> None:
    for result in testing.run_ranks(_with_weights, 2):
        assert result.get() < 1e-12


def _mean_or_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    squares = (output - target).square()
    return squares.mean() if len(output) == 3 else squares.sum()


def _over_sixteen(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / 16


def _refused(_: World, loss_fn: OfTarget, size: int) -> str:
    rw.mesh(pp=2)
    step = rw.pipeline(_deep(), loss_fn, example=drawn(8, 4), micro_batches=4 if size > 5 else 2)
    with pytest.raises((ConfigurationError, PeerFailed)) as caught:
        step(drawn(size, 4), drawn(size, 4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("loss_fn", "size", "words"),
    [
        (_mean_or_sum, 5, "The loss of the pipeline does not have the same terms for all micro-batches"),
        # Each of the micro-batches has 16 elements, and the batch 16 samples.
        (_over_sixteen, 16, "which is ambiguous"),
    ],
)
def test_an_ambiguous_loss_is_an_error_on_every_rank(loss_fn: OfTarget, size: int, words: str) -> None:
    for result in testing.run_ranks(_refused, 2, loss_fn, size):
        assert words in result.get()


def _train_worker_groups(world: World) -> tuple[float, list[str]]:
    rw.mesh(worker_groups=2, pp=2)
    worker_group = int(world.rank > 1)
    x, y = drawn(10, 4), drawn(10, 4, seed=2)
    found = []
    with said() as lines:
        for name in ("class_weights", "mse_sum"):
            model, plain = _deep(), _deep()
            step = rw.pipeline(model, _of(EXACT[name]), example=x, micro_batches=2)
            rw.local_sgd(model, every=1)
            torch_sgd = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
            step(x.split((3, 7))[worker_group], y.split((3, 7))[worker_group])
            torch_sgd[0].step()
            _of(EXACT[name])(plain(x), y).backward()
            torch_sgd[1].step()
            found.append(difference(model, plain, "value"))
    return found[0], [line for line in lines if "worker groups steps with the sum over its own" in line]


def test_worker_groups_of_pipelines_count_by_what_their_means_are_over_and_warn_of_sums() -> None:
    results = [result.get() for result in testing.run_ranks(_train_worker_groups, 4)]
    assert max(off for off, _ in results) < 1e-10
    assert [len(lines) for _, lines in results] == [0, 1, 0, 1]


def _penalized(_: World) -> tuple[float, float, list[int]]:
    rw.mesh(pp=2)
    offs, lines_of = [], []
    for reduction in ("mean", "sum"):
        model, plain = _deep(), _deep()

        def loss_with(head: nn.Module, reduction: str = reduction) -> OfTarget:
            return lambda o, t: (
                functional.mse_loss(o[kept(t)], t[kept(t)], reduction=reduction)
                + sum(one.square().sum() for one in head.parameters())
            )

        with said() as lines:
            step = rw.pipeline(model, loss_with(model[-1]), example=drawn(9, 4), micro_batches=3)
            step(drawn(11, 4), drawn(11, 4, seed=2))
        loss_with(plain[-1])(plain(drawn(11, 4)), drawn(11, 4, seed=2)).backward()
        offs.append(difference(model, plain))
        lines_of.append(sum("the loss of the pipeline" in line for line in lines))
    return offs[0], offs[1], lines_of


def test_a_penalty_on_parameters_counts_once_beside_a_mean_and_is_warned_of_beside_a_sum() -> None:
    results = [result.get() for result in testing.run_ranks(_penalized, 2)]
    assert max(of_mean for of_mean, _, _ in results) < 1e-10
    assert min(of_sum for _, of_sum, _ in results) > 1e-6
    assert [lines for _, _, lines in results] == [[0, 0], [0, 1]]
