# SPDX-License-Identifier: Apache-2.0
"""Calls of modules on rank zero, split by the rows of their batch: every rank computes its rows of them.

The outermost call of a module with parameters is split once it is proved that its samples do not see one another: at
the first, second, fourth, eighth ... call, and when something has changed that it reads. What cannot be split runs
whole, and the modules in it are tried instead. A call that fails on rows runs whole too: the script sees the error
that it sees in plain Python.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rankwise.auto.known import KnownModules, ModuleCall, fitting
from rankwise.auto.proof import PLAIN, as_output, batch_dims, buffers_of, obstacle, parameters_of, plain
from rankwise.auto.rows import OwnArguments
from rankwise.auto.settings import GeneratorStates
from rankwise.auto.split import Ways, first_line, whole_outputs, with_graph
from rankwise.auto.trial import Trials
from rankwise.log import log
from rankwise.meter import note_layout
from rankwise.torch_private.tensors import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import nn

    from rankwise.auto.module_calls import ModuleCalls
    from rankwise.auto.proof import BatchDims
    from rankwise.auto.replacing import HeldSignals
    from rankwise.auto.servers import Ran, Servers

LARGE_OUTPUT_BYTES = 2**24
"""Outputs of which it is said that they are large, if they are larger than the arguments."""


class SplitCalls:
    """Splits the calls of modules, from the start of the script to its end."""

    def __init__(
        self,
        servers: Servers,
        calls: ModuleCalls,
        signals: HeldSignals,
        device: torch.device,
        *,
        splits_always: bool,
    ) -> None:
        """``splits_always``: whether to split also where it saves no time."""
        self._servers = servers
        self._calls = calls
        self._signals = signals
        self._device = device
        self._splits_always = splits_always
        self._known = KnownModules(servers.own.new_draws)
        self._trials = Trials(self._known, servers, calls, device)
        self._account = Account(servers.exchange.world_size)

    @contextmanager
    def replacing(self) -> Generator[None]:
        """Split calls inside the block."""
        try:
            with self._signals.replacing(), self._calls.replacing(self._called):
                yield
        finally:
            self._account.record()

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._signals:
            run = self._way(module, args, kwargs)
            if isinstance(run, partial):
                return run()
        return run(module, args, kwargs)

    def _way(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return how a call runs: a function of these arguments, or a partial one that splits it."""
        self._servers.check()
        if self._known.rests(module):
            self._account.add(type(module).__name__, SLOWER)
            return self._whole
        known = self._known.of(module)
        if known is None:
            return self._whole
        given, tree = tree_flatten((args, kwargs))
        kind = self._known.kind(known, module, given, tree)
        if kind is None:
            return self._whole
        if kind.reason is not None:
            self._account.add(type(module).__name__, kind.reason)
            return self._calls.plain
        leaves = [plain(one) for one in given]
        call = ModuleCall(module, known, kind, given, leaves, tree)
        num_ranks = self._servers.exchange.world_size
        batches = batch_dims(leaves, num_ranks) if kind.batch is None else fitting(kind.batch, leaves)
        if not batches and any(not isinstance(one, (*PLAIN, torch.Tensor)) for one in leaves):
            self._runs_whole(call, obstacle(module, leaves) or "its arguments have no rows")
            return self._calls.plain
        if not batches or batches[0].num_global < num_ranks:
            self._account.add(call.name, NO_ROWS)
            return self._whole
        kind.count()
        # In single rows, samples that meet are not told from others.
        is_clear = batches[0].num_global >= 2 * num_ranks
        is_due = kind.num_calls >= kind.next_proof and (kind.pace.is_split or self._splits_always)
        if kind.is_doubtful and not is_clear:
            self._account.add(call.name, NO_ROWS)
            return self._whole
        if kind.batch is None or kind.is_doubtful or (is_clear and is_due):
            return partial(self._proved, call, batches)
        if self._splits_always or self._pays(call):
            return partial(self._in_parts, call, batches[0])
        self._account.add(call.name, SLOWER)
        return self._whole

    def _whole(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._calls.whole(module, args, kwargs)[0]

    def _pays(self, call: ModuleCall) -> bool:
        """Return whether the call that begins now is to be split: whether that saves time, or is being measured."""
        pace = call.kind.pace
        before, is_split = pace.ratio, pace.next_is_split()
        if pace.ratio is not None and pace.ratio != before:
            ranks = f"{self._servers.exchange.world_size} ranks"
            if not pace.is_split:
                call.known.rest((call.module.training, torch.is_grad_enabled()), pace.take_rest())
                call.kind.doubt()  # nothing is proved while calls run whole
            what = "is split over" if pace.is_split else "runs whole on one rank: it would be slower on"
            self._account.say(
                f"auto: {call.name} {what} {ranks}", f": its loop takes {pace.ratio:.2f} of the time on one"
            )
        return is_split

    def _proved(self, call: ModuleCall, batches: Sequence[BatchDims]) -> Any:
        result, reason = self._trials.proved(call, batches)
        # What is set once, as a cache, is not set in the second call.
        if reason is not None and (call.kind.num_calls > 1 or not reason.may_pass):
            self._runs_whole(call, reason.text)
        return result

    def _in_parts(self, call: ModuleCall, batch: BatchDims) -> Any:
        kind, known = call.kind, call.known
        may_draw = kind.is_random or known.num_changes
        before = GeneratorStates.now(self._device) if may_draw else None
        arguments = OwnArguments(call.leaves, batch.dims, call.tree)
        found = self._rows_computed(call, arguments, batch, before if kind.is_random else None)
        if isinstance(found, str):
            result = self._whole_again(call, before)
            self._runs_whole(call, found)
            return result
        ran, whole = found
        if before is not None and not kind.is_random and not before.are(GeneratorStates.now(self._device)):
            kind.doubt()  # it draws since something has changed: each rank has drawn numbers of its own
            self._servers.forget(ran.number)
            return self._whole_again(call, before)
        kind.add_split()
        self._account.add(call.name)
        self._note_sizes(call, whole)
        if torch.is_grad_enabled():
            ways = Ways(self._servers, partial(self._differentiated_again, call, before), self._signals)
            parameters = parameters_of(call.module)
            whole = with_graph(ran, whole, kind.outputs, arguments=arguments, parameters=parameters, ways=ways)
        return tree_unflatten([as_output(one, call.given) for one in whole], ran.structure)

    def _rows_computed(
        self, call: ModuleCall, arguments: OwnArguments, batch: BatchDims, generators: GeneratorStates | None
    ) -> tuple[Ran, list[Any]] | str:
        """Return a call that has run on all ranks, and its outputs for the whole batch; or why it must run whole."""
        try:
            ran = self._servers.call(call, call.module, arguments, batch.num_global, generators=generators)
            return ran, whole_outputs(ran, call.kind.outputs)
        except Exception as error:
            if self._servers.have_failed:
                raise
            return f"it fails for a part of the batch ({first_line(error)})"

    def _whole_again(self, call: ModuleCall, before: GeneratorStates | None) -> Any:
        """Run a call whole that has failed on rows: it raises where plain Python raises."""
        self._servers.restore_buffers(call.module)
        if before is not None:
            before.restore(self._device)
        return self._whole(call.module, *call.arguments())

    def _differentiated_again(self, call: ModuleCall, before: GeneratorStates | None, reason: str) -> list[Any]:
        """Return the outputs of a call, run whole with a graph: its gradients cannot be split, for a reason."""
        self._runs_whole(call, reason)
        now = GeneratorStates.now(self._device)
        buffers = [(one, one.detach().clone()) for one in buffers_of(call.module)]
        if before is not None:
            before.restore(self._device)
        try:
            with torch.enable_grad():
                result = self._whole(call.module, *call.arguments())
        finally:
            now.restore(self._device)
            for one, value in buffers:
                one.data.copy_(value)  # the graph that was made now may hold it, and does not read it
        return tree_leaves(result)  # type: ignore[no-any-return]

    def _note_sizes(self, call: ModuleCall, outputs: Sequence[Any]) -> None:
        """Say so where what travels is mostly outputs."""
        num_bytes, num_given = (
            sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor)) for leaves in (outputs, call.leaves)
        )
        if num_bytes > max(LARGE_OUTPUT_BYTES, num_given):
            self._account.say(
                f"auto: {call.name} returns {num_bytes >> 20} MiB for {max(1, num_given >> 20)} MiB of arguments, "
                "which travel to rank 0 in each call: return only what the loss needs"
            )

    def _runs_whole(self, call: ModuleCall, reason: str) -> None:
        call.kind.run_whole(reason)
        self._account.add(call.name, reason)
        self._account.say(f"auto: {call.name} runs whole on one rank: {reason}")


SLOWER = "splitting it would be slower"
NO_ROWS = "its batch has too few samples for so many ranks, or no rows"
TOLD_AFTER_SECONDS = 30.0
"""It is said then if nothing has been split."""


class Account:
    """Counts the calls of modules, by class."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._tell_at: float | None = time.monotonic() + TOLD_AFTER_SECONDS
        self._counts: Counter[tuple[str, str]] = Counter()
        """By class, and by the reason why calls were not split; no words: they were."""
        self._said: set[str] = set()

    def add(self, name: str, reason: str = "") -> None:
        """Count a call."""
        self._counts[name, reason] += 1
        if not reason:
            self._tell_at = None
        elif self._tell_at is not None and time.monotonic() > self._tell_at:
            self._tell_at = None
            (most, why), _ = self._counts.most_common(1)[0]
            self.say(
                f"auto: no call of a model has been split so far, so {self._num_ranks} ranks are no faster than one: "
                f"{most} runs whole, because {why}. docs/auto.md says what can be split, and what to change"
            )

    def say(self, message: str, figures: str = "") -> None:
        """Log a message, if it was not logged yet, with the figures of this time."""
        if message not in self._said:
            self._said.add(message)
            log(message + figures)
            self.record()

    def record(self) -> None:
        """Have the report show what has been counted."""
        rows = [[name, count, reason] for (name, reason), count in self._counts.items()]
        if rows:
            note_layout("calls", rows=rows)
