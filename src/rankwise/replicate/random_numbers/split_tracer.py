# SPDX-License-Identifier: Apache-2.0
"""Follows the part of a split layer's output that a rank computes: which dim of each tensor is divided along ``tp``.

The same technique as for samples: a rank's part is the one "sample" of the tensor, and the dim that grows with a second
one is divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.health.call_site import user_call_site, words
from rankwise.log import warn
from rankwise.replicate.random_numbers.batch_tracer import (
    FILLING,
    RESHAPES,
    SIZED,
    BatchTracer,
    TracedCall,
    identity_of,
    outputs_of,
)
from rankwise.replicate.random_numbers.sample_layout import KnownLayout, SampleLayout, part_viewed
from rankwise.replicate.random_numbers.scope import current_scope
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.replicate.random_numbers.batch_tracer import Identity
    from rankwise.replicate.random_numbers.scope import DrawScope
    from rankwise.torch_private.kernels import Operator

_warned: set[str] = set()


class SplitTracer(BatchTracer):
    """Notes which dim of each tensor is divided among the ranks that share layers, and gives it to the draws."""

    def __init__(self, scope: DrawScope) -> None:
        super().__init__(scope, 1, ())

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = TracedCall(func, args, dict(kwargs or {}))
        facts = self._facts
        layouts = {key: fact.layout for one in call.tensors if (fact := facts.get(key := identity_of(one))) is not None}
        is_lost = any(identity_of(one) in self._lost for one in call.tensors)
        if call.is_random:
            return self._draw_part(call, layouts, is_lost=is_lost)
        if call.name in RESHAPES and layouts:
            return self._reshape(call, layouts)
        for one in call.tensors if layouts else ():
            place = self._drawn_by_sizes.pop(identity_of(one), None)
            if place is not None and _is_as_wide(one, call, facts):
                warn_of_parts(place)
        out = func(*args, **call.given)
        if call.name in SIZED:
            whole = next((one for one in call.tensors if identity_of(one) in layouts), None)
            for one in outputs_of(out):
                fact = None if whole is None or whole.shape != one.shape else facts[identity_of(whole)]
                self.set_fact(one, fact)
        else:
            self._note(call, layouts, out)
        for one in outputs_of(out):
            key = identity_of(one)
            if (layouts or is_lost) and key not in facts:
                self._lost.add(key)
            else:
                self._lost.discard(key)
        return out

    def _draw_part(self, call: TracedCall, layouts: dict[Identity, SampleLayout | None], *, is_lost: bool) -> Any:
        layout = next((one for one in layouts.values() if one is not None), None)
        if layout is None and is_lost:
            warn_of_parts()
        scope = self._scope
        scope.traced_splits.append(layout)
        try:
            out = call.func(*call.args, **call.given)
        finally:
            scope.traced_splits.pop()
        for one in outputs_of(out):
            fits = layout is not None and layout.fits(one.shape, 1)
            self.set_fact(one, KnownLayout(layout) if fits else None)
            self._drawn_by_sizes.pop(identity_of(one), None)
            if not call.tensors or (layout is None and call.name in FILLING):
                self._drawn_by_sizes[identity_of(one)] = words(user_call_site())
        return out

    def _viewed(self, layout: SampleLayout, old: Sequence[int], new: Sequence[int]) -> SampleLayout | None:
        return part_viewed(layout, old, new)

    def through_layer(self, x: torch.Tensor, out: torch.Tensor, *, is_part: bool) -> None:
        """Record the output of a layer that is split: a part of the features, or all of them."""
        del x
        layout = SampleLayout(out.dim() - 1, inner=out.shape[-1]) if is_part else None
        self.set_fact(out, None if layout is None else KnownLayout(layout))
        self._lost.discard(identity_of(out))


def _is_as_wide(drawn: torch.Tensor, call: TracedCall, facts: Mapping[Identity, KnownLayout]) -> bool:
    """Return whether numbers are combined with a part as if they were a part too."""
    for one in call.tensors:
        fact = facts.get(identity_of(one))
        layout = None if fact is None else fact.layout
        dim = -1 if layout is None else layout.dim - one.dim() + drawn.dim()
        if layout is not None and dim >= 0 and drawn.shape[dim] == one.shape[layout.dim] > 1:
            return call.is_pointwise
    return False


def warn_of_parts(place: str | None = None) -> None:
    """Warn once per line that draws for a part of a layer of which the place in the whole is not known."""
    place = place or words(user_call_site())
    if place not in _warned:
        _warned.add(place)
        warn(
            f"cannot tell which part of a split layer the random numbers at {place} are for: ranks along tp draw the "
            "same ones for their parts, and one device would draw others; draw them where activations are whole, or "
            'leave that layer whole: tensor_parallel(model, {..., "name": "replicate"})'
        )


def follow_layer(layer: nn.Module, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    """Note the output of a layer that is split, whose operations the tracers do not see. A forward hook."""
    scope = current_scope()
    if scope is None or not scope.tracers or not inputs or not isinstance(inputs[0], torch.Tensor):
        return
    is_part = isinstance(layer, nn.Linear) and output.shape[-1] != layer.out_features
    for tracer in scope.tracers:
        tracer.through_layer(own_part(inputs[0]), output, is_part=is_part)
