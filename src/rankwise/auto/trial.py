# SPDX-License-Identifier: Apache-2.0
"""A proof: the call runs whole, then a copy of the module runs on rows, on all ranks, and what they did is compared."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.auto.code_reads import noted_functions
from rankwise.auto.coupling import CouplingWatch
from rankwise.auto.proof import (
    Reason,
    as_output,
    checksum,
    copy_of,
    difference,
    difference_beside,
    elsewhere,
    gradient_elsewhere,
    is_alike,
    obstacle,
    obstacle_after,
    parameters_of,
    plain,
    shares_memory,
    tensors_kept,
    uncompiled,
)
from rankwise.auto.replacing import replaced
from rankwise.auto.rows import OwnArguments, Share
from rankwise.auto.settings import GeneratorStates
from rankwise.auto.split import ResultChanged, first_line, whole_outputs
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.random_numbers.source import draws_forgotten
from rankwise.torch_private.tensors import tree_flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import nn

    from rankwise.auto.known import KnownModules, ModuleCall
    from rankwise.auto.module_calls import ModuleCalls
    from rankwise.auto.proof import BatchDims
    from rankwise.auto.rows import OutputRows
    from rankwise.auto.servers import Servers


@dataclass(frozen=True, slots=True)
class _WholeRun:
    """A call that has run whole."""

    result: Any
    reason: Reason | None
    """Why such calls must not be split, if that is known already."""
    before: GeneratorStates
    after: GeneratorStates


class Trials:
    """Proves that calls can be split by rows."""

    def __init__(self, known: KnownModules, servers: Servers, calls: ModuleCalls, device: torch.device) -> None:
        self._known = known
        self._servers = servers
        self._calls = calls
        self._device = device
        self._effects = Effects()

    def proved(self, call: ModuleCall, batches: Sequence[BatchDims]) -> tuple[Any, Reason | None]:
        """Run a call whole, and copies of its module on rows; return its outputs, and why it is not to be split.

        Args:
            call: of the script. What is found of its kind is noted.
            batches: where the rows may lie, the likeliest first.

        Raises:
            ConfigurationError: calls that were split have returned wrong values.
        """
        kind = call.kind
        kind.start_proof()
        copies, given = self._copies(call, len(batches))
        reason = self._prepared(call, can_be_copied=bool(copies))
        whole_run = self._run_whole(call)
        kind.draw(is_random=not whole_run.before.are(whole_run.after))
        reason = first_reason = reason or whole_run.reason
        for copy, batch in zip(copies, batches, strict=False) if reason is None else ():
            whole_run.before.restore(self._device)
            try:
                with draws_forgotten():
                    reason, outputs = self._compared(call, copy, batch, given, whole_run)
            finally:
                whole_run.after.restore(self._device)
            if reason is None:
                kind.end_proof(batch, outputs)
                return whole_run.result, None
            first_reason = first_reason or reason
            kind.draw_anew(*self._known.new_draws(call.name))
        assert first_reason is not None  # noqa: S101 - there is a batch
        if kind.num_split and first_reason.is_wrong:
            raise _no_longer(call, first_reason.text)
        return whole_run.result, first_reason

    def _prepared(self, call: ModuleCall, *, can_be_copied: bool) -> Reason | None:
        """Copy values as they are before the call; return why the call must not even be tried on rows."""
        text = obstacle(call.module, call.leaves) or call.known.guard.obstacle
        if text is not None or not can_be_copied:
            return Reason(text or "it cannot be copied for a trial")
        try:
            self._servers.copy_module(call)
        except Exception as error:
            if self._servers.have_failed:
                raise
            return Reason(f"it cannot be sent to other ranks ({first_line(error)})")
        return None

    def _copies(self, call: ModuleCall, number: int) -> tuple[list[nn.Module], list[Any]]:
        """Return copies of the module, none if it cannot be copied, and of the arguments: as before the call."""
        try:
            copies = [uncompiled(copy_of(call.module)) for _ in range(number)]
        except Exception:  # noqa: BLE001 - whatever an object of the script raises when it is copied
            return [], []
        return copies, [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in call.leaves]

    def _run_whole(self, call: ModuleCall) -> _WholeRun:
        """Run a call whole, and look at what it does besides."""
        module, leaves = call.module, call.leaves
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        facts = checksum(tensors), checksum(parameters_of(module))
        before = GeneratorStates.now(self._device)
        with self._effects.noted(), noted_functions() as ran:
            result, checkpoints = self._calls.whole(module, *call.arguments())
        after = GeneratorStates.now(self._device)
        name = call.known.guard.changed()
        call.known.guard.add(ran)
        reason = (
            (None if self._effects.found is None else Reason(self._effects.found))
            or (None if name is None else Reason(f"it changes {name}", is_wrong=True, may_pass=True))
            or gradient_elsewhere(module, call.given, result)
            or shares_memory(result, leaves, module)
            or obstacle_after(
                module,
                checkpoints,
                changes_arguments=facts[0] != checksum(tensors),
                changes_parameters=facts[1] != checksum(parameters_of(module)),
                is_random=not before.are(after),
            )
        )
        return _WholeRun(result, reason, before, after)

    def _compared(
        self, call: ModuleCall, copy: nn.Module, batch: BatchDims, given: Sequence[Any], whole_run: _WholeRun
    ) -> tuple[Reason | None, tuple[OutputRows | None, ...]]:
        """Run a call on rows; return why that is not the same, and where the outputs' rows lie."""
        share = Share(0, self._servers.exchange.world_size, batch.num_global)
        leaves = [
            one.requires_grad_(like.requires_grad and torch.is_grad_enabled()) if isinstance(one, torch.Tensor) else one
            for one, like in zip(given, call.leaves, strict=True)
        ]
        arguments = OwnArguments(leaves, batch.dims, call.tree)
        watch = CouplingWatch(share.num)
        generators = whole_run.before if call.kind.is_random else None
        try:
            ran = self._servers.call(call, copy, arguments, batch.num_global, generators=generators, watch=watch)
            self._servers.forget(ran.number)
        except Exception as error:
            if self._servers.have_failed:
                raise
            return Reason(f"it fails for a part of the batch ({first_line(error)})"), ()
        whole, structure = tree_flatten(whole_run.result)
        if structure != ran.structure or len(whole) != len(ran.outputs):
            return Reason("it returns something else for a part of the batch"), ()
        whole_plain = [plain(one) for one in whole]
        reason, places = difference(whole_plain, [plain(one) for one in ran.outputs], share, watch.layout_of)
        if reason is None:
            try:
                reason = elsewhere(whole_plain, whole_outputs(ran, places))
            except ResultChanged as error:
                reason = Reason(str(error), is_wrong=True)
        if not all(is_alike(one, as_output(plain(one), call.given)) for one in whole):
            reason = Reason("it returns tensors of another type than torch's functions do for its arguments")
        # What is made of parameters alone would pass its gradient back once per rank.
        kept = next((name for name, one in tensors_kept(copy) if one.requires_grad or watch.holds_samples(one)), None)
        if kept is not None:
            reason = Reason(f"it keeps tensors of its batch, in {kept}", is_wrong=True)
        reason = reason or difference_beside(call.module, copy)
        if reason is None and watch.found is not None:
            reason = Reason(watch.found, is_wrong=True)
        if reason is None and not whole_run.after.are(GeneratorStates.now(self._device)):
            reason = Reason("it draws other random numbers for a part of the batch", is_wrong=True)
        return reason, places


def _no_longer(call: ModuleCall, how: str) -> ConfigurationError:
    return ConfigurationError(
        f"{call.name} no longer treats the samples of a batch separately: {how}.",
        where=words(user_call_site()),
        evidence="its earlier calls did, and so each rank has computed its own samples only",
        do="run without --auto",
    )


_WRITES = frozenset("wax+")


class Effects:
    """What calls do, one after the other."""

    def __init__(self) -> None:
        self.found: str | None = None
        """Of the last call, in words that follow a colon."""
        self._is_noting = False
        sys.addaudithook(self._opened)  # it cannot be removed

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note what is done inside the block."""
        self.found, self._is_noting = None, True
        try:
            with replaced(
                (sys, ["stdout", "stderr"], lambda stream: _Noting(stream, self)),
                (logging.Logger, ["handle"], self._noting_logs),
                (torch.Tensor, ["register_hook", "register_post_accumulate_grad_hook", "retain_grad"], self._noting),
            ):
                yield
        finally:
            self._is_noting = False

    def note(self, text: str) -> None:
        """Note an effect, if it is the first one."""
        self.found = self.found or text

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_noting and event == "open" and isinstance(args[1], str) and _WRITES & set(args[1]):
            self.note("it writes files")

    def _noting_logs(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def call(logger: logging.Logger, record: logging.LogRecord) -> Any:
            if not logger.name.startswith("torch."):  # the compiler's
                self.note("it logs")
            return handle(logger, record)

        return call

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(f"it calls Tensor.{method.__name__}, which would see a part of the batch")
            return method(*args, **kwargs)

        return call


class _Noting:
    """A stream that notes that it is written to."""

    def __init__(self, stream: Any, effects: Effects) -> None:
        self._stream = stream
        self._effects = effects

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") != "warnings":  # noqa: SLF001 - the documented name
            self._effects.note("it prints")
        return int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
