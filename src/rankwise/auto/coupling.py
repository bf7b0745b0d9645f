# SPDX-License-Identifier: Apache-2.0
"""Follows the samples through a call, and notes where they meet: a result that all of them determine.

Comparing values cannot show that samples never meet: a limit may be exceeded, or a sequence padded, in a later batch
only. Nor may a call read values of samples, on which its next operation could depend.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.random_numbers.batch_tracer import (
    MeetingTracer,
    TracedCall,
    identity_of,
    outputs_of,
)
from rankwise.replicate.random_numbers.sample_layout import KnownLayout, SampleLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch.nn.utils.rnn import PackedSequence

    from rankwise.replicate.random_numbers.batch_tracer import Identity
    from rankwise.torch_private.kernels import Operator

_READS = frozenset(
    {
        "_local_scalar_dense",
        "_pack_padded_sequence",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operations whose result, or its shape, depends on values."""
_LEAVES_TORCH = frozenset({torch.Tensor.__array__, torch.Tensor.numpy, torch.Tensor.tolist})


class CouplingWatch(MeetingTracer):
    """Notes the first operation of a call in which samples meet, or that reads their values."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples, [])
        self._of_samples: set[Identity] = set()
        self._packed: set[Identity] = set()
        """Values of packed sequences, whose rows belong to the samples in another order."""
        self._is_paused = False
        self.found: str | None = None
        """What was found, in words that follow a colon."""

    @contextmanager
    def paused(self) -> Generator[None]:
        """Note nothing inside the block: samples meet there on purpose."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def watching(self, inputs: Sequence[tuple[torch.Tensor, int]]) -> Generator[None]:
        """Watch the call inside the block, from its split inputs on; with the dims of their rows."""
        for one, dim in inputs:
            self.set_fact(one, KnownLayout(SampleLayout(dim), is_direct=True))
        self._of_samples = {identity_of(one) for one, _ in inputs}
        with ExitStack() as stack:
            stack.enter_context(self)
            stack.enter_context(_LeavingTorch(self))
            yield

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See one operation. Called by torch."""
        call = TracedCall(func, args, dict(kwargs or {}))
        if any(one.is_meta for one in call.tensors) or str(call.given.get("device")) == "meta":
            return func(*args, **call.given)  # another mode asks for shapes
        is_of_samples = any(self.holds_samples(one) for one in call.tensors)
        is_packing = call.name == "_pack_padded_sequence" and self._can_pack(*call.args)
        is_read = call.name in _READS or (call.name == "index" and self._is_masked(call))
        if is_of_samples and is_read and not is_packing:
            self.note_read(call.name)
        if any(identity_of(one) in self._packed for one in call.tensors):
            self.note_read("a packed sequence")
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for one in outputs_of(out):
            (self._of_samples.add if is_of_samples else self._of_samples.discard)(identity_of(one))
            (self._packed.add if is_packing else self._packed.discard)(identity_of(one))
        return out

    def _can_pack(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> bool:  # noqa: FBT001 - torch's
        """Return whether sequences are packed by sample."""
        return self.layout_of(x) == SampleLayout(0 if batch_first else 1) and (
            not self.holds_samples(lengths) or self.layout_of(lengths) == SampleLayout(0)
        )

    def through_packed(self, layer: Callable[[], Any], packed: PackedSequence) -> Any:
        """Run a recurrent layer of torch's on packed sequences, and return its outputs: it keeps samples apart."""
        with self._unseen(packed.data):
            output, hidden = layer()
        self._packed.add(identity_of(output.data))
        for one in outputs_of(hidden):
            self.set_fact(one, KnownLayout(SampleLayout(one.dim() - 2)))
        return output, hidden

    def unpacked(self, unpack: Callable[[], Any], data: torch.Tensor, *, batch_first: bool, is_sized: bool) -> Any:
        """Run torch's function that pads packed sequences; to the longest of these, unless it is given a size."""
        if not is_sized:
            self.note_read("pad_packed_sequence, which needs total_length=")
        with self._unseen(data):
            padded, lengths = unpack()
        self.set_fact(padded, KnownLayout(SampleLayout(0 if batch_first else 1)))
        self.set_fact(lengths, KnownLayout(SampleLayout(0)))
        return padded, lengths

    @contextmanager
    def _unseen(self, data: torch.Tensor) -> Generator[None]:
        """Note nothing inside the block, which computes with packed sequences."""
        if identity_of(data) not in self._packed:
            self.note_read("a packed sequence")
        with self.paused():
            yield

    def holds_samples(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was computed from samples."""
        return identity_of(tensor) in self._of_samples

    def layout_of(self, tensor: torch.Tensor) -> SampleLayout | None:
        """Return where the samples are in a tensor; ``None`` if that is not known, or it has none."""
        fact = self.fact_of(tensor)
        return None if fact is None else fact.layout

    def note_read(self, name: str) -> None:
        """Record that values of samples are read."""
        self._note_first(f"it decides by values of its samples ({name.strip('_')} at {words(user_call_site())})")

    def _is_masked(self, call: TracedCall) -> bool:
        return any(one.dtype in {torch.bool, torch.uint8} for one in call.tensors[1:])

    def note_meeting(self, call: TracedCall, *, are_pairs: bool) -> None:
        """Record the first operation in which samples meet."""
        del are_pairs
        self._note_first(f"samples meet in {call.name.strip('_')} at {words(user_call_site())}")

    def _note_first(self, text: str) -> None:
        if self.found is None and not self._is_paused:
            self.found = text


class _LeavingTorch(TorchFunctionMode):
    """Sees values that are passed to other libraries, which is no operation of torch."""

    def __init__(self, watch: CouplingWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See one call. Called by torch."""
        if func in _LEAVES_TORCH and self._watch.holds_samples(args[0]):
            self._watch.note_read(func.__name__)
        if getattr(func, "__name__", "") == "_pad_packed_sequence":
            given = sys._getframe(1).f_locals  # noqa: SLF001 - of torch's pad_packed_sequence()
            is_sized = given.get("total_length") is not None
            return self._watch.unpacked(partial(func, *args), args[0], batch_first=args[2], is_sized=is_sized)
        return func(*args, **(kwargs or {}))
