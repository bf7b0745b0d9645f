# SPDX-License-Identifier: Apache-2.0
"""Calls of modules on rank zero, split by the rows of their batch: every rank computes its rows of them.

The outermost call of a module with parameters is split once it is proved that its samples do not see one another. The
proof: the call runs whole, then a copy of the module runs on rows, on all ranks, and outputs, buffers and generators
are compared; again at the second, fourth, eighth ... call. What cannot be split runs whole, and the modules in it are
tried instead. A call that fails on rows runs whole too: the script sees the error that it sees in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.log import log
from rankwise.parallel.randomness.source import draws_forgotten
from rankwise.tools.auto.code_reads import noted_functions
from rankwise.tools.auto.coupling import CouplingWatch
from rankwise.tools.auto.effects import Effects
from rankwise.tools.auto.generators import GeneratorStates
from rankwise.tools.auto.guards import Guard
from rankwise.tools.auto.own_call import OwnArguments
from rankwise.tools.auto.pace import Pace
from rankwise.tools.auto.parameters import TensorsOfModule, TensorTable
from rankwise.tools.auto.proof import (
    PLAIN,
    Reason,
    batch_dims,
    buffers_of,
    checksum,
    copy_of,
    difference,
    difference_beside,
    elsewhere,
    gradient_elsewhere,
    obstacle,
    obstacle_after,
    parameters_of,
    shares_memory,
    tensors_kept,
    uncompiled,
)
from rankwise.tools.auto.rows import Share
from rankwise.tools.auto.shipping import dumped, dumped_tree
from rankwise.tools.auto.split import Request, ResultChanged, SplitCall, first_line
from rankwise.tools.auto.subclasses import as_output, is_alike, plain
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.modules import BatchNorm, has_hooks_of_all, hooks_of, own_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from rankwise.parallel.randomness.model_draws import DrawsOfModel
    from rankwise.tools.auto.module_calls import ModuleCalls
    from rankwise.tools.auto.own_call import OwnCalls
    from rankwise.tools.auto.proof import BatchDims
    from rankwise.tools.auto.rows import OutputRows
    from rankwise.tools.auto.split import Servers

    Kind = tuple[object, ...]
    """Calls that are proved together: modes of the module and its parts, and the arguments but for their sizes."""

MOST_KINDS = 64
"""Kinds of calls of a module that are proved."""
LARGE_OUTPUT_BYTES = 2**24
"""Outputs of which it is said that they are large, if they are larger than the arguments."""
CHANGES_PROVED = 4
"""Changes of numbers after which calls are proved; of later ones, as of a schedule, the eighth, sixteenth, ... one."""


@dataclass(slots=True)
class KindOfCall:
    """What is known of the calls of one kind."""

    number: int
    draws: DrawsOfModel
    num_calls: int = 0
    num_split: int = 0
    """How many calls ran on each rank's rows only."""
    batch: BatchDims | None = None
    """Where the rows lie; ``None``: not proved."""
    outputs: tuple[OutputRows | None, ...] = ()
    """Per leaf of the outputs; ``None``: the same for every row."""
    is_doubtful: bool = False
    """Whether something has changed that such calls read, since they were proved."""
    is_random: bool = False
    is_known: bool = False
    """Whether servers know the structure of its arguments."""
    pace: Pace = field(default_factory=Pace)
    """Whether splitting saves time."""
    reason: str | None = None
    """Why it is not split."""

    next_proof: int = 1
    """The number of the call that is proved next: the first, second, fourth, eighth ..."""


@dataclass(slots=True)
class KnownModule:
    """A module that the script has called."""

    number: int
    guard: Guard
    modes: tuple[object, ...]
    held: TensorsOfModule | None = None
    """Its parameters and buffers, once servers have copies."""
    is_shipped: bool = False
    """Whether servers have it as it is."""
    pickled: bytes | None = None
    """As it is to be sent to them."""
    kinds: dict[Kind, KindOfCall] = field(default_factory=dict)
    resting: dict[tuple[bool, bool], int] = field(default_factory=dict)
    """By training mode and whether gradients are enabled: how many calls run whole without a look at them."""
    num_changes: int = 0
    """How often something has changed that its calls read."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module."""

    module: nn.Module
    known: KnownModule
    kind: KindOfCall
    given: list[Any]
    """Its arguments, flat."""
    leaves: list[Any]
    """The same, of which ranks take their rows."""
    tree: pytree.TreeSpec

    @property
    def name(self) -> str:
        """The module's class."""
        return type(self.module).__name__

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments."""
        return pytree.tree_unflatten(list(self.given), self.tree)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A call that has run whole."""

    result: Any
    reason: Reason | None
    """Why such calls must not be split, if that is known already."""
    before: GeneratorStates
    after: GeneratorStates


class SplitCalls:
    """Splits the calls of modules, from the start of the script to its end."""

    def __init__(
        self, servers: Servers, own: OwnCalls, calls: ModuleCalls, device: torch.device, *, splits_always: bool
    ) -> None:
        """``splits_always``: whether to split also where it saves no time."""
        self._splits_always = splits_always
        self._servers = servers
        self._own = own
        self._calls = calls
        self._device = device
        self._table = TensorTable(is_shared=servers.share_memory)
        self._modules: WeakKeyDictionary[nn.Module, KnownModule] = WeakKeyDictionary()
        self._num_modules = 0
        self._num_kinds = 0
        self._logged: set[str] = set()

    def replacing(self) -> AbstractContextManager[None]:
        """Split calls inside the block."""
        return self._calls.replacing(self._called)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._servers.are_there() or self._rests(module):
            return self._calls.whole(module, args, kwargs)[0]
        known = self._known(module)
        if known is None:
            return self._calls.whole(module, args, kwargs)[0]
        given, tree = pytree.tree_flatten((args, kwargs))
        leaves = [plain(one) for one in given]
        kind = self._kind(known, given, tree, type(module).__name__)
        if kind is None:
            return self._calls.whole(module, args, kwargs)[0]
        if kind.reason is not None:
            return self._calls.plain(module, args, kwargs)
        num_ranks = self._servers.exchange.world_size
        batches = batch_dims(leaves, num_ranks) if kind.batch is None else _fitting(kind.batch, leaves)
        call = Call(module, known, kind, given, leaves, tree)
        if not batches and any(not isinstance(one, (*PLAIN, torch.Tensor)) for one in leaves):
            self._runs_whole(call, obstacle(module, leaves) or "its arguments have no rows")
            return self._calls.plain(module, args, kwargs)
        if not batches or batches[0].num_global < num_ranks:
            return self._calls.whole(module, args, kwargs)[0]
        kind.num_calls += 1
        # In single rows, samples that meet are not told from others.
        is_clear = batches[0].num_global >= 2 * num_ranks
        if kind.is_doubtful and not is_clear:
            return self._calls.whole(module, args, kwargs)[0]
        if kind.batch is None or kind.is_doubtful or (is_clear and self._is_due(kind)):
            kind.pace.interrupted()
            kind.next_proof = 2 * kind.num_calls
            return self._proved(call, batches)
        if self._splits_always or self._pays(call):
            return self._in_parts(call, batches[0])
        return self._calls.whole(module, args, kwargs)[0]

    def _rests(self, module: nn.Module) -> bool:
        """Return whether a call is one of those that run whole without a look at them."""
        known = self._modules.get(module)
        mode = module.training, torch.is_grad_enabled()
        if known is None or not known.resting.get(mode):
            return False
        known.resting[mode] -= 1
        return True

    def _known(self, module: nn.Module) -> KnownModule | None:
        """Return what is known of a module as it is now; ``None``: its parameters and class are made in this call."""
        known = self._modules.get(module)
        if known is None:
            if any(map(is_lazy, module.parameters())):
                return None
            self._num_modules += 1
            known = self._modules[module] = KnownModule(self._num_modules, Guard.of(module), _modes(module))
        elif known.guard.changed() is not None:
            self._note_change(known)
            known.guard, known.modes = known.guard.renewed(), _modes(module)
            known.held, known.is_shipped = None, False
        return known

    def _note_change(self, known: KnownModule) -> None:
        """Note that something has changed that calls of a module read: they are proved again, if not each time."""
        known.num_changes += 1
        is_rare = known.num_changes <= CHANGES_PROVED or known.num_changes & (known.num_changes - 1) == 0
        if is_rare or not known.guard.is_of_numbers:
            for kind in known.kinds.values():
                kind.is_doubtful = kind.batch is not None

    def _is_due(self, kind: KindOfCall) -> bool:
        return kind.num_calls >= kind.next_proof and (kind.pace.is_split or self._splits_always)

    def _pays(self, call: Call) -> bool:
        """Return whether the call that begins now is to be split: whether that saves time, or is being measured."""
        pace = call.kind.pace
        before, is_split = pace.ratio, pace.next_is_split()
        if pace.ratio is not None and pace.ratio != before:
            ranks = f"{self._servers.exchange.world_size} ranks"
            if not pace.is_split:
                call.known.resting[call.module.training, torch.is_grad_enabled()] = pace.take_rest()
                call.kind.is_doubtful = True  # nothing is proved while calls run whole
            what = "is split over" if pace.is_split else "runs whole on one rank: it would be slower on"
            self._log(f"auto: {call.name} {what} {ranks}", f": its loop takes {pace.ratio:.2f} of the time on one")
        return is_split

    def _kind(self, known: KnownModule, given: Sequence[Any], tree: pytree.TreeSpec, name: str) -> KindOfCall | None:
        key = _kind_of(known.modes, given, tree)
        kind = known.kinds.get(key)
        if kind is None and len(known.kinds) < MOST_KINDS:
            self._num_kinds += 1
            kind = known.kinds[key] = KindOfCall(self._num_kinds, self._own.new_draws(name))
        return kind

    def _in_parts(self, call: Call, batch: BatchDims) -> Any:
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
            kind.is_doubtful = True  # it draws since something has changed: each rank has drawn numbers of its own
            return self._whole_again(call, before)
        kind.num_split += 1
        self._note_sizes(call, whole)
        if torch.is_grad_enabled():
            again = _Again(self, call, before)
            whole = ran.with_graph(whole, kind.outputs, arguments, parameters_of(call.module), again)
        return pytree.tree_unflatten([as_output(one, call.given) for one in whole], ran.structure)

    def _rows_computed(
        self, call: Call, arguments: OwnArguments, batch: BatchDims, generators: GeneratorStates | None
    ) -> tuple[SplitCall, list[Any]] | str:
        """Return a call that has run on all ranks, and its outputs for the whole batch; or why it must run whole."""
        try:
            ran = self._run_split(call, call.module, arguments, batch, generators=generators)
            return ran, ran.whole(call.kind.outputs)
        except Exception as error:
            if self._servers.is_final(error):
                raise
            return f"it fails for a part of the batch ({first_line(error)})"

    def _whole_again(self, call: Call, before: GeneratorStates | None) -> Any:
        """Run a call whole that has failed on rows: it raises where plain Python raises."""
        if call.known.held is not None:
            call.known.held.restore_buffers()
        if before is not None:
            before.restore(self._device)
        return self._calls.whole(call.module, *call.arguments())[0]

    def _note_sizes(self, call: Call, outputs: Sequence[Any]) -> None:
        """Say so where what travels is mostly outputs."""
        num_bytes, num_given = (
            sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor)) for leaves in (outputs, call.leaves)
        )
        if num_bytes > max(LARGE_OUTPUT_BYTES, num_given):
            self._log(
                f"auto: {call.name} returns {num_bytes >> 20} MiB for {max(1, num_given >> 20)} MiB of arguments, "
                "which travel to rank 0 in each call: return only what the loss needs"
            )

    def _run_split(
        self,
        call: Call,
        module: nn.Module,
        arguments: OwnArguments,
        batch: BatchDims,
        *,
        generators: GeneratorStates | None,
        watch: CouplingWatch | None = None,
    ) -> SplitCall:
        held = self._held(call)
        if watch is None:  # else it is a trial of a call that has run
            self._table.copy(held)
        shipped, structure = self._shipped(call), None if call.kind.is_known else dumped_tree(call.tree)
        self._servers.prepare()
        values, sent = self._table.message(held)
        request = Request(
            call.known.number,
            call.kind.number,
            shipped,
            values,
            sent,
            structure,
            batch.num_global,
            any(isinstance(one, BatchNorm) and one.training for one in module.modules()),
            generators,
        )
        call.known.is_shipped = call.kind.is_known = True
        return self._servers.call(module, call.kind.draws, request, arguments, watch)

    def _shipped(self, call: Call) -> bytes | None:
        """Return the module as it is to be sent; ``None`` if servers have it."""
        known = call.known
        if known.is_shipped:
            return None
        pickled, known.pickled = known.pickled or dumped(call.module, self._table.number_of), None
        return pickled

    def _held(self, call: Call) -> TensorsOfModule:
        """Return the tensors of a module that servers have copies of."""
        known = call.known
        if known.held is None or not known.held.is_current():
            known.held, known.is_shipped = TensorsOfModule(call.module, self._table), False
        return known.held

    def differentiated_again(self, call: Call, before: GeneratorStates | None, reason: str) -> list[Any]:
        """Return the outputs of a call, run whole with a graph: its gradients cannot be split, for a reason."""
        self._runs_whole(call, reason)
        now = GeneratorStates.now(self._device)
        buffers = [(one, one.detach().clone()) for one in buffers_of(call.module)]
        if before is not None:
            before.restore(self._device)
        try:
            with torch.enable_grad():
                result, _ = self._calls.whole(call.module, *call.arguments())
        finally:
            now.restore(self._device)
            for one, value in buffers:
                one.data.copy_(value)  # the graph that was made now may hold it, and does not read it
        return pytree.tree_leaves(result)  # type: ignore[no-any-return]

    # -- proofs ------------------------------------------------------------------------------------

    def _proved(self, call: Call, batches: Sequence[BatchDims]) -> Any:
        """Run a call whole, and try copies of the module on rows; return its outputs."""
        kind = call.kind
        if kind.is_doubtful:
            kind.is_doubtful, kind.num_split = False, 0  # the calls before the change were as they were proved
        copies, given = self._copies(call, len(batches))
        reason = self._prepared(call, can_be_copied=bool(copies))
        whole_run = self._run_whole(call)
        kind.is_random = not whole_run.before.are(whole_run.after)
        reason = reason or whole_run.reason
        reasons = [] if reason is None else [reason]
        for copy, batch in zip(copies, batches, strict=False):
            if reason is not None:
                break
            found, outputs = self._tried(call, copy, batch, given, whole_run)
            if found is None:
                kind.batch, kind.outputs = batch, outputs
                return whole_run.result
            reasons.append(found)
            # How its draws lie in the other dim is no knowledge of this one.
            kind.draws, kind.is_known = self._own.new_draws(call.name), False
        if kind.num_split and reasons[0].is_wrong:
            raise _no_longer(call, reasons[0].text)
        # What is set once, as a cache, is not set in the second call.
        if kind.num_calls > 1 or not reasons[0].may_pass:
            self._runs_whole(call, reasons[0].text)
        return whole_run.result

    def _prepared(self, call: Call, *, can_be_copied: bool) -> Reason | None:
        """Copy values as they are before the call; return why the call must not even be tried on rows."""
        words = obstacle(call.module, call.leaves) or call.known.guard.obstacle
        if words is not None or not can_be_copied:
            return Reason(words or "it cannot be copied for a trial")
        try:
            held = self._held(call)
            if not call.known.is_shipped:
                call.known.pickled = dumped(call.module, self._table.number_of)
        except Exception as error:
            if self._servers.is_final(error):
                raise
            return Reason(f"it cannot be sent to other ranks ({first_line(error)})")
        self._table.copy(held)
        return None

    def _copies(self, call: Call, number: int) -> tuple[list[nn.Module], list[Any]]:
        """Return copies of the module, none if it cannot be copied, and of the arguments: as before the call."""
        try:
            copies = [uncompiled(copy_of(call.module)) for _ in range(number)]
        except Exception as error:
            if self._servers.is_final(error):
                raise
            return [], []
        return copies, [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in call.leaves]

    def _run_whole(self, call: Call) -> WholeRun:
        """Run a call whole, and look at what it does besides."""
        module, leaves = call.module, call.leaves
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        facts = checksum(tensors), checksum(parameters_of(module))
        effects, before = Effects(), GeneratorStates.now(self._device)
        with effects.noted(), noted_functions() as ran:
            result, checkpoints = self._calls.whole(module, *call.arguments())
        after = GeneratorStates.now(self._device)
        name = call.known.guard.changed()
        call.known.guard.add(ran)
        reason = (
            (None if effects.found is None else Reason(effects.found))
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
        return WholeRun(result, reason, before, after)

    def _tried(
        self, call: Call, copy: nn.Module, batch: BatchDims, given: Sequence[Any], whole_run: WholeRun
    ) -> tuple[Reason | None, tuple[OutputRows | None, ...]]:
        """Run a call on rows; return why that is not the same, and where the outputs' rows lie."""
        whole_run.before.restore(self._device)
        try:
            with draws_forgotten():
                return self._compared(call, copy, batch, given, whole_run)
        finally:
            whole_run.after.restore(self._device)

    def _compared(
        self, call: Call, copy: nn.Module, batch: BatchDims, given: Sequence[Any], whole_run: WholeRun
    ) -> tuple[Reason | None, tuple[OutputRows | None, ...]]:
        share = Share(0, self._servers.exchange.world_size, batch.num_global)
        leaves = [
            one.requires_grad_(like.requires_grad and torch.is_grad_enabled()) if isinstance(one, torch.Tensor) else one
            for one, like in zip(given, call.leaves, strict=True)
        ]
        arguments = OwnArguments(leaves, batch.dims, call.tree)
        watch = CouplingWatch(share.num)
        generators = whole_run.before if call.kind.is_random else None
        try:
            ran = self._run_split(call, copy, arguments, batch, generators=generators, watch=watch)
        except Exception as error:
            if self._servers.is_final(error):
                raise
            return Reason(f"it fails for a part of the batch ({first_line(error)})"), ()
        whole, structure = pytree.tree_flatten(whole_run.result)
        if structure != ran.structure or len(whole) != len(ran.outputs):
            return Reason("it returns something else for a part of the batch"), ()
        whole_plain = [plain(one) for one in whole]
        reason, places = difference(whole_plain, [plain(one) for one in ran.outputs], share, watch.layout_of)
        if reason is None:
            try:
                reason = elsewhere(whole_plain, ran.whole(places))
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

    def _runs_whole(self, call: Call, reason: str) -> None:
        call.kind.reason = reason
        self._log(f"auto: {call.name} runs whole on one rank: {reason}")

    def _log(self, message: str, figures: str = "") -> None:
        if message not in self._logged:
            self._logged.add(message)
            log(message + figures)


@dataclass(frozen=True, slots=True)
class _Again:
    """Runs a call whole when its gradients cannot be split."""

    calls: SplitCalls
    call: Call
    before: GeneratorStates | None

    def __call__(self, reason: str) -> list[Any]:
        return self.calls.differentiated_again(self.call, self.before, reason)


def _kind_of(modes: tuple[object, ...], leaves: Sequence[Any], tree: pytree.TreeSpec) -> Kind:
    facts = tuple(
        (type(one), one.dim(), one.dtype, one.requires_grad)
        if isinstance(one, torch.Tensor)
        else (type(one), _setting(one) if isinstance(one, PLAIN) else "")
        for one in leaves
    )
    return (
        modes,
        has_hooks_of_all(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(tree),
        facts,
    )


def _modes(module: nn.Module) -> tuple[object, ...]:
    return tuple(map(_modes_of, module.modules()))


def _modes_of(part: nn.Module) -> tuple[object, ...]:
    """Return what may make a part compute something else than before: hooks and parameters, and own settings."""
    own = type(part).__module__.partition(".")[0] != "torch"
    plain_values = vars(part).items() if own else ()
    settings = [(key, value) for key, value in plain_values if isinstance(value, bool | str)]
    parameters = [one for one in own_parameters(part).values() if one is not None]
    # functional_call() replaces them for a call.
    are_own = all(isinstance(one, nn.Parameter) for one in parameters)
    return part.training, sum(1 for _ in hooks_of(part)), len(parameters), are_own, *settings


def _setting(value: object) -> str:
    """Return what tells settings apart; of a float only the sign, since it may be another one in each call."""
    if isinstance(value, float):
        return f"sign {(value > 0) - (value < 0)}"
    # Python writes no decimal number of more than 4,300 digits.
    return f"{type(value).__name__} {value:x}" if isinstance(value, int) else repr(value)


def _fitting(batch: BatchDims, leaves: Sequence[Any]) -> list[BatchDims]:
    """Return where the rows lie in other arguments of the same kind; nothing if they do not fit."""
    sizes = {one.shape[dim] for one, dim in zip(leaves, batch.dims, strict=True) if dim is not None}
    return [replace(batch, num_global=size) for size in sizes] if len(sizes) == 1 else []


def _no_longer(call: Call, how: str) -> ConfigurationError:
    return ConfigurationError(
        f"{call.name} no longer treats the samples of a batch separately: {how}.",
        where=words(user_call_site()),
        evidence="its earlier calls did, and so each rank has computed its own samples only",
        do="run without --auto",
    )
