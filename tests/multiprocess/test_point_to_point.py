# SPDX-License-Identifier: Apache-2.0
"""Values between two ranks, and one model in parts on several ranks that trains as on one."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from replicas import TOLERANCE, largest_difference
from torch import nn

from rankwise import testing
from rankwise.comm.point_to_point.send_recv import recv, send
from rankwise.errors import ConfigurationError, PeerMissing

if TYPE_CHECKING:
    from rankwise.world.facts import World


DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


WIDTHS = (6, 9, 7, 8, 3)
"""Of the layers of a model; layer n goes from width n to width n + 1."""


def _everything() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, 3, 4, generator=generator)
    base = torch.arange(24.0).view(4, 6)
    return [
        *(numbers.mul(3).to(dtype) for dtype in DTYPES),
        base.t()[1::2],
        base[:, :1].expand(4, 3),
        torch.complex(numbers, numbers).conj(),
        torch.zeros(3, 0, 2, dtype=torch.int16),
        torch.tensor(2.5, dtype=torch.float64),
        nn.Parameter(torch.ones(2), requires_grad=False),
        {"a": [1, 2.5, True], 7: (np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2], np.float32(1.5)), "b": {}},
        [None, "é\n", float("inf"), 10**30, np.zeros((0, 2)), ()],
        torch.arange(8 * 2**20).view(torch.uint8),
    ]


def _send_everything(world: World) -> list[bool]:
    other = 1 - world.rank
    values = _everything()
    for value in values:
        assert not send(value, to=other).requires_grad
    values[0].zero_()  # What was sent is a copy.
    return [_same(recv(source=other), value) for value in _everything()]


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right) and not isinstance(right, nn.Parameter):
        return False
    if isinstance(right, torch.Tensor):
        same_kind = left.dtype == right.dtype and left.shape == right.shape and not left.requires_grad
        return same_kind and torch.equal(_bytes(left), _bytes(right))
    if isinstance(right, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(right, list | tuple):
        return len(left) == len(right) and all(_same(*pair) for pair in zip(left, right, strict=True))
    if isinstance(right, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in right)
    return left == right


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def test_every_kind_of_value_comes_as_it_was_also_when_both_ranks_send_first() -> None:
    for result in testing.run_ranks(_send_everything, 2):
        assert result.get() == [True] * len(_everything())


def _layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(before, after).double() for before, after in pairwise(WIDTHS)]


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, WIDTHS[0], generator=generator).double(), torch.randn(size, 1, generator=generator).double())
        for size in (5, 7, 4)
    ]


def _one_device(num_layers: int) -> dict[str, torch.Tensor]:
    layers = _layers()[:num_layers]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.2)
    for x, y in _batches():
        hidden = x
        for layer in layers:
            hidden = torch.tanh(layer(hidden))
        (hidden - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"{number}.{name}": v for number, layer in enumerate(layers) for name, v in layer.state_dict().items()}


def _own_part(world: World, num_microbatches: int) -> dict[str, torch.Tensor]:
    """Train layer ``rank`` of as many layers as there are ranks."""
    layer = _layers()[world.rank]
    is_last = world.rank == world.world_size - 1
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
    for x, y in _batches():
        held: list[torch.Tensor] = []
        for part, target in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True):
            hidden = torch.tanh(layer(part if world.rank == 0 else recv(world.rank - 1)))
            loss = (hidden - target).square().mean() * (len(part) / len(x)) if is_last else hidden
            held.append(loss if is_last else send(hidden, to=world.rank + 1))
        for loss in held[::-1] if is_last else held:  # in any order
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"{world.rank}.{name}": value for name, value in layer.state_dict().items()}


@pytest.mark.parametrize(("world_size", "num_microbatches"), [(2, 1), (4, 3)])
def test_a_layer_on_each_rank_trains_as_one_model_on_one_device(world_size: int, num_microbatches: int) -> None:
    got: dict[str, torch.Tensor] = {}
    for result in testing.run_ranks(_own_part, world_size, num_microbatches):
        got |= result.get()
    assert largest_difference(got, _one_device(world_size)) <= TOLERANCE


def _ring(world: World) -> tuple[float, torch.Tensor, torch.Tensor | None]:
    """Send to the right before anything is received; the gradients go round the other way."""
    weight = torch.full((2**20,), float(world.rank + 1), requires_grad=True)
    sent = send({"hidden": weight * 2, "rank": world.rank}, to=(world.rank + 1) % world.world_size)
    left = recv((world.rank - 1) % world.world_size)
    # Used twice, so that one gradient goes back which is the sum; and sent counts as zero in a loss of this rank.
    (left["hidden"].sum() + (left["hidden"] * 3).sum() + sent * 0.5).backward()
    return float(left["rank"]), left["hidden"].detach()[:1], weight.grad


def test_a_ring_of_ranks_that_all_send_first_comes_round() -> None:
    for rank, result in enumerate(testing.run_ranks(_ring, 3)):
        number, received, gradient = result.get()
        left = (rank - 1) % 3
        assert number == left
        assert received.item() == 2 * (left + 1)
        # 2 for what was sent, 1 + 3 for its two uses, 0.5 for what the result of send was multiplied with.
        assert torch.equal(gradient, torch.full((2**20,), 2 * (1 + 3) * 0.5))


def _corners(world: World) -> list[Any]:
    given = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.int64)]
    if world.rank == 0:
        sent = send(given, to=1)
        sent.backward(retain_graph=True)
        with pytest.raises(ConfigurationError, match="A second backward"):
            sent.backward()
        found: list[Any] = [given[0].grad, given[1].grad]
        with torch.no_grad():
            found.append(send(given[0], to=1).requires_grad)
        for _ in range(2):
            with pytest.raises(PeerMissing) as caught:
                send(given[0], to=1).backward()
            found.append(str(caught.value))
        with pytest.raises(ConfigurationError, match="no second derivative"):
            torch.autograd.grad(send(given[0], to=1), given[0], create_graph=True)
        return found
    used, unused, integers = recv(0)
    found = [used.requires_grad, unused.requires_grad, integers.requires_grad]
    # Into memory of its own, in place.
    (used.mul_(2) * integers * 2).sum().backward(retain_graph=True)
    # Its gradients are with rank 0, which went on with them: a part of the sum, without a word, is no gradient.
    with pytest.raises(ConfigurationError, match=r"(?s)A second backward.*loss1 \+ loss2"):
        (used * 5).sum().backward()
    found.append(recv(0).requires_grad)
    with torch.no_grad():
        found.append(recv(0).requires_grad)
    del used, unused, integers
    recv(0)
    received = recv(0)
    gc.collect()
    with pytest.raises(ConfigurationError, match="no second derivative"):
        torch.autograd.grad(received.sum(), received.grad_fn.next_functions[0][0].variable, create_graph=True)
    return found


def test_gradients_in_the_corners() -> None:
    sender, receiver = (result.get() for result in testing.run_ranks(_corners, 2))
    used, unused, requires_grad, under_no_grad, let_go = sender
    assert torch.equal(used, torch.full((2,), 4.0))
    assert unused is None
    assert not requires_grad
    assert "rank 1 received it inside torch.no_grad()" in under_no_grad
    assert "rank 1 freed what it received" in let_go
    assert receiver == [True, True, False, False, False]


def _scaled(world: World, scales: list[float]) -> list[torch.Tensor | None]:
    """Rank 1 multiplies with each scale, rank 0 divides by it again."""
    found: list[torch.Tensor | None] = []
    for scale in scales:
        weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
        if world.rank == 0:
            (send(weight, to=1) / scale).backward()
            found.append(weight.grad)
        else:
            recv(0).mul(scale).sum().backward()
    return found


def test_a_factor_that_half_precision_does_not_hold_scales_its_gradients() -> None:
    scales = [2.0**14, 2.0**-9]
    sender = testing.run_ranks(_scaled, 2, [*scales, 2.0**-20])[0].get()
    for gradient in sender:
        assert torch.equal(gradient, torch.ones(2, dtype=torch.float16))


def _inside_compiled(world: World) -> torch.Tensor | None:
    layer = nn.Linear(3, 3)
    if world.rank == 0:
        torch.compile(lambda x: send(layer(x), to=1) * 2, backend="eager")(torch.ones(2, 3)).backward()
    else:
        torch.compile(lambda: recv(0).mul(3).sum(), backend="eager")().backward()
    return layer.bias.grad


def test_compiled_functions_send_and_receive() -> None:
    first, second = (result.get() for result in testing.run_ranks(_inside_compiled, 2))
    assert torch.equal(first, torch.full((3,), 12.0))
    assert second is None
