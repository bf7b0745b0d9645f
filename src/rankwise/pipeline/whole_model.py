# SPDX-License-Identifier: Apache-2.0
"""What torch computes from all gradients, computed over all stages: norms, and whether GradScaler finds infinite ones.

torch's functions are replaced from the first pipeline until the world is left. Used by pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from rankwise.errors import ConfigurationError
from rankwise.replicate.device_mesh import exchange_along
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.gradient_totals import has_scaled, replace_norm, replace_scaler, restore, total_norm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from rankwise.comm.session import Session


def cover_all_stages(model: nn.Module, device: torch.device, session: Session) -> None:
    """Have torch's norms and scalers cover all stages of ``model``, on each rank. Called by: every rank."""
    if exchange_along("pp") is not None:
        whole = session.once(_WholeModels)
        whole.models.add(model)
        whole.device = device


class _WholeModels:
    """The models in stages, and torch's functions as they are replaced for them."""

    def __init__(self, session: Session) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()
        self.device = torch.device("cpu")
        along = exchange_along("pp")
        assert along is not None  # noqa: S101 - checked by the caller
        self._along = along
        self._ready: WeakSet[GradScaler] = WeakSet()
        """Scalers whose scale is known on every rank."""
        replace_norm(self._norm)
        replace_scaler(self._complete, self._begin)
        session.at_end(restore)

    @torch.no_grad()
    def _norm(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - as torch's
        foreach: bool | None = None,  # noqa: FBT001
    ) -> torch.Tensor:
        """Return the norm of gradients of all ranks. Called by: every rank, since others may have some of them."""
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        of_stages = {id(parameter.grad) for parameter in parameters if parameter.grad is not None}
        own = [one for one in given if id(one) in of_stages]
        others = [one for one in given if id(one) not in of_stages]
        if not parameters:
            return total_norm(given, norm_type, error_if_nonfinite, foreach)
        if not float(norm_type) > 0:
            raise ConfigurationError(
                f"The norm of order {norm_type} cannot be computed over the stages of a pipeline.",
                do="use an order above 0, or float('inf')",
            )
        norm: Any = total_norm(own, norm_type, False, foreach)
        if own_part(norm) is not norm:
            norm = norm.full_tensor()
        norms = self._along.all_gather(norm.to(self.device, torch.float64), what="norm of the gradients")
        # The norm of norms is that of all elements.
        total = total_norm([*norms.unbind(), *others], norm_type, error_if_nonfinite)
        return total.to((given or parameters)[0].dtype)

    def _complete(
        self, optimizer: Optimizer, found: dict[torch.device, torch.Tensor]
    ) -> dict[torch.device, torch.Tensor]:
        """Return whether any stage has infinite gradients. Called by: every rank, for a model in stages."""
        own = {id(parameter) for model in self.models for parameter in model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return found
        is_found = torch.zeros((), device=self.device)
        for one in found.values():
            is_found += own_part(one).to(self.device)
        return {self.device: self._along.all_reduce(is_found, what="whether gradients are finite")}

    def _begin(self, scaler: GradScaler) -> None:
        """Have ranks without the last stage, on which the loss was scaled, start from the same scale."""
        if scaler in self._ready or not self.models:
            return
        flag = torch.tensor(has_scaled(scaler), dtype=torch.int64, device=self.device)
        if self._along.all_reduce(flag, what="whether the loss was scaled") > 0:
            scaler.scale(torch.zeros((), device=self.device))
            self._ready.add(scaler)
