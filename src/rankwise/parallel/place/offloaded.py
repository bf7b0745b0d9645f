# SPDX-License-Identifier: Apache-2.0
"""A part whose weights are elsewhere than it runs: what its modules see in their place while it does.

Parameters stay registered as they are. Fetches nothing itself. Imported by place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.torch_private.modules import own_parameters, update_flat_weights

if TYPE_CHECKING:
    import torch

    from rankwise.parallel.place.units import Unit


class OffloadedPart:
    """A part of a model that runs on another device than its weights are on.

    Knows its modules weakly: their hooks know it.

    Args:
        unit: the part; only parameters are fetched.
        device: where it runs.
    """

    def __init__(self, unit: Unit, device: torch.device) -> None:
        self.name = unit.name
        self.device = device
        self.parameters = unit.parameters
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._places = [
            _ParameterSlot(ref(slot.module), slot.attribute, numbers[id(slot.tensor)])
            for slot in unit.slots
            if slot.is_parameter
        ]
        self._shown: list[tuple[_ParameterSlot, torch.Tensor | None]] = []
        self._depth = 0
        """How many calls of it are running inside one another."""

    @property
    def is_running(self) -> bool:
        """Whether a call of it is running."""
        return self._depth > 0

    def enter(self) -> None:
        """Note that a call of it begins, perhaps within another one."""
        self._depth += 1

    def leave(self) -> None:
        """Note that a call of it has ended."""
        self._depth -= 1

    def abandon(self) -> None:
        """Note that no call of it is running any more: what an interrupt has left."""
        self._depth = 0

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that hold its parameters, each once."""
        return list({id(module): module for place in self._places if (module := place.module()) is not None}.values())

    @property
    def is_as_placed(self) -> bool:
        """Whether its modules hold the parameters that they held when they were placed."""
        return all(place.parameter is self.parameters[place.number] for place in self._places)

    def show(self, tensors: list[torch.Tensor]) -> None:
        """Have the modules see ``tensors`` in place of the parameters, which stay registered."""
        for place in self._places:
            self._show(place, tensors[place.number])

    def show_replaced(self) -> None:
        """Have the modules see what they hold now in place of the parameters, on the device of the part."""
        copies: dict[int, torch.Tensor] = {}
        for place in self._places:
            parameter = place.parameter
            if parameter is not None:
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.to(self.device)
                self._show(place, copies[id(parameter)])

    def _show(self, place: _ParameterSlot, tensor: torch.Tensor) -> None:
        module = place.module()
        if module is not None:
            self._shown.append((place, place.parameter))
            # An attribute of the object comes before what nn.Module.__getattr__ finds.
            module.__dict__[place.attribute] = tensor

    def hide(self) -> None:
        """Have the modules see their parameters again."""
        shown, self._shown = self._shown, []
        for place, _ in shown:
            module = place.module()
            if module is not None:
                module.__dict__.pop(place.attribute, None)
        for module in {module for place, _ in shown if isinstance(module := place.module(), nn.RNNBase)}:
            # torch keeps a list of the weights that it ran with, which would keep the fetched ones alive.
            update_flat_weights(module)

    def check_shown(self, module: nn.Module) -> None:
        """Raise if a parameter of ``module`` was replaced while the part runs, which goes on to see the old one.

        Raises:
            ConfigurationError: says which.
        """
        for place, parameter in self._shown:
            if place.module() is module and place.parameter is not parameter and place.attribute in vars(module):
                raise ConfigurationError(
                    f"{place.attribute} of a {type(module).__name__} was replaced while {self.name}, whose weights are "
                    "fetched, was running.",
                    do="replace parameters before the block is called (functional_call of the block, not of a layer in "
                    f"it), or assign {self.name} to the device that it runs on",
                )


@dataclass(frozen=True, slots=True)
class _ParameterSlot:
    """Where a module of a part holds a parameter."""

    module: ref[nn.Module]
    attribute: str
    number: int
    """Of the parameter that was there when the part was placed."""

    @property
    def parameter(self) -> torch.Tensor | None:
        """What is there now. functional_call puts there what it was given."""
        module = self.module()
        return None if module is None else own_parameters(module).get(self.attribute)
