# SPDX-License-Identifier: Apache-2.0
"""Calls of modules, split by the rows of their batch: each rank computes its rows, and the script sees them all.

The outermost call of a module with parameters is split once it is proved that its samples do not see one another. The
proof: the call runs whole, then a copy of the module runs on this rank's rows, and outputs, buffers and generators are
compared; again at the second, fourth, eighth ... call. What cannot be split runs whole on every rank, and the modules
in it are tried instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parameter import is_lazy

from rankwise.comm.session import CurrentBatch
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.log import log
from rankwise.parallel.randomness.model_draws import DrawsOfModel
from rankwise.parallel.randomness.source import draws_forgotten
from rankwise.tools.auto.agreement import agreed, check_parameters, checksum, digest
from rankwise.tools.auto.coupling import CouplingWatch
from rankwise.tools.auto.generators import GeneratorStates
from rankwise.tools.auto.module_calls import ModuleCalls
from rankwise.tools.auto.proof import (
    PLAIN,
    WRONG_VALUES,
    batch_dims,
    check_device,
    copy_of,
    difference,
    difference_beside,
    gradient_elsewhere,
    obstacle,
    obstacle_after,
    parameters_of,
    tensors_kept,
    uncompiled,
)
from rankwise.tools.auto.rows import Share, once, own_rows, whole_batch
from rankwise.tools.auto.sharing import parameters_shared
from rankwise.tools.auto.side_effects import Effects, changed, python_state, text_of
from rankwise.tools.auto.subclasses import as_output, is_alike, plain
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.modules import hooks_of, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.tools.auto.proof import BatchDims, OutputRows

    Kind = tuple[object, ...]
    """Calls that are proved together: modes of the module and its parts, and the arguments but for their sizes."""

MOST_KINDS = 64
"""Kinds of calls of a module that are proved: where sizes differ in each call, proofs cost more than they save."""


@dataclass(slots=True)
class KindOfCall:
    """What is known of the calls of one kind."""

    draws: DrawsOfModel
    num_calls: int = 0
    num_split: int = 0
    """How many calls ran on each rank's rows only."""
    batch: BatchDims | None = None
    """Where the rows lie; ``None``: not proved."""
    outputs: tuple[OutputRows | None, ...] = ()
    """Per leaf of the outputs; ``None``: the same for every row."""
    reason: str | None = None
    """Why it is not split."""

    @property
    def is_due(self) -> bool:
        """Whether this call is one that is proved: the first, second, fourth, eighth ..."""
        return self.num_calls & (self.num_calls - 1) == 0


@dataclass(slots=True)
class KnownModule:
    """A module that the script has called."""

    number: int
    """In the order of first calls, the same on every rank."""
    kinds: dict[Kind, KindOfCall] = field(default_factory=dict)
    is_random: bool = False
    """Whether it draws random numbers. Which dims of a draw hold the rows is then known for equal sizes only."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module."""

    module: nn.Module
    draws: DrawsOfModel
    given: list[Any]
    """Its arguments, flat."""
    leaves: list[Any]
    """The same, of which ranks take their rows."""
    tree: pytree.TreeSpec

    @property
    def name(self) -> str:
        """The module's class."""
        return type(self.module).__name__

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments made of other leaves."""
        return pytree.tree_unflatten(list(leaves), self.tree)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class OwnArguments:
    """This rank's rows of the arguments of a call."""

    leaves: Sequence[Any]
    dims: tuple[int | None, ...]

    @property
    def rows(self) -> list[tuple[torch.Tensor, int]]:
        """The arguments that were split, and the dims of their rows."""
        return [(one, dim) for one, dim in zip(self.leaves, self.dims, strict=True) if dim is not None]


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A call that has run whole."""

    result: Any
    reason: str | None
    """Why such calls must not be split, if that is known already."""
    facts: tuple[int, int]
    """Checksums of its arguments and of the parameters."""
    before: GeneratorStates
    after: GeneratorStates

    @property
    def is_random(self) -> bool:
        """Whether it drew random numbers."""
        return not self.before.are(self.after)


class SplitCalls:
    """Splits the calls of modules, from the start of the script to its end."""

    def __init__(self, session: Session, exchange: Exchange, num_file_changes: Callable[[], int]) -> None:
        """``num_file_changes`` returns how often files have been changed so far."""
        self._num_file_changes = num_file_changes
        self._session = session
        self._exchange = exchange
        self._device = torch.device(session.world.device)
        self._calls = ModuleCalls(exchange)
        self._modules: WeakKeyDictionary[nn.Module, KnownModule] = WeakKeyDictionary()
        self._num_modules = 0
        self._logged: set[str] = set()

    def replacing(self) -> AbstractContextManager[None]:
        """Split calls inside the block."""
        return self._calls.replacing(self._called)

    def check_parameters(self) -> None:
        """Raise if a module's parameters differ between ranks. Called by: every rank, at the end of the script."""
        check_parameters(
            {
                f"{known.number}. {type(module).__name__}": checksum(parameters_of(module))
                for module, known in list(self._modules.items())
            }
        )

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, tree = pytree.tree_flatten((args, kwargs))
        leaves = [plain(one) for one in given]
        known = self._modules.get(module)
        if known is None:
            if any(map(is_lazy, module.parameters())):
                return self._calls.whole(module, args, kwargs)[0]  # parameters and class are made in this call
            check_device(module, self._device)
            self._num_modules += 1
            known = self._modules[module] = KnownModule(self._num_modules)
        name = _kind_of(module, given, tree)
        sizes = tuple(one.shape for one in leaves if isinstance(one, torch.Tensor))
        kind = known.kinds.get((*name, sizes) if known.is_random else name)
        if kind is None and len(known.kinds) >= MOST_KINDS:
            return self._calls.whole(module, args, kwargs)[0]
        if kind is None:
            kind = KindOfCall(DrawsOfModel(self._session, "torch", type(module).__name__))
            known.kinds[(*name, sizes) if known.is_random else name] = kind
        if kind.reason is not None:
            return self._calls.plain(module, args, kwargs)
        batches = batch_dims(leaves, self._exchange.world_size) if kind.batch is None else _fitting(kind.batch, leaves)
        if not batches or batches[0].num_global < self._exchange.world_size:
            return self._calls.whole(module, args, kwargs)[0]
        kind.num_calls += 1
        call = Call(module, kind.draws, given, leaves, tree)
        if not kind.is_due:
            agreed(self._exchange, call.name, None, (digest(leaves), 0))
            kind.num_split += 1
            return self._in_parts(call, kind, batches[0])
        result, is_random = self._proved(call, kind, batches)
        if is_random and not known.is_random:
            known.is_random = True
            known.kinds = {(*name, sizes): kind}
        return result

    def _in_parts(self, call: Call, kind: KindOfCall, batch: BatchDims) -> Any:
        share = Share(self._exchange, batch.num_global)
        placed = list(zip(call.leaves, batch.dims, strict=True))
        whole_arguments = [one for one, dim in placed if dim is None and isinstance(one, torch.Tensor)]
        with parameters_shared(call.module, whole_arguments, self._exchange) as shared:
            own = [shared.get(id(one), one) if dim is None else own_rows(one, dim, share) for one, dim in placed]
            arguments = OwnArguments(own, batch.dims)
            outputs, structure = pytree.tree_flatten(self._on_rows(call, call.module, share, arguments))
        if len(outputs) != len(kind.outputs):
            raise _no_longer(call, f"it returned {len(outputs)} values instead of {len(kind.outputs)}")
        whole = [self._made_whole(call, one, rows, share) for one, rows in zip(outputs, kind.outputs, strict=True)]
        return pytree.tree_unflatten(whole, structure)

    def _made_whole(self, call: Call, output: Any, rows: OutputRows | None, share: Share) -> Any:
        """Return an output as the script is to see it."""
        if rows is None:
            return as_output(once(output, self._exchange), call.given) if isinstance(output, torch.Tensor) else output
        if (
            not isinstance(output, torch.Tensor)
            or output.dim() != len(rows.order)
            or output.shape[rows.dim] != share.num
        ):
            raise _no_longer(call, f"it returned {list(getattr(output, 'shape', ()))} for {share.num} rows")
        return as_output(whole_batch(output, rows.dim, share, rows.order), call.given)

    def _on_rows(
        self, call: Call, module: nn.Module, share: Share, own: OwnArguments, watch: CouplingWatch | None = None
    ) -> Any:
        """Call the module, or its copy, with this rank's rows; it draws its rows of torch's numbers for the batch."""
        args, kwargs = call.arguments(own.leaves)
        values = [one.movedim(dim, 0) for one, dim in own.rows]
        self._session.take(CurrentBatch(0, 0, 0, share.num, share.num_global, share.start, values))
        call.draws.before(module, args, kwargs)
        try:
            return self._calls.on_rows(module, args, kwargs, watch)
        except Exception as error:
            error.add_note(f"rankwise: this rank ran {call.name} on {share.num} of the {share.num_global} rows")
            raise
        finally:
            call.draws.after(module)
            self._session.finish_loop(0)

    # -- proofs ------------------------------------------------------------------------------------

    def _proved(self, call: Call, kind: KindOfCall, batches: Sequence[BatchDims]) -> tuple[Any, bool]:
        """Run a call whole, and try copies of the module on rows; return its outputs, and whether it drew numbers."""
        copies, given = self._copies(call, len(batches))
        whole_run = self._run_whole(call, can_be_copied=bool(copies))
        reasons: list[str] = []
        # A reason may hold on some ranks only, as that of the one that prints: all ranks agree equally often.
        for number, batch in enumerate(batches):
            failed, outputs = whole_run.reason, ()
            if failed is None:
                failed, outputs = self._tried(call, copies[number], batch, given, whole_run)
            answers = list(filter(None, agreed(self._exchange, call.name, failed, whole_run.facts)))
            if not answers:
                kind.batch, kind.outputs = batch, outputs
                return whole_run.result, whole_run.is_random
            reasons.append(answers[0])
        if kind.num_split and reasons[0].startswith(WRONG_VALUES):
            raise _no_longer(call, reasons[0])
        # What is set once, as a cache, is not set in the second call.
        if kind.num_calls > 1 or not reasons[0].startswith("it changes "):
            kind.reason = reasons[0]
            self._log(f"auto: {call.name} runs whole on every rank: {kind.reason}")
        return whole_run.result, whole_run.is_random

    def _copies(self, call: Call, number: int) -> tuple[list[nn.Module], list[Any]]:
        """Return copies of the module as it is before the call, none if it cannot be copied, and of the arguments."""
        if obstacle(call.module, call.leaves) is not None:
            return [], []
        try:
            copies = [uncompiled(copy_of(call.module)) for _ in range(number)]
        except Exception:  # noqa: BLE001 - whatever a class raises
            return [], []
        return copies, [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in call.leaves]

    def _run_whole(self, call: Call, *, can_be_copied: bool) -> WholeRun:
        """Run a call whole, and look at what it does besides."""
        module, leaves = call.module, call.leaves
        facts = digest(leaves), checksum(parameters_of(module))
        effects, state, before = Effects(), python_state(module), GeneratorStates.now(self._device)
        num_changes = self._num_file_changes()
        with effects.noted():
            result, checkpoints = self._calls.whole(module, *call.arguments(call.given))
        after = GeneratorStates.now(self._device)
        name = changed(state, python_state(module))
        if name is not None:
            effects.note(f"it changes {name}")
        if num_changes != self._num_file_changes():
            effects.note("it writes files")
        reason = (
            obstacle(module, leaves)
            or (None if can_be_copied else "it cannot be copied for a trial")
            or effects.found
            or gradient_elsewhere(module, call.given, result)
            or obstacle_after(
                module,
                checkpoints,
                changes_arguments=facts[0] != digest(leaves),
                changes_parameters=facts[1] != checksum(parameters_of(module)),
                is_random=not before.are(after),
            )
        )
        return WholeRun(result, reason, facts, before, after)

    def _tried(
        self, call: Call, copy: nn.Module, batch: BatchDims, given: Sequence[Any], whole_run: WholeRun
    ) -> tuple[str | None, tuple[OutputRows | None, ...]]:
        """Run a copy on this rank's rows; return why that is not the same, and where the outputs' rows lie."""
        whole_run.before.restore(self._device)
        try:
            with draws_forgotten():
                return self._compared(call, copy, batch, given, whole_run)
        finally:
            whole_run.after.restore(self._device)

    def _compared(
        self, call: Call, copy: nn.Module, batch: BatchDims, given: Sequence[Any], whole_run: WholeRun
    ) -> tuple[str | None, tuple[OutputRows | None, ...]]:
        share = Share(self._exchange, batch.num_global)
        own = [
            one if dim is None else one.narrow(dim, share.start, share.num).clone().requires_grad_(like.requires_grad)
            for one, like, dim in zip(given, call.leaves, batch.dims, strict=True)
        ]
        arguments = OwnArguments(own, batch.dims)
        watch = CouplingWatch(share.num, arguments.rows)
        try:
            output = self._on_rows(call, copy, share, arguments, watch)
        except Exception as error:  # noqa: BLE001 - whatever the module raises for fewer rows
            return f"it fails for a part of the batch ({_first_line(error)})", ()
        whole, structure = pytree.tree_flatten(whole_run.result)
        outputs, structure_of_rows = pytree.tree_flatten(output)
        if structure != structure_of_rows:
            return "it returns something else for a part of the batch", ()
        reason, places = difference([plain(one) for one in whole], [plain(one) for one in outputs], share)
        if not all(is_alike(one, as_output(plain(one), call.given)) for one in whole):
            reason = "it returns tensors of another type than torch's functions do for its arguments"
        # What is made of parameters alone would pass its gradient back once per rank.
        kept = next((name for name, one in tensors_kept(copy) if one.requires_grad or watch.holds_samples(one)), None)
        if kept is not None:
            reason = f"it keeps tensors of its batch, in {kept}"
        reason = reason or difference_beside(call.module, copy) or watch.found
        if reason is None and not whole_run.after.are(GeneratorStates.now(self._device)):
            reason = "it draws other random numbers for a part of the batch"
        return reason, places

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log(message)


def _kind_of(module: nn.Module, leaves: Sequence[Any], tree: pytree.TreeSpec) -> Kind:
    facts = tuple(
        (type(one), one.dim(), one.dtype, one.requires_grad)
        if isinstance(one, torch.Tensor)
        else (type(one), _setting(one) if isinstance(one, PLAIN) else "")
        for one in leaves
    )
    modes = tuple(map(_modes_of, module.modules()))
    return (
        modes,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(tree),
        facts,
    )


def _modes_of(part: nn.Module) -> tuple[object, ...]:
    """Return what may make a part compute something else than before: hooks and parameters, and own settings."""
    own = type(part).__module__.partition(".")[0] != "torch"
    plain_values = vars(part).items() if own else ()
    settings = [(key, _setting(value)) for key, value in plain_values if isinstance(value, bool | int | str | float)]
    return part.training, sum(1 for _ in hooks_of(part)), len(own_parameters(part)), *settings


def _setting(value: object) -> str:
    """Return what tells settings apart; of a float only the sign, since it may be another one in each call."""
    if isinstance(value, float):
        return f"sign {(value > 0) - (value < 0)}"
    return text_of(value)


def _fitting(batch: BatchDims, leaves: Sequence[Any]) -> list[BatchDims]:
    """Return where the rows lie in other arguments of the same kind; nothing if they do not fit."""
    sizes = {one.shape[dim] for one, dim in zip(leaves, batch.dims, strict=True) if dim is not None}
    return [replace(batch, num_global=size) for size in sizes] if len(sizes) == 1 else []


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _no_longer(call: Call, how: str) -> ConfigurationError:
    return ConfigurationError(
        f"{call.name} no longer treats the samples of a batch separately: {how}.",
        where=words(user_call_site()),
        evidence="its earlier calls did, and so each rank has computed its own samples only",
        do="run without --auto",
    )
