# SPDX-License-Identifier: Apache-2.0
"""What replicas compare, as values: checksums that any bit changes, settings, and what counts as rounding."""

from __future__ import annotations

import pytest
import torch

from rankwise.tensors.checksum import (
    ChecksumOfAll,
    are_equal,
    checksums_of_each,
    combined,
    is_rounding,
    is_same_setting,
    settings_checksum,
    settings_of,
    short,
    summary_of,
    tolerance,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]


def _tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (7, 5), (), (40, 60), (0, 4), (300, 100)]
    return [torch.randn(shape, generator=generator).mul(3).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_changes_with_any_bit(dtype: torch.dtype) -> None:
    tensors = _tensors(dtype)
    take = ChecksumOfAll()
    before, each = take(tensors), checksums_of_each(tensors)
    assert (take(_tensors(dtype)), checksums_of_each(_tensors(dtype))) == (before, each)
    for number, tensor in enumerate(tensors):
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            raw = tensor.view(-1).view(torch.uint8)
            at = place * tensor.itemsize
            raw[at] ^= 1
            assert take(tensors) != before
            assert [one for one, (a, b) in enumerate(zip(checksums_of_each(tensors), each, strict=True)) if a != b] == [
                number
            ]
            raw[at] ^= 1
    assert take(tensors) == before


def test_rows_that_change_places_change_the_checksum() -> None:
    table = _tensors()[-1].clone()
    swapped = table[[1, 0, *range(2, len(table))]]
    assert checksums_of_each([table]) != checksums_of_each([swapped])


def test_a_checksum_follows_memory_that_is_replaced_and_tensors_that_are_not_contiguous() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    take = ChecksumOfAll()
    zeros = take([parameter])
    parameter.data = torch.ones(4, 6)
    assert take([parameter]) != zeros
    turned = torch.nn.Parameter(torch.zeros(6, 4).t())
    assert take([turned]) == zeros
    with torch.no_grad():
        turned[1, 1] = 1.0
    assert take([turned]) != zeros
    odd = torch.zeros(9)[1:]
    assert checksums_of_each([odd]) == checksums_of_each([torch.zeros(8)])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 1000])
def test_sums_of_short_checksums_tell_whether_all_are_the_same(num_ranks: int) -> None:
    code = float(short(combined([num_ranks, 5])))
    other = float(short(combined([num_ranks, 6])))
    alike = [code] * num_ranks
    assert are_equal(num_ranks, sum(alike), sum(one * one for one in alike))
    if num_ranks > 1:
        apart = [*alike[1:], other]
        assert not are_equal(num_ranks, sum(apart), sum(one * one for one in apart))


def _optimizer(**settings: object) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], **settings)  # type: ignore[arg-type]


def test_settings_that_change_a_step_are_compared() -> None:
    same = settings_checksum(_optimizer(lr=0.1))
    assert settings_checksum(_optimizer(lr=0.1)) == same
    assert settings_checksum(_optimizer(lr=0.1, foreach=False)) == same
    assert settings_checksum(_optimizer(lr=0.10000001)) != same
    assert settings_checksum(_optimizer(lr=0.1, betas=(0.9, 0.99))) != same
    tensor = _optimizer(lr=torch.tensor(0.5), foreach=False)
    assert settings_checksum(tensor) != settings_checksum(_optimizer(lr=torch.tensor(0.25), foreach=False))
    assert settings_of(tensor.param_groups[0])["lr"] == 0.5
    assert settings_of(tensor.param_groups[0])["betas"] == [0.9, 0.999]
    assert is_same_setting(float("nan"), float("nan"))
    assert not is_same_setting(1.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_rounding_is_distinguished_from_training_apart(dtype: torch.dtype) -> None:
    tensor = _tensors(dtype)[-1]
    eps = torch.finfo(dtype).eps
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64)
    rounded = (wide * (1 + eps * noise)).to(dtype)
    trained = (wide + 0.1 * noise * wide.abs().max()).to(dtype)
    assert is_rounding(summary_of(tensor), summary_of(rounded), tolerance(dtype))
    assert not is_rounding(summary_of(tensor), summary_of(trained), tolerance(dtype))
    broken = tensor.clone().fill_(float("nan"))
    assert is_rounding(summary_of(broken), summary_of(broken.clone()), tolerance(dtype))
    assert not is_rounding(summary_of(broken), summary_of(tensor), tolerance(dtype))


def test_integers_do_not_round() -> None:
    assert tolerance(torch.int64) == 0.0
