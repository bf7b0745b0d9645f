# SPDX-License-Identifier: Apache-2.0
"""Statistics of a rank's samples that a loss depends on without being a mean or a sum over them.

The graph of a loss does not show them all: a normalized advantage, a count of labels or a permuted sample may need no
gradient. So the first batch is followed from the loader to backward, operation by operation, and what is kept of it (a
center, a queue of keys) from there to the backward of the second batch. Used by hooks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rankwise.comm.current_batch import CurrentBatch
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.random_numbers.batch_tracer import (
    OF_OTHER_VALUES,
    KnownLayout,
    MeetingTracer,
    TracedCall,
    identity_of,
    outputs_of,
)
from rankwise.replicate.random_numbers.sample_layout import SampleLayout, layout_of
from rankwise.torch_private.compiler import compiles_code
from rankwise.torch_private.kernels import innermost_dispatch_mode
from rankwise.torch_private.tensors import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankwise.comm.session import Session
    from rankwise.torch_private.kernels import Operator

MOST_AFTER = 20_000
"""Operations that have nothing to do with the batch, after its backward, until nothing more is followed."""
_RANKWISE = f"{Path(__file__).parents[2]}{os.sep}"
_BETWEEN = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1] / 'random_numbers'}{os.sep}",
    f"{Path(__file__).parents[2] / 'pipeline' / 'traced.py'}",
)
"""Files that run an operation for their callers."""
_NO_VALUES = OF_OTHER_VALUES | {
    f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
}
_MOVING = frozenset(
    {"_reshape_alias", "_to_copy", "_unsafe_view", "alias", "cat", "clone", "copy", "detach", "expand", "mean"}
    | {"neg", "permute", "select", "slice", "split", "squeeze", "stack", "sum", "t", "transpose", "unbind"}
    | {"unsqueeze", "view"}
)
"""Linear in every tensor that they take."""
_CLAMPING = frozenset({"clamp", "clamp_min", "maximum", "nan_to_num"})
_LINEAR_SUMS = frozenset({"bmm", "dot", "mean", "mm", "mv", "sum"})
_NOT_ADDED = frozenset(
    {"_cdist_forward", "_pdist_forward", "all", "amax", "amin", "any", "argmax", "argmin", "gather", "index"}
    | {"index_select", "kthvalue", "linalg_vector_norm", "logsumexp", "max", "median", "min", "mode", "nanmedian"}
    | {"prod", "std", "std_mean", "take", "topk", "var", "var_mean"}
)
"""Results in which samples meet otherwise than in a sum."""
_COUNTING = frozenset({"bincount", "histc"})
"""Sums over samples whose shape depends on values, so that the samples do not show."""
_WRITING_ROWS = frozenset({"index_add_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_"})
"""Write into rows of a tensor that they choose."""
_OVER_DIMS = frozenset(
    {"amax", "amin", "logsumexp", "max", "mean", "median", "min", "prod", "std", "std_mean", "sum", "var", "var_mean"}
)
"""Reduce the dims that they are given, or all."""
_MIXING = frozenset(
    {"_log_softmax", "_softmax", "cummax", "cummin", "cumprod", "cumsum", "flip", "logcumsumexp", "roll"} | {"sort"}
)
"""Keep the rows, and let samples see one another along the dims that they are given."""


class Statistic(NamedTuple):
    """A result of several samples of this rank."""

    name: str
    """The operation in which they met."""
    place: str
    """Its line."""
    is_term: bool
    """Whether it is a mean or a sum that has been no more than scaled and added since, as the terms of a loss are."""
    has_graph: bool = False


class StatisticsTracer(MeetingTracer):
    """Notes for each tensor which statistic of this rank's samples it depends on."""

    is_graph_read = True
    """Whether the graph of the loss will show what else happens to a term with a gradient."""

    def __init__(self, batch: CurrentBatch) -> None:
        """Start with the tensors that a loader has given."""
        super().__init__(batch.num, ())
        self._of: dict[Any, Statistic] = {}
        self._met: Statistic | None = None
        """Of the operation under way."""
        self._storages: dict[Any, StorageWeakRef] = {}
        """Of tensors of which something is known: memory may be reused while nothing is followed."""
        self._written: dict[StorageWeakRef, Statistic] = {}
        """Memory that holds samples next to other values."""
        self._kept: dict[StorageWeakRef, Statistic] = {}
        """The same from an earlier batch."""
        self.is_over = False
        self.is_after = False
        """Whether backward has run: what has nothing to do with samples, as an optimizer's step, is not looked at."""
        self._num_after = 0
        for one in tree_leaves(batch.values):
            if isinstance(one, torch.Tensor) and (layout := layout_of(one.shape, batch.num)) is not None:
                self.set_fact(one, KnownLayout(layout))

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = TracedCall(func, args, dict(kwargs or {}))
        if self.is_over or any(one.is_meta for one in call.tensors) or str(call.given.get("device")) == "meta":
            return func(*args, **call.given)
        given = [(one, known) for one in call.tensors if (known := self.statistic(one)) is not None]
        if self.is_after and not given and all(self._layout(one) is None for one in call.tensors):
            self._num_after += 1
            self.is_over = self._num_after > MOST_AFTER
            out = func(*args, **call.given)
            for one in outputs_of(out):
                self._of.pop(identity_of(one), None)
                self._facts.pop(identity_of(one), None)
            return out
        self._met = self._met_unseen(call)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        is_exchange = func.namespace.endswith("c10d")
        is_own = is_exchange or _is_of_rankwise()
        known = None if is_own else self._statistic(call, given)
        keys = {identity_of(one) for one in (*outputs_of(out), *(call.tensors if is_exchange else ()))}
        if is_own and not (is_exchange or call.name.endswith("_")):
            keys -= {identity_of(one) for one in call.tensors}  # a view, as of an output that is looked at
        for key in keys:
            if known is None:
                self._of.pop(key, None)
            else:
                self._of[key] = known
        for one in outputs_of(out):
            self._storages[identity_of(one)] = StorageWeakRef(one.untyped_storage())
        if not is_own:
            self._note_written(call, known, out)
        return out

    def set_statistic(self, tensor: torch.Tensor, statistic: Statistic | None) -> None:
        """Note which statistic a tensor depends on."""
        if statistic is not None:
            self._of[identity_of(tensor)] = statistic

    def follow(self, earlier: StatisticsTracer) -> None:
        """Take over what is known of tensors that are kept from an earlier batch."""
        earlier.forget_freed()
        self._of |= {key: one._replace(is_term=False) for key, one in earlier._of.items()}
        self._kept = earlier._written
        self._storages |= earlier._storages
        for key, fact in earlier._facts.items():
            self._facts.setdefault(key, fact)

    def forget_freed(self) -> None:
        """Forget tensors whose memory has been freed, and perhaps been reused, while nothing was followed."""
        for key in [*self._facts, *self._of]:
            storage = self._storages.get(key)
            if storage is None or storage.expired():
                self._facts.pop(key, None)
                self._of.pop(key, None)
        self._written = {storage: one for storage, one in self._written.items() if not storage.expired()}

    def statistic(self, tensor: torch.Tensor) -> Statistic | None:
        """Return the statistic that a tensor depends on, also one that is a term."""
        known = self._of.get(identity_of(tensor))
        if known is None and self._kept:
            known = self._kept.get(StorageWeakRef(tensor.untyped_storage()))
        return known

    def _note_written(self, call: TracedCall, known: Statistic | None, out: object) -> None:
        """Note that samples, or a statistic of them, lie next to other values from now on."""
        if call.name == "cat" and isinstance(out, torch.Tensor):
            layouts = [self._layout(one) for one in call.tensors]
            dim = call.given.get("dim", call.args[1] if len(call.args) > 1 else 0) % out.dim()
            is_written = None in layouts and any(one is not None and one.dim == dim for one in layouts)
            storages = [one.untyped_storage() for one in outputs_of(out)] if is_written else []
        elif call.name.endswith("_") and call.tensors:
            target, *sources = call.tensors
            storages = [target.untyped_storage()]
            is_whole = target.nbytes == storages[0].nbytes() and call.name not in _WRITING_ROWS
            is_written = not is_whole and any(self._layout(one) is not None for one in sources)
            storages = [] if is_whole else storages
        else:
            return
        if known is None and is_written:
            known = _statistic_of(call, is_term=False)._replace(name="keeping samples in a tensor")
        if known is not None:
            self._written |= {StorageWeakRef(one): known._replace(is_term=False) for one in storages}

    def of(self, roots: Iterable[torch.Tensor]) -> Statistic | None:
        """Return the first statistic that a loss depends on otherwise than as its terms."""
        found = map(self.statistic, roots)
        return next((one for one in found if one is not None and not one.is_term), None)

    def note_meeting(self, call: TracedCall, *, are_pairs: bool) -> None:
        """Record the statistic of the operation under way."""
        self._met = _statistic_of(call, is_term=not are_pairs and call.name not in _NOT_ADDED)

    def _met_unseen(self, call: TracedCall) -> Statistic | None:
        """Return the statistic in which samples meet, if the shape of the result does not show that they do."""
        if call.name in _OVER_DIMS and self._reduces_chosen(call):
            return _statistic_of(call, is_term=call.name in _LINEAR_SUMS)
        if call.name not in _MIXING | _COUNTING or (layout := self._layout(call.tensors[0])) is None:
            return None
        if call.name in _COUNTING:
            return _statistic_of(call, is_term=True)
        key, place = ("dims", 2) if call.name == "roll" else ("dims" if call.name == "flip" else "dim", 1)
        dims = call.given.get(key, call.args[place] if len(call.args) > place else -1)
        num_dims = max(call.tensors[0].dim(), 1)
        is_along = any(dim % num_dims == layout.dim for dim in tree_leaves(dims))
        return _statistic_of(call, is_term=False) if is_along else None

    def _reduces_chosen(self, call: TracedCall) -> bool:
        """Return whether an operation reduces rows that were chosen by their values, whose number is not known."""
        if not call.tensors or identity_of(call.tensors[0]) not in self._lost:
            return False
        dims = tree_leaves(call.given.get("dim", call.args[1] if len(call.args) > 1 else None))
        num_dims = max(call.tensors[0].dim(), 1)
        numbers = [dim for dim in dims if isinstance(dim, int) and not isinstance(dim, bool)]
        return not numbers or any(dim % num_dims == 0 for dim in numbers)

    def _statistic(self, call: TracedCall, given: Sequence[tuple[torch.Tensor, Statistic]]) -> Statistic | None:
        if not given or call.name in _NO_VALUES:
            return self._met
        known = min((one for _, one in given), key=lambda one: (one.is_term, one.has_graph))
        return known if not known.is_term or self._is_linear(call, given) else known._replace(is_term=False)

    def _is_linear(self, call: TracedCall, given: Sequence[tuple[torch.Tensor, Statistic]]) -> bool:
        """Return whether the result of an operation on terms is a term, as far as the graph does not show it."""
        name, terms = call.name.rstrip("_"), [one for one, _ in given]
        keys = set(map(identity_of, terms))
        has_rows = any(
            identity_of(one) not in keys and (self._layout(one) is not None or identity_of(one) in self._lost)
            for one in call.tensors
        )
        are_rows = [self._layout(one) is not None for one in terms]  # rows that a term has divided
        if self._met is not None:
            return name in _LINEAR_SUMS and all(are_rows)
        if name in _MOVING:
            return not has_rows
        if name in {"add", "sub", "rsub"}:
            return not has_rows and len(set(are_rows)) == 1
        if name == "mul":
            return len(terms) == 1 and (not has_rows or are_rows[0])
        if name == "div" and isinstance(call.args[1], torch.Tensor) and identity_of(call.args[1]) in keys:
            # A divisor without a gradient is what a mean is over: the reader of losses adds it up over ranks.
            return isinstance(call.args[0], torch.Tensor) and call.args[0].requires_grad and torch.is_grad_enabled()
        if name == "div":
            return not has_rows or are_rows[0]
        return not (has_rows or any(are_rows)) and (
            name in _CLAMPING or (self.is_graph_read and any(one.requires_grad for one in terms))
        )

    def _layout(self, tensor: torch.Tensor) -> SampleLayout | None:
        fact = self._facts.get(identity_of(tensor))
        return None if fact is None else fact.layout


def _statistic_of(call: TracedCall, *, is_term: bool) -> Statistic:
    has_graph = torch.is_grad_enabled() and any(one.requires_grad for one in call.tensors)
    return Statistic(call.name.strip("_"), words(user_call_site()), is_term, has_graph)


def _is_of_rankwise() -> bool:
    """Return whether rankwise runs an operation itself: its results are those of all ranks."""
    frame = sys._getframe(2)  # noqa: SLF001 - the only way to see the callers without a traceback
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_RANKWISE)


def _can_follow() -> bool:
    # The compiler would not compile what is first called under a mode.
    return torch.is_grad_enabled() and innermost_dispatch_mode() is None and not compiles_code()


class FollowedLoss:
    """A function of a loss whose first call, with a part of the batch, is followed."""

    def __init__(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        self.plain = loss_fn
        self._is_over = False
        self.statistic: Statistic | None = None
        """Of the part, on which the loss depends otherwise than as its terms."""
        self._of_outputs: Sequence[Statistic | None] = ()

    def note_outputs(self, statistics: Sequence[Statistic | None]) -> None:
        """Note which statistic each tensor of the output depends on."""
        self._of_outputs = statistics

    def __call__(self, output: object, target: Any) -> torch.Tensor:
        """Return the loss of a part of the batch."""
        if self._is_over or not _can_follow():
            return self.plain(output, target)
        self._is_over = True
        num = next(len(one) for one in tree_leaves(target) if isinstance(one, torch.Tensor) and one.dim())
        tracer = StatisticsTracer(CurrentBatch(0, 0, 0, num, num, 0, values=(output, target)))
        tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
        for tensor, known in zip(tensors, self._of_outputs, strict=False):
            tracer.set_statistic(tensor, known)
        with tracer:
            loss = self.plain(output, target)
        if isinstance(loss, torch.Tensor):
            self.statistic = tracer.of([loss])
        return loss


class FirstBatches:
    """Follows the first two batches that a loader divides among the ranks after a model was spread over them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_following = False
        """Whether it follows a batch, or waits for one."""
        self._tracer: StatisticsTracer | None = None
        self._earlier: StatisticsTracer | None = None
        """Of the first batch, from its backward on."""
        self._is_wanted = False
        session.batches.after_loop(self._pause)
        session.at_end(self._end)

    def follow_next(self) -> None:
        """Follow the next batches."""
        if not self.is_following:
            self.is_following = True
            self._session.batches.on_take(self._begin)
        self._is_wanted = True
        self._earlier = None

    def _begin(self, batch: CurrentBatch) -> None:
        self._end()
        if self._is_wanted and _can_follow() and 1 < batch.num < batch.num_global:
            self._tracer = StatisticsTracer(batch)
            if self._earlier is not None:
                self._tracer.follow(self._earlier)
            self._tracer.__enter__()

    def _pause(self) -> None:
        tracer = self._tracer
        if tracer is not None and innermost_dispatch_mode() is tracer:
            self._tracer = None
            tracer.__exit__(None, None, None)

    def _end(self) -> None:
        tracer = self._tracer
        if tracer is not None:
            tracer.is_over = True
            self._pause()

    def statistic(self, roots: Sequence[torch.Tensor]) -> Statistic | None:
        """Stop following, and return the statistic that a loss depends on otherwise than as its terms."""
        tracer = self._tracer
        if tracer is None or tracer.is_over:
            return None
        self._pause()
        if tracer is self._earlier:
            return None
        self._is_wanted = self._earlier is None
        self._earlier = tracer if self._earlier is None else None
        if not self._is_wanted and self._tracer is None:
            self.is_following = False
            self._session.batches.forget_on_take(self._begin)
        return tracer.of(roots)

    def after_backward(self) -> None:
        """Follow what the script keeps of the first batch."""
        if self._earlier is not None and self._tracer is None and _can_follow():
            self._earlier.forget_freed()
            self._earlier.is_after = True
            self._tracer = self._earlier
            self._tracer.__enter__()
