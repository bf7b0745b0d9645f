# SPDX-License-Identifier: Apache-2.0
"""Follows the samples through operations, and sees where they meet: a result that all of them determine.

Each operation on samples has a result that grows with one more sample; a result that does not grow is computed from
several samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.replicate.random_numbers.batch_tracer import BatchTracer, KnownLayout, TracedCall, identity_of, outputs_of
from rankwise.replicate.random_numbers.scope import DrawScope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from rankwise.replicate.random_numbers.sample_layout import SampleLayout

_SLICES = frozenset({"narrow", "select", "slice", "split", "split_with_sizes", "unbind", "unsafe_split"})
OF_OTHER_VALUES = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
"""Operations that take from samples nothing but their dtype and device."""


class MeetingTracer(BatchTracer):
    """Calls :meth:`_meet` for each operation in which samples meet. Leaves draws to torch."""

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
        if call.name in _SLICES | OF_OTHER_VALUES or not any(layouts.values()):
            return
        if any(identity_of(one) in layouts for one in outputs):
            return  # changed in place
        if call.is_pointwise and len({at.dim - one.dim() for one, at in _known(call, layouts)}) == 1:
            return  # every sample with itself
        now, grown = [one.shape for one in outputs], self._grown(call, layouts)
        if now and grown:
            grows_twice = any(map(_grows_twice, now, grown))
            if now == grown or grows_twice:
                self._meet(call, are_pairs=grows_twice)

    def _meet(self, call: TracedCall, *, are_pairs: bool) -> None:
        """Note that samples meet in an operation; ``are_pairs``: its result has an entry for each pair of them."""
        raise NotImplementedError


def _known(call: TracedCall, layouts: dict[Any, SampleLayout | None]) -> Iterator[tuple[torch.Tensor, SampleLayout]]:
    for one in call.tensors:
        layout = layouts.get(identity_of(one))
        if layout is not None:
            yield one, layout


def _grows_twice(now: Sequence[int], grown: Sequence[int]) -> bool:
    return sum(old != new for old, new in zip(now, grown, strict=False)) > 1
