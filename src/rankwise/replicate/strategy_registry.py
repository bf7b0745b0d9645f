# SPDX-License-Identifier: Apache-2.0
"""The models that went through a strategy: each strategy registers its models here, with their gradient sync."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from rankwise.comm import optimizer_steps
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError
from rankwise.replicate.own_hooks import measure_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount
    from rankwise.world.mesh import Axes


class GradientStrategy(Protocol):
    """Makes the gradients of one model exact."""

    @property
    def strategy(self) -> str:
        """Name of the strategy: ``"replicate"``."""
        ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of the model."""
        ...

    def set_accumulating(self, value: bool) -> bool:  # noqa: FBT001 - what it sets
        """Set whether another microstep follows the one under way; return the value before."""
        ...

    def set_given_weight(self, amount: Amount | None) -> Amount | None:
        """Set the number that the loss is a mean over; return the value before."""
        ...


_registered: WeakKeyDictionary[nn.Module, Callable[[], GradientStrategy | None]] = WeakKeyDictionary()
_placed: WeakSet[nn.Module] = WeakSet()
_TAKES_PLACED = {"place", "replicate"}


def register(model: nn.Module, strategy: GradientStrategy | ref[GradientStrategy]) -> None:
    """Note that ``model`` trains on several ranks.

    ``strategy`` is a weak reference if it refers to the model, whose hooks then hold it.
    """
    optimizer_steps.account_for(model)
    measure_forward(model)
    _registered[model] = strategy if isinstance(strategy, ref) else lambda: strategy


def unregister(model: nn.Module) -> None:
    """Note that a strategy has left ``model``, which may go through one again."""
    del _registered[model]


def register_placed(model: nn.Module) -> None:
    """Note that the parts of ``model`` are placed on devices of this process."""
    _placed.update(model.modules())


def is_placed(model: nn.Module) -> bool:
    """Return whether a model is placed, a part of it is, or it is part of one that is."""
    return any(module in _placed for module in model.modules())


def check_unregistered(model: nn.Module, strategy: str) -> dict[str, nn.Parameter]:
    """Raise if ``model`` or a part of it trains on several ranks already, or is placed and cannot be spread further.

    Returns:
        Its parameters by name, each tied one once.

    Raises:
        ConfigurationError: names the strategy it went through; or it is no module, or has lazy layers.
    """
    named = _check_module(model, strategy)
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
    name_of = strategies_by_parameter()
    for name, parameter in named.items() if name_of else ():
        if id(parameter) in name_of:
            raise ConfigurationError(
                f"{name_of[id(parameter)]}() was already called on a part of this model.",
                evidence=f"its parameter {name} belongs to another model",
                do=f"call {strategy}() once, for the whole model",
            )
    return named


def _instead(first: str, second: str) -> str:
    """Return the nearest alternative to two strategies that cannot be combined, or not in this order."""
    pair = {first, second}
    if first == second == "replicate":
        return "call replicate() once per model, and again after its parameters have changed"
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


def strategies_by_parameter() -> dict[int, str]:
    """Return the strategy of each parameter, by its id."""
    known = [one for reference in _registered.values() if (one := reference()) is not None]
    return {id(parameter): one.strategy for one in known for parameter in one.parameters}


def is_registered(model: nn.Module) -> bool:
    """Return whether the gradients of a model are averaged: it, or a model it is part of, went through a strategy."""
    if strategy_of(model) is not None:
        return True
    strategies = strategies_by_parameter()
    return any(id(parameter) in strategies for parameter in model.parameters())


def _check_module(model: object, strategy: str) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model``, which is a module without lazy layers."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{strategy}() takes a torch.nn.Module, not a {type(model).__name__}.", do="pass the model itself"
        )
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            wrapper = type(part).__name__
            raise ConfigurationError(
                f"{strategy}() was given a model in {wrapper}, which spreads it over devices too.",
                evidence=f"it is the part {name} of the model" if name else None,
                do=f"omit {wrapper}(...): call rankwise.{strategy}() with the model that was passed to it",
            )
        if getattr(part, "scale_grad_by_freq", False) is True and current().world.world_size > 1:
            raise ConfigurationError(
                f"The {type(part).__name__} {name} divides each row's gradient by how often the row occurs in a batch "
                "(scale_grad_by_freq=True): a rank would count its own part of the batch.",
                do="omit scale_grad_by_freq",
            )
    named = dict(model.named_parameters())
    lazy = next((name for name, one in named.items() if torch.nn.parameter.is_lazy(one)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"Parameter {lazy} has no shape yet because its layer is lazy.",
            do=f"call the model once with an example input, then {strategy}()",
        )
    return named


def strategy_of(model: nn.Module) -> GradientStrategy | None:
    """Return the registered strategy of a model; ``None`` if it went through none."""
    one = _registered.get(model)
    return None if one is None else one()


def registered_strategy(model: nn.Module, caller: str) -> GradientStrategy:
    """Return the registered strategy of a model that a script has passed to the public function ``caller``.

    Raises:
        ConfigurationError: the model went through no strategy.
    """
    found = strategy_of(model) if isinstance(model, torch.nn.Module) else None
    if found is None:
        raise ConfigurationError(
            f"{caller}() was given a {type(model).__name__} that is neither replicated nor sharded.",
            do="pass the model that rankwise.replicate() or rankwise.shard() was called with",
        )
    return found


def check_no_optimizer_holds(before: Sequence[ref[nn.Parameter]], strategy: str) -> None:
    """Raise if an optimizer holds parameters from before ``strategy`` replaced them, which are no longer trained."""
    left = {id(parameter) for one in before if (parameter := one()) is not None}
    if not left:
        return
    # isinstance() would ask objects for their class, and some of torch's warn when asked.
    optimizers = (one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))
    for thing in optimizers:
        if any(id(parameter) in left for group in thing.param_groups for parameter in group["params"]):
            # The error ends forward before torch's hooks prepared what those after it need; torch would warn of that.
            warnings.filterwarnings("ignore", "module forward hook with ``always_call=True``", UserWarning)
            raise ConfigurationError(
                f"An optimizer ({type(thing).__name__}) was created before {strategy}(), so it would not train "
                "the model.",
                evidence=f"{strategy}() replaces the parameters that the optimizer holds",
                do=f"create the optimizer after model = rankwise.{strategy}(model)",
            )


def check_split(model: nn.Module, axes: Axes, strategy: str) -> None:
    """Raise if ranks lie along ``tp`` and no parameter of ``model`` is split over them: their copies would diverge."""
    # Only a DTensor has a mesh; asking for its class would import it.
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if axes.tp > 1 and not any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes if mesh is not None):
        raise ConfigurationError(
            f"{strategy}() was given a model that is not split: each of the {axes.tp} ranks along tp would have a "
            "copy.",
            evidence=f"the mesh is {axes}",
            do="call rankwise.tensor_parallel(model) first, or create the mesh without tp: "
            f"rankwise.mesh(dp_replicate={axes.data_ranks_per_group * axes.tp})",
        )
