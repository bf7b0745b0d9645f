# SPDX-License-Identifier: Apache-2.0
"""The first step of every optimizer of this rank: do the ranks train one model, or each its own by mistake?

Follows the steps of all optimizers, from join to leave. Sends nothing that a rank would wait for. Used by
``join``, by the strategies, which report the models they handle, and by users, as ``rankwise.independent``.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, ref

from torch import nn
from torch.optim import LBFGS

from rankwise.comm.same_state import Posted, checksum_of_shapes, listed, names_in_modules, split_by_wrapper
from rankwise.comm.step_hooks import Follower, Phase, ask_again, closure_of, with_closure
from rankwise.comm.step_hooks import follow as follow_steps
from rankwise.errors import ConfigurationError
from rankwise.log import warn
from rankwise.tensors.checksum import checksums_of_each, combined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.optim.optimizer import Optimizer

    from rankwise.comm.session import Session
    from rankwise.comm.step_hooks import Arguments

M = TypeVar("M", bound="nn.Module")

MOST_ELEMENTS = 2**16
"""How much of each tensor is compared."""

_accounted: WeakSet[nn.Module] = WeakSet()
_parts: dict[int, ref[torch.Tensor]] = {}
"""By their ``id``. Tensors compare element by element, so a set cannot hold them."""
_following: list[Callable[[], None]] = []


def independent(model: M) -> M:
    """Declare that each rank trains its own model on purpose: an ensemble, or parts split by hand.

    Called by: any rank, before the first step of the model's optimizer. Does no communication. Its only effect:
    rankwise does not warn that ``model`` was trained without a strategy and differs between ranks.

    Args:
        model: the module whose parameters an optimizer of this rank steps.

    Returns:
        ``model`` itself.

    Raises:
        ConfigurationError: ``model`` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"independent() takes a torch.nn.Module, got a {type(model).__name__}.", do="pass the model itself"
        )
    account_for(model)
    return model


def account_for(model: nn.Module) -> None:
    """Note that a strategy keeps ``model`` correct on every rank. Called by each strategy."""
    _accounted.add(model)


def accounted_modules() -> set[nn.Module]:
    """Return all modules of the models that a strategy keeps correct, or that differ on purpose."""
    return {module for model in _accounted for module in model.modules()}


def account_for_part(tensor: torch.Tensor) -> None:
    """Note that ``tensor`` belongs to this rank's part of a model that was split by hand. Called by compat."""
    key = id(tensor)
    _parts[key] = ref(tensor, lambda _: _parts.pop(key, None))


def follow(session: Session) -> None:
    """Compare parameters that no strategy handles after each optimizer's first step; warn once per job if they differ.

    Called by: join, on every rank. Does nothing in a world of one.
    """
    posted = Posted.of(session, "rankwise/steps")
    if posted is not None:
        first_steps = _FirstSteps(posted, session.world.world_size)
        _following.append(follow_steps(first_steps, Phase.FIRST_STEP, is_kept=True))


def stop() -> None:
    """Stop following optimizers. Called by leave, and by code that exchanges gradients in its own way."""
    while _following:
        _following.pop()()


class _FirstSteps(Follower):
    """What one rank has seen of its optimizers."""

    def __init__(self, posted: Posted, world_size: int) -> None:
        self._posted = posted
        self._world_size = world_size
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._count: Counter[int] = Counter()
        self._has_compared = False

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has not been looked at."""
        return optimizer not in self._seen

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Compare what the closure of LBFGS returns first: from other values ranks diverge."""
        closure = closure_of(args, kwargs)
        if not isinstance(optimizer, LBFGS) or self._has_compared or closure is None:
            return None

        def compared() -> Any:
            loss = closure()
            if not self._has_compared:
                self._has_compared = True
                self._compare_losses(loss)
            return loss

        return with_closure(args, kwargs, compared)

    def _compare_losses(self, loss: Any) -> None:
        with contextlib.suppress(OSError, RuntimeError, TypeError, ValueError):
            if self._posted.are_alike("lbfgs", zlib.crc32(float(loss).hex().encode())) is False:
                warn(
                    "the loss that the closure returns decides how often LBFGS runs backward, and it differs between "
                    "ranks: return rankwise.mean(loss, len(x)), which is equal on every rank, or the ranks diverge",
                    all_ranks=True,
                )

    def after_step(self, optimizer: Optimizer) -> None:
        """Look at an optimizer after its first step."""
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        self._seen.add(optimizer)
        ask_again()
        own = _unaccounted(trained)
        # Whatever waits for a lost store reports it; tensors without plain values are not compared.
        with contextlib.suppress(OSError, RuntimeError, TypeError):
            if own and self._differs(own):
                self._warn_difference(optimizer, own, is_beside=len(own) < len(trained))

    def _differs(self, own: Sequence[torch.Tensor]) -> bool:
        """Return whether this rank is the last to post its digest, and the ranks differ."""
        shapes = checksum_of_shapes(own)
        self._count[shapes] += 1
        return self._posted.are_alike(f"{shapes:x}-{self._count[shapes]}", _digest(own)) is False

    def _warn_difference(self, optimizer: Optimizer, own: Sequence[torch.Tensor], *, is_beside: bool) -> None:
        if not self._posted.is_first("told"):
            return
        one = "1 parameter" if len(own) == 1 else f"{len(own)} parameters"
        if is_beside:
            warn(
                f"{type(optimizer).__name__} has stepped {one} outside the distributed model, which no strategy "
                f"synchronizes ({_names(own)}), and they differ between ranks after the first step: each rank trains "
                "them on its own samples; also call rankwise.replicate() for the module that holds them, such as a "
                "criterion with parameters, or make it a submodule of the model first; or, if ranks are meant to "
                "differ, call rankwise.independent(module)",
                all_ranks=True,
            )
            return
        warn(
            f"each of {self._world_size} ranks trains its own model: {type(optimizer).__name__} has stepped "
            f"{one} that no strategy synchronizes, and they differ between ranks after the first step; call "
            "model = rankwise.replicate(model) before the optimizer is built, or, if ranks are meant to differ, "
            "rankwise.independent(model)",
            all_ranks=True,
        )


def _unaccounted(trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that no strategy is known to keep correct."""
    known = _parts.keys() | {id(parameter) for model in _accounted for parameter in model.parameters()}
    return split_by_wrapper(p for p in trained if id(p) not in known)[1]


def _names(own: Sequence[torch.Tensor]) -> str:
    """Return the names of tensors in their modules, as ``centers of CenterLoss``; or their shapes."""
    names = zip(names_in_modules(own), own, strict=True)
    return listed([name or f"of shape {list(one.shape)}" for name, one in names])


def _digest(own: Sequence[torch.Tensor]) -> int:
    """Return a checksum of values and gradients: with a learning rate of zero the values alone stay equal."""
    held = [tensor for parameter in own for tensor in (parameter, parameter.grad) if tensor is not None]
    # Sparse gradients show in the values that they change.
    return combined(checksums_of_each([one.detach().flatten()[:MOST_ELEMENTS] for one in held if not one.is_sparse]))
