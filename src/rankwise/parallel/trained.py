# SPDX-License-Identifier: Apache-2.0
"""Which models were spread already, and what is said around their backward: accumulation and weights.

Each strategy notes its models here with what makes their gradients exact. Used by replicate and shard.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from rankwise import steps
from rankwise.errors import ConfigurationError
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import nn

    from rankwise.mesh import Axes


class Trained(Protocol):
    """What makes the gradients of one model exact."""

    @property
    def strategy(self) -> str:
        """What its model went through, as ``rankwise.`` has it: ``"replicate"``."""
        ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of the model."""
        ...

    @property
    def is_accumulating(self) -> bool:
        """Whether another microstep follows the one under way."""
        ...

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None: ...

    @property
    def given_weight(self) -> float | None:
        """What the user says the loss is a mean over."""
        ...

    @given_weight.setter
    def given_weight(self, value: float | None) -> None: ...


_trained: WeakKeyDictionary[nn.Module, Callable[[], Trained | None]] = WeakKeyDictionary()
_placed: WeakSet[nn.Module] = WeakSet()
_TAKES_PLACED = {"place", "replicate"}


def note_trained(model: nn.Module, trained: Trained | ref[Trained]) -> None:
    """Note that ``model`` trains on several ranks.

    Args:
        model: that went through a strategy.
        trained: a weak reference where it leads back to the model, whose hooks hold it then.
    """
    steps.account_for(model)
    _trained[model] = trained if isinstance(trained, ref) else lambda: trained


def note_placed(model: nn.Module) -> None:
    """Note that the parts of ``model`` lie on devices of this process."""
    _placed.update(model.modules())


def is_placed(model: nn.Module) -> bool:
    """Return whether a model is placed, a part of it is, or it is part of one that is."""
    return any(module in _placed for module in model.modules())


def check_untrained(model: nn.Module, strategy: str) -> None:
    """Raise if ``model`` or a part of it trains on several ranks already, or is placed and cannot be spread further.

    Raises:
        ConfigurationError: says which strategy it went through; or it is no module, or not built to the end.
    """
    _check_module(model, strategy)
    if strategy not in _TAKES_PLACED and is_placed(model):
        raise ConfigurationError(
            f"{strategy}() does not go with place(), which this model went through.",
            do=f"call rankwise.replicate(model), which trains placed models data parallel; or {strategy}() "
            "without place()",
        )
    own = trained_as(model)
    if own is not None:
        raise ConfigurationError(
            f"This model went through {own.strategy}() already.", do=_instead(own.strategy, strategy)
        )
    strategy_of = _strategies()
    for name, parameter in model.named_parameters():
        if id(parameter) in strategy_of:
            raise ConfigurationError(
                f"A part of this model went through {strategy_of[id(parameter)]}() already.",
                evidence=f"its parameter {name} belongs to another model there",
                do=f"call {strategy}() once, for the whole model",
            )


def _instead(first: str, second: str) -> str:
    """Return what comes nearest to two strategies that do not go together, or not in this order."""
    pair = {first, second}
    if first == second:
        return f"call {second}() once per model"
    if "local_sgd" in pair:
        return f"call {(pair - {'local_sgd'}).pop()}() first, then local_sgd()"
    if "tensor_parallel" in pair:
        return f"call tensor_parallel() first, then {(pair - {'tensor_parallel'}).pop()}()"
    if "place" in pair:
        return "call place() first: rankwise.replicate(rankwise.place(model))"
    if "pipeline" in pair:
        return "call pipeline() alone, after rankwise.mesh(pp=..., dp_replicate=...): it averages over dp_replicate too"
    return "call shard() alone, after rankwise.mesh(dp_replicate=..., dp_shard=...): it averages over both"


def _strategies() -> dict[int, str]:
    """Return what each parameter went through, by its id."""
    known = [one for reference in _trained.values() if (one := reference()) is not None]
    return {id(parameter): one.strategy for one in known for parameter in one.parameters}


def is_trained(model: nn.Module) -> bool:
    """Return whether the gradients of a model are averaged: it, or a model it is part of, went through a strategy."""
    if trained_as(model) is not None:
        return True
    strategies = _strategies()
    return any(id(parameter) in strategies for parameter in model.parameters())


def _check_module(model: object, strategy: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{strategy}() was given a {type(model).__name__}, and takes a torch.nn.Module.", do="pass the model itself"
        )
    lazy = next((name for name, one in model.named_parameters() if torch.nn.parameter.is_lazy(one)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"Parameter {lazy} has no shape yet: its layer is lazy.",
            do=f"call the model once with an example, then {strategy}()",
        )


def check_callable(weight: object, strategy: str) -> None:
    """Raise unless ``weight`` is what can be called, or nothing.

    Raises:
        ConfigurationError: it is something else.
    """
    if weight is not None and not callable(weight):
        raise ConfigurationError(
            f"{strategy}() was given weight={weight!r}, which cannot be called.",
            do="pass a function of what the model is called with: weight=lambda x: len(x)",
        )


@contextmanager
def no_sync(*models: nn.Module) -> Generator[None]:
    """Add gradients up on this rank only; the first backward outside the block makes them exact.

    Called by: every rank. For accumulation: all microsteps but the last one inside the block, the last one
    outside. The gradients are then the mean over all samples of all microsteps of all ranks, so do not divide
    the loss by the number of microsteps; they may be unequal in size and number. A sharded model keeps whole
    gradients on each rank meanwhile, and clearing gradients does not forget microsteps.

    Args:
        models: replicated or sharded models.

    Raises:
        ConfigurationError: a model is neither.
    """
    found = [_trained_of(model, "no_sync") for model in models]
    before = [one.is_accumulating for one in found]
    for one in found:
        one.is_accumulating = True
    try:
        yield
    finally:
        for one, was in zip(found, before, strict=True):
            one.is_accumulating = was


@contextmanager
def weight(model: nn.Module, amount: float | torch.Tensor) -> Generator[None]:
    """Say what the loss of the backward inside the block is a mean over, on this rank.

    Called by: every rank, each with its own amount, around ``loss.backward()``.

    For a loss that is a mean over tokens: ``with rankwise.weight(model, num_tokens): loss.backward()``. The
    gradients are then means over all tokens of all ranks, however many each rank has.

    Args:
        model: a replicated or sharded model.
        amount: number of tokens or samples on this rank, at least zero.

    Raises:
        ConfigurationError: the model is neither, or the amount is negative or not finite.
    """
    found = _trained_of(model, "weight")
    before = found.given_weight
    found.given_weight = float(amount)
    try:
        yield
    finally:
        found.given_weight = before


def _trained_of(model: nn.Module, caller: str) -> Trained:
    found = trained_as(model)
    if found is None:
        raise ConfigurationError(
            f"{caller}() was given a {type(model).__name__} that is neither replicated nor sharded.",
            do="pass the model that rankwise.replicate() or rankwise.shard() was called with",
        )
    return found


def trained_as(model: nn.Module) -> Trained | None:
    """Return what was noted of a model; ``None`` where it went through no strategy."""
    one = _trained.get(model)
    return None if one is None else one()


def check_no_optimizer_holds(before: Sequence[ref[nn.Parameter]], strategy: str) -> None:
    """Raise if an optimizer has the parameters of before a strategy replaced them: nothing trains those any more.

    Args:
        before: those parameters; all are gone where nobody holds them.
        strategy: that replaced them.
    """
    left = {id(parameter) for one in before if (parameter := one()) is not None}
    if not left:
        return
    for thing in gc.get_objects():
        if isinstance(thing, torch.optim.Optimizer) and any(
            id(parameter) in left for group in thing.param_groups for parameter in group["params"]
        ):
            raise ConfigurationError(
                f"An optimizer ({type(thing).__name__}) was built before {strategy}(): it would train nothing.",
                evidence=f"{strategy}() puts new parameters in the place of the old ones, which the optimizer holds",
                do=f"build the optimizer after model = rankwise.{strategy}(model)",
            )


def samples_of(
    weight: Callable[..., float | torch.Tensor] | None, args: object, kwargs: dict[str, Any]
) -> float | None:
    """Return what the loss of a forward call is a mean over, as far as the call tells.

    Args:
        weight: what the user says it is, as a function of the call's arguments.
        args: of the call.
        kwargs: of the call.
    """
    if weight is not None:
        return float(weight(*args, **kwargs))  # type: ignore[misc] # a tuple, whatever torch calls it
    first = _first_tensor((args, kwargs))
    return None if first is None else float(first.shape[0])


def sizes_of_first(args: object, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the sizes of the first tensor that a forward call was given."""
    first = _first_tensor((args, kwargs))
    return () if first is None or first.is_nested else tuple(first.shape)


def _first_tensor(values: object) -> torch.Tensor | None:
    if type(values) is tuple and values and type(values[0]) is tuple and values[0]:
        first = values[0][0]
        if isinstance(first, torch.Tensor) and first.ndim:
            return first
    return next((leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)


def tensors_with_grad(output: object) -> list[torch.Tensor]:
    """Return the tensors of an output that backward can come from, also those in a dataclass."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(output):
        values = [leaf] if isinstance(leaf, torch.Tensor) else list(getattr(leaf, "__dict__", {}).values())
        found += [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    return found


def check_split(model: nn.Module, axes: Axes, strategy: str) -> None:
    """Raise if ranks lie along ``tp`` and nothing of ``model`` is split over them: they would train apart.

    Raises:
        ConfigurationError: says what to call first.
    """
    # Only a DTensor has such; to ask for its class would be to import it.
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if axes.tp > 1 and not any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes if mesh is not None):
        raise ConfigurationError(
            f"{strategy}() was given a model that is not split, and {axes.tp} ranks along tp would have a copy each.",
            evidence=f"the ranks are laid out as {axes}",
            do="call rankwise.tensor_parallel(model) first, or lay the ranks out without tp: "
            f"rankwise.mesh(dp_replicate={axes.data_ranks_per_island * axes.tp})",
        )
