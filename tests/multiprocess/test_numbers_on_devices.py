# SPDX-License-Identifier: Apache-2.0
"""Random numbers on the stand-in device: those of CPUs, drawn for a rank's own rows, without waiting for the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from on_standin import build_standin, on_standin
from random_models import DRAWING, LENGTH, WIDTH
from replicas import TOLERANCE, Parameters, largest_difference

import rankwise as rw
from rankwise.replicate.random_numbers.counter import SAMPLERS, bits, kept, words_by_tensors

if TYPE_CHECKING:
    from rankwise.world.facts import World

pytestmark = pytest.mark.timeout(180)  # the first of these tests may have to compile the device

ARGS = {
    "bernoulli_.float": (0.9,),
    "uniform_": (-1.0, 3.0),
    "random_": (),
    "random_.to": (10,),
    "random_.from": (-(2**62), 2**62 + 12345),
}
MODELS = [name for name in DRAWING if "LSTM" not in name and "GRU" not in name and name != "noise of sizes on weights"]
"""The stand-in has no fused cells of recurrent layers, and draws ``randn`` of sizes on the CPU and copies it: it cannot
be drawn again."""


@pytest.fixture(scope="module", autouse=True)
def _standin_is_built() -> None:
    build_standin()


@pytest.mark.parametrize("key", [(0, 0), (2**63 - 1, 1), (2**64 - 3, 2**40)], ids=str)
@pytest.mark.parametrize("first", [0, 5, 2**33])
def test_operations_on_tensors_compute_numpys_philox(key: tuple[int, int], first: int) -> None:
    expected = bits(key, range(first * 4, first * 4 + 1200), torch.int64, torch.device("cpu"))
    assert torch.equal(words_by_tensors(key, first, 300, torch.device("cpu")), expected)


def _bits(world: World) -> list[str]:
    device, found = torch.device(world.device), []
    for operation, args in ARGS.items():
        for dtype in (torch.float32, torch.float64):
            for at in (range(7), range(2**34 + 3, 2**34 + 70_003)):
                drawn = SAMPLERS[operation]((2**63 + 5, 3), at, dtype, args, device)
                expected = SAMPLERS[operation]((2**63 + 5, 3), at, dtype, args, torch.device("cpu"))
                if drawn.device.type == "cpu" or not torch.equal(drawn.cpu(), expected):
                    found.append(f"{operation} {dtype} {at}")
    for probability in (0.0, 1e-6, 0.1, 0.5, 1 / 3, 1 - 1e-6, 1.0):
        at = range(3, 300_003)
        drawn = SAMPLERS["bernoulli_.float"]((1, 2), at, torch.float32, (probability,), device)
        if not torch.equal(drawn.cpu(), torch.from_numpy(kept((1, 2), 3, len(at), probability))):
            found.append(f"kept with {probability}")
    return found


def test_a_device_draws_the_bits_of_a_cpu() -> None:
    assert on_standin(_bits, 1) == [[]]


def _remainders(world: World) -> list[int]:
    from rankwise.replicate.random_numbers.counter import _remainders

    words = bits((4, 4), range(1000), torch.int64, torch.device("cpu"))
    on_device = words.to(world.device)
    return [
        divisor
        for divisor in (1, 3, 2**31 + 11, 2**62 + 1, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1)
        if not torch.equal(_remainders(on_device, divisor).cpu(), _remainders(words.clone(), divisor))
    ]


def test_a_device_divides_words_without_signs() -> None:
    assert on_standin(_remainders, 1) == [[]]


def _statistics(world: World) -> list[float]:
    """Standard errors: of mean and variance of normal numbers, of a mask's mean, and chi-square over 64 classes."""
    device, count = torch.device(world.device), 200_000
    at = range(9, 9 + count)
    normal = SAMPLERS["normal_"]((8, 1), at, torch.float64, (), device).cpu()
    mask = SAMPLERS["bernoulli_.float"]((8, 2), at, torch.float32, (0.9,), device).cpu().double()
    classes = (SAMPLERS["uniform_"]((8, 3), at, torch.float32, (), device).cpu() * 64).long().bincount(minlength=64)
    chi = (classes - count / 64).square().sum() / (count / 64)
    return [
        normal.mean().item() * math.sqrt(count),
        (normal.var().item() - 1) * math.sqrt(count / 2),
        (mask.mean().item() - 0.9) / math.sqrt(0.09 / count),
        (chi.item() - 63) / math.sqrt(2 * 63),
    ]


def test_numbers_of_a_device_have_their_distribution() -> None:
    ((*errors,),) = on_standin(_statistics, 1)
    assert max(map(abs, errors)) < 4


def _permutation(world: World) -> list[int]:
    torch.manual_seed(1)
    with rw.as_one_rank(num_samples=2):
        return torch.randperm(100, device=world.device).tolist()


def test_a_permutation_is_the_same_on_all_ranks() -> None:
    first, *others = on_standin(_permutation, 2)
    assert sorted(first) == list(range(100)) != first
    assert [first] == others


def _own_generator(world: World) -> list[list[float]]:
    generator = torch.Generator(world.device).manual_seed(2)
    with rw.as_one_rank(num_samples=6 // world.world_size):
        return [torch.rand(6 // world.world_size, device=world.device, generator=generator).tolist() for _ in "ab"]


def test_a_generator_of_the_device_gives_keys() -> None:
    ((first, second),) = on_standin(_own_generator, 1)
    parts = on_standin(_own_generator, 2)
    assert [parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]] == [first, second]
    assert first != second


def _train(world: World, name: str, dtype: torch.dtype) -> Parameters:
    torch.manual_seed(0)
    model = DRAWING[name]().to(dtype).to(world.device)
    x = torch.randn(23, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for part in rw.DataLoader(x, global_batch_size=12):
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def _train_all(world: World) -> dict[str, Parameters]:
    return {name: _train(world, name, torch.float64) for name in MODELS}


@pytest.fixture(scope="module")
def one_device() -> dict[str, Parameters]:
    return on_standin(_train_all, 1)[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_models_on_devices_draw_as_on_one_device(one_device: dict[str, Parameters], world_size: int) -> None:
    for found in on_standin(_train_all, world_size):
        apart = {name: largest_difference(found[name], one_device[name]) for name in MODELS}
        assert {name: one for name, one in apart.items() if one > TOLERANCE} == {}


def _in_autocast(world: World, dtype: torch.dtype) -> tuple[list[int], list[bool]]:
    """Return which elements a dropout under autocast and of narrow numbers keeps."""
    torch.manual_seed(0)
    x = torch.ones(12, 5, dtype=dtype, device=world.device)
    share = 12 // world.world_size
    x = x[world.rank * share : (world.rank + 1) * share]
    with rw.as_one_rank(num_samples=len(x)), torch.autocast(torch.device(world.device).type, dtype=torch.bfloat16):
        kept = torch.nn.functional.dropout(x, 0.4)
    assert kept.dtype == dtype
    return list(kept.shape), (kept != 0).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_masks_are_those_of_one_device_in_every_dtype_and_under_autocast(dtype: torch.dtype) -> None:
    ((_, whole),) = on_standin(_in_autocast, 1, dtype)
    parts = on_standin(_in_autocast, 2, dtype)
    assert [one for _, mask in parts for one in mask] == whole
    assert 10 < sum(whole) < 60
