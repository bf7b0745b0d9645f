# SPDX-License-Identifier: Apache-2.0
"""``megengine.autodiff``: the GradManager on torch's autograd: tensors that get gradients, and callbacks of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import nn

from rankwise.comm.collectives import exchange_of
from rankwise.comm.optimizer_steps import account_for_part
from rankwise.compat.megengine.alias import refusing
from rankwise.compat.megengine.distributed.functional import Recording, recordings
from rankwise.compat.megengine.distributed.groups import AllreduceCallback
from rankwise.errors import ConfigurationError
from rankwise.replicate.gradient_buckets import GradientBuckets, call_when_accumulated
from rankwise.replicate.no_sync_and_weight import add_back, restore, set_aside

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.replicate.bucket import Weights

__all__ = ["GradManager", "NotRecording"]

GradCallback = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class NotRecording(ConfigurationError, RuntimeError):
    """A GradManager was asked for gradients without recording, or asked to record twice."""


@dataclass(eq=False)
class _Attached:
    """A tensor of a GradManager, and the callbacks of its gradient."""

    tensor: weakref.ref[torch.Tensor]
    hook: RemovableHandle
    callbacks: list[GradCallback] = field(default_factory=list)
    over_ranks: AllreduceCallback | None = None


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Reduces the gradients of some tensors over ranks, in every backward."""

    exchange: Exchange
    buckets: GradientBuckets
    weights: Weights
    numbers: dict[int, int]
    """The numbers of the tensors, by their ids; the buckets keep the tensors alive."""


_in_backward: list[GradManager] = []
"""Those whose backward is running; the hooks of others do nothing meanwhile."""


class GradManager:
    """Computes gradients of the tensors attached to it, and adds them to their ``grad``.

    One step of a data-parallel training::

        gm = GradManager().attach(model.parameters(), callbacks=[dist.make_allreduce_cb("mean")])
        for x, y in loader:
            with gm:
                loss = loss_fn(model(x), y)
                gm.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    torch always records; a GradManager records the tensors that this rank sends to others and receives from them, so
    that :meth:`backward` reaches them even if no loss of this rank depends on them. Only attached tensors get
    gradients.
    """

    def __init__(self) -> None:
        self._attached: dict[int, _Attached] = {}
        self._recording: Recording | None = None
        self._reductions: dict[AllreduceCallback, _Reduction] = {}

    def __del__(self) -> None:
        for attached in self._attached.values():
            attached.hook.remove()

    def attached_tensors(self) -> list[torch.Tensor]:
        """Return the attached tensors that still exist."""
        return [tensor for tensor, _ in self._alive()]

    def attach(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        callbacks: GradCallback | Iterable[GradCallback] | None = None,
    ) -> Self:
        """Compute gradients for some tensors, as long as they exist.

        Args:
            tensors: one or several, floating point, not the result of an operation. Held weakly.
            callbacks: one or several, called with each tensor and its gradient, in the order in which they were
                attached; each receives the gradient that the one before returned, and that of the last is added to
                ``grad``. ``make_allreduce_cb(...)`` must be the last.

        Returns:
            This GradManager.

        Raises:
            ConfigurationError: one of ``tensors`` is not a tensor, not floating point, the result of an operation, or a
                frozen parameter; or a callback follows ``make_allreduce_cb(...)``.
        """
        if callable(tensors):
            raise ConfigurationError(
                f"attach takes tensors, not {type(tensors).__name__}.", do="call it: gm.attach(net.parameters())"
            )
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if callbacks is None:
            callbacks = []
        added = [callbacks] if callable(callbacks) else list(callbacks)
        for tensor in given:
            _check_attachable(tensor)
        for tensor in given:
            attached = self._attached.get(id(tensor)) or self._follow(tensor)
            for callback in added:
                if attached.over_ranks is not None:
                    raise ConfigurationError(
                        "A callback follows make_allreduce_cb(), whose results are ready only after backward has run.",
                        do="attach make_allreduce_cb() once, as the last callback of a tensor",
                    )
                if isinstance(callback, AllreduceCallback):
                    attached.over_ranks = callback
                else:
                    attached.callbacks.append(callback)
        return self

    def record(self) -> None:
        """Start recording, for the next :meth:`backward`.

        Raises:
            NotRecording: it is already recording.
        """
        if self._recording is not None:
            raise NotRecording("This GradManager is already recording.", do="call backward() or release() first")
        self._recording = Recording()
        recordings.append(self._recording)

    def release(self) -> None:
        """Stop recording, without a :meth:`backward`."""
        if self._recording is not None:
            recordings.remove(self._recording)
            self._recording = None

    def backward(
        self,
        y: torch.Tensor | Sequence[torch.Tensor] | None = None,
        dy: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Compute gradients for the attached tensors, add them to their ``grad``, and end the recording.

        Called by: every rank of the groups that tensors are reduced over, or that collectives were called in.

        Args:
            y: one or several results; none if this rank only sends its results to others.
            dy: their gradients, of the same shapes; default: ones.

        Raises:
            NotRecording: nothing has been recorded.
            ConfigurationError: ``dy`` does not match ``y``, or a callback returned no gradient.
            CollectiveMismatch: ranks attached different tensors.
            PeerFailed, PeerMissing: a rank failed, left, or did not call it in time.
        """
        recording = self._recording
        if recording is None:
            raise NotRecording(
                "Nothing has been recorded for this backward().",
                do="compute the loss within `with gm:`, or after gm.record(), and call backward() once for each",
            )
        try:
            roots, gradients = _roots(y, dy)
            ends = recording.ends
            if ends or recording.beginnings:
                # The loss is on another rank, or depends on one: each rank holds a part of one model.
                for tensor in self.attached_tensors():
                    account_for_part(tensor)
            self._run_backward(
                [*roots, *ends],
                [*gradients, *(torch.ones_like(end) for end in ends)],
                recording.beginnings,
            )
        finally:
            self.release()

    def __enter__(self) -> Self:
        self.record()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        awaited = self._recording is not None and bool(self._recording.ends)
        self.release()
        if awaited and error is None:
            raise ConfigurationError(
                "`with gm:` ended without gm.backward(), so tensors that this rank sent never receive their gradients.",
                do="call gm.backward() on every rank, without an argument on ranks that have no loss; send x.detach() "
                "if no gradient is needed",
            )

    def _run_backward(
        self, roots: list[torch.Tensor], gradients: list[torch.Tensor], beginnings: list[torch.Tensor]
    ) -> None:
        alive = [(tensor, attached) for tensor, attached in self._alive() if tensor.requires_grad]
        tensors = [tensor for tensor, _ in alive]
        reductions = self._open_reductions(alive)
        # Callbacks must not receive earlier gradients again.
        earlier = set_aside(tensors)
        _in_backward.append(self)
        try:
            if roots and (tensors or beginnings):
                torch.autograd.backward(roots, gradients, inputs=[*tensors, *beginnings])
            for reduction in reductions:
                reduction.buckets.send_rest(reduction.weights)
            for reduction in reductions:
                reduction.buckets.take_back()
                recorder = reduction.exchange.detector.recorder
                recorder.note_step(recorder.step + 1)
        except BaseException:
            for reduction in reductions:
                reduction.buckets.start_over()
            restore(tensors, earlier)
            raise
        finally:
            _in_backward.remove(self)
        add_back(earlier)

    def _open_reductions(self, alive: list[tuple[torch.Tensor, _Attached]]) -> list[_Reduction]:
        """Return the reductions over ranks, with new buckets if other tensors are attached by now."""
        tensors_of: dict[AllreduceCallback, list[torch.Tensor]] = {}
        for tensor, attached in alive:
            if attached.over_ranks is not None:
                tensors_of.setdefault(attached.over_ranks, []).append(tensor)
        reductions: list[_Reduction] = []
        for callback, tensors in tensors_of.items():
            exchange = exchange_of(callback.group.group)
            if exchange is None:
                self._reductions.pop(callback, None)
                continue
            reduction = self._reductions.get(callback)
            numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
            if reduction is None or reduction.exchange is not exchange or reduction.numbers != numbers:
                # The last layer's gradients arrive first. The collectives of backward may run between the channels'
                # exchanges in any order.
                order, what = reversed(range(len(tensors))), "gradients of a GradManager"
                buckets = GradientBuckets(tensors, order, exchange.dup(), what)
                reduction = _Reduction(exchange, buckets, callback.weights(exchange.world_size), numbers)
                self._reductions[callback] = reduction
            reductions.append(reduction)
        return reductions

    def _arrived(self, key: int) -> None:
        """Handle the gradient of an attached tensor, which backward has accumulated."""
        attached = self._attached[key]
        tensor = attached.tensor()
        if tensor is None:
            return
        if self not in _in_backward:
            if not _in_backward and (self._recording is not None or attached.over_ranks is not None):
                raise ConfigurationError(
                    "loss.backward() reached a tensor that is attached to a GradManager, so its callbacks did not run.",
                    evidence=f"its shape is {list(tensor.shape)}",
                    do="call gm.backward(loss) instead of loss.backward(), within `with gm:`",
                )
            return
        for callback in attached.callbacks:
            gradient = callback(tensor, cast("torch.Tensor", tensor.grad))
            if not isinstance(gradient, torch.Tensor):
                raise ConfigurationError(
                    f"The callback {callback!r} must return a gradient, got {gradient!r}.",
                    do="return a gradient tensor: the one it received, or a new one",
                )
            tensor.grad = gradient
        if attached.over_ranks is not None:
            reduction = self._reductions.get(attached.over_ranks)
            if reduction is not None and reduction.buckets.note_arrival(reduction.numbers[id(tensor)]):
                reduction.buckets.send_full(reduction.weights)

    def _alive(self) -> list[tuple[torch.Tensor, _Attached]]:
        found = [(attached.tensor(), attached) for attached in self._attached.values()]
        return [(tensor, attached) for tensor, attached in found if tensor is not None]

    def _follow(self, tensor: torch.Tensor) -> _Attached:
        """Attach a tensor, and call :meth:`_arrived` for its gradients."""
        key = id(tensor)
        own = weakref.ref(self)

        def forget(_: object) -> None:
            manager = own()
            if manager is not None:
                manager._attached.pop(key, None)  # noqa: SLF001 - its own

        tensor.requires_grad_()
        hook = call_when_accumulated(tensor, self, GradManager._arrived, key)
        attached = self._attached[key] = _Attached(weakref.ref(tensor, forget), hook)
        return attached


def _check_attachable(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigurationError(
            f"attach takes tensors, not {type(tensor).__name__}.", do="pass model.parameters(), or tensors"
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigurationError(
            f"A tensor of {tensor.dtype} cannot have gradients.",
            evidence=f"its shape is {list(tensor.shape)}",
            do="attach floating-point tensors only",
        )
    if not tensor.is_leaf:
        raise ConfigurationError(
            "attach was given the result of an operation; tensors before an attached tensor receive no gradient.",
            do="attach x = x.detach(), and compute with that",
        )
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        raise ConfigurationError(
            f"attach was given a frozen parameter of shape {list(tensor.shape)}.",
            do="leave it out: gm.attach(p for p in model.parameters() if p.requires_grad)",
        )


def _roots(
    y: torch.Tensor | Sequence[torch.Tensor] | None, dy: torch.Tensor | Sequence[torch.Tensor] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results that require a gradient, and their gradients."""
    results = _listed(y)
    gradients = [torch.ones_like(one) for one in results] if dy is None else _listed(dy)
    if len(results) != len(gradients):
        raise ConfigurationError(
            f"backward was given {len(results)} results but {len(gradients)} gradients.",
            do="pass one dy for each y, or omit dy",
        )
    pairs = [pair for pair in zip(results, gradients, strict=True) if pair[0].requires_grad]
    return [result for result, _ in pairs], [gradient for _, gradient in pairs]


def _listed(given: torch.Tensor | Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    if given is None:
        return []
    return [given] if isinstance(given, torch.Tensor) else list(given)


__getattr__ = refusing("megengine.autodiff", __all__, {"Function": "torch.autograd.Function"}.get)
