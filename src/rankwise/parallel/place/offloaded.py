# SPDX-License-Identifier: Apache-2.0
"""A part that runs on another device than its weights are on: the tensors its modules see while it runs.

Parameters stay registered. Fetches nothing itself. Imported by place.
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
    """A part of a model, and the device it runs on. Only parameters are fetched.

    Refers to its modules weakly, since their hooks refer to it.
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
        """The number of nested calls that are running."""

    @property
    def is_running(self) -> bool:
        """Whether a call of the part is running."""
        return self._depth > 0

    def enter(self) -> None:
        """Note that a call begins, perhaps within another one."""
        self._depth += 1

    def leave(self) -> None:
        """Note that a call has ended."""
        self._depth -= 1

    def abandon(self) -> None:
        """Note that all calls have ended, after an interrupt."""
        self._depth = 0

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that hold its parameters, each once."""
        return list({id(module): module for place in self._places if (module := place.module()) is not None}.values())

    @property
    def is_as_placed(self) -> bool:
        """Whether the modules still hold the parameters they were placed with."""
        return all(place.parameter is self.parameters[place.number] for place in self._places)

    def show(self, tensors: list[torch.Tensor]) -> None:
        """Have the modules see ``tensors`` in place of the parameters, which stay registered."""
        for place in self._places:
            self._show(place, tensors[place.number])

    def show_replaced(self) -> None:
        """Have the modules see the tensors they hold now, moved to the device of the part."""
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
            # An attribute of the object hides what nn.Module.__getattr__ finds.
            module.__dict__[place.attribute] = tensor

    def hide(self) -> None:
        """Have the modules see their parameters again."""
        shown, self._shown = self._shown, []
        for place, _ in shown:
            module = place.module()
            if module is not None:
                module.__dict__.pop(place.attribute, None)
        for module in {module for place, _ in shown if isinstance(module := place.module(), nn.RNNBase)}:
            # torch keeps a list of the weights it ran with, which would keep the fetched ones alive.
            update_flat_weights(module)

    def check_shown(self, module: nn.Module) -> None:
        """Raise a ConfigurationError if a parameter of ``module`` was replaced while the part runs with the old one."""
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
    """A place where a module of a part holds a parameter."""

    module: ref[nn.Module]
    attribute: str
    number: int
    """Of the parameter that the module was placed with."""

    @property
    def parameter(self) -> torch.Tensor | None:
        """The tensor that is there now, perhaps put there by functional_call."""
        module = self.module()
        return None if module is None else own_parameters(module).get(self.attribute)
