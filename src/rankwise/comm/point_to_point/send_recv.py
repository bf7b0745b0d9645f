# SPDX-License-Identifier: Apache-2.0
"""``send`` and ``recv``: one value from one rank to another, and its gradients back.

The graph of a model may span several ranks: a received tensor requires a gradient if the sent one did, and
backward continues on the sending rank.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch

from rankwise.comm.point_to_point.endpoint import Endpoint, current_endpoint, refuse_alone
from rankwise.comm.point_to_point.message import pack, replaced, unpack
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, PeerMissing
from rankwise.torch_private.compiler import uncompiled

if TYPE_CHECKING:
    from rankwise.comm.point_to_point.endpoint import ReceivedMessage

P = ParamSpec("P")
R = TypeVar("R")

NO_GRAD = "received it inside torch.no_grad()"
LET_GO = "freed what it received before a backward() reached it"


@uncompiled
def send(value: object, to: int) -> torch.Tensor:
    """Send ``value`` to rank ``to``, which receives it with :func:`recv`, and return without waiting for that.

    Called by: this rank, once for each ``recv(source=this rank)`` of ``to``, in the same order.

    If tensors in ``value`` require a gradient, ``send(...).backward()`` waits until rank ``to`` has run backward
    through what it received, and then continues backward here::

        sent = rw.send(first(x), to=1)        # rank 0
        sent.backward()

        loss_fn(second(rw.recv(0)), y).backward()     # rank 1

    The result is zero, so it can be added to a loss of this rank; a factor on it multiplies
    the gradients. Each ``send`` allows one backward, and no second derivative. Several values may be sent before
    the first backward; backwards may run in any order.

    The value is copied immediately. It is held on the other rank until it is received; a rank that sends faster than
    the other receives fills that rank's memory. GPU tensors are copied through host memory;
    for a pipeline of GPUs use ``rankwise.pipeline``.

    Args:
        value: tensor, NumPy array, number, string or ``None``, or a list, tuple or dict of them; any shape and
            dtype, which are sent with it.
        to: another rank.

    Returns:
        A scalar zero of float32, or of float64 if a tensor of ``value`` is. It is part of the graph if a tensor
        requires a gradient.

    Raises:
        ConfigurationError: there is no such rank, it is this one, or ``value`` holds something that cannot be sent.
            Nothing was sent.
        PeerFailed, PeerMissing: a rank failed; or ``to`` left. From ``backward()`` also if ``to`` freed what it
            received, or did not run backward within ``join(timeout_seconds=...)``.
    """
    _check_rank("send", "to", to)
    packed = pack(value)
    endpoint = current_endpoint("send")
    number = endpoint.next_number(to)
    if packed.sources:
        endpoint.recv_queue.expect(to, number)
    words = f"send({', '.join(packed.words)}, to={to})"
    endpoint.send(to, {"kind": "value", "number": number, "tree": packed.tree}, packed.buffers)
    if not packed.sources:
        return torch.zeros(())
    sent = _SentValue(endpoint, to, number, words)
    return cast("torch.Tensor", _Send.apply(sent, *packed.sources))


@uncompiled
def recv(source: int) -> Any:
    """Return the next value that rank ``source`` has sent to this one, waiting for it.

    Called by: this rank, once for each ``send(..., to=this rank)`` of ``source``, in the same order.

    The value has the type that was sent; tensors are on this rank's device. Those that required a gradient on the
    sender require one here, and ``backward()`` through them sends their gradients back, all at once after it has
    passed every use of them. A tensor that this backward did not reach gets no gradient on the sender either. Each
    received value allows one backward: add several losses first. Nothing is unpickled.

    Args:
        source: another rank.

    Raises:
        ConfigurationError: there is no such rank, or it is this one.
        PeerFailed: a rank failed.
        PeerMissing: ``source`` left or died, or sent nothing within ``join(timeout_seconds=...)``.
    """
    _check_rank("recv", "source", source)
    endpoint = current_endpoint("recv")
    waiting = endpoint.recv_queue.values[source]
    endpoint.wait(f"recv(source={source})", source, lambda: bool(waiting))
    message = waiting.popleft()
    value, wanting = unpack(message.head["tree"], message.buffers, torch.device(endpoint.world.device))
    if not wanting:
        return value
    endpoint.open_way(source)
    received = _ReceivedValue(endpoint, source, int(message.head["number"]))
    if not torch.is_grad_enabled():
        received.answer(NO_GRAD)
        return value
    asking = _Receive.apply(torch.zeros((), requires_grad=True), received, wanting)
    return replaced(value, {id(tensor): output for tensor, output in zip(wanting, asking, strict=True)})


class _SentValue:
    """A sent value that receives gradients, as long as its graph exists."""

    def __init__(self, endpoint: Endpoint, to: int, number: int, words: str) -> None:
        self.words = words
        self.to = to
        self._endpoint = endpoint
        self._number = number
        self._is_used = False
        weakref.finalize(self, endpoint.recv_queue.forget, to, number).atexit = False

    def wait_for_gradients(self) -> ReceivedMessage:
        if self._is_used:
            raise _second_backward(self.words)
        answers = self._endpoint.recv_queue.gradients[self.to, self._number]
        self._endpoint.wait(f"backward() of {self.words}", self.to, lambda: bool(answers))
        message = answers.popleft()
        self._is_used = True
        if message.head["kind"] == "none":
            raise PeerMissing(
                f"No gradients arrive for {self.words}: rank {self.to} {message.head['why']}.",
                ranks=[self.to],
                where=str(self._endpoint.world),
                do="make the loss there depend on the received value; or send value.detach() and leave out backward()",
            )
        return message


class _ReceivedValue:
    """A received value whose gradients another rank may wait for, as long as its graph exists."""

    def __init__(self, endpoint: Endpoint, source: int, number: int) -> None:
        self._endpoint = endpoint
        self._source = source
        self._number = number
        self._is_sent = False
        self._let_go = weakref.finalize(self, _send_no_gradients, weakref.ref(endpoint), source, number, LET_GO)
        self._let_go.atexit = False

    def answer(self, why: str) -> None:
        """Report that no gradients will be sent."""
        self._let_go.detach()
        _send_no_gradients(weakref.ref(self._endpoint), self._source, self._number, why)

    def send_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        if self._is_sent:
            # The other rank may have already continued with the first ones.
            raise _second_backward(f"what recv(source={self._source}) returned")
        self._is_sent = True
        self._let_go.detach()
        packed = pack([None if one is None else one.detach().to_dense() for one in gradients])
        self._endpoint.send(
            self._source, {"kind": "gradients", "number": self._number, "tree": packed.tree}, packed.buffers
        )


def _send_no_gradients(endpoint_reference: weakref.ref[Endpoint], to: int, number: int, why: str) -> None:
    endpoint = endpoint_reference()
    if endpoint is not None:
        endpoint.send_head(to, {"kind": "none", "number": number, "tree": None, "why": why})


def _second_backward(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"A second backward() reached {what}, but its gradients have already been sent.",
        do="run one backward() through it: add the losses up first, (loss1 + loss2).backward(); "
        "or send the value twice, once for each",
    )


class _Send(torch.autograd.Function):
    """Forward returns zero; backward waits for the gradients of the sent value."""

    @staticmethod
    def forward(ctx: Any, sent: _SentValue, *sources: torch.Tensor) -> torch.Tensor:
        ctx.sent = sent
        ctx.devices = [source.device for source in sources]
        # A factor of the gradients passes through this value, such as a loss scale, which half precision cannot hold.
        dtypes = {source.dtype for source in sources}
        dtype = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
        return torch.zeros((), dtype=dtype, device=sources[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _refuse_second("send")
        message = ctx.sent.wait_for_gradients()
        given, _ = unpack(message.head["tree"], message.buffers, torch.device("cpu"))
        factor = gradients[0].item()
        there = [None if one is None else one.to(device) for one, device in zip(given, ctx.devices, strict=True)]
        return (None, *(one if one is None or factor == 1.0 else one * factor for one in there))


class _Receive(torch.autograd.Function):
    """Forward returns the received value; backward sends the gradients back, once for all its tensors."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, received: _ReceivedValue, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.received = received
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        _refuse_second("recv")
        ctx.received.send_gradients(list(gradients))
        return (None, None, None)


def _refuse_second(name: str) -> None:
    if torch.is_grad_enabled():
        raise ConfigurationError(
            f"{name} has no second derivative: it does not support backward(create_graph=True).",
            do="leave create_graph=True out, or compute the second derivative on one rank",
        )


def _check_rank(name: str, argument: str, rank: object) -> None:
    world = current().world
    refuse_alone(name, world)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ConfigurationError(f"{name} needs the number of a rank, got {rank!r}.", do=f"pass {argument}= an integer")
    if not 0 <= rank < world.world_size:
        raise ConfigurationError(
            f"{name}: there is no rank {rank}.",
            where=str(world),
            evidence=f"the ranks are 0 to {world.world_size - 1}",
            do=f"pass {argument}= one of them",
        )
    if rank == world.rank:
        raise ConfigurationError(
            f"{name}: rank {rank} cannot communicate with itself.",
            where=str(world),
            do=f"pass {argument}= another rank; this rank already has the value",
        )
