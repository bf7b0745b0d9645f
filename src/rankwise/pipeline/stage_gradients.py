# SPDX-License-Identifier: Apache-2.0
"""Gradients of the stages: those of a step, made exact, and what torch computes from all of them.

Gradients of a step are scaled when the losses of all its micro-batches are known, and then seen by the script's hooks;
those of earlier steps stay as they are. Norms, and whether GradScaler finds infinite gradients, are computed over all
stages: torch's functions are replaced from the first pipeline until the world is left. Used by step_api and pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from rankwise.errors import ConfigurationError
from rankwise.replicate.bucket import Weights
from rankwise.replicate.device_mesh import exchange_along
from rankwise.replicate.gradient_buckets import GradientBuckets
from rankwise.replicate.gradient_hooks import GradientHooks
from rankwise.replicate.loss.graph import multiply_
from rankwise.replicate.no_sync_and_weight import Earlier, add_back, restore, set_aside
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.gradient_totals import has_scaled, replace_norm, replace_scaler, total_norm
from rankwise.torch_private.gradient_totals import restore as restore_totals
from rankwise.torch_private.tensors import foreach_add_, foreach_mul_, foreach_sub_

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.comm.session import Session
    from rankwise.pipeline.loss_on_stages import StepWeight


class StepGradients:
    """The gradients of this rank's stages: :meth:`begin`, compute them, :meth:`finish`."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], copies: Exchange | None, what: str, sparse: Container[int]
    ) -> None:
        """Open channels to ``copies``, the ranks with the same stages.

        Called by: every rank, in one order.

        Args:
            named: the parameters of this rank's stages, by name.
            copies: ``None`` if there are none.
            what: the name of the gradients, for errors.
            sparse: identities of the parameters whose gradients are sparse.
        """
        self._parameters = parameters = list(named.values())
        self._hooks = GradientHooks(list(named), parameters, is_in_stages=True)
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets: GradientBuckets | None = None
        if copies is not None and self._trained:
            in_rows = {number for number, one in enumerate(self._trained) if id(one) in sparse}
            self._buckets = GradientBuckets(self._trained, range(len(self._trained)), copies, what, sparse=in_rows)
        self._earlier: Earlier = []

    def begin(self, *, has_factor: bool) -> None:
        """Keep gradients of earlier steps from being scaled or averaged again."""
        self._hooks.begin(is_deferred=True)
        if self._buckets is not None:
            self._buckets.start_over()
            self._earlier = set_aside(self._trained)
        elif has_factor:
            # Backward keeps adding to the gradients themselves: without a factor the sum is bitwise the same.
            self._earlier = [(p, own_part(p.grad).detach().clone()) for p in self._parameters if p.grad is not None]

    def give_up(self) -> None:
        """Put back the gradients of earlier steps, after a step that failed."""
        if self._buckets is not None:
            restore(self._trained, self._earlier)
        self._earlier = []
        self._hooks.end()

    @torch.no_grad()
    def finish(self, step: StepWeight) -> Amount:
        """Make the gradients what one device computes of all copies' batches; return what they are the mean over.

        Called by: every rank of the pipeline and of its copies.
        """
        total = step.divisor
        if self._buckets is not None:
            self._buckets.send_rest(Weights(step.share, step.divisor))
            total = self._buckets.take_back()
            add_back(self._earlier)
        elif isinstance(step.factor, torch.Tensor) or step.factor != 1.0:
            self._scale(step.factor)
        self._earlier = []
        self._hooks.change({})
        self._hooks.follow()
        self._hooks.end()
        return total if step.total is None else step.total

    def _scale(self, factor: Amount) -> None:
        parts = [own_part(p.grad) for p in self._parameters if p.grad is not None]
        earlier = [one for _, one in self._earlier]
        added_to = [own_part(p.grad) for p, _ in self._earlier if p.grad is not None]
        if earlier:
            foreach_sub_(added_to, earlier)
        if isinstance(factor, torch.Tensor):
            for part in parts:
                multiply_(part, factor)
        elif parts:
            foreach_mul_(parts, factor)
        if earlier:
            foreach_add_(added_to, earlier)


# -- what torch computes from the gradients of all stages --------------------------------------------------


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
        session.at_end(restore_totals)

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
