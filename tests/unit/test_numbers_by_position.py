# SPDX-License-Identifier: Apache-2.0
"""Random numbers by position, and where samples lie in a tensor after each view."""

from __future__ import annotations

import pytest
import torch

from rankwise.replicate.random_numbers.counter import SAMPLERS, kept, mixed
from rankwise.replicate.random_numbers.sample_layout import SampleLayout, layout_of, viewed

CPU = torch.device("cpu")
FLOATING = {
    "bernoulli_.float": (0.3,),
    "uniform_": (-1.0, 3.0),
    "normal_": (2.0, 0.5),
    "exponential_": (2.0,),
    "random_.from": (-5, 12),
    "random_.to": (9,),
}
MOMENTS = {
    "bernoulli_.float": (0.3, 0.21),
    "uniform_": (1.0, 16 / 12),
    "normal_": (2.0, 0.25),
    "exponential_": (0.5, 0.25),
    "random_.from": (3.0, (17**2 - 1) / 12),
    "random_.to": (4.0, 80 / 12),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operation", FLOATING)
def test_numbers_depend_on_their_position_alone(operation: str, dtype: torch.dtype) -> None:
    draw = SAMPLERS[operation]
    whole = draw((77, 1), range(41), dtype, FLOATING[operation], CPU)
    for cut in range(42):
        parts = [
            draw((77, 1), range(cut), dtype, FLOATING[operation], CPU),
            draw((77, 1), range(cut, 41), dtype, FLOATING[operation], CPU),
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operation", FLOATING)
def test_numbers_have_the_moments_of_their_distribution(operation: str, dtype: torch.dtype) -> None:
    drawn = SAMPLERS[operation]((5, 0), range(3, 200_004), dtype, FLOATING[operation], CPU).double()
    mean, variance = MOMENTS[operation]
    # Of a fixed key: five standard errors, and a hundredth.
    assert abs(drawn.mean() - mean) < 5 * (variance / len(drawn)) ** 0.5
    assert abs(drawn.var() / variance - 1) < 0.01
    shifted = torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1]
    assert abs(shifted) < 5 / len(drawn) ** 0.5


def test_keys_that_follow_each_other_give_unlike_numbers() -> None:
    rows = torch.stack(
        [SAMPLERS["normal_"]((key, 0), range(1000), torch.float64, (), CPU) for key in (0, 1, 2, mixed(0), 2**63)]
    )
    apart = torch.corrcoef(rows) - torch.eye(5, dtype=torch.float64)
    assert apart.abs().max() < 5 / 1000**0.5


def test_keys_are_mixed_as_splitmix64_does() -> None:
    # Its first outputs from the seed 0. With others, a training that resumes would draw other numbers than before.
    assert [mixed(number) for number in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("bernoulli_.float", (1.5,)),
        ("uniform_", (1.0, 0.0)),
        ("normal_", (0.0, -1.0)),
        ("exponential_", (0.0,)),
        ("random_.to", (0,)),
    ],
)
def test_arguments_are_checked_as_torch_checks_them(operation: str, args: tuple[float, ...]) -> None:
    with pytest.raises(RuntimeError, match="expects"):
        SAMPLERS[operation]((0, 0), range(1), torch.float32, args, CPU)


def test_whole_ranges_of_integers() -> None:
    assert SAMPLERS["random_"]((0, 0), range(1000), torch.uint8, (), CPU).max() == 255
    assert SAMPLERS["random_"]((0, 0), range(1000), torch.bool, (), CPU).max() == 1
    assert SAMPLERS["random_"]((0, 0), range(1000), torch.int64, (), CPU).min() >= 0


@pytest.mark.parametrize(
    ("layout", "old", "new", "expected"),
    [
        (SampleLayout(0), (5, 4, 6), (20, 6), SampleLayout(0, inner=4)),
        (SampleLayout(1), (4, 5, 6), (20, 6), SampleLayout(0, outer=4)),
        (SampleLayout(0, inner=4), (20, 6), (5, 4, 6), SampleLayout(0)),
        (SampleLayout(0, outer=4), (20, 6), (4, 5, 6), SampleLayout(1)),
        (SampleLayout(1), (4, 5, 6), (4, 10, 3), SampleLayout(1, inner=2)),
        (SampleLayout(0), (5, 6), (5, 2, 3), SampleLayout(0)),
        (SampleLayout(0), (5, 6), (30,), SampleLayout(0, inner=6)),
        (SampleLayout(0, inner=6), (30,), (10, 3), SampleLayout(0, inner=2)),
        (SampleLayout(0), (5, 4), (4, 5), None),
        (SampleLayout(0), (5, 0), (0,), None),
    ],
)
def test_views_move_samples(
    layout: SampleLayout, old: tuple[int, ...], new: tuple[int, ...], expected: SampleLayout | None
) -> None:
    assert viewed(layout, old, new, 5) == expected
    if expected is not None:
        marked = torch.zeros(old)
        layout.parts(marked, 5, 0, 5).movedim(layout.dim + 1, -1).copy_(torch.arange(5.0))
        again = torch.zeros(new)
        expected.parts(again, 5, 0, 5).movedim(expected.dim + 1, -1).copy_(torch.arange(5.0))
        assert torch.equal(marked.reshape(new), again)


def test_a_layout_takes_the_rows_of_some_samples_and_puts_them_in_order() -> None:
    whole = torch.arange(2 * 3 * 2 * 4.0).view(4, 12).T
    layout = SampleLayout(0, outer=2, inner=2)
    assert torch.equal(layout.part(whole, 3, 1, 2), whole[[2, 3, 4, 5, 8, 9, 10, 11]])
    blocks = torch.arange(48.0).view(layout.by_sample((12, 4), 3))
    assert torch.equal(layout.from_samples(blocks).view(2, 3, 2, 4).transpose(0, 1), blocks)


def test_shapes_are_batch_first_if_they_can_be() -> None:
    assert layout_of((5, 5, 2), 5) == SampleLayout(0)
    assert layout_of((4, 5), 5) == SampleLayout(1)
    assert layout_of((10, 3), 5) == SampleLayout(0, inner=2)
    assert layout_of((3, 7), 5) is None


@pytest.mark.parametrize("probability", [0.0, 1e-6, 0.1, 0.5, 1 / 3, 0.9, 1 - 1e-6, 1.0])
def test_kept_elements_have_the_given_probability(probability: float) -> None:
    count = 3_000_001
    share = kept((1, 2), 5, count, probability).mean()
    assert abs(share - probability) <= 5 * (probability * (1 - probability) / count) ** 0.5
