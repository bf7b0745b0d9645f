# SPDX-License-Identifier: Apache-2.0
"""Calls of modules, split by the rows of their batch: each rank computes its rows, and the script sees them all.

The outermost call of a module with parameters is split once it is proved that its samples do not see one another. The
proof: the call runs whole, then a copy of the module runs on this rank's rows, and outputs, buffers and generators are
compared; again at the second, fourth, eighth ... call. What cannot be split runs whole on every rank, and the modules
in it are tried instead.
"""

from __future__ import annotations

import os
import random
import threading
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.utils import checkpoint

from rankwise.comm.session import CurrentBatch
from rankwise.errors import ConfigurationError, ReplicasDiffer, fold_values
from rankwise.health.call_site import user_call_site, words
from rankwise.log import log
from rankwise.parallel.core.global_statistics import normalised
from rankwise.parallel.randomness.model_draws import DrawsOfModel, generators_of
from rankwise.tensors.checksum import checksums_of_each, combined
from rankwise.tools.auto.proof import (
    PLAIN,
    agree,
    attributes_of,
    batch_dims,
    buffers_of,
    copy_of,
    difference,
    kept_tensors,
    obstacle,
    parameters_of,
)
from rankwise.tools.auto.rows import Share, own_rows, shared_by_ranks, whole_batch
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.autograd import in_backward, version_of
from rankwise.torch_private.compiler import is_transforming
from rankwise.torch_private.modules import BatchNorm, check_input_dim, flat_weights, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.tools.auto.proof import BatchDims

    Kind = tuple[object, ...]
    """Calls that are proved together: modes of the module and its parts, and the arguments but for their sizes."""

_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(slots=True)
class KindOfCall:
    """What is known of the calls of one kind."""

    num_calls: int = 0
    batch: BatchDims | None = None
    """Where the rows lie; ``None``: not split."""
    output_dims: tuple[int | None, ...] = ()
    reason: str | None = None
    """Why it is not split."""

    @property
    def is_due(self) -> bool:
        """Whether this call is one that is proved: the first, second, fourth, eighth ..."""
        return self.num_calls & (self.num_calls - 1) == 0


@dataclass(slots=True)
class KnownModule:
    """A module that the script has called."""

    draws: DrawsOfModel
    kinds: dict[Kind, KindOfCall] = field(default_factory=dict)


class SplitCalls:
    """Replaces the call of every module, from the start of the script to its end."""

    def __init__(self, session: Session, exchange: Exchange) -> None:
        self._session = session
        self._exchange = exchange
        self._process = os.getpid()
        self._modules: WeakKeyDictionary[nn.Module, KnownModule] = WeakKeyDictionary()
        self._call: Callable[..., Any] = nn.Module.__call__
        self._is_inside = False
        """Whether a call is under way that is not to be split further."""
        self._is_split = False
        """Whether that one runs on this rank's rows."""
        self._has_checkpoint: list[bool] = []
        self._num_logged = 0

    @contextmanager
    def replacing(self) -> Generator[None]:
        """Split calls inside the block."""
        calls, plain_call, plain_checkpoint = self, self._call, checkpoint.checkpoint

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
            return calls._called(module, args, kwargs)

        def noted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch
            calls._has_checkpoint.append(kwargs.get("use_reentrant", True) is not False)
            return plain_checkpoint(*args, **kwargs)

        nn.Module.__call__ = call
        checkpoint.checkpoint = noted
        try:
            yield
        finally:
            nn.Module.__call__ = plain_call
            checkpoint.checkpoint = plain_checkpoint

    # -- one call ----------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if self._is_inside:
            if self._is_split and isinstance(module, _BATCHNORMS) and type(module) in _BATCHNORMS:
                return self._normalised(module, *args, **kwargs)
            return self._call(module, *args, **kwargs)
        if (
            os.getpid() != self._process
            or threading.current_thread() is not threading.main_thread()
            or in_backward()
            or is_transforming()
            or next(module.parameters(), None) is None
        ):
            return self._call(module, *args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        known = self._modules.get(module)
        if known is None:
            known = KnownModule(DrawsOfModel(self._session, "torch", type(module).__name__))
            self._modules[module] = known
        kind = known.kinds.setdefault(_kind_of(module, leaves, tree), KindOfCall())
        if kind.reason is not None:
            return self._call(module, *args, **kwargs)
        candidates = batch_dims(leaves, self._exchange.world_size) if kind.batch is None else _same(kind.batch, leaves)
        if not candidates or candidates[0].num_global < self._exchange.world_size:
            with self._inside(is_split=False):
                return self._call(module, *args, **kwargs)
        kind.num_calls += 1
        if kind.is_due:
            return self._proved(module, known.draws, kind, candidates, leaves, tree)
        self._compare(module, leaves)
        return self._in_parts(module, known.draws, kind, candidates[0], leaves, tree)

    def _in_parts(
        self,
        module: nn.Module,
        draws: DrawsOfModel,
        kind: KindOfCall,
        batch: BatchDims,
        leaves: Sequence[Any],
        tree: pytree.TreeSpec,
    ) -> Any:  # noqa: ANN401 - the module's own
        share = Share(self._exchange, batch.num_global)
        own = [
            one if dim is None else own_rows(one, dim, share) for one, dim in zip(leaves, batch.dims, strict=True)
        ]
        with self._sharing(module):
            outputs, structure = pytree.tree_flatten(self._on_rows(module, draws, share, own, batch, tree))
        if len(outputs) != len(kind.output_dims):
            raise _changed(module, f"returned {len(outputs)} values instead of {len(kind.output_dims)}")
        whole: list[Any] = []
        for output, dim in zip(outputs, kind.output_dims, strict=True):
            if dim is not None and (not isinstance(output, torch.Tensor) or output.shape[dim] != share.num):
                raise _changed(module, f"returned {getattr(output, 'shape', output)} for {share.num} rows")
            whole.append(output if dim is None else whole_batch(output, dim, share))
        return pytree.tree_unflatten(whole, structure)

    def _on_rows(
        self,
        module: nn.Module,
        draws: DrawsOfModel,
        share: Share,
        own: Sequence[Any],
        batch: BatchDims,
        tree: pytree.TreeSpec,
    ) -> Any:  # noqa: ANN401 - the module's own
        """Call a module with this rank's rows; it draws its rows of the numbers that torch draws for the batch."""
        args, kwargs = pytree.tree_unflatten(list(own), tree)
        values = [one for one, dim in zip(own, batch.dims, strict=True) if dim == 0]
        self._session.take(CurrentBatch(0, 0, 0, share.num, share.num_global, share.start, values))
        draws.before(module, args, kwargs)
        try:
            with self._inside(is_split=True):
                return self._call(module, *args, **kwargs)
        finally:
            draws.after(module)
            self._session.finish_loop(0)

    def _normalised(self, layer: BatchNorm, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        if not layer.training and layer.running_mean is not None:
            return self._call(layer, input)  # type: ignore[no-any-return]
        check_input_dim(layer, input)
        return normalised(layer, input, _AllRanks(self._exchange))

    @contextmanager
    def _inside(self, *, is_split: bool) -> Generator[None]:
        self._is_inside, self._is_split = True, is_split
        try:
            yield
        finally:
            self._is_inside = self._is_split = False

    @contextmanager
    def _sharing(self, module: nn.Module) -> Generator[None]:
        """Have a module compute with parameters whose gradients are added over ranks."""
        used = [one for one in parameters_of(module) if one.requires_grad] if torch.is_grad_enabled() else []
        if not used:
            yield
            return
        shared = dict(zip(map(id, used), shared_by_ranks(used, self._exchange), strict=True))
        before: list[tuple[Any, Any, Any]] = []
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                flat = flat_weights(part)
                before += [(flat, place, one) for place, one in enumerate(flat) if id(one) in shared]
            table = own_parameters(part)
            before += [(table, name, one) for name, one in table.items() if id(one) in shared]
        for table, name, one in before:
            table[name] = shared[id(one)]
        try:
            yield
        finally:
            for table, name, one in before:
                table[name] = one

    # -- proofs ------------------------------------------------------------------------------------

    def _proved(
        self,
        module: nn.Module,
        draws: DrawsOfModel,
        kind: KindOfCall,
        candidates: Sequence[BatchDims],
        leaves: Sequence[Any],
        tree: pytree.TreeSpec,
    ) -> Any:  # noqa: ANN401 - the module's own
        """Return the outputs of a call that runs whole, after a copy of the module has run split."""
        reason = obstacle(module, leaves)
        copies: list[nn.Module] = []
        if reason is None:
            try:
                copies = [copy_of(module) for _ in candidates]
            except Exception as error:  # noqa: BLE001 - whatever a class raises
                reason = f"cannot be copied for a trial ({type(error).__name__}: {str(error).splitlines()[0][:80]})"
        parameters, attributes = parameters_of(module), attributes_of(module)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        given = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in leaves] if copies else []
        state = combined(checksums_of_each([one.detach() for one in parameters if one.layout == torch.strided]))
        facts = self._digest(leaves), state
        versions = [version_of(one) for one in tensors if not one.is_inference()]
        generators = _Generators.now(self._session)
        args, kwargs = pytree.tree_unflatten(list(leaves), tree)
        self._has_checkpoint.clear()
        with self._inside(is_split=False):
            result = self._call(module, *args, **kwargs)
        after = _Generators.now(self._session)
        if reason is None:
            now = attributes_of(module)
            if versions != [version_of(one) for one in tensors if not one.is_inference()]:
                reason = "changes its arguments"
            elif state != combined(checksums_of_each([one.detach() for one in parameters if one.layout == torch.strided])):
                reason = "changes its parameters in forward"
            elif (name := kept_tensors(attributes, now)) is not None:
                reason = f"keeps tensors of its batch in .{name}"
            elif any(self._has_checkpoint):
                reason = "uses torch.utils.checkpoint with use_reentrant=True"
            elif self._has_checkpoint and any(isinstance(one, BatchNorm) and one.training for one in module.modules()):
                reason = "has BatchNorm in torch.utils.checkpoint"
        dims: tuple[int | None, ...] = ()
        reasons: list[str] = []
        for batch, spare in zip(candidates, copies, strict=False):
            failed = reason
            if reason is None:
                generators.restore(self._session)
                try:
                    failed, dims = self._tried(module, spare, draws, batch, given, tree, result, after)
                except Exception as error:  # noqa: BLE001 - whatever the module raises for fewer rows
                    failed = f"fails for a part of the batch ({type(error).__name__}: {str(error).splitlines()[0][:80]})"
                after.restore(self._session)
            answers = self._agreed(module, failed, facts)
            if not any(answers):
                kind.batch, kind.output_dims = batch, dims
                return result
            reasons.append(next(filter(None, answers)))
        if not copies:
            reasons.append(next(filter(None, self._agreed(module, reason, facts)), "another rank cannot split it"))
        if kind.batch is not None:
            raise _changed(module, reasons[0])
        kind.reason = reasons[0]
        self._log_whole(module, kind.reason)
        return result

    def _tried(
        self,
        module: nn.Module,
        spare: nn.Module,
        draws: DrawsOfModel,
        batch: BatchDims,
        given: Sequence[Any],
        tree: pytree.TreeSpec,
        result: Any,  # noqa: ANN401 - the module's own
        after: _Generators,
    ) -> tuple[str | None, tuple[int | None, ...]]:
        """Run a copy on this rank's rows, and return why this is not the same, and the dims of the outputs' rows."""
        share = Share(self._exchange, batch.num_global)
        own = [
            one if dim is None else one.narrow(dim, share.start, share.num).clone()
            for one, dim in zip(given, batch.dims, strict=True)
        ]
        output = self._on_rows(spare, draws, share, own, batch, tree)
        whole, structure = pytree.tree_flatten(result)
        rows, structure_of_rows = pytree.tree_flatten(output)
        if structure != structure_of_rows:
            return "returns something else for a part of the batch", ()
        reason, dims = difference(whole, rows, share)
        if reason is not None:
            return reason, ()
        buffers = zip(buffers_of(module), buffers_of(spare), strict=True)
        if not all(one.shape == other.shape and agree(one, other) for one, other in buffers):
            return "its buffers depend on the rows", ()
        plain, of_rows = attributes_of(module).plain, attributes_of(spare).plain
        for name in plain.keys() | of_rows.keys():
            if plain.get(name) != of_rows.get(name):
                return f"its attribute .{name} depends on the rows", ()
        if after != _Generators.now(self._session):
            return "draws other random numbers for a part of the batch", ()
        return None, dims

    # -- ranks -------------------------------------------------------------------------------------

    def _compare(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        """Raise unless every rank calls the module with the same arguments."""
        self._agreed(module, None, (self._digest(leaves), 0))

    def _agreed(self, module: nn.Module, reason: str | None, facts: tuple[int, int]) -> list[str]:
        """Return every rank's reason not to split, empty if there is none; raise if the ranks differ otherwise."""
        name = type(module).__name__
        note = f"{facts[0]:x} {facts[1]:x} {reason or ''}".encode()[:200]
        notes = self._exchange.gather_notes(note, what=f"a call of {name}")
        texts = [one.rstrip(b"\0").decode(errors="ignore").split(" ", 2) for one in notes]
        for place, fact in enumerate(("arguments", "parameters")):
            values = [text[place] for text in texts]
            if len(set(values)) > 1:
                raise ReplicasDiffer(
                    f"{name} was called with different {fact} on different ranks.",
                    where=words(user_call_site()),
                    evidence=fold_values({rank: f"checksum {value}" for rank, value in enumerate(values)}),
                    do="every rank runs the whole script: seed what it draws (torch.manual_seed, random.seed, "
                    "numpy.random.seed, numpy.random.default_rng(0)), sort what it lists, and decide nothing by time",
                )
        return [text[2] for text in texts]

    def _digest(self, leaves: Sequence[Any]) -> int:
        tensors = [one.detach() for one in leaves if isinstance(one, torch.Tensor) and one.layout == torch.strided]
        facts = [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in leaves]
        texts = [repr(one) if isinstance(one, tuple | str | int | float | None) else type(one).__name__ for one in facts]
        return combined([*checksums_of_each([one.contiguous() for one in tensors]), zlib.crc32(repr(texts).encode())])

    def _log_whole(self, module: nn.Module, reason: str) -> None:
        log(f"auto: {type(module).__name__} runs whole on every rank, since it {reason}" if not reason.startswith(("samples", "output", "the output", "its "))
            else f"auto: {type(module).__name__} runs whole on every rank: {reason}")


class _AllRanks:
    """The ranks of a split call; see :class:`rankwise.parallel.core.global_statistics.StatisticsRanks`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self._exchange.all_gather(own, what="BatchNorm statistics")

    def mean_sums(self, own: torch.Tensor, x: torch.Tensor, count: torch.Tensor, *, is_needed: bool) -> torch.Tensor:  # noqa: ARG002
        return self._exchange.all_reduce(own, what="BatchNorm gradients") / count


@dataclass(frozen=True, slots=True)
class _Generators:
    """The states of the generators that a module may draw from."""

    torchs: list[torch.Tensor]
    pythons: Any
    numpys: Any

    @classmethod
    def now(cls, session: Session) -> _Generators:
        torchs = [one.get_state() for one in generators_of(torch.device(session.world.device))]
        return cls(torchs, random.getstate(), np.random.get_state())

    def restore(self, session: Session) -> None:
        for one, state in zip(generators_of(torch.device(session.world.device)), self.torchs, strict=True):
            one.set_state(state)
        random.setstate(self.pythons)
        np.random.set_state(self.numpys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Generators):
            return False
        same = all(torch.equal(one, two) for one, two in zip(self.torchs, other.torchs, strict=True))
        return same and self.pythons == other.pythons and all(
            np.array_equal(one, two) for one, two in zip(self.numpys, other.numpys, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _kind_of(module: nn.Module, leaves: Sequence[Any], tree: pytree.TreeSpec) -> Kind:
    modes = tuple(part.training for part in module.modules())
    facts = tuple(
        (one.dim(), one.dtype, one.requires_grad) if isinstance(one, torch.Tensor) else (type(one), repr(one) if isinstance(one, PLAIN) else "")
        for one in leaves
    )
    return modes, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), str(tree), facts


def _same(batch: BatchDims, leaves: Sequence[Any]) -> list[BatchDims]:
    """Return where the rows lie in other arguments of the same kind; nothing if they do not fit."""
    sizes = {
        one.shape[dim] for one, dim in zip(leaves, batch.dims, strict=True) if dim is not None and isinstance(one, torch.Tensor)
    }
    return [replace(batch, num_global=size) for size in sizes] if len(sizes) == 1 else []


def _changed(module: nn.Module, how: str) -> ConfigurationError:
    name = type(module).__name__
    return ConfigurationError(
        f"{name} no longer treats the samples of a batch separately: it {how}.",
        where=words(user_call_site()),
        evidence="its earlier calls did, so it was run on each rank's samples",
        do=f"run without --auto; or tell rankwise that {name} needs the whole batch",
    )
