# SPDX-License-Identifier: Apache-2.0
"""Which models went through a strategy: each strategy registers its models here, with what makes gradients exact."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from rankwise.comm import optimizer_steps
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.world.mesh import Axes


class GradientStrategy(Protocol):
    """What makes the gradients of one model exact."""

    @property
    def strategy(self) -> str:
        """What its model went through, as ``rankwise.`` has it: ``"replicate"``."""
        ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of the model."""
        ...

    def set_accumulating(self, value: bool) -> bool:  # noqa: FBT001 - what it sets
        """Say whether another microstep follows the one under way; return what was said before."""
        ...

    def set_given_weight(self, amount: float | None) -> float | None:
        """Say what the loss is a mean over; return what was said before."""
        ...


_registered: WeakKeyDictionary[nn.Module, Callable[[], GradientStrategy | None]] = WeakKeyDictionary()
_placed: WeakSet[nn.Module] = WeakSet()
_TAKES_PLACED = {"place", "replicate"}


def register(model: nn.Module, strategy: GradientStrategy | ref[GradientStrategy]) -> None:
    """Note that ``model`` trains on several ranks.

    Args:
        model: that went through a strategy.
        strategy: a weak reference where it leads back to the model, whose hooks hold it then.
    """
    optimizer_steps.account_for(model)
    _registered[model] = strategy if isinstance(strategy, ref) else lambda: strategy


def register_placed(model: nn.Module) -> None:
    """Note that the parts of ``model`` lie on devices of this process."""
    _placed.update(model.modules())


def is_placed(model: nn.Module) -> bool:
    """Return whether a model is placed, a part of it is, or it is part of one that is."""
    return any(module in _placed for module in model.modules())


def check_unregistered(model: nn.Module, strategy: str) -> None:
    """Raise if ``model`` or a part of it trains on several ranks already, or is placed and cannot be spread further.

    Raises:
        ConfigurationError: says which strategy it went through; or it is no module, or not built to the end.
    """
    _check_module(model, strategy)
    if strategy not in _TAKES_PLACED and is_placed(model):
        raise ConfigurationError(
            f"{strategy}() cannot be combined with place(), which was already applied to this model.",
            do=f"call rankwise.replicate(model), which supports placed models, or call {strategy}() without place()",
        )
    own = strategy_of(model)
    if own is not None:
        raise ConfigurationError(
            f"{own.strategy}() was already called on this model.", do=_instead(own.strategy, strategy)
        )
    name_of = _strategies()
    for name, parameter in model.named_parameters():
        if id(parameter) in name_of:
            raise ConfigurationError(
                f"{name_of[id(parameter)]}() was already called on a part of this model.",
                evidence=f"its parameter {name} belongs to another model",
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
        return "call only pipeline(), after rankwise.mesh(pp=..., dp_replicate=...): it averages over dp_replicate too"
    return "call only shard(), after rankwise.mesh(dp_replicate=..., dp_shard=...): it averages over both"


def _strategies() -> dict[int, str]:
    """Return what each parameter went through, by its id."""
    known = [one for reference in _registered.values() if (one := reference()) is not None]
    return {id(parameter): one.strategy for one in known for parameter in one.parameters}


def is_registered(model: nn.Module) -> bool:
    """Return whether the gradients of a model are averaged: it, or a model it is part of, went through a strategy."""
    if strategy_of(model) is not None:
        return True
    strategies = _strategies()
    return any(id(parameter) in strategies for parameter in model.parameters())


def _check_module(model: object, strategy: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{strategy}() takes a torch.nn.Module, not a {type(model).__name__}.", do="pass the model itself"
        )
    lazy = next((name for name, one in model.named_parameters() if torch.nn.parameter.is_lazy(one)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"Parameter {lazy} has no shape yet because its layer is lazy.",
            do=f"call the model once with an example input, then {strategy}()",
        )


def strategy_of(model: nn.Module) -> GradientStrategy | None:
    """Return what was registered of a model; ``None`` where it went through no strategy."""
    one = _registered.get(model)
    return None if one is None else one()


def registered_strategy(model: nn.Module, caller: str) -> GradientStrategy:
    """Return what was registered of a model.

    Args:
        model: that a script has given to a public function.
        caller: its name.

    Raises:
        ConfigurationError: the model went through no strategy.
    """
    found = strategy_of(model)
    if found is None:
        raise ConfigurationError(
            f"{caller}() was given a {type(model).__name__} that is neither replicated nor sharded.",
            do="pass the model that rankwise.replicate() or rankwise.shard() was called with",
        )
    return found


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
                f"An optimizer ({type(thing).__name__}) was created before {strategy}(), so it would not train "
                "the model.",
                evidence=f"{strategy}() replaces the parameters that the optimizer holds",
                do=f"create the optimizer after model = rankwise.{strategy}(model)",
            )


def check_split(model: nn.Module, axes: Axes, strategy: str) -> None:
    """Raise if ranks lie along ``tp`` and nothing of ``model`` is split over them: they would train apart.

    Raises:
        ConfigurationError: says what to call first.
    """
    # Only a DTensor has such; to ask for its class would be to import it.
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if axes.tp > 1 and not any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes if mesh is not None):
        raise ConfigurationError(
            f"{strategy}() was given a model that is not split: each of the {axes.tp} ranks along tp would have a "
            "copy.",
            evidence=f"the mesh is {axes}",
            do="call rankwise.tensor_parallel(model) first, or create the mesh without tp: "
            f"rankwise.mesh(dp_replicate={axes.data_ranks_per_island * axes.tp})",
        )
