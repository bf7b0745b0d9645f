# SPDX-License-Identifier: Apache-2.0
"""Follows the samples through a forward pass: which dim of each tensor holds them, operation by operation.

A guess by size would be wrong if a sequence is as long as the batch, or there are as many heads. So the first forward
pass of a kind runs under a mode that sees each operation and asks torch's meta kernels, which compute shapes only, for
the shape with one more sample: the dim of the result that grows holds the samples. Later passes draw as that pass did,
and pay nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.random_numbers.draw_warnings import warn_of_own_rows
from rankwise.replicate.random_numbers.sample_layout import (
    OWN_ROWS,
    Guess,
    KnownLayout,
    SampleLayout,
    broadcast_layout,
    grown_layout,
    is_aligned,
    layout_of,
    layouts_of,
    viewed,
)
from rankwise.replicate.random_numbers.scope import DrawScope
from rankwise.torch_private.kernels import DispatchMode
from rankwise.torch_private.tensors import memory_key, tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from rankwise.replicate.random_numbers.scope import PlannedDraw
    from rankwise.torch_private.kernels import Operator

    Identity = tuple[int, object, tuple[int, ...], tuple[int, ...]]

_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
SIZED = {"empty", "zeros", "ones", "full", "arange", "new_empty", "new_zeros", "new_ones", "new_full", "empty_strided"}
_SLICES = {"select", "slice", "narrow"}
_SPLITS = {"split", "split_with_sizes", "unsafe_split"}
_BY_SAMPLE = {"index_add", "index_reduce", "scatter", "scatter_add", "scatter_reduce"}
"""Operations that gather rows by an index: of a sample, if the index says so."""
RESHAPES = {"squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
"""Views in place."""
FILLING = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}


def is_random(func: Operator) -> bool:
    """Return whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket.__name__ in FILLING


class TracedCall:
    """One operation, and its arguments."""

    def __init__(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.given = given
        self.name: str = func.overloadpacket.__name__
        self.tensors = outputs_of((args, given))
        self.is_pointwise = torch.Tag.pointwise in func.tags
        self.is_random = is_random(func)

    def sizes(self) -> Sequence[int]:
        """Return the sizes that are given in numbers."""
        lists = (one for one in (*self.args, *self.given.values()) if isinstance(one, list | tuple))
        return next((one for one in lists if all(isinstance(size, int) for size in one)), ())

    def dim(self, tensor: torch.Tensor) -> int:
        """Return the dim of a slice or a split."""
        place = 2 if self.name in _SPLITS else 1
        dim = self.args[place] if len(self.args) > place else self.given.get("dim", 0)
        return int(dim) % max(tensor.dim(), 1)


class BatchTracer(DispatchMode):
    """Notes where the samples are in each tensor, and gives the scope the layout of each draw."""

    def __init__(
        self, scope: DrawScope, num_samples: int, inputs: Iterable[tuple[torch.Tensor, list[SampleLayout]]]
    ) -> None:
        """Start with the inputs of the model, each with its possible layouts; the first input's is certain.

        ``[OWN_ROWS]`` stands for an input that holds samples in a way that cannot be followed.
        """
        super().__init__()
        self._scope = scope
        self._num = num_samples
        self._facts: dict[Identity, KnownLayout] = {}
        self._lost: set[Identity] = set()
        """Tensors computed from samples, of which it is not known where the samples are in them."""
        self._grown_shapes: dict[object, list[torch.Size] | None] = {}
        """What :meth:`_grown` has found; loops, as over time, repeat operations."""
        self._drawn_by_sizes: dict[Identity, str] = {}
        """Where random numbers were drawn whose shape was given in numbers."""
        self._is_without_data = False
        self._around_shapes: Callable[[], AbstractContextManager[object]] = nullcontext
        is_first = True
        for tensor, layouts in inputs:
            if layouts == [OWN_ROWS]:
                self._lost.add(identity_of(tensor))
            elif layouts:
                guess = None if is_first else Guess([*layouts, None])
                self._facts[identity_of(tensor)] = KnownLayout(layouts[0], guess, is_direct=True)
                is_first = False

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = TracedCall(func, args, dict(kwargs or {}))
        found = [(one, fact) for one in call.tensors if (fact := self._facts.get(identity_of(one))) is not None]
        is_lost = any(identity_of(one) in self._lost for one in call.tensors)
        if call.is_random:
            return self._draw(call, found, is_lost=is_lost)
        if not found:
            out = func(*args, **call.given)
            self._note_new(call, out)
            self._note_lost(call, out, is_lost=is_lost)
            return out
        layouts = self._settle(call, found)
        if call.name in RESHAPES:
            return self._reshape(call, layouts)
        out = func(*args, **call.given)
        self._note(call, layouts, out)
        self._note_lost(call, out, is_lost=is_lost)
        return out

    def _note_lost(self, call: TracedCall, out: object, *, is_lost: bool) -> None:
        """Note results of samples whose place is not known."""
        if call.name in SIZED:
            is_lost = False  # they take the dtype and the device
        if not is_lost:
            return
        by_sample = self._by_sample(call)
        for one in outputs_of(out):
            fact = self._facts.get(identity_of(one))
            if fact is None or fact.guess is not None:
                is_by_sample = by_sample is not None and by_sample.fits(one.shape, self._num)
                self.set_fact(one, KnownLayout(by_sample) if is_by_sample else None, is_lost=not is_by_sample)
        for one in call.tensors if call.is_pointwise else ():
            place = self._drawn_by_sizes.pop(identity_of(one), None)
            if place is not None and any(one.shape == other.shape for other in call.tensors if other is not one):
                self._warn_of_own_rows(place, one)

    def _by_sample(self, call: TracedCall) -> SampleLayout | None:
        """Return where samples are after rows were gathered by an index that numbers the samples, in order."""
        if call.name.rstrip("_") not in _BY_SAMPLE or not isinstance(call.args[1], int):
            return None
        out, dim, index = call.args[:3]
        dim %= max(out.dim(), 1)
        if index.dim() > dim > 0:
            index = index.movedim(dim, 0)
        numbers = index.reshape(len(index), -1)[:, 0] if index.numel() else index
        is_in_order = numbers.numel() > 0 and bool((numbers.diff() >= 0).all())
        is_whole = is_in_order and int(numbers[0]) == 0 and int(numbers[-1]) == self._num - 1
        return SampleLayout(dim) if is_whole else None

    # -- draws -------------------------------------------------------------------------------------

    def _draw(self, call: TracedCall, found: list[tuple[torch.Tensor, KnownLayout]], *, is_lost: bool = False) -> Any:
        scope = self._scope
        guess = None
        if is_lost:
            layout = OWN_ROWS
            self._warn_of_own_rows(words(user_call_site()), max(call.tensors, key=torch.Tensor.dim))
        elif found:
            fact = max(found, key=lambda one: one[0].dim())[1]
            layout, guess = fact.layout, fact.guess
            if guess is not None and not guess.place:
                guess = Guess([*(one for one in guess.layouts if one is not None), None])
                layout = guess.layouts[0]
        elif call.tensors:
            layout = None
        else:
            guess = Guess([*layouts_of(call.sizes(), self._num), None])
            layout = guess.layouts[0]
        before = len(scope.made)
        scope.traced_layouts.append(layout)
        try:
            out = call.func(*call.args, **call.given)
            if self._is_without_data:
                first = outputs_of(out)[0]
                scope.plan_draw("", first.shape, first.stride())
                scope.note_redraw(lambda _: None)
        finally:
            scope.traced_layouts.pop()
        if guess is not None and len(guess.layouts) > 1 and len(scope.made) > before:
            guess.set_draw(words(user_call_site()), before, scope.redraw)
        else:
            guess = None
        for one in outputs_of(out):
            is_of_batch = layout is not None and 0 <= layout.dim < one.dim()
            fact = KnownLayout(layout, guess, is_direct=True) if is_of_batch or guess is not None else None
            self.set_fact(one, fact, is_lost=is_lost)
            if not (found or is_lost):
                self._drawn_by_sizes[identity_of(one)] = words(user_call_site())
        scope.note_redraw(None)
        return out

    def _warn_of_own_rows(self, place: str, numbers: torch.Tensor) -> None:
        rows = self._scope.rows
        if rows is not None and rows.num != rows.num_global and not self._scope.is_per_rank:
            warn_of_own_rows(place, numbers.shape, rows.num)

    # -- what was given in numbers -----------------------------------------------------------------

    def _note_new(self, call: TracedCall, out: object) -> None:
        """Note the results of an operation without followed inputs: the same on all ranks, unless sizes differ."""
        for one in outputs_of(out):
            layouts = layouts_of(one.shape, self._num) if call.name in SIZED else []
            self.set_fact(one, KnownLayout(None, Guess([None, *layouts]), is_direct=True) if layouts else None)

    def _settle(
        self, call: TracedCall, found: list[tuple[torch.Tensor, KnownLayout]]
    ) -> dict[Identity, SampleLayout | None]:
        """Return the layouts of an operation's inputs, after deciding the assumed ones."""
        facts = {identity_of(one): fact for one, fact in found}
        layouts = {key: fact.layout for key, fact in facts.items()}
        certain = [(one, fact.layout) for one, fact in found if fact.guess is None and fact.layout is not None]
        alike = [one for one in call.tensors if isinstance(one, torch.nn.Parameter)]
        for tensor, fact in found:
            key, guess = identity_of(tensor), fact.guess
            if guess is None or not (certain or (alike and call.is_pointwise)):
                continue
            for option in guess.layouts if fact.is_direct else [fact.layout]:
                if call.is_pointwise:
                    agrees = is_aligned(tensor, option, certain, alike)
                else:
                    agrees = self._takes_more(call, layouts | {key: option})
                if agrees:
                    self._decide(guess, option if fact.is_direct else guess.layouts[0])
                    layouts[key] = option
                    self._facts[key] = KnownLayout(option)
                    break
            else:
                if guess.place:
                    raise _contradicts(guess, tensor)
                layouts[key] = None
        return layouts

    def _takes_more(self, call: TracedCall, layouts: dict[Identity, SampleLayout | None]) -> bool:
        """Return whether an operation can take one more sample, and its results grow in at most one dim."""
        now, grown = self._grown(call, {}), self._grown(call, layouts)
        if now is None or grown is None or len(now) != len(grown):
            return False
        return all(sum(a != b for a, b in zip(old, new, strict=True)) <= 1 for old, new in zip(now, grown, strict=True))

    def _decide(self, guess: Guess, layout: SampleLayout | None) -> None:
        if guess.place and layout != guess.layouts[0] and guess.redraw is not None:
            planned = self._scope.made[guess.number]
            self._scope.made[guess.number] = replace(planned, layout=layout)
            guess.redraw(layout)
        guess.decide(layout)

    # -- operations --------------------------------------------------------------------------------

    def _note(self, call: TracedCall, layouts: dict[Identity, SampleLayout | None], out: object) -> None:
        """Note where samples are in the results of an operation."""
        outputs = [
            one for one in outputs_of(out) if identity_of(one) not in layouts
        ]  # others were changed in place at most
        known = [(one, at) for one in call.tensors if (at := layouts.get(identity_of(one))) is not None]
        facts = [fact for key in layouts if (fact := self._facts.get(key)) is not None]
        guess = next((fact.guess for fact in facts if fact.guess is not None), None)
        if any(fact.guess is None for one, _ in known if (fact := self._facts.get(identity_of(one))) is not None):
            guess = None
        found = self._found(call, layouts, known, outputs) if known else [None] * len(outputs)
        for one, layout in zip(outputs, found, strict=True):
            is_lost = layout == OWN_ROWS
            has_fact = not is_lost and (layout is not None or guess is not None)
            self.set_fact(one, KnownLayout(layout, guess) if has_fact else None, is_lost=is_lost)
        if call.is_pointwise:
            self._note_changed(call, out)

    def _reshape(self, call: TracedCall, layouts: dict[Identity, SampleLayout | None]) -> Any:
        """Run an operation that gives its input another shape, in place, and note where samples are now."""
        first = call.tensors[0]
        layout, fact = layouts.get(identity_of(first)), self._facts.get(identity_of(first))
        grown = None if layout is None else self._grown(call, layouts)
        out = call.func(*call.args, **call.given)
        now = None
        if layout is not None and grown:
            now = grown_layout(out.shape, grown[0], [(first, layout)], call.name)
        self.set_fact(out, None if fact is None or now is None else replace(fact, layout=now, is_direct=False))
        return out

    def _note_changed(self, call: TracedCall, out: object) -> None:
        """Record that a tensor whose layout was assumed holds the samples of another one, which was added to it."""
        facts = [(one, fact) for one in call.tensors if (fact := self._facts.get(identity_of(one))) is not None]
        certain = [(one, fact.layout) for one, fact in facts if fact.guess is None and fact.layout is not None]
        for one in outputs_of(out):
            fact = self._facts.get(identity_of(one))
            layout = broadcast_layout(certain, one)
            if fact is not None and fact.guess is not None and layout is not None:
                self.set_fact(one, KnownLayout(layout))

    def _found(
        self,
        call: TracedCall,
        layouts: dict[Identity, SampleLayout | None],
        known: list[tuple[torch.Tensor, SampleLayout]],
        outputs: list[torch.Tensor],
    ) -> list[SampleLayout | None]:
        """Return where samples are in the outputs of an operation, from where they are in its inputs."""
        first, layout = known[0]
        if call.name in _VIEWS:
            return [self._viewed(layout, first.shape, one.shape) for one in outputs]
        if call.name == "expand" or call.is_pointwise:
            return [broadcast_layout(known, one) for one in outputs]
        if call.name in _SLICES | _SPLITS and call.dim(first) == layout.dim:
            return [self._sliced(layout, first, one) for one in outputs]
        if call.name in SIZED:
            return [layout_of(one.shape, self._num) for one in outputs]
        grown = self._grown(call, layouts)
        if grown is None or len(grown) != len(outputs):
            return [OWN_ROWS] * len(outputs)
        places = [grown_layout(one.shape, more, known, call.name) for one, more in zip(outputs, grown, strict=True)]
        return [
            OWN_ROWS if at is not None and not at.fits(one.shape, self._num) else at
            for at, one in zip(places, outputs, strict=True)
        ]

    def _sliced(self, layout: SampleLayout, whole: torch.Tensor, part: torch.Tensor) -> SampleLayout | None:
        """Return where samples are in a slice along the dim that holds them: all of one batch of several, or one."""
        if part.dim() < whole.dim() or part.shape == whole.shape:
            return layout if part.shape == whole.shape else None
        batch = self._num * layout.inner
        first = part.storage_offset() - whole.storage_offset()
        is_of_batches = part.stride() == whole.stride() and part.shape[layout.dim] % batch == 0
        if not (is_of_batches and first % (batch * whole.stride(layout.dim)) == 0):
            return OWN_ROWS
        return replace(layout, outer=part.shape[layout.dim] // batch)

    def _viewed(self, layout: SampleLayout, old: Sequence[int], new: Sequence[int]) -> SampleLayout | None:
        """Return where samples lie after a view with other sizes."""
        return viewed(layout, old, new, self._num)

    def _grown(self, call: TracedCall, layouts: dict[Identity, SampleLayout | None]) -> list[torch.Size] | None:
        """Return the shapes of an operation's results with one more sample; ``None`` if it cannot take one more."""

        def facts(one: Any) -> object:
            if isinstance(one, torch.Tensor):
                return one.dtype, one.shape, one.stride(), layouts.get(identity_of(one))
            return type(one), tuple(map(facts, one)) if isinstance(one, list | tuple) else one

        key = call.func, facts(call.args), tuple((name, facts(one)) for name, one in call.given.items())
        try:
            if key not in self._grown_shapes:
                self._grown_shapes[key] = self._computed_grown(call, layouts)
            return self._grown_shapes[key]
        except TypeError:  # an argument has no hash
            return self._computed_grown(call, layouts)

    def _computed_grown(
        self, call: TracedCall, layouts: dict[Identity, SampleLayout | None]
    ) -> list[torch.Size] | None:
        def as_meta(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            layout = layouts.get(identity_of(one))
            shape = one.shape if layout is None else layout.resized(one.shape, self._num + 1)
            order = sorted(range(one.dim()), key=lambda dim: -one.stride(dim))
            meta = torch.empty([shape[dim] for dim in order], dtype=one.dtype, device="meta")
            return meta.permute([order.index(dim) for dim in range(one.dim())])

        try:
            with self._around_shapes():
                args, given = tree_map(as_meta, (call.args, call.given))
                if "device" in given:
                    given["device"] = torch.device("meta")
                return [one.shape for one in outputs_of(call.func(*args, **given))]
        except Exception:  # noqa: BLE001 - it cannot take one more sample, or has no meta kernel
            return None

    def through_layer(self, x: torch.Tensor, out: torch.Tensor, *, is_part: bool) -> None:
        """Record the output of a layer that is split along ``tp``, whose operations are not seen."""
        del is_part
        fact = self._facts.get(identity_of(x))
        is_kept = fact is not None and fact.layout is not None and fact.layout.dim < out.dim() - 1
        self.set_fact(out, replace(fact, is_direct=False) if fact is not None and is_kept else None)

    def plan_without_data(
        self, kind: type[torch.Tensor], outside: Callable[[], AbstractContextManager[object]]
    ) -> Sequence[PlannedDraw]:
        """Follow tensors of a class without data, and compute shapes outside the mode that creates them.

        Returns:
            A list that is filled with the draws.
        """
        _FOLLOWED.add(kind)
        self._around_shapes = outside
        self._is_without_data = True
        return self._scope.made

    def fact_of(self, tensor: torch.Tensor) -> KnownLayout | None:
        """Return where the samples are in a tensor, if that is known."""
        return self._facts.get(identity_of(tensor))

    def set_fact(self, tensor: torch.Tensor, fact: KnownLayout | None, *, is_lost: bool = False) -> None:
        """Note where the samples are in a tensor; ``None``: it holds none, or they are lost."""
        key = identity_of(tensor)
        (self._lost.add if is_lost else self._lost.discard)(key)
        if fact is not None:
            self._facts[key] = fact
        else:
            self._facts.pop(key, None)


_WITH_DATA = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_FOLLOWED: set[type] = {*_WITH_DATA}


def identity_of(tensor: torch.Tensor) -> Identity:
    """Return what two tensors have in common that are views of the same numbers."""
    # Not the object, of which autograd creates views. Memory is reused only after its fact was replaced.
    memory = tensor.untyped_storage().data_ptr() if type(tensor) in _WITH_DATA else memory_key(tensor)
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def outputs_of(out: object) -> list[torch.Tensor]:
    """Return the tensors in the result of an operation, but for sparse ones, which have no memory of their own."""
    leaves: list[Any] = [out] if type(out) in _FOLLOWED else tree_leaves(out)
    return [one for one in leaves if type(one) in _FOLLOWED and one.layout is torch.strided]


def _contradicts(guess: Guess, tensor: torch.Tensor) -> ConfigurationError:
    return ConfigurationError(
        f"Cannot tell whether the random numbers drawn at {guess.place} belong to the samples of the batch.",
        evidence=f"they are used with shape {list(tensor.shape)}, whose first dimension is not the batch",
        do="draw them like a tensor of the batch (torch.randn_like, torch.rand_like), or before the loop if "
        "they are the same for all samples",
    )


OF_OTHER_VALUES = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
"""Operations that take from samples nothing but their dtype and device."""


class MeetingTracer(BatchTracer):
    """Calls :meth:`note_meeting` for each operation in which samples meet. Leaves draws to torch."""

    def __init__(self, num_samples: int, inputs: Iterable[tuple[torch.Tensor, list[SampleLayout]]]) -> None:
        """Start with the inputs, each with its possible layouts; the first input's is certain."""
        super().__init__(DrawScope(None, "torch", 0), num_samples, inputs)

    def _draw(self, call: TracedCall, found: list[tuple[torch.Tensor, KnownLayout]], *, is_lost: bool = False) -> Any:
        out = call.func(*call.args, **call.given)
        fact = max(found, key=lambda one: one[0].dim())[1] if found else None
        for one in outputs_of(out):
            self.set_fact(
                one,
                fact if fact is not None and fact.layout is not None and fact.layout.dim < one.dim() else None,
                is_lost=is_lost,
            )
        return out

    def _note(self, call: TracedCall, layouts: dict[Any, SampleLayout | None], out: object) -> None:
        super()._note(call, layouts, out)
        outputs = outputs_of(out)
        if call.name in _SLICES | _SPLITS | {"unbind"} | OF_OTHER_VALUES or not any(layouts.values()):
            return
        if any(identity_of(one) in layouts for one in outputs):
            return  # changed in place
        if call.is_pointwise and len({at.dim - one.dim() for one, at in _known(call, layouts)}) == 1:
            return  # every sample with itself
        now, grown = [one.shape for one in outputs], self._grown(call, layouts)
        if now and grown:
            grows_twice = any(map(_grows_twice, now, grown))
            if now == grown or grows_twice:
                self.note_meeting(call, are_pairs=grows_twice)

    def note_meeting(self, call: TracedCall, *, are_pairs: bool) -> None:
        """Record an operation in which samples meet; ``are_pairs``: its result has an entry for each pair of them."""
        raise NotImplementedError


def _known(call: TracedCall, layouts: dict[Any, SampleLayout | None]) -> Iterator[tuple[torch.Tensor, SampleLayout]]:
    for one in call.tensors:
        layout = layouts.get(identity_of(one))
        if layout is not None:
            yield one, layout


def _grows_twice(now: Sequence[int], grown: Sequence[int]) -> bool:
    return sum(old != new for old, new in zip(now, grown, strict=False)) > 1
