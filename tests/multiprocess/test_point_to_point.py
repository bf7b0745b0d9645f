# SPDX-License-Identifier: Apache-2.0
"""Values between two ranks, and one model in parts on several ranks that trains as on one."""

from __future__ import annotations

import gc
import logging
import signal
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from replicas import TOLERANCE, largest_difference
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError, NotJoined, PeerFailed, PeerMissing
from rankwise.parallel.threads import data_parallel
from rankwise.point_to_point.calls import recv, send
from rankwise.point_to_point.desk import desk

if TYPE_CHECKING:
    from rankwise.world import World

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
        torch.randint(256, (64 * 2**20,), generator=generator, dtype=torch.uint8),
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
        return same_kind and torch.equal(left.to(torch.complex128), right.to(torch.complex128))
    if isinstance(right, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(right, list | tuple):
        return len(left) == len(right) and all(_same(*pair) for pair in zip(left, right, strict=True))
    if isinstance(right, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in right)
    return left == right


def test_every_kind_of_value_comes_as_it_was_also_when_both_ranks_send_first() -> None:
    for result in testing.run_ranks(_send_everything, 2):
        assert result.get() == [True] * len(_everything())


# -- one model on several ranks ------------------------------------------------------------------------


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
    assert "rank 1 let go of what it received" in let_go
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


# -- when it cannot be -----------------------------------------------------------------------------------


def _both_wait(world: World) -> None:
    recv(1 - world.rank)


def test_two_ranks_that_wait_for_each_other_are_told_both_places() -> None:
    results = testing.run_ranks(_both_wait, 2, join_timeout_seconds=2.0, timeout_seconds=20.0)
    errors = [result.error for result in results]
    missing = [error for error in errors if isinstance(error, PeerMissing)]
    assert missing, errors
    assert all(isinstance(error, PeerMissing | PeerFailed) for error in errors)
    text = max(map(str, missing), key=len)
    assert "waited 2" in text
    for rank in (0, 1):
        assert f"waiting in recv(source={rank})" in text
    assert text.count("in _both_wait") >= 2


def _no_backward(world: World) -> None:
    if world.rank == 0:
        send(torch.ones(2, requires_grad=True), to=1).backward()
    kept = recv(0)
    threading.Event().wait(4)
    del kept


def test_a_backward_that_the_receiver_never_runs_ends_by_the_limit_and_names_it() -> None:
    sender = testing.run_ranks(_no_backward, 2, join_timeout_seconds=2.0, timeout_seconds=20.0)[0]
    assert isinstance(sender.error, PeerMissing)
    text = str(sender.error)
    assert "backward() of send(float32[2], to=1) waited 2" in text
    assert "Missing: rank 1" in text
    assert "in _no_backward" in text.partition("stack of rank 1")[2], "says where it is"


def _end(world: World, how: str) -> None:
    if world.rank == 1:
        if how == "raise":
            message = "the batch is bad"
            raise ValueError(message)
        if how == "kill":
            testing.kill_self()
        return
    recv(1)


@pytest.mark.parametrize(("how", "kind"), [("raise", PeerFailed), ("kill", PeerMissing), ("leave", PeerMissing)])
def test_a_rank_that_ends_is_named_by_who_waits_for_it(how: str, kind: type[Exception]) -> None:
    waiting, ended = testing.run_ranks(_end, 2, how)
    assert isinstance(waiting.error, kind), waiting.error
    assert "in vain" not in str(waiting.error), "nobody waits for the limit"
    assert "ank 1" in str(waiting.error)
    if how == "raise":
        assert "the batch is bad" in str(waiting.error)
    if how == "kill":
        assert ended.exit_code == -signal.SIGKILL


def _sent_and_left(world: World) -> None:
    if world.rank == 0:
        send(torch.ones(3, requires_grad=True), to=1)
        send("nobody", to=2)
    elif world.rank == 1:
        # Its gradients go to a rank that asks for none, and may have left.
        recv(0).sum().backward()


def test_a_value_that_its_receiver_left_without_is_an_error_of_the_sender() -> None:
    sender, receiver, absent = testing.run_ranks(_sent_and_left, 3)
    assert isinstance(sender.error, PeerMissing)
    assert sender.error.ranks == (2,)
    assert "rank 2 has left" in str(sender.error)
    assert receiver.error is None
    assert absent.error is None


def _sent_too_late(world: World) -> None:
    if world.rank == 1:
        send(recv(0), to=0)
        return
    send("early", to=1)
    recv(1)
    with pytest.raises(PeerMissing, match="rank 1 has left"):
        recv(1)
    send("late", to=1)


def test_a_value_sent_to_a_rank_that_has_left_is_an_error_of_the_sender() -> None:
    sender, receiver = testing.run_ranks(_sent_too_late, 2)
    assert isinstance(sender.error, PeerMissing)
    assert "ank 1 has left, and 1 value sent to it had not come" in str(sender.error)
    assert receiver.error is None


def _received_and_left(world: World) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rankwise").addHandler(handler)
    way = desk("this test")
    if world.rank == 0:
        forgotten = [send(torch.ones(2, requires_grad=True), to=1) for _ in range(2)]
        del forgotten[0]
        for number in range(3):
            send(number, to=1)
        way.wait("gradients", 1, lambda: bool(way.inbox.untaken[1] and any(way.inbox.gradients.values())))
    else:
        for _ in range(2):
            recv(0).sum().backward()
        recv(0)
        way.wait("the rest", 0, lambda: len(way.inbox.values[0]) == 2)
    rw.leave()
    return said


def test_values_and_gradients_that_came_and_were_never_taken_are_told_where_they_came() -> None:
    sender, receiver = (result.get() for result in testing.run_ranks(_received_and_left, 2))
    assert any("gradients came back for 2 of the values that this rank sent, from rank 1" in line for line in sender)
    assert any("never received on this rank: 2 of the values sent to it, by rank 0" in line for line in receiver)


def _after_leaving(world: World) -> str:
    received = recv(0) if world.rank == 1 else None
    if received is None:
        send(torch.ones(3, requires_grad=True), to=1)
    rw.leave()
    if received is None:
        return ""
    with pytest.raises(NotJoined) as caught:
        received.sum().backward()
    return str(caught.value)


def test_a_backward_behind_the_end_of_the_world_says_so() -> None:
    _, receiver = testing.run_ranks(_after_leaving, 2)
    assert "run backward() inside the world" in receiver.get()


def _wrong_calls(world: World) -> list[str]:
    calls: list[Any] = [
        lambda: send(1, to=world.world_size),
        lambda: recv(-1),
        lambda: send(1, to=True),
        lambda: recv("one"),  # type: ignore[arg-type]
        lambda: recv(world.rank),
        lambda: send(1, to=world.rank),
    ]
    if world.world_size > 1:
        other = 1 - world.rank
        calls += [
            lambda: send({1, 2}, to=other),
            lambda: send(10**5000, to=other),
            lambda: send({(1, 2): 3}, to=other),
            lambda: send(np.array([object()]), to=other),
            lambda: send(torch.ones(2, device="meta"), to=other),
            lambda: send(torch.eye(3).to_sparse(), to=other),
            lambda: data_parallel(nn.Linear(2, 2), ["cpu", "cpu"]),
        ]
    texts: list[str] = []
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        texts.append(str(caught.value))
    if world.world_size > 1:
        send("and the way is as it was", to=1 - world.rank)
        texts.append(recv(1 - world.rank))
    return texts


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    (alone,) = (result.get() for result in testing.run_ranks(_wrong_calls, 1))
    assert all("world of one" in text for text in alone)
    for result in testing.run_ranks(_wrong_calls, 2):
        texts = result.get()
        for text, words in zip(
            texts,
            (
                "no rank 2",
                "no rank -1",
                "needs the number of a rank",
                "needs the number of a rank",
                "recv cannot be used by rank",
                "send cannot be used by rank",
                "send cannot send builtins.set",
                "an integer of 16610 bits",
                "keys that are no texts",
                "NumPy array of object",
                "on meta",
                "sparse",
                "one of 2 ranks",
                "and the way is as it was",
            ),
            strict=True,
        ):
            assert words in text
