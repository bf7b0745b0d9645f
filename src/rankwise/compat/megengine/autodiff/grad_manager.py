# SPDX-License-Identifier: Apache-2.0
"""MegEngine's GradManager on torch's autograd: which tensors get gradients, and what is done with each gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import nn

from rankwise.comm.collectives import exchange_of
from rankwise.comm.optimizer_steps import account_for_part
from rankwise.compat.megengine.autodiff.reduced_gradients import ReducedGradients
from rankwise.compat.megengine.distributed.gradients import AllreduceCallback
from rankwise.compat.megengine.recording import Recording, recordings
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

GradCallback = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class NotRecording(ConfigurationError, RuntimeError):
    """A GradManager was asked for gradients of what it did not record, or told to record twice."""


@dataclass(eq=False)
class _Attached:
    """A tensor of a GradManager, and what is done with its gradient."""

    tensor: weakref.ref[torch.Tensor]
    hook: RemovableHandle
    callbacks: list[GradCallback] = field(default_factory=list)
    over_ranks: AllreduceCallback | None = None


_in_backward: list[GradManager] = []
"""Those whose backward is under way: hooks of the others have nothing to do then."""


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

    torch records in any case; what a GradManager records is what this rank sends to others and receives from them, so
    that :meth:`backward` comes through it also where no loss of this rank depends on it. Only attached tensors get a
    gradient.
    """

    def __init__(self) -> None:
        self._attached: dict[int, _Attached] = {}
        self._recording: Recording | None = None
        self._ways: dict[AllreduceCallback, ReducedGradients] = {}

    def __del__(self) -> None:
        for attached in self._attached.values():
            attached.hook.remove()

    def attached_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are attached and still there."""
        return [tensor for tensor, _ in self._alive()]

    def attach(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        callbacks: GradCallback | Iterable[GradCallback] | None = None,
    ) -> Self:
        """Have gradients computed for some tensors, until these are gone.

        Args:
            tensors: one or several, floating point, made by no operation. Held weakly.
            callbacks: one or several, called with each tensor and its gradient, in the order in which they were
                attached; what one returns is given to the next, and the last one's is added to ``grad``.
                ``make_allreduce_cb(...)`` comes last.

        Returns:
            This GradManager.

        Raises:
            ConfigurationError: one of ``tensors`` is no tensor, not floating point, the result of an operation, or a
                frozen parameter; or something stands behind ``make_allreduce_cb(...)``.
        """
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
        """Begin to record, for a :meth:`backward` to come.

        Raises:
            NotRecording: it records already.
        """
        if self._recording is not None:
            raise NotRecording("This GradManager is already recording.", do="call backward() or release() first")
        self._recording = Recording()
        recordings.append(self._recording)

    def release(self) -> None:
        """End the recording. There is nothing for :meth:`backward` afterwards."""
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
            y: one or several results; none where this rank only sends on.
            dy: gradients of them, of their shapes; default: ones.

        Raises:
            NotRecording: nothing has been recorded.
            ConfigurationError: ``dy`` does not go with ``y``, or a callback returned no gradient.
            CollectiveMismatch: ranks attached different tensors.
            PeerFailed, PeerMissing: a rank failed, left, or did not come in time.
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
        ways = self._open_ways(alive)
        earlier = _set_aside(alive)
        _in_backward.append(self)
        try:
            inputs = [*(tensor for tensor, _ in alive), *beginnings]
            if roots and inputs:
                torch.autograd.backward(roots, gradients, inputs=inputs)
            for way in ways:
                way.send_rest()
            for way in ways:
                way.finish()
        except BaseException:
            for way in ways:
                way.abandon()
            for tensor, _ in alive:
                tensor.grad = None
            for tensor, gradient in earlier:
                tensor.grad = gradient
            raise
        finally:
            _in_backward.remove(self)
        _add(earlier)

    def _open_ways(self, alive: list[tuple[torch.Tensor, _Attached]]) -> list[ReducedGradients]:
        """Return the ways of what is reduced over ranks, opened anew where other tensors are attached by now."""
        tensors_of: dict[AllreduceCallback, list[torch.Tensor]] = {}
        for tensor, attached in alive:
            if attached.over_ranks is not None:
                tensors_of.setdefault(attached.over_ranks, []).append(tensor)
        ways: list[ReducedGradients] = []
        for callback, tensors in tensors_of.items():
            exchange = exchange_of(callback.group.group)
            if exchange is None:
                self._ways.pop(callback, None)
                continue
            way = self._ways.get(callback)
            if way is None or not way.is_of(tensors, exchange):
                way = self._ways[callback] = ReducedGradients(tensors, exchange, callback.reduce_method)
            ways.append(way)
        return ways

    def _arrived(self, tensor: torch.Tensor, attached: _Attached) -> None:
        """Do what is to be done with the gradient of an attached tensor, which is there."""
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
            way = self._ways.get(attached.over_ranks)
            if way is not None:
                way.arrived(tensor)

    def _alive(self) -> list[tuple[torch.Tensor, _Attached]]:
        found = [(attached.tensor(), attached) for attached in self._attached.values()]
        return [(tensor, attached) for tensor, attached in found if tensor is not None]

    def _follow(self, tensor: torch.Tensor) -> _Attached:
        """Have gradients computed for a tensor, and note when they are."""
        key = id(tensor)
        # The tensor holds the hook, which must not hold the GradManager.
        own = weakref.ref(self)

        def arrived(there: torch.Tensor) -> None:
            manager = own()
            if manager is not None:
                manager._arrived(there, attached)  # noqa: SLF001 - its own

        def forget(_: object) -> None:
            manager = own()
            if manager is not None:
                manager._attached.pop(key, None)  # noqa: SLF001 - its own

        tensor.requires_grad_()
        hook = tensor.register_post_accumulate_grad_hook(arrived)
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
    """Return the results that have a gradient at all, and theirs."""
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


def _set_aside(alive: list[tuple[torch.Tensor, _Attached]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take away the gradients so far, which callbacks do not see again, and return them."""
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor, attached in alive:
        gradient = tensor.grad
        if gradient is not None:
            # Its memory may be that in which gradients travel.
            earlier.append((tensor, gradient if attached.over_ranks is None else gradient.detach().clone()))
            tensor.grad = None
    return earlier


@torch.no_grad()
def _add(earlier: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, gradient in earlier:
        if tensor.grad is None:
            tensor.grad = gradient
        else:
            tensor.grad.add_(gradient)
