# SPDX-License-Identifier: Apache-2.0
"""Replaces the call of every module: the outermost one of modules with parameters goes to a function.

Calls inside a split one stay as they are, but for BatchNorm, which takes the statistics of all rows.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import checkpoint

from rankwise.auto.replacing import replaced
from rankwise.comm.session import CurrentBatch
from rankwise.replicate.global_statistics import normalised
from rankwise.replicate.random_numbers.scope import DrawScope, enter, leave
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import is_transforming
from rankwise.torch_private.modules import check_input_dim

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from rankwise.auto.coupling import CouplingWatch
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.torch_private.modules import BatchNorm

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ModuleCalls:
    """The calls of modules, from the start of the script to its end."""

    def __init__(self, exchange: Exchange) -> None:
        self._ranks = _AllRanks(exchange)
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._call: Callable[..., Any] = nn.Module.__call__
        self._is_inside = self._is_split = False
        self._checkpoints: list[bool] = []
        self._watch: CouplingWatch | None = None

    def replacing(
        self, outermost: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
    ) -> AbstractContextManager[None]:
        """Have outermost calls of modules with parameters run ``outermost`` inside the block."""
        plain_call, plain_checkpoint = self._call, checkpoint.checkpoint

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return plain_call(module, *args, **kwargs)
            if self._is_inside:
                return self._called_inside(module, args, kwargs)
            return outermost(module, args, kwargs) if self._counts(module) else plain_call(module, *args, **kwargs)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return plain_checkpoint(*args, **kwargs)
            self._checkpoints.append(kwargs.get("use_reentrant") is not False)
            if self._is_split:
                return plain_checkpoint(*args, **kwargs)
            # What is computed again in backward runs whole there, and draws the same for the whole batch.
            with nullcontext() if self._is_inside else self._inside(is_split=False), _drawing_for_all():
                return plain_checkpoint(*args, **kwargs)

        return replaced((nn.Module, ["__call__"], lambda _: call), (checkpoint, ["checkpoint"], lambda _: noted))

    def plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module as torch does; the modules in it may be split."""
        return self._call(module, *args, **kwargs)

    def whole(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[bool]]:
        """Call a module as torch does, and the modules in it.

        Returns:
            What it returns; and for each use of torch.utils.checkpoint in it, whether that is the reentrant kind.
        """
        self._checkpoints.clear()
        with self._inside(is_split=False):
            return self._call(module, *args, **kwargs), list(self._checkpoints)

    def on_rows(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rows: Sequence[tuple[torch.Tensor, int]],
        watch: CouplingWatch | None,
    ) -> Any:
        """Call a module with this rank's rows. Called by: every rank.

        Args:
            module: to call.
            args: positional ones.
            kwargs: named ones.
            rows: the arguments with rows, and the dims of these.
            watch: follows them through the call, but for BatchNorm.
        """
        self._watch = watch
        try:
            with self._inside(is_split=True), nullcontext() if watch is None else watch.watching(rows):
                return self._called_inside(module, args, kwargs)
        finally:
            self._watch = None

    def _counts(self, module: nn.Module) -> bool:
        return (
            next(module.parameters(), None) is not None
            and os.getpid() == self._process  # no worker of a loader
            and not in_backward()  # not a recomputation
            and not is_transforming()
        )

    def _called_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_split and isinstance(module, _BATCHNORMS) and type(module) in _BATCHNORMS:
            return self._normalised(module, *args, **kwargs)
        if self._watch is not None and type(module) in _RECURRENT:
            sequences = args[0] if args else kwargs.get("input")
            if isinstance(sequences, PackedSequence):
                return self._watch.through_packed(partial(self._call, module, *args, **kwargs), sequences)
        return self._call(module, *args, **kwargs)

    def _normalised(self, layer: BatchNorm, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        if not layer.training and layer.running_mean is not None:
            return self._call(layer, input)  # type: ignore[no-any-return]
        check_input_dim(layer, input)
        with nullcontext() if self._watch is None else self._watch.paused():
            return normalised(layer, input, self._ranks)

    @contextmanager
    def _inside(self, *, is_split: bool) -> Generator[None]:
        self._is_inside, self._is_split = True, is_split
        try:
            yield
        finally:
            self._is_inside = self._is_split = False


@contextmanager
def _drawing_for_all() -> Generator[None]:
    """Draw as torch does inside the block, and remember that: a state of the generator may occur again."""
    enter(DrawScope(CurrentBatch(0, 0, 0, 1, 1, 0), "torch", 0, has_graph=torch.is_grad_enabled()))
    try:
        yield
    finally:
        leave()


class _AllRanks:
    """The ranks of a split call; see :class:`rankwise.replicate.global_statistics.StatisticsRanks`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self._exchange.all_gather(own, what="BatchNorm statistics")

    def mean_sums(self, own: torch.Tensor, x: torch.Tensor, count: torch.Tensor, *, is_needed: bool) -> torch.Tensor:  # noqa: ARG002
        return self._exchange.all_reduce(own, what="BatchNorm gradients") / count
