# SPDX-License-Identifier: Apache-2.0
"""The first step of every optimizer of this rank: do the ranks train one model, or each its own by mistake?

Follows optimizers through torch's global hook, from join to leave. Sends nothing that a rank would wait for. Used by
``join``, by the strategies, which report the models they handle, and by users, as ``rankwise.independent``.
"""

from __future__ import annotations

import contextlib
import gc
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, ref

from torch import nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankwise.errors import ConfigurationError
from rankwise.log import warn
from rankwise.tensors.arrays import memory_of
from rankwise.torch_private.compiler import uncompiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.utils.hooks import RemovableHandle

    from rankwise.store.values import Store
    from rankwise.world.facts import World

M = TypeVar("M", bound="nn.Module")

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""torch's own wrappers, which keep their models equal themselves."""
MOST_ELEMENTS = 2**16
"""How much of each tensor is compared."""
MOST_NAMES = 4
"""How many tensors are named."""
ANSWER_SECONDS = 10.0
"""How long the store may take to return a key that is set."""
_KEY = "rankwise/steps"

_accounted: WeakSet[nn.Module] = WeakSet()
_parts: dict[int, ref[torch.Tensor]] = {}
"""By their ``id``. Tensors compare element by element, so a set cannot hold them."""
_following: list[RemovableHandle] = []


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


def follow(store: Store | None, world: World) -> None:
    """Compare parameters that no strategy handles after each optimizer's first step; warn once per job if they differ.

    Called by: join, on every rank. Does nothing in a world of one.
    """
    if store is not None:
        look = _Look(store, world)
        _following.append(register_optimizer_step_pre_hook(look.before_step))
        _following.append(register_optimizer_step_post_hook(look.after_step))


def stop() -> None:
    """Stop following optimizers. Called by leave, and by code that exchanges gradients in its own way."""
    while _following:
        _following.pop().remove()


class _Look:
    """What one rank has seen of its optimizers."""

    def __init__(self, store: Store, world: World) -> None:
        self._store = store
        self._world = world
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._count: Counter[str] = Counter()
        self._has_compared = False

    @uncompiled
    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Compare what the closure of LBFGS returns first: from other values ranks diverge. Called by torch."""
        if not isinstance(optimizer, LBFGS) or self._has_compared:
            return None
        closure = kwargs.get("closure") or args[1]  # the first one is the optimizer

        def compared() -> Any:
            loss = closure()
            if not self._has_compared:
                self._has_compared = True
                self._compare_losses(loss)
            return loss

        return args[:1], {"closure": compared}

    def _compare_losses(self, loss: Any) -> None:
        with contextlib.suppress(OSError, RuntimeError, TypeError, ValueError):
            if self._are_posted_unlike("lbfgs", float(loss).hex()):
                warn(
                    "the loss that the closure returns decides how often LBFGS runs backward, and it differs between "
                    "ranks: return rankwise.mean(loss, len(x)), which is equal on every rank, or the ranks diverge",
                    all_ranks=True,
                )

    @uncompiled
    def after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Look at an optimizer after its first step. Called by torch."""
        if optimizer in self._seen:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        self._seen.add(optimizer)
        own = _unaccounted(trained)
        # Whatever waits for a lost store reports it; tensors without plain values are not compared.
        with contextlib.suppress(OSError, RuntimeError, TypeError):
            if own and self._differs(own):
                self._warn_difference(optimizer, own, is_beside=len(own) < len(trained))

    def _differs(self, own: Sequence[torch.Tensor]) -> bool:
        """Return whether this rank is the last to post its digest, and the ranks differ."""
        # Ranks that step tensors of different shapes train different models on purpose.
        shapes = f"{zlib.crc32(str([(tuple(p.shape), str(p.dtype)) for p in own]).encode()):x}"
        self._count[shapes] += 1
        return self._are_posted_unlike(f"{shapes}-{self._count[shapes]}", f"{_digest(own):x}")

    def _are_posted_unlike(self, key: str, value: str) -> bool:
        """Post a value of this rank; return whether it is the last rank to do so and the ranks' values differ."""
        part = self._store.prefixed(f"{_KEY}/{key}")
        part.set(str(self._world.rank), value)
        if part.add("count", 1) < self._world.world_size:
            return False
        return len({part.get(str(rank), ANSWER_SECONDS) for rank in range(self._world.world_size)}) > 1

    def _warn_difference(self, optimizer: Optimizer, own: Sequence[torch.Tensor], *, is_beside: bool) -> None:
        if self._store.add(f"{_KEY}/told", 1) > 1:
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
            f"each of {self._world.world_size} ranks trains its own model: {type(optimizer).__name__} has stepped "
            f"{one} that no strategy synchronizes, and they differ between ranks after the first step; call "
            "model = rankwise.replicate(model) before the optimizer is built, or, if ranks are meant to differ, "
            "rankwise.independent(model)",
            all_ranks=True,
        )


def _unaccounted(trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that no strategy is known to keep correct."""
    known = _ids(_accounted) | _parts.keys()
    # Only a DTensor has a mesh, and torch averages its gradients.
    own = [p for p in trained if id(p) not in known and getattr(p, "device_mesh", None) is None and not p.is_meta]
    if not own:
        return []
    wrapped = _ids([one for one in gc.get_objects() if _is_wrapper(type(one))])
    return [p for p in own if id(p) not in wrapped]


def _names(own: Sequence[torch.Tensor]) -> str:
    """Return the names of tensors in their modules, as ``centers of CenterLoss``; or their shapes."""
    wanted = {id(one): f"of shape {list(one.shape)}" for one in own[:MOST_NAMES]}
    for module in [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in wanted:
                wanted[id(parameter)] = f"{name} of {type(module).__name__}"
    return ", ".join(wanted.values()) + (", ..." if len(own) > MOST_NAMES else "")


def _is_wrapper(kind: type) -> bool:
    return issubclass(kind, nn.Module) and any(base.__name__ in WRAPPERS for base in kind.__mro__)


def _ids(models: WeakSet[nn.Module] | list[nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}


def _digest(own: Sequence[torch.Tensor]) -> int:
    """Return a checksum of values and gradients: with a learning rate of zero the values alone stay equal."""
    digest = 0
    for parameter in own:
        for tensor in (parameter, parameter.grad):
            # Sparse gradients show in the values that they change.
            if tensor is not None and not tensor.is_sparse:
                plain = tensor.detach().flatten()[:MOST_ELEMENTS].to("cpu").contiguous()
                digest = zlib.crc32(memory_of(plain), digest)
    return digest
