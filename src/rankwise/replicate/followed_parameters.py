# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model as they were when it went through a strategy, and the hooks on those that train.

Used by gradient_sync.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle


class FollowedParameters:
    """The parameters of one model, from its strategy until it goes through one again."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], strategy: str) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.strategy = strategy
        first = self.parameters[0]
        self.kind = (first.dtype, first.device)
        """Of the first one, which tells whether the model was moved since."""
        self._kinds = [_kind_of(parameter) for parameter in self.parameters]
        self.hooked: set[int] = set()
        """Numbers of those that have needed gradients so far."""
        self.unhooked = list(enumerate(self.parameters))
        """Those that have not."""
        self._handles: list[RemovableHandle] = []

    def hook_new(self, note: Callable[[int, torch.Tensor], None]) -> bool:
        """Have backward call ``note(number, parameter)`` for those that need gradients now; return whether some do."""
        new = [number for number, parameter in self.unhooked if parameter.requires_grad]
        self._handles += [self.parameters[n].register_post_accumulate_grad_hook(partial(note, n)) for n in new]
        if new:
            self.hooked.update(new)
            self.unhooked = [(number, parameter) for number, parameter in self.unhooked if number not in self.hooked]
        return bool(new)

    def remove_hooks(self) -> None:
        """Follow no gradient any more."""
        for handle in self._handles:
            handle.remove()

    def changed(self) -> ConfigurationError:
        """Return the error for a model whose parameters are of another :attr:`kind` now."""
        first = self.parameters[0]
        return ConfigurationError(
            f"Parameter {self.names[0]} was {self.kind[0]} on {self.kind[1]} when {self.strategy}() was called "
            "and has since changed.",
            evidence=f"it is {first.dtype} on {first.device}",
            do=f"call model.to(...) first, then rankwise.{self.strategy}(model)",
        )

    def check_all_of(self, model: nn.Module) -> None:
        """Raise unless every parameter of ``model`` is one of these."""
        known = {id(parameter) for parameter in self.parameters}
        new = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
        if new:
            first = "change the model first (layers, load_state_dict(assign=True)), then call"
            if self.strategy == "replicate":
                first = "after each change of the model (layers, load_state_dict(assign=True)), call"
            raise ConfigurationError(
                f"Parameter {new[0]} was added after {self.strategy}(), so its gradient would not be synchronized.",
                evidence=f"new parameters: {', '.join(new)}",
                do=f"{first} rankwise.{self.strategy}(model), then create the optimizer, or pass the new parameters to "
                "optimizer.add_param_group()",
            )

    def are_those_of(self, model: nn.Module) -> bool:
        """Return whether ``model`` has the same parameters as when it went through the strategy."""
        known = list(zip(map(id, self.parameters), self._kinds, strict=True))
        return [(id(parameter), _kind_of(parameter)) for parameter in model.parameters()] == known


def _kind_of(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.shape, parameter.dtype, parameter.device
