# SPDX-License-Identifier: Apache-2.0
"""Equal values and equal gradients on every rank, for data-parallel scripts.

The callback only holds options: the GradManager does the reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.comm import collectives
from rankwise.compat.megengine.distributed.groups import WORLD, Group, arguments_of, checked
from rankwise.errors import ConfigurationError
from rankwise.replicate.bucket import Weights

if TYPE_CHECKING:
    from collections.abc import Iterable

REDUCE_METHODS = ("sum", "mean")


def bcast_list_(inps: Iterable[torch.Tensor], group: Group = WORLD) -> None:
    """Overwrite tensors, in place, with those of the root, for example parameters before a training.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        inps: tensors, as ``model.parameters()`` gives them.
        group: whose first rank is the root.

    Raises:
        ConfigurationError: something in ``inps`` is not a tensor.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.broadcast`.
    """
    group = checked(group)
    tensors = list(inps)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"bcast_list_ takes tensors, not {type(tensor).__name__}.",
                do="pass model.parameters() or model.buffers()",
            )
    received = collectives.broadcast([tensor.detach() for tensor in tensors], group.root, group=group.group)
    with torch.no_grad():
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value)


class AllreduceCallback:
    """Makes a GradManager add up, or average, gradients over ranks.

    Every rank has the same weight, whatever its number of samples. A parameter that a rank did not use counts as zero
    there; one that no rank used keeps ``grad=None``. Gradients are sent in buckets, while backward runs.

    Args:
        reduce_method: ``"sum"`` or ``"mean"``.
        group: the ranks.
        backend: one of MegEngine's names; it has no effect, see ``override_backend``.

    Raises:
        ConfigurationError: ``reduce_method`` or ``backend`` is unknown.
    """

    def __init__(self, reduce_method: str, group: Group = WORLD, backend: str | None = None) -> None:
        if reduce_method.lower() not in REDUCE_METHODS:
            raise ConfigurationError(
                f"Unknown reduce_method {reduce_method!r}.", do="use one of " + ", ".join(REDUCE_METHODS)
            )
        if backend is not None:
            arguments_of(backend)
        self.reduce_method = reduce_method.lower()
        self.group = checked(group)

    def weights(self, num_ranks: int) -> Weights:
        """Return the weight of every rank's gradients, which does not depend on its number of samples."""
        # For a sum, the factor cancels the division by the number of ranks: the bits are those of a plain sum.
        return Weights(float(num_ranks) if self.reduce_method == "sum" else 1.0, 1.0)

    def __call__(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - as callbacks are called
        """Raise: gradients are not reduced one by one.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "The callback of make_allreduce_cb() works only with a GradManager, which reduces many gradients together.",
            do="pass it to gm.attach(model.parameters(), callbacks=[...]); use all_reduce_sum() for one tensor",
        )


make_allreduce_cb = AllreduceCallback
