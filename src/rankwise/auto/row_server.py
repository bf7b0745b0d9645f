# SPDX-License-Identifier: Apache-2.0
"""How a rank other than zero serves: it runs modules of the script for its rows, and goes back through their graphs."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.auto.connection import Backward, End, Failed, Forward, Outputs, Rows
from rankwise.auto.proof import buffers_of, parameters_of
from rankwise.auto.rows import OwnArguments, Share, added_together
from rankwise.auto.settings import AppliedSettings
from rankwise.auto.shipping import (
    ServerTensors,
    loaded,
    loaded_tree,
)
from rankwise.errors import RankwiseError
from rankwise.torch_private.tensors import TreeSpec, tree_leaves

if TYPE_CHECKING:
    from torch import nn

    from rankwise.auto.connection import Backward, Connection
    from rankwise.auto.rows import OwnCalls
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.replicate.random_numbers.model_draws import DrawsOfModel


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of the script, as it was sent last."""

    module: nn.Module
    buffers: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Calls that draw alike, with arguments of one structure."""

    tree: TreeSpec
    draws: DrawsOfModel


@dataclass(frozen=True, slots=True)
class _Graph:
    """A call that a backward may follow."""

    outputs: list[Any]
    shared: list[torch.Tensor]
    """Parameters, and arguments without rows, that require a gradient."""
    rows: list[torch.Tensor]
    """Arguments with rows that require one."""


class RowServer:
    """Serves from the start of the script to its end."""

    def __init__(self, connection: Connection, exchange: Exchange, own: OwnCalls, device: torch.device) -> None:
        self._connection = connection
        self._exchange = exchange
        self._own = own
        self._device = device
        self._settings = AppliedSettings()
        self._tensors = ServerTensors(device)
        self._modules: dict[int, _Module] = {}
        self._kinds: dict[int, _Kind] = {}
        self._graphs: dict[int, _Graph] = {}

    def serve(self) -> bool:
        """Serve until the script ends; return whether it has ended well."""
        # They are for the script, which may call modules while it cleans up.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                self._connection.await_request()
                message, tensors = self._connection.receive()
            except (ConnectionError, RankwiseError):
                return False
            if isinstance(message, End):
                return True
            try:
                if isinstance(message, Forward):
                    reply, sent = self._forward(message, tensors)
                else:
                    reply, sent = self._backward(message, tensors)
            except BaseException as error:  # noqa: BLE001 - whatever a module raises
                reply, sent = Failed(type(error).__name__, str(error), traceback.format_exc()), []
            try:
                self._connection.send(reply, sent)
            except (ConnectionError, RankwiseError):
                return False

    def _forward(self, message: Forward, tensors: list[torch.Tensor]) -> tuple[Outputs, list[torch.Tensor]]:
        num_values = 0 if message.values.by_broadcast else len(message.values.sent)
        for call in message.forgotten:
            self._graphs.pop(call, None)
        try:
            self._tensors.update(message.values, tensors[:num_values], self._exchange)
            entry = self._entry(message)
            share = Share(self._exchange.rank, self._exchange.world_size, message.num_global)
            received = iter(tensors[num_values:])
            leaves = [
                self._own_leaf(next(received), one, has_graph=message.has_graph) if isinstance(one, Rows) else one
                for one in message.leaves
            ]
            self._tensors.reset(entry.buffers)
            if message.generators is not None:
                message.generators.restore(self._device)
            if message.structure is not None:
                draws = self._own.new_draws(type(entry.module).__name__)
                self._kinds[message.kind] = _Kind(loaded_tree(message.structure), draws)
            kind = self._kinds[message.kind]
        except BaseException as error:
            self._own.end_together(error, meets=message.meets)
            raise
        arguments = OwnArguments(leaves, message.dims, kind.tree)
        with self._settings.applied(message.settings):
            result = self._own.run(entry.module, kind.draws, share, arguments, meets=message.meets)
        outputs = tree_leaves(result)
        if message.has_graph and any(isinstance(one, torch.Tensor) and one.requires_grad for one in outputs):
            shared = [one for one in (*parameters_of(entry.module), *arguments.whole) if one.requires_grad]
            rows = [one for one, _ in arguments.rows if one.requires_grad]
            self._graphs[message.call] = _Graph(outputs, shared, rows)
        sent = [one for one in outputs if isinstance(one, torch.Tensor)]
        return Outputs([Rows() if isinstance(one, torch.Tensor) else one for one in outputs]), sent

    def _entry(self, message: Forward) -> _Module:
        if message.pickled is not None:
            module = loaded(message.pickled, self._tensors.__getitem__)
            self._modules[message.module] = _Module(module, buffers_of(module))
        return self._modules[message.module]

    def _own_leaf(self, received: torch.Tensor, facts: Rows, *, has_graph: bool) -> torch.Tensor:
        own = received.to("cpu" if facts.is_on_cpu else self._device, copy=True)
        return own.requires_grad_(facts.requires_grad and has_graph)

    def _backward(self, message: Backward, tensors: list[torch.Tensor]) -> tuple[Outputs, list[torch.Tensor]]:
        graph = self._graphs[message.call] if message.keeps_graph else self._graphs.pop(message.call)
        found = self._own.gradients(
            [graph.outputs[place] for place in message.given],
            [one.to(graph.outputs[place].device, copy=True) for place, one in zip(message.given, tensors, strict=True)],
            [*graph.shared, *graph.rows],
            keeps_graph=message.keeps_graph,
            meets=message.meets,
        )
        if message.adds:
            num_shared = len(graph.shared)
            added_together(found[:num_shared], graph.shared, self._exchange)
            found[:num_shared] = [None] * num_shared
        sent = [one for one in found if one is not None]
        return Outputs([None if one is None else Rows() for one in found]), sent
