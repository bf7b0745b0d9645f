# SPDX-License-Identifier: Apache-2.0
"""Refuses gradients of gradients, of which torch leaves a part out silently. Used by shard and tensor_parallel."""

from __future__ import annotations

import torch

from rankwise.errors import ConfigurationError


def refuse_second_derivatives(strategy: str) -> None:
    """Raise if the backward under way records a graph. Called by: nodes of that backward, which it then ends.

    Raises:
        ConfigurationError: ``create_graph=True`` was given.
    """
    # torch runs backward in the grad mode that create_graph asks for.
    if torch.is_grad_enabled():
        raise ConfigurationError(
            f"{strategy}() does not support gradients of gradients: create_graph=True was passed to "
            "torch.autograd.grad() or backward().",
            evidence="torch would leave a part of the second derivatives out",
            do="use rankwise.replicate(model), with which they are exact, or leave create_graph=True out",
        )
